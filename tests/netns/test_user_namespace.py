"""A pod whose network namespace belongs to another user namespace, and the back end it gets."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from namespaces import inside
from netns.plugin import JSON, Node
from netns.programming import CLI
from netns.test_sandbox import reach_within, user_namespace_pod
from netns.traffic import (
    APPLICATION,
    FAMILIES,
    INBOUND,
    OUTBOUND,
    OUTSIDE,
    POD,
    PROXY,
    PROXY_LISTENERS,
    Call,
    Listener,
    reach,
    serving,
)

pytestmark = pytest.mark.netns

DUAL_STACK: JSON = {"name": "ISTIO_DUAL_STACK", "value": "true"}
FIRST_ID = 100_000  # of the pod's user namespace, as the node counts
OUT = [Call(OUTSIDE[family], 80) for family in FAMILIES]
IN = [Call(POD[family], 8080) for family in FAMILIES]


class Remapped(NamedTuple):
    """A pod of another user namespace: its path, a process in it, and the world outside."""

    path: str
    process: int
    outside: str


@pytest.fixture(params=[True, False], ids=["mapped first", "mapped later"])
def pod(netns: str, request: pytest.FixtureRequest) -> Iterator[Remapped]:
    """Run a pod with ids from 100000 on, its proxy and its application, and a server outside."""
    with ExitStack() as stack:
        made = user_namespace_pod(netns, mapped_first=request.param)
        path, process = stack.enter_context(made)
        stack.enter_context(serving(path, "proxy", PROXY_LISTENERS))
        stack.enter_context(serving(path, "pod", [Listener(8080)]))
        stack.enter_context(serving(netns, "outside", [Listener(80)]))
        yield Remapped(path, process, netns)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Make a node with a dual-stack pod of the mesh."""
    node = Node(tmp_path)
    node.add_pod(env=[DUAL_STACK])
    return node


def test_auto_is_nftables_there(node: Node, pod: Remapped) -> None:
    """Although iptables is on the node; the log gives the reason, CHECK and DEL do their work."""
    config = node.config(backend="auto")
    added = node.call("ADD", pod.path, config=config)
    assert (added.status, added.logged("", "warn")) == (0, False)
    (line,) = added.log
    assert (line["level"], line["backend"]) == ("info", "nftables")
    assert "user namespace" in str(line["reason"])
    assert node.call("CHECK", pod.path, config=config).silent
    assert node.call("DEL", pod.path, config=config).silent
    assert inside(pod.path, ["nft", "list", "ruleset"]) == ""
    directly = reach_within(pod.path, pod.process, APPLICATION, *OUT)
    assert [one[:2] for one in directly] == [("outside", 80)] * 2


def test_the_command_line_sees_it_likewise(pod: Remapped) -> None:
    """Started by the node in such a namespace, `auto` does not try iptables, which would fail."""
    enter = ["nsenter", f"--net={pod.path}", str(CLI)]
    done = subprocess.run(
        [*enter, "-i", "*", "-b", "*"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "back end nftables: the network namespace belongs to another user" in done.stderr


def test_owners_are_the_pod_s_ids(node: Node, pod: Remapped) -> None:
    """Its 1337 is the proxy, the node's 101337; who is 1337 on the node is nobody there."""
    assert node.call("ADD", pod.path).status == 0
    captured = reach_within(pod.path, pod.process, APPLICATION, *OUT)
    assert [one[:2] for one in captured] == [("proxy", OUTBOUND)] * 2
    exempt = reach_within(pod.path, pod.process, PROXY, *OUT)
    assert [one[:2] for one in exempt] == [("outside", 80)] * 2
    as_seen_by_the_node = reach(pod.path, FIRST_ID + PROXY, *OUT)
    assert [one[:2] for one in as_seen_by_the_node] == [("outside", 80)] * 2
    stranger = reach(pod.path, PROXY, *OUT)
    assert [one[:2] for one in stranger] == [("proxy", OUTBOUND)] * 2
    arrived = reach(pod.outside, APPLICATION, *IN)
    assert [one[:2] for one in arrived] == [("proxy", INBOUND)] * 2


def test_a_proxy_with_another_id_is_exempt_by_that(node: Node, pod: Remapped) -> None:
    """`runAsUser` of the proxy container counts in the pod's ids, too."""
    context = {"runAsUser": 2024, "runAsGroup": 2024}
    proxy = {"name": "istio-proxy", "env": [DUAL_STACK], "securityContext": context}
    node.add_pod(containers=[proxy])
    assert node.call("ADD", pod.path).status == 0
    exempt = reach_within(pod.path, pod.process, 2024, *OUT)
    assert [one[:2] for one in exempt] == [("outside", 80)] * 2
    captured = reach_within(pod.path, pod.process, PROXY, *OUT)
    assert [one[:2] for one in captured] == [("proxy", OUTBOUND)] * 2
