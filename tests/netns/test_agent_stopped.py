"""An agent that is stopped in the middle of a call, and goes on when others have finished it.

Whoever called it has given up by then: the launcher has run the bundle, the runtime has sent DEL.
By default callers are made by hand and give up early. With AGENT_STOPS they are launchers, which
wait for ten seconds, and the bundle for a lock as long again; the number is that of rounds.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from fake_apiserver import FakeApiServer, Reply
from namespaces import inside
from netns.agents import (
    OWN_NETNS,
    Agent,
    call,
    connect,
    is_serving,
    opened,
    send,
)
from netns.plugin import (
    JSON,
    PROGRAM,
    WEB,
    Answer,
    Node,
    Pod,
    environment,
    finish,
    give_address,
    start,
    stdin,
)
from netns.ways import install
from waiting import wait

pytestmark = pytest.mark.netns

ROUNDS = int(os.environ.get("AGENT_STOPS") or 0)
PODS = 12 if ROUNDS else 6
SEED = int(os.environ.get("AGENT_SEED") or 11)
DUAL_STACK: JSON = {"name": "ISTIO_DUAL_STACK", "value": "true"}
FREE = ("read", "looked up", "before the lock")
"""Moments in which the agent holds no lock, so that the bundle can finish its work."""
NATIVE = ("lock taken", "record written", "after the batch")
PROGRAMS = ("before the first program", "between the programs", "after the programs")
CASES = [
    *zip(["nftables"] * 3, FREE, (False, True, False), strict=True),
    *zip(["iptables"] * 3, FREE, (True, False, True), strict=True),
    *[("nftables", moment, True) for moment in NATIVE],
    ("nftables", "before the batch", True),
    *[("iptables", moment, True) for moment in PROGRAMS],
    ("iptables", "before the only program", True),
]
"""Where no lock is held, each moment by each back end, and each of both with and without a DEL."""


class Seen(NamedTuple):
    """What is programmed in a namespace, and what is recorded of it."""

    nft: str
    iptables: tuple[str, ...]
    records: dict[str, str]


def see(netns: str, node: Node) -> Seen:
    """Look at a namespace and at all records."""
    saved = [
        inside(netns, [f"{base}-{variant}-save"])
        for base in ("iptables", "ip6tables")
        for variant in ("nft", "legacy")
    ]
    rules = tuple(line for text in saved for line in text.splitlines() if line[:1] in "-*")
    records = {path.name: path.read_text() for path in node.attachments.glob("*")}
    return Seen(inside(netns, ["nft", "-s", "list", "ruleset"]), rules, records)


def added(before: Seen, after: Seen) -> list[str]:
    """Return what is there that was not.

    What somebody has taken back is nothing, nor is the end of a record whose rules were there.
    """
    lines = set(before.nft.splitlines())
    new = [line for line in after.nft.splitlines() if line not in lines]
    new += [line for line in after.iptables if line not in before.iptables]
    return new + [name for name in after.records if name not in before.records]


class Story:
    """A pod with an agent of its own, which stops at a moment of the first call."""

    def __init__(self, directory: Path, netns: str, moment: str, backend: str) -> None:
        self.mark = directory / "stopped"
        self.netns = netns
        self.agent = Agent(directory, str(self.mark), moment, module="netns.stopping_agent")
        self.node = Node(directory)
        self.config = self.node.config(backend=backend)

    def see(self) -> Seen:
        """Look at the namespace and at the records."""
        return see(self.netns, self.node)

    def in_process(self, verb: str) -> Answer:
        """Do what the launcher does when it has given up."""
        process = start(environment(verb, self.netns), stdin(self.config), program=PROGRAM)
        return finish(process, time.monotonic())

    def begin(self, verb: str) -> Callable[[], None]:
        """Begin a call by hand; return what gives it up."""
        with opened(self.netns, OWN_NETNS) as descriptors:
            caller = connect(self.agent.socket)
            send(caller, call(environment(verb, self.netns), stdin(self.config)), descriptors)
        return caller.close

    def stop(self) -> list[int]:
        """Wait until the agent is at the moment, and stop all of it."""
        wait(self.mark.exists, "the moment comes")
        stopped = self.agent.stop()
        self.mark.unlink()
        return stopped


@pytest.fixture
def story(tmp_path: Path, pod_netns: str) -> Callable[[str, str], Story]:
    """Make the story of a pod."""
    return lambda moment, backend: Story(tmp_path, pod_netns, moment, backend)


def tell(told: Story, moment: str, *, undo: bool) -> tuple[str, Seen, Seen]:
    """Tell one story by hand; return how the fall-back went, and what was there then and later."""
    with told.agent as agent:
        resting = agent.rest()
        give_up = told.begin("ADD")
        stopped = told.stop()
        give_up()
        went = "not tried"
        if moment in FREE:
            answer = told.in_process("ADD")
            went = "done" if answer.status == 0 else f"code {answer.code}: {answer.msg}"
        if undo:
            answer = told.in_process("DEL")
            assert answer.silent
            assert answer.logged("capture undone") == (moment in FREE), answer.stderr
        before = told.see()
        agent.resume(stopped)
        assert is_serving(agent.socket)
        assert agent.rest(resting) == resting
        return went, before, told.see()


@pytest.mark.parametrize(("backend", "moment", "undo"), CASES)
def test_who_wakes_up_too_late_adds_nothing(
    story: Callable[[str, str], Story], backend: str, moment: str, undo: bool
) -> None:
    """Neither rules nor records; half of its own work it takes back, alone as it still is."""
    told = story(moment.replace("only", "first"), backend)
    told.node.add_pod(env=[] if "only" in moment else [DUAL_STACK])
    went, before, after = tell(told, moment, undo=undo)
    assert went in ("done", "not tried")
    assert added(before, after) == []
    assert not any(name.startswith(".") for name in after.records)
    if moment in FREE:
        assert after == before


DELETIONS = [
    ("nftables", "record dropped"),
    ("nftables", "before the batch"),
    ("iptables", "record dropped"),
    ("iptables", "before the first program"),
    ("iptables", "between the programs"),
]


@pytest.mark.parametrize(("backend", "moment"), DELETIONS)
def test_a_del_that_goes_on_too_late_brings_nothing_back(
    story: Callable[[str, str], Story], backend: str, moment: str
) -> None:
    """What was removed stays so; the namespace may get rid of the rest."""
    told = story(moment, backend)
    told.node.add_pod(env=[DUAL_STACK])
    with told.agent as agent:
        assert told.in_process("ADD").status == 0
        resting = agent.rest()
        give_up = told.begin("DEL")
        stopped = told.stop()
        give_up()
        assert told.in_process("DEL").silent
        before = told.see()
        agent.resume(stopped)
        assert is_serving(agent.socket)
        assert agent.rest(resting) == resting
        assert added(before, told.see()) == []


@pytest.mark.parametrize("moment", ["deleting", "record dropped"])
@pytest.mark.parametrize("backend", ["nftables", "iptables"])
def test_a_del_that_goes_on_too_late_spares_the_next_add(
    story: Callable[[str, str], Story], backend: str, moment: str
) -> None:
    """An ADD of the same container comes first, where it gets the lock, else it fails."""
    told = story(moment, backend)
    told.node.add_pod(env=[DUAL_STACK])
    with told.agent as agent:
        assert told.in_process("ADD").status == 0
        resting = agent.rest()
        give_up = told.begin("DEL")
        stopped = told.stop()
        give_up()
        assert told.in_process("DEL").silent
        if moment == "deleting":
            assert told.in_process("ADD").status == 0
        before = told.see()
        agent.resume(stopped)
        assert is_serving(agent.socket)
        assert agent.rest(resting) == resting
        after = told.see()
        if moment == "deleting":
            assert after == before
        else:
            assert added(before, after) == []


def give_up_a_switch(told: Story, former: JSON) -> tuple[Seen, Seen]:
    """Give up an ADD of a pod that another configuration captures; return both views of it."""
    told.node.add_pod(env=[DUAL_STACK])
    with told.agent as agent:
        assert told.node.call("ADD", told.netns, config=former).status == 0
        before = told.see()
        resting = agent.rest()
        give_up = told.begin("ADD")
        stopped = told.stop()
        give_up()
        agent.resume(stopped)
        assert is_serving(agent.socket)
        assert agent.rest(resting) == resting
        return before, told.see()


def test_a_switch_of_the_back_end_that_nobody_waits_for_is_taken_back(
    story: Callable[[str, str], Story],
) -> None:
    """The former rules capture all the time, and nothing is dropped."""
    told = story("after the batch", "nftables")
    former = told.node.config(backend="iptables")
    before, after = give_up_a_switch(told, former)
    assert (after.iptables, after.nft) == (before.iptables, before.nft)
    assert told.node.call("CHECK", told.netns, config=former).silent


def test_a_captured_pod_stays_so_when_a_switch_to_iptables_is_given_up(
    story: Callable[[str, str], Story],
) -> None:
    """Our tables go last; whoever gives up right then has the new rules, or the former ones."""
    told = story("after the batch", "iptables")
    _, after = give_up_a_switch(told, told.node.config(backend="nftables"))
    by_iptables = "-A OUTPUT -j ISTIO_OUTPUT" in after.iptables
    assert by_iptables or "table inet istio-proxy-nat" in after.nft
    assert "DROP" not in "".join(after.iptables)
    assert told.in_process("ADD").status == 0


# -- at any moment ---------------------------------------------------------------------------------


def pods(node: Node, new_netns: Callable[[], str]) -> list[tuple[Pod, str, JSON]]:
    """Make pods of both back ends, each with its namespace and configuration."""
    made = []
    for number in range(PODS):
        pod = Pod(f"web-{number}", uid=f"u{number}", container_id=f"c{number:x}")
        node.add_pod(pod, env=[DUAL_STACK])
        netns = new_netns()
        give_address(netns, f"10.1.0.{number + 1}/24", f"fd00::{number + 1:x}/64")
        made.append((pod, netns, node.config(backend=("nftables", "iptables")[number % 2])))
    return made


def by_hand(agent: Agent, pod: Pod, netns: str, config: JSON) -> Callable[[], object]:
    """Begin an ADD; return what gives it up."""
    with opened(netns, OWN_NETNS) as descriptors:
        caller = connect(agent.socket)
        send(caller, call(environment("ADD", netns, pod), stdin(config)), descriptors)
    return caller.close


def by_launcher(program: Path, pod: Pod, netns: str, config: JSON) -> Callable[[], Answer]:
    """Begin an ADD; return what waits for its end."""
    process = start(environment("ADD", netns, pod), stdin(config), program=program)
    return lambda: finish(process, time.monotonic())


@pytest.mark.parametrize("number", range(max(1, ROUNDS)))
def test_an_agent_may_be_stopped_at_any_moment(
    tmp_path: Path,
    launcher: Path,
    new_netns: Callable[[], str],
    record_property: Callable[[str, object], None],
    number: int,
) -> None:
    """It serves on afterwards, and what the others have made of its calls stays as it is."""
    rng = random.Random(SEED + number)  # noqa: S311 – test data
    node = Node(tmp_path)
    made = pods(node, new_netns)
    with Agent(tmp_path) as agent, ThreadPoolExecutor(PODS) as pool:
        program = install(tmp_path / "bin", launcher, agent.socket)
        resting, ends = agent.rest(), []
        for each in made:
            ends.append(by_launcher(program, *each) if ROUNDS else by_hand(agent, *each))
            time.sleep(rng.random() * 0.01)
        time.sleep(rng.random() * 0.05)
        stopped = agent.stop()
        answers = list(pool.map(lambda end: end(), ends))
        codes = [answer.code for answer in answers if isinstance(answer, Answer)]
        record_property("codes", f"{codes.count(None)} done, {codes.count(11)} failed with code 11")
        assert set(codes) <= {None, 11}
        undone = made[::2] + made[1::4]  # of both back ends; of the others the fall-back is the end
        programs = program if ROUNDS else PROGRAM
        deletions = [
            start(environment("DEL", netns, pod), stdin(config), program=programs)
            for pod, netns, config in undone
        ]
        assert all(finish(deletion, time.monotonic()).silent for deletion in deletions)
        before = [see(netns, node) for _, netns, _ in made]
        agent.resume(stopped)
        assert is_serving(agent.socket)
        assert agent.rest(resting) == resting

        def new() -> list[list[str]]:
            after = [see(netns, node) for _, netns, _ in made]
            return [added(*pair)[:3] for pair in zip(before, after, strict=True)]

        with contextlib.suppress(AssertionError):  # what a program was loading is taken back
            wait(lambda: not any(new()), "nothing is new", patience_s=5.0)
        assert new() == [[]] * PODS, codes


# -- calls that waited to be taken in --------------------------------------------------------------


@pytest.fixture
def idle(tmp_path: Path) -> Agent:
    """Return an agent that is not started yet."""
    return Agent(tmp_path)


def wait_in_vain(agent: Agent, verb: str, netns: str, config: JSON, number: int = 1) -> None:
    """Call an agent that is stopped, and give up."""
    for _ in range(number):
        with opened(netns, OWN_NETNS) as descriptors, connect(agent.socket) as caller:
            data = call(environment(verb, netns), stdin(config), wait_s=0.1)
            send(caller, data, descriptors)


@pytest.mark.parametrize("verb", ["DEL", "GC"])
@pytest.mark.parametrize("backend", ["nftables", "iptables"])
def test_deletions_that_nobody_waits_for_are_not_carried_out(
    idle: Agent, tmp_path: Path, pod_netns: str, backend: str, verb: str
) -> None:
    """The bundle has done it, and since then the same container was added again."""
    node = Node(tmp_path)
    node.add_pod()
    config = node.config(backend=backend)
    with idle as agent:
        resting = agent.rest()
        assert node.call("ADD", pod_netns, config=config).status == 0
        stopped = agent.stop()
        wait_in_vain(agent, verb, pod_netns, {**config, "cni.dev/valid-attachments": []})
        assert node.call("DEL", pod_netns, config=config).silent
        assert node.call("ADD", pod_netns, config=config).status == 0
        before = see(pod_netns, node)
        agent.resume(stopped)
        assert is_serving(agent.socket)
        assert agent.rest(resting) == resting
        assert see(pod_netns, node) == before
    assert node.records == [f"{WEB.container_id}-{WEB.ifname}"]
    assert node.call("CHECK", pod_netns, config=config).silent


def test_nobody_is_asked_for_pods_that_nobody_waits_for(
    idle: Agent, tmp_path: Path, pod_netns: str, server: FakeApiServer
) -> None:
    """An agent that was away for a while does not fall upon the API server."""
    node = Node(tmp_path, server)
    node.add_pod()
    config = node.config(backend="nftables")
    with idle as agent:
        resting = agent.rest()
        stopped = agent.stop()
        wait_in_vain(agent, "ADD", pod_netns, config, 40)
        agent.resume(stopped)
        assert is_serving(agent.socket)
        assert agent.rest(resting) == resting
    assert server.requests == []
    assert see(pod_netns, node) == Seen("", (), {})


@pytest.mark.parametrize("backend", ["nftables", "iptables"])
def test_an_answer_of_the_api_server_may_come_too_late(
    idle: Agent, tmp_path: Path, pod_netns: str, server: FakeApiServer, backend: str
) -> None:
    """The look-up was under way when the agent was stopped; the bundle and DEL come meanwhile."""
    node = Node(tmp_path, server)
    node.add_pod()
    config = node.config(backend=backend)
    with idle as agent:
        resting = agent.rest()
        server.script.append(Reply(delay_s=1.0))
        give_up = by_hand(agent, WEB, pod_netns, config)
        wait(lambda: server.requests, "it asks")
        stopped = agent.stop()
        give_up()
        assert node.call("ADD", pod_netns, config=config).status == 0
        assert node.call("DEL", pod_netns, config=config).silent
        before = see(pod_netns, node)
        agent.resume(stopped)
        assert is_serving(agent.socket)
        assert agent.rest(resting) == resting
        assert see(pod_netns, node) == before
