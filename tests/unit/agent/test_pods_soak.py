"""Pods come and go while everything fails that can: in the end the cache has those that are there.

A seed draws what happens; the server's threads add some chance of their own. A failure names the
seed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fake_apiserver import Reply
from fake_watch import NODE, FakeWatchServer, Order, pod, until
from istio_cni.agent.pods import Pace, PodCache
from istio_cni.edge.kube.watch import NodePods, Patience
from istio_cni.plugin.pod import Pod

STEPS, SETTLE_EVERY = 250, 12
PATIENCE = Patience(connect_s=0.5, answer_s=0.1, list_s=0.3, idle_s=0.1, watch_s=60.0)
PACE = Pace(first_s=0.001, most_s=0.01, lasting_s=0.02)
ORDERS = [
    *(Order("end"), Order("torn"), Order("reset"), Order("mute"), Order("gone")),
    *(Order("bookmark"), Order("bookmark"), Order("raw", b"garbage\n"), Order("raw", b"\n")),
    Order("raw", b'{"type":"DELETED","object":{"metadata":{"name":"p1"}}}\n'),
]
REPLIES = [
    *(Reply(401), Reply(410), Reply(429), Reply(500), Reply(504), Reply(200, body=b"[")),
    *(Reply(fault="reset"), Reply(fault="hang"), Reply(200, body=b'{"metadata":{"resour')),
]


class World:
    """A server whose pods change at random, and which fails at random."""

    def __init__(self, server: FakeWatchServer, seed: int, account: Path) -> None:
        self._server = server
        self._random = random.Random(seed)  # noqa: S311 – test data
        self._account = account
        self._count = 0

    def step(self) -> None:
        """Let something happen, mostly to a pod."""
        draw = self._random.random()
        if draw < 0.75:
            self._change()
        elif draw < 0.87:
            self._disturb()
        elif draw < 0.94:
            self._server.script.append(self._random.choice(REPLIES))
        elif draw < 0.98:
            self._server.compact()
        else:
            self._count += 1
            self._server.tokens = {f"token-{self._count}"}
            self._server.write_account(self._account, f"token-{self._count}")

    def _change(self) -> None:
        """Create, change or end a pod; names come back with another uid."""
        name = f"p{self._random.randrange(12)}"
        there = self._server.pods.get(("shop", name))
        if there and self._random.random() < 0.5:
            self._server.delete("shop", name)
            return
        self._count += 1
        node = self._random.choice([NODE, NODE, "node-2"])
        uid, number = f"uid-{self._count}", str(self._count)
        if there:
            uid = str(there["metadata"]["uid"])  # type: ignore[index] # a pod's
            node = str(there["spec"]["nodeName"])  # type: ignore[index] # likewise
        self._server.put(pod("shop", name, uid, node=node, _inject=number))

    def _disturb(self) -> None:
        with self._server.changed:
            order = self._random.choice(ORDERS)
            if self._server.streams and self._random.random() < 0.7:
                self._server.order(order)
            else:
                self._server.orders.append([order])


def agrees(cache: PodCache, server: FakeWatchServer) -> bool:
    """Whether the cache has the pods of its node, as they are, and no other one."""
    pods = server.of(NODE)
    return cache.size == len(pods) and all(
        shown(cache.find(namespace, name, about["metadata"]["uid"])) == shown(Pod(about))  # type: ignore[index] # a pod's
        for (namespace, name), about in pods.items()
    )


def shown(pod: Pod | None) -> dict[str, object]:
    """Return all that is known of a pod; the server's have no proxy."""
    return {name: getattr(pod, name) for name in Pod.__slots__} if pod is not None else {}


@pytest.mark.parametrize("seed", range(5))
def test_the_cache_ends_up_with_what_is_there(seed: int, tmp_path: Path) -> None:
    """Whatever was in between, by a stream that goes on or a list."""
    with FakeWatchServer() as server:
        env = server.write_account(tmp_path)
        pods = NodePods(str(tmp_path), env, NODE, patience=PATIENCE, page_pods=3)
        cache, world = PodCache(pods, pace=PACE), World(server, seed, tmp_path)
        cache.start()
        try:
            for step in range(STEPS):
                world.step()
                if step % SETTLE_EVERY == 0:  # with all that is still to go wrong
                    until(lambda: agrees(cache, server), 10)
            server.script.clear()
            server.orders.clear()
            until(lambda: agrees(cache, server), 10)
        finally:
            cache.stop()
        kinds = ["watch" in query for query in server.asked()]
        assert kinds.count(True) > 10
        assert kinds.count(False) > 5
