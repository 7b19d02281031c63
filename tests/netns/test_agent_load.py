"""Many pods at once, and very many one after the other.

AGENT_ROUNDS says how many ADDs and DELs the search for leaks makes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher_agent import LIMIT
from namespaces import inside
from netns.agents import OWN_NETNS, Agent, Reply, Rest, agent, ask, call, opened
from netns.plugin import (
    JSON,
    Answer,
    Node,
    Pod,
    Way,
    environment,
    finish,
    give_address,
    manifest,
    start,
    stdin,
)
from netns.ways import install

__all__ = ["agent"]  # a fixture
pytestmark = pytest.mark.netns

ROUNDS = int(os.environ.get("AGENT_ROUNDS") or 200)
PODS = 110  # the kubelet's limit
WITHIN_S = 2.0
MAY_GROW_KIB = 1024


@pytest.fixture
def local(tmp_path: Path, launcher: Path, agent: Agent) -> Node:
    """Return a node whose pods are files, served by the agent."""
    node = Node(tmp_path)
    node.way = Way(install(tmp_path / "bin", launcher, agent.socket))
    return node


def make_namespaces(tmp_path: Path, number: int) -> list[str]:
    """Make many network namespaces with an address, in few processes."""
    names = [f"istio-load-{os.getpid()}-{index}" for index in range(number)]
    batch = tmp_path / "batch"
    batch.write_text("".join(f"netns add {name}\n" for name in names))
    subprocess.run(["ip", "-batch", str(batch)], check=True)
    for index, name in enumerate(names):
        batch.write_text(
            f"link set lo up\naddr add 10.1.{index // 250}.{index % 250 + 1}/32 dev lo\n"
        )
        subprocess.run(["ip", "-n", name, "-batch", str(batch)], check=True)
    return names


@pytest.fixture
def many_netns(tmp_path: Path) -> Iterator[list[str]]:
    """Return the paths of namespaces for all pods of a node."""
    names = make_namespaces(tmp_path, PODS)
    try:
        yield [f"/run/netns/{name}" for name in names]
    finally:
        batch = tmp_path / "batch"
        batch.write_text("".join(f"netns del {name}\n" for name in names))
        subprocess.run(["ip", "-batch", str(batch)], check=True)


def alone(node: Node, pod: Pod, backend: str = "nftables") -> JSON:
    """Let a pod exist in a directory of its own, as quick to find as in the agent's cache."""
    directory = node.manifests / pod.container_id
    directory.mkdir()
    (directory / "pod.json").write_text(json.dumps(manifest(pod)))
    return node.config(backend=backend, pod_source=f"manifests:{directory}")


def test_a_node_may_start_all_its_pods_at_once(
    local: Node,
    agent: Agent,
    many_netns: list[str],
    record_property: Callable[[str, object], None],
) -> None:
    """110 within two seconds: all are captured, by the agent."""
    resting = agent.rest()
    pods = [Pod(f"web-{n}", uid=f"u{n}", container_id=f"{n:x}") for n in range(PODS)]
    configs = [alone(local, pod) for pod in pods]
    begin = time.monotonic() + 0.2

    def add(number: int) -> Answer:
        time.sleep(max(0.0, begin + WITHIN_S * number / PODS - time.monotonic()))
        env, started = environment("ADD", many_netns[number], pods[number]), time.monotonic()
        data = stdin(configs[number])
        return finish(start(env, data, program=local.way.program), started)

    with ThreadPoolExecutor(PODS) as pool:
        answers = list(pool.map(add, range(PODS)))
    took_ms = sorted(1000 * answer.took_s for answer in answers)
    told = {
        "p50": f"{statistics.median(took_ms):.1f} ms",
        "p99": f"{statistics.quantiles(took_ms, n=100)[98]:.1f} ms",
        "last": f"{took_ms[-1]:.1f} ms",
    }
    record_property("took", told)
    assert [answer for answer in answers if answer.status or answer.stderr] == []
    assert len([line for line in agent.lines() if "captured" in str(line["msg"])]) == PODS
    assert len(local.records) == PODS
    for netns in many_netns[::20]:
        assert inside(netns, ["nft", "list", "ruleset"]).count("redirect to :15001") == 1
    assert agent.rest(resting) == resting


class Sample(NamedTuple):
    """What the agent has after some rounds."""

    rest: Rest
    resident_kib: int


def do(agent: Agent, verb: str, netns: str, pod: Pod, config: JSON) -> Reply:
    """Make a call by hand: launchers would be most of the time."""
    with opened(netns, OWN_NETNS) as descriptors:
        data = call(environment(verb, netns, pod), stdin(config))
        reply = ask(agent.socket, data, descriptors)
    assert reply is not None
    assert (reply.kind, reply.status) == (LIMIT["DONE"], 0), reply
    return reply


def test_nothing_grows(
    local: Node,
    agent: Agent,
    new_netns: Callable[[], str],
    record_property: Callable[[str, object], None],
) -> None:
    """Neither memory nor threads nor descriptors, over ADD and DEL of ever new pods."""
    places = [new_netns() for _ in range(4)]
    for netns in places:
        give_address(netns, "10.1.0.5/24")

    def work(lane: int) -> list[Sample]:
        samples = []
        backend = "iptables" if lane == 3 else "nftables"  # one in four needs the workshop
        rounds = ROUNDS * (1 if backend == "iptables" else 5) // 16
        for number in range(max(8, rounds)):
            pod = Pod(f"web-{lane}", uid=f"u{number}", container_id=f"{lane}a{number:x}")
            config = alone(local, pod, backend)
            do(agent, "ADD", places[lane], pod, config)
            do(agent, "DEL", places[lane], pod, config)
            samples.append(Sample(agent.now(), agent.resident_kib()))
        return samples

    resting = agent.rest()
    with ThreadPoolExecutor(len(places)) as pool:
        lanes = list(pool.map(work, range(len(places))))
    samples = lanes[0]
    quarter = len(samples) // 4
    first, last = samples[:quarter], samples[-quarter:]
    kib = [statistics.median(sample.resident_kib for sample in each) for each in (first, last)]
    threads = [max(sample.rest.threads for sample in each) for each in (first, last)]
    files = [max(sample.rest.descriptors for sample in each) for each in (first, last)]
    record_property("grew", f"{sum(map(len, lanes))} rounds, {kib} KiB, {threads}, {files}")
    assert kib[1] - kib[0] < MAY_GROW_KIB
    assert agent.rest(resting) == resting
    assert local.records == []
    assert agent.now().namespaces == 1
