"""An agent, or its workshop, that is killed at any moment, while pods start.

AGENT_KILLED says how many pods start meanwhile.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from namespaces import inside
from netns.agents import Agent, is_alive, is_serving
from netns.plugin import JSON, WEB, Answer, Node, Pod, Way, give_address
from netns.ways import install
from waiting import wait

pytestmark = pytest.mark.netns

PODS = int(os.environ.get("AGENT_KILLED") or 12)
AT_ONCE = 8
SEED = int(os.environ.get("AGENT_SEED") or 5)
BACKENDS = ("nftables", "iptables")
DUAL_STACK: JSON = {"name": "ISTIO_DUAL_STACK", "value": "true"}


class Started(NamedTuple):
    """A pod, where it is and how its ADD went."""

    pod: Pod
    netns: str
    config: JSON
    answer: Answer


def listing(netns: str) -> list[str]:
    """List all that is programmed in a namespace, without counters, sorted.

    What families are loaded at the same time have no order.
    """
    text = inside(netns, ["nft", "-s", "list", "ruleset"])
    lines = [line for line in text.splitlines() if not line.startswith(("#", "\tcomment"))]
    for base in ("iptables", "ip6tables"):
        saved = inside(netns, [f"{base}-legacy-save"])
        lines += [line for line in saved.splitlines() if line.startswith("-")]
    return sorted(line.partition("comment")[0].rstrip() for line in lines)


def is_empty(netns: str) -> bool:
    """Tell whether a namespace has nothing of ours: no chain, no rule, no address."""
    text = "\n".join(listing(netns))
    there = inside(netns, ["ip", "-6", "addr", "show", "lo"])
    return "ISTIO" not in text and "istio" not in text and "::6/128" not in there


class Killer:
    """Kills an agent, or its workshop, again and again, and starts the agent again at once."""

    def __init__(self, agent: Agent, *, workshop: bool) -> None:
        self.agent = agent
        self.kills = 0
        self.left: list[int] = []
        self._workshop = workshop
        self._rng = random.Random(SEED)  # noqa: S311 – test data
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ending.wait(self._rng.random() * 0.4):
            family = self.agent.family()
            if self._workshop:
                os.kill(self.agent.workshop(), signal.SIGKILL)
                self._ending.wait(self._rng.random() * 0.4)  # some are asked meanwhile
                family = [*family, *self.agent.family()]
            self.agent.kill()
            self.left += family
            self.kills += 1
            self.agent.start()


def start_pods(node: Node, new_netns: Callable[[], str]) -> list[Started]:
    """Start pods of both back ends, several at a time."""
    prepared = []
    for number in range(PODS):
        pod = Pod(f"web-{number}", uid=f"u{number}", container_id=f"{number:x}")
        node.add_pod(pod, env=[DUAL_STACK])
        netns = new_netns()
        give_address(netns, "10.1.0.5/24", "fd00::5/64")
        prepared.append((pod, netns, node.config(backend=BACKENDS[number % 2])))

    def add(each: tuple[Pod, str, JSON]) -> Started:
        pod, netns, config = each
        return Started(*each, node.call("ADD", netns, pod, config=config))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(add, prepared))


def references(node: Node, new_netns: Callable[[], str]) -> dict[str, list[str]]:
    """Return what the plugin makes of such a pod when nothing is in its way, for each back end."""
    made = {}
    for backend in BACKENDS:
        netns = new_netns()
        give_address(netns, "10.1.0.5/24", "fd00::5/64")
        pod = Pod(f"ref-{backend}", container_id=f"ref{backend}")
        node.add_pod(pod, env=[DUAL_STACK])
        answer = node.call("ADD", netns, pod, config=node.config(backend=backend))
        assert answer.status == 0
        made[backend] = listing(netns)
    return made


@pytest.mark.parametrize("victim", ["agent", "workshop"])
def test_pods_start_whoever_is_killed(
    tmp_path: Path,
    launcher: Path,
    new_netns: Callable[[], str],
    record_property: Callable[[str, object], None],
    victim: str,
) -> None:
    """Each is captured by the right rules, once; or its ADD has failed and may be repeated."""
    agent = Agent(tmp_path)
    node = Node(tmp_path)
    wanted = references(node, new_netns)
    node.way = Way(install(tmp_path / "bin", launcher, agent.socket))
    with agent:
        with Killer(agent, workshop=victim == "workshop") as killer:
            pods = start_pods(node, new_netns)
        assert is_serving(agent.socket)
        wait(lambda: not any(map(is_alive, killer.left)), "nobody of a killed agent stays")
        failed = [one for one in pods if one.answer.status]
        told = [line for one in pods for line in one.answer.log]
        words = sorted({str(line["fallback"]) for line in told if "fallback" in line})
        codes = [one.answer.code for one in failed]
        record_property("numbers", f"{killer.kills} kills, {len(failed)} failed, {words}, {codes}")
        check_all(node, pods, wanted)


def kill_workshop(agent: Agent) -> None:
    """Kill an agent's workshop, and wait until all that it had are gone."""
    workshop = agent.workshop()
    os.kill(workshop, signal.SIGSTOP)  # it forks no more
    gone = agent.family()[1:]
    os.kill(workshop, signal.SIGKILL)
    wait(lambda: not any(map(is_alive, gone)), "it is gone")


