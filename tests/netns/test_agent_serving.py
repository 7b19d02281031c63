"""An agent that ends while it works, works beside the plugin's process, and tells what it does."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_apiserver import FakeApiServer, Reply
from namespaces import inside
from netns.agents import Agent, agent, is_alive, is_serving
from netns.plugin import (
    JSON,
    PROGRAM,
    WEB,
    Answer,
    Node,
    Pod,
    Way,
    environment,
    finish,
    give_address,
    rules,
    start,
    stdin,
)
from netns.ways import install
from waiting import wait

__all__ = ["agent"]  # a fixture
pytestmark = pytest.mark.netns

BACKENDS = ("nftables", "iptables")
PODS = 6


@pytest.fixture
def served(tmp_path: Path, launcher: Path, agent: Agent, server: FakeApiServer) -> Node:
    """Return a node with an API server, whose launcher asks the agent."""
    node = Node(tmp_path, server)
    node.way = Way(install(tmp_path / "bin", launcher, agent.socket))
    return node


def made(netns: str) -> str:
    """List what is programmed in a namespace."""
    return inside(netns, ["nft", "-s", "list", "ruleset"])


def words(answer: Answer) -> list[object]:
    """Return why the bundle did a call, from the lines of its log."""
    return [line["fallback"] for line in answer.log if "fallback" in line]


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGTERM", "stdin"])
def test_what_was_taken_in_is_finished_and_nothing_new_begun(
    served: Node, agent: Agent, server: FakeApiServer, new_netns: Callable[[], str], how: str
) -> None:
    """Calls wait for the API server when the agent is told to end; later ones are the bundle's."""
    pods = [Pod(f"web-{n}", uid=f"u{n}", container_id=f"{n:x}") for n in range(PODS)]
    places = [new_netns() for _ in pods]
    answering = threading.Event()
    server.script.extend([Reply(before=lambda: answering.wait(20))] * PODS)
    calls = []
    for number, (pod, netns) in enumerate(zip(pods, places, strict=True)):
        give_address(netns, f"10.1.0.{number + 1}/24")
        served.add_pod(pod)
        config = served.config(backend=BACKENDS[number % 2])
        calls.append((served.start("ADD", netns, pod, config=config), time.monotonic()))
    wait(lambda: len(server.requests) == PODS, "all of them ask")
    family = agent.family()
    ending = threading.Thread(target=agent.end)
    if how == "SIGTERM":
        agent.process.send_signal(signal.SIGTERM)
    ending.start()
    wait(lambda: not agent.socket.exists(), "it takes nobody in any more")
    late, place = Pod("late", uid="late", container_id="1a7e"), new_netns()
    give_address(place, "10.1.0.99/24")
    served.add_pod(late)
    after = served.call("ADD", place, late)
    assert (after.status, words(after)) == (0, ["absent"])
    assert not [netns for netns in places if made(netns)]
    answering.set()
    answers = [finish(*each) for each in calls]
    ending.join()
    assert [(answer.status, answer.stderr) for answer in answers] == [(0, "")] * PODS
    assert agent.process.returncode == 0
    wait(lambda: not any(map(is_alive, family)), "nobody stays")
    for pod, netns in zip(pods, places, strict=True):
        assert served.call("CHECK", netns, pod).silent
        assert ("ISTIO" in made(netns)) != ("istio-proxy" in made(netns))


def test_who_takes_too_long_is_left_to_the_bundle(
    served: Node, agent: Agent, server: FakeApiServer, pod_netns: str
) -> None:
    """An agent that ends without having finished closes the connection; nothing is half done."""
    served.add_pod()
    server.script.append(Reply(fault="hang"))
    process, started = served.start("ADD", pod_netns), time.monotonic()
    wait(lambda: server.requests, "it asks")
    assert agent.end() == 1
    answer = finish(process, started)
    assert (answer.status, words(answer)) == (0, ["died", "died"][: len(words(answer))])
    assert words(answer)
    assert served.call("CHECK", pod_netns).silent