def check_all(node: Node, pods: list[Started], wanted: dict[str, list[str]]) -> None:
    """Look at every pod."""
    for pod, netns, config, answer in pods:
        rules = listing(netns)
        right = wanted[str(config["backend"])]
        if answer.status:
            assert answer.code == 11, answer
            told = "repeating the call completes" in answer.msg  # its process was killed half way
            assert told or rules == right or is_empty(netns), (answer.msg, rules)
        else:
            assert rules == right, pod
            assert node.call("CHECK", netns, pod, config=config).silent, pod
        assert node.call("ADD", netns, pod, config=config).status == 0, pod
        assert listing(netns) == right, pod
    for pod, _, config, _ in pods:
        assert node.call("DEL", "", pod, config=config).silent
    assert [name for name in node.records if "ref" not in name] == []  # half records included


def test_del_undoes_without_a_workshop(tmp_path: Path, launcher: Path, pod_netns: str) -> None:
    """The agent declines before it has touched anything, and the bundle does all of it."""
    node = Node(tmp_path)
    node.add_pod(env=[DUAL_STACK])
    config = node.config(backend="iptables")
    with Agent(tmp_path) as agent:
        node.way = Way(install(tmp_path / "bin", launcher, agent.socket))
        added = node.call("ADD", pod_netns, config=config)
        assert (added.status, added.stderr) == (0, "")
        kill_workshop(agent)
        assert node.call("CHECK", pod_netns, config=config).silent
        assert node.call("DEL", pod_netns, config=config).silent
        assert (node.records, is_empty(pod_netns)) == ([], True)


def test_add_without_a_workshop_is_left_to_the_bundle(
    tmp_path: Path, launcher: Path, new_netns: Callable[[], str]
) -> None:
    """The back end that needs none works as ever; nothing of it stays in the agent."""
    node = Node(tmp_path)
    places = {backend: new_netns() for backend in BACKENDS}
    for netns in places.values():
        give_address(netns, "10.1.0.5/24", "fd00::5/64")
    node.add_pod(env=[DUAL_STACK])
    with Agent(tmp_path) as agent:
        node.way = Way(install(tmp_path / "bin", launcher, agent.socket))
        kill_workshop(agent)
        before = agent.rest()
        for backend, netns in [*places.items()] * 2:
            config = node.config(backend=backend)
            answer = node.call("ADD", netns, config=config)
            assert answer.status == 0
            words = [line["fallback"] for line in answer.log if "fallback" in line]
            assert words == (["declined"] if backend == "iptables" else []), answer.stderr
            assert node.call("CHECK", netns, config=config).silent
            assert node.call("DEL", netns, config=config).silent
        assert agent.rest(before) == before
    assert WEB.container_id not in "".join(node.records)