# -- side by side ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_agent_and_process_at_once_make_one_rule_set(
    served: Node, agent: Agent, pod_netns: str, backend: str
) -> None:
    """Two ADDs of one container: one waits for the other, and finds all in place."""
    served.add_pod()
    config = served.config(backend=backend)
    assert served.call("ADD", pod_netns, config=config).status == 0
    wanted, record = made(pod_netns), served.record()
    env, data = environment("ADD", pod_netns), stdin(config)
    before = agent.rest()
    for number in range(3):
        assert served.call("DEL", pod_netns, config=config).silent
        programs = (served.way.program, PROGRAM)
        calls = [(start(env, data, program=one), time.monotonic()) for one in programs]
        assert [finish(*each).status for each in calls] == [0, 0], number
        assert made(pod_netns) == wanted, number
        assert served.record() == record, number
        assert served.records == [f"{WEB.container_id}-{WEB.ifname}"]
    assert len(rules(pod_netns)) == len(set(rules(pod_netns)))
    assert agent.rest(before) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_add_and_del_at_once_leave_all_or_nothing(
    served: Node, agent: Agent, pod_netns: str, backend: str
) -> None:
    """One through the agent, one in process, in either order."""
    served.add_pod()
    config = served.config(backend=backend)
    assert served.call("ADD", pod_netns, config=config).status == 0
    wanted = made(pod_netns)
    for number in range(4):
        programs = [served.way.program, PROGRAM][:: (-1) ** number]
        calls = [
            (start(environment(verb, pod_netns), stdin(config), program=program), time.monotonic())
            for verb, program in zip(("DEL", "ADD"), programs, strict=True)
        ]
        assert [finish(*each).status for each in calls] == [0, 0], number
        left = made(pod_netns)
        captured = left == wanted
        assert captured or ("ISTIO" not in left and "istio" not in left), number
        assert bool(served.records) == captured, number
        assert served.call("ADD", pod_netns, config=config).status == 0
        assert made(pod_netns) == wanted
    assert is_serving(agent.socket)


# -- the log ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sidecar", [True, False])
def test_an_add_is_three_lines_at_most(
    served: Node, agent: Agent, pod_netns: str, backend: str, sidecar: bool
) -> None:
    """At info; each has the launcher's id, a pod and a verb, and there is nothing on stderr."""
    served.add_pod(sidecar=sidecar)
    seen: set[object] = set()
    for _ in range(3):
        size = agent.log_size()
        answer = served.call("ADD", pod_netns, config=served.config(backend=backend))
        assert (answer.status, answer.stderr) == (0, "")
        lines = agent.lines(size)
        assert 1 <= len(lines) <= 3, lines
        (identity,) = {line["request_id"] for line in lines}
        assert len(bytes.fromhex(str(identity))) == 16
        assert identity not in seen
        seen.add(identity)
        for line in lines:
            assert (line["verb"], line["pod"], line["level"]) == ("ADD", "shop/web", line["level"])
            assert line["level"] in ("info", "warn")


def test_lines_of_the_agent_have_the_id_that_the_launcher_sent(
    served: Node, agent: Agent, pod_netns: str
) -> None:
    """A call that the agent has to leave half way is found by it in both logs."""
    served.add_pod()
    served.api.script.append(Reply(fault="hang"))
    process, started = served.start("ADD", pod_netns), time.monotonic()
    wait(lambda: served.api.requests, "it asks")
    agent.kill()
    answer = finish(process, started)
    assert answer.status == 0
    told = [line["request_id"] for line in answer.log]
    assert len(set(told)) == 1
    assert words(answer)[0] == "died"


@pytest.mark.parametrize("why", ["absent", "died", "declined"])
def test_a_fall_back_says_so(
    served: Node, agent: Agent, pod_netns: str, why: str, tmp_path: Path
) -> None:
    """In a field of a line; the pod starts all the same."""
    served.add_pod()
    config: JSON = served.config(backend="iptables")
    wrapper: list[str] = []
    if why == "absent":
        agent.end()
    elif why == "declined":
        os.kill(agent.workshop(), signal.SIGKILL)
        wait(lambda: sum(map(is_alive, agent.family())) == 1, "the workshop is gone")
    else:
        served.api.script.append(Reply(before=agent.process.kill))
    answer = served.call("ADD", pod_netns, config=config, wrapper=wrapper)
    assert answer.status == 0
    assert set(words(answer)) == {why}
    assert len(answer.log) <= 3
    assert len({line["request_id"] for line in answer.log}) == 1
    written = (served.run_dir / "istio-cni.log").read_text().splitlines()
    assert any(json.loads(line).get("fallback") == why for line in written)
