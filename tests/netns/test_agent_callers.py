"""Callers that mean harm, or nothing at all: the agent serves on, and keeps nothing of theirs."""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from launcher_agent import LIMIT, VERSION
from namespaces import inside
from netns.agents import (
    OWN_NETNS,
    Agent,
    Reply,
    Rest,
    ask,
    call,
    connect,
    is_serving,
    opened,
    receive,
    send,
)
from netns.plugin import WEB, Node, Pod, Way, environment, give_address, is_captured, stdin
from netns.ways import install

pytestmark = pytest.mark.netns

SELF = Path("/proc/self/ns")
SHORT = {"CNI_COMMAND": "VERSION"}
DONE = LIMIT["DONE"]
SEED = 7


@pytest.fixture(scope="module")
def resting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Rest]]:
    """Run an agent for the tests of this file; tell what it has while nobody asks."""
    if os.geteuid() != 0:
        pytest.skip("needs root, whom alone an agent serves")
    with Agent(tmp_path_factory.mktemp("agent")) as agent:
        assert is_serving(agent.socket)
        yield agent, agent.rest()


@pytest.fixture
def unharmed(resting: tuple[Agent, Rest]) -> Iterator[Agent]:
    """Return an agent that must be as it was when the test is over, and serve."""
    agent, before = resting
    yield agent
    assert is_serving(agent.socket)
    assert agent.rest(before) == before
    assert before.namespaces == 1


@pytest.fixture
def local(tmp_path: Path) -> Node:
    """Return a node whose pods are files."""
    return Node(tmp_path)


def add(node: Node, netns: str, pod: Pod = WEB) -> bytes:
    """Write an ADD that would be carried out."""
    node.add_pod(pod)
    return call(environment("ADD", netns, pod), stdin(node.config(backend="nftables")))


def listing(netns: str) -> str:
    """List what is programmed in a namespace, by whatever back end."""
    saved = [inside(netns, [f"{base}-legacy-save"]) for base in ("iptables", "ip6tables")]
    return inside(netns, ["nft", "list", "ruleset"]) + "".join(
        line for text in saved for line in text.splitlines() if line.startswith(("-A", ":ISTIO"))
    )


# -- a caller as it should be ----------------------------------------------------------------------


def test_a_call_by_hand_is_carried_out(unharmed: Agent, local: Node, netns: str) -> None:
    """What the other tests change is a call that works."""
    give_address(netns, "10.1.0.5/24")
    with opened(netns, OWN_NETNS) as descriptors:
        reply = ask(unharmed.socket, add(local, netns), descriptors)
    assert reply is not None
    assert (reply.version, reply.kind, reply.status) == (VERSION, DONE, 0)
    assert "istio-proxy-nat" in listing(netns)


# -- descriptors -----------------------------------------------------------------------------------


def descriptors_of(kind: str, netns: str) -> tuple[list[int], list[object]]:
    """Return descriptors of a kind, and what must be kept meanwhile."""
    if kind == "file":
        return [os.open("/etc/passwd", os.O_RDONLY)], []
    if kind == "directory":
        return [os.open("/", os.O_RDONLY)], []
    if kind == "path":
        return [os.open(netns, os.O_PATH)], []
    if kind == "pipe":
        return [*os.pipe()], []
    if kind == "socket":
        pair = socket.socketpair()
        return [pair[0].fileno()], list(pair)
    if kind == "device":
        return [os.open("/dev/zero", os.O_RDONLY)], []
    return [os.open(SELF / kind, os.O_RDONLY)], []


@pytest.mark.parametrize(
    "kind",
    ["file", "directory", "path", "pipe", "socket", "device", "mnt", "user", "pid", "ipc", "uts"],
)
@pytest.mark.parametrize("place", ["pod", "own", "both"])
def test_what_is_no_network_namespace_is_not_taken_for_one(
    unharmed: Agent, local: Node, netns: str, kind: str, place: str
) -> None:
    """As the pod's: the error of the protocol. As the caller's own: declined."""
    theirs, kept = descriptors_of(kind, netns)
    with opened(netns, OWN_NETNS) as (pod, own):
        sent = [theirs[0] if place != "own" else pod, theirs[0] if place != "pod" else own]
        reply = ask(unharmed.socket, add(local, netns), sent)
    assert reply is not None
    if place == "pod" and kind != "path":
        assert (reply.kind, reply.status, reply.json["code"]) == (DONE, 1, 8)
        assert "is not a network namespace" in str(reply.json["msg"])
    elif place == "pod":
        assert (reply.kind, reply.status) == (DONE, 1)
    else:
        assert reply.is_declined
    assert listing(netns) == ""
    assert local.records == []
    if not kept:
        for descriptor in theirs:
            os.close(descriptor)
    for each in kept:
        each.close()  # type: ignore[attr-defined] # a socket


@pytest.mark.parametrize("count", [0, 1, 3, 16, 17, 200, 253])
@pytest.mark.parametrize("error", [0, 2])
def test_a_wrong_number_of_descriptors_is_declined(
    unharmed: Agent, local: Node, netns: str, count: int, error: int
) -> None:
    """Nothing is guessed from their order, and none stays open."""
    data = call(environment("ADD", netns), stdin(local.config()), netns_error=error)
    if (count, error) == (1, 2):
        count = 2  # one is right then
    with opened(OWN_NETNS) as own:
        reply = ask(unharmed.socket, data, own * count)
    assert reply is not None
    assert reply.is_declined
    assert b"descriptors" in reply.body or b"not in the host" in reply.body


def test_swapped_descriptors_are_declined(unharmed: Agent, local: Node, netns: str) -> None:
    """The caller's own namespace comes last, and must be the host's."""
    with opened(OWN_NETNS, netns) as descriptors:
        reply = ask(unharmed.socket, add(local, netns), descriptors)
    assert reply is not None
    assert reply.is_declined
    assert listing(netns) == ""


@pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK"])
def test_the_hosts_namespace_is_refused(unharmed: Agent, local: Node, verb: str) -> None:
    """An ADD has code 8; the others find nothing to do there."""
    local.add_pod()
    before = subprocess.check_output(["nft", "list", "ruleset"])
    data = call(environment(verb, "/proc/1/ns/net"), stdin(local.config(backend="nftables")))
    with opened(OWN_NETNS, OWN_NETNS) as descriptors:
        reply = ask(unharmed.socket, data, descriptors)
    assert reply is not None
    assert reply.kind == DONE
    if verb == "ADD":
        assert (reply.status, reply.json["code"]) == (1, 8)
        assert "is the host's network namespace" in str(reply.json["msg"])
    assert subprocess.check_output(["nft", "list", "ruleset"]) == before
    assert local.records == []


def test_descriptors_with_every_byte_are_closed(unharmed: Agent, local: Node, netns: str) -> None:
    """As many as the kernel lets one send at a time."""
    data = add(local, netns)
    with opened(OWN_NETNS) as own, connect(unharmed.socket) as caller:
        for place in range(0, len(data), 16):
            send(caller, data[place : place + 16], own * 16)
        reply = receive(caller)
    assert reply is None or reply.is_declined
    assert listing(netns) == ""


def test_a_callers_descriptors_are_limited(unharmed: Agent) -> None:
    """Else one caller takes all that the agent may have, and calls of others fail."""
    most = unharmed.now().descriptors
    with opened(OWN_NETNS) as own, connect(unharmed.socket) as caller:
        data = call(SHORT, bytes(4096))
        for place in range(len(data) - 1):
            send(caller, data[place : place + 1], own * 16)
            most = max(most, unharmed.now().descriptors) if place % 16 == 0 else most
            if most > 200:
                break
    assert most <= 200


def test_no_descriptors_left_is_no_end(unharmed: Agent) -> None:
    """Callers are let go or wait; afterwards all is as before."""
    limits = resource.prlimit(unharmed.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(
        unharmed.pid, resource.RLIMIT_NOFILE, (unharmed.now().descriptors + 3, limits[1])
    )
    callers = [connect(unharmed.socket) for _ in range(24)]
    try:
        with opened(OWN_NETNS) as own:
            for caller in callers:
                send(caller, call(SHORT, netns_error=2), own)
            time.sleep(0.3)
            resource.prlimit(unharmed.pid, resource.RLIMIT_NOFILE, limits)
            replies = [receive(caller) for caller in callers]
    finally:
        resource.prlimit(unharmed.pid, resource.RLIMIT_NOFILE, limits)
        for caller in callers:
            caller.close()
    assert all(reply is None or reply.kind in (DONE, LIMIT["DECLINED"]) for reply in replies)


# -- frames ----------------------------------------------------------------------------------------


def cut(agent: Agent, data: bytes, sizes: Sequence[int], *, half_closed: bool) -> list[object]:
    """Send beginnings of a call and leave, or leave only one direction."""
    replies: list[object] = []
    with opened(OWN_NETNS) as own:
        for size in sizes:
            with connect(agent.socket) as caller:
                if size:
                    send(caller, data[:size], own)
                if half_closed:
                    caller.shutdown(socket.SHUT_WR)
                    replies.append(receive(caller))
    return replies


@pytest.mark.parametrize("half_closed", [True, False])
def test_a_call_may_end_anywhere(unharmed: Agent, half_closed: bool) -> None:
    """Each beginning of it is declined; nothing stays of those who have gone."""
    data = call(SHORT, b'{"a": 1}', netns_error=2)
    replies = cut(unharmed, data, range(len(data)), half_closed=half_closed)
    for reply in replies:
        assert isinstance(reply, Reply)
        assert reply.is_declined


LIES: dict[str, dict[str, int]] = {
    "no environment": {"environment_size": 0},
    "environment too short": {"environment_size": 3},
    "environment too long": {"environment_size": 1 << 20},
    "stdin too long": {"stdin_size": 1 << 24},
    "environment above the limit": {"environment_size": (1 << 20) + 1},
    "stdin above the limit": {"stdin_size": (1 << 24) + 1},
    "both above all limits": {"environment_size": 2**32 - 1, "stdin_size": 2**32 - 1},
    "no magic": {"magic": 0},
    "magic of another machine": {"magic": 0x49434E49},
    "version 0": {"version": 0},
    "version 2": {"version": 2},
    "version 65535": {"version": 65535},
    "an error with a namespace": {"netns_error": 0},
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_declined(unharmed: Agent, lie: str) -> None:
    """In time, also where more is promised than is sent."""
    data = call(SHORT, b"{}", **{"netns_error": 2, **LIES[lie]})
    with opened(OWN_NETNS) as own:
        started = time.monotonic()
        reply = ask(unharmed.socket, data, own)
    assert time.monotonic() - started < 10
    if lie == "no environment":  # the variables are stdin then, and there is no verb
        assert reply is None or reply.status == 1 or reply.is_declined
        return
    assert reply is not None
    assert reply.is_declined
    assert reply.body


def test_what_another_version_sends_is_declined(unharmed: Agent) -> None:
    """Whatever follows its head; the answer says what is spoken here."""
    with opened(OWN_NETNS) as own:
        data = call(SHORT, os.urandom(5000), version=2, environment_size=2**32 - 1)
        reply = ask(unharmed.socket, data, own)
    assert reply is not None
    assert (reply.version, reply.is_declined) == (VERSION, True)
    assert b"version 2 is not spoken here; allowed: 1" in reply.body


@pytest.mark.parametrize("deadline", [0, 1, 2**63, 2**64 - 1])
def test_any_deadline_is_borne(unharmed: Agent, local: Node, netns: str, deadline: int) -> None:
    """One that is over: nothing is done. One that never comes: the plugin's own limits hold."""
    give_address(netns, "10.1.0.5/24")
    local.add_pod()
    data = call(
        environment("ADD", netns), stdin(local.config(backend="nftables")), deadline_ns=deadline
    )
    with opened(netns, OWN_NETNS) as descriptors:
        reply = ask(unharmed.socket, data, descriptors)
    assert reply is not None
    over = deadline < 2
    assert reply.is_declined or (reply.status == 1) == over
    assert ("istio-proxy" in listing(netns)) == (not over)
    assert bool(local.records) == (not over)


def test_garbage_is_declined_or_left(unharmed: Agent, local: Node, netns: str) -> None:
    """Calls with changed bytes, and bytes that never were one."""
    rng = random.Random(SEED)  # noqa: S311 – test data
    for _ in range(100):
        good = call(environment("CHECK", netns), stdin(local.config()))
        data = bytearray(rng.choice([good, rng.randbytes(200), good + good]))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with opened(netns, OWN_NETNS) as descriptors, connect(unharmed.socket) as caller:
            send(caller, bytes(data), descriptors[: rng.randint(0, 2)])
            caller.shutdown(socket.SHUT_WR)
            reply = receive(caller)
        assert reply is None or reply.kind in (DONE, LIMIT["DECLINED"])


def test_values_in_no_encoding_are_answered(unharmed: Agent, local: Node, netns: str) -> None:
    """In JSON, as in process."""
    for value in ("\udcff/\x01\n", "\ud7ff", "x" * 100000):
        for name in ("CNI_NETNS", "CNI_IFNAME", "CNI_CONTAINERID", "CNI_ARGS", "CNI_COMMAND"):
            env = environment("ADD", netns) | {name: value}
            with opened(netns, OWN_NETNS) as descriptors:
                data = call(env, stdin(local.config()))
                reply = ask(unharmed.socket, data, descriptors)
            assert reply is not None, (name, value[:9])
            assert reply.kind == DONE, (name, value[:9])
            assert reply.json.get("code") != 999, reply.json
            assert bool(reply.status) == (name != "CNI_ARGS"), (name, value[:9])


# -- callers that take their time ------------------------------------------------------------------


def test_slow_and_silent_callers_cost_the_others_little(unharmed: Agent) -> None:
    """More of them than there are threads: whoever comes after them is served all the same."""
    stopping = threading.Event()

    def dribble(caller: socket.socket) -> None:
        with caller:
            for byte in call(SHORT, bytes(1 << 20), netns_error=2):
                if stopping.wait(0.1):
                    return
                try:
                    caller.send(bytes([byte]))
                except OSError:
                    return

    silent = [connect(unharmed.socket) for _ in range(20)]
    slow = [connect(unharmed.socket) for _ in range(4)]
    threads = [threading.Thread(target=dribble, args=(caller,)) for caller in slow]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    try:
        assert is_serving(unharmed.socket)
        assert time.monotonic() - started < 8  # twice what it waits for a call, and some more
        assert [reply.is_declined for reply in map(receive, silent) if reply] == [True] * 20
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
        for caller in silent:
            caller.close()


def test_callers_that_never_read_cost_nothing(unharmed: Agent, local: Node, netns: str) -> None:
    """An answer of megabytes is given up after a while, with its descriptors."""
    local.add_pod(sidecar=False)
    result = {"cniVersion": "1.1.0", "x": "y" * (4 << 20)}
    data = call(environment("ADD", netns), stdin(local.config(), result))
    with opened(netns, OWN_NETNS) as descriptors:
        callers = [connect(unharmed.socket) for _ in range(4)]
        for caller in callers:
            send(caller, data, descriptors)
        assert is_serving(unharmed.socket)
        time.sleep(2.2)
        for caller in callers:
            caller.close()


def test_strangers_make_the_agent_keep_nothing_of_theirs(unharmed: Agent, netns: str) -> None:
    """A caller that is not on the host's network is declined before its stdin is waited for."""
    data = call(SHORT, netns_error=2, stdin_size=1 << 24)
    with opened(netns) as foreign, connect(unharmed.socket) as caller:
        started = time.monotonic()
        send(caller, data, foreign)
        reply = receive(caller)
    assert reply is not None
    assert reply.is_declined
    assert time.monotonic() - started < 1.5


# -- users -----------------------------------------------------------------------------------------

ASKS_AS = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from netns.agents import ask, call, opened, OWN_NETNS
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
with opened(OWN_NETNS) as own:
    try:
        reply = ask(Path(sys.argv[1]), call({"CNI_COMMAND": "VERSION"}, netns_error=2), own)
    except PermissionError as error:
        print("refused:", error)
    else:
        print("declined" if reply and reply.is_declined else reply, reply and reply.body)
"""


@pytest.mark.parametrize("reachable", [False, True])
def test_only_root_is_served(unharmed: Agent, reachable: bool) -> None:
    """Others do not get to the socket; whoever does is declined."""
    directories = [unharmed.socket, *unharmed.socket.parents[:-2]] if reachable else []
    modes = {path: path.stat().st_mode & 0o7777 for path in directories}
    for path in directories:
        path.chmod(0o777)
    try:
        told = subprocess.check_output(
            [sys.executable, "-c", ASKS_AS, str(unharmed.socket), str(Path(__file__).parents[1])],
            text=True,
        )
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert ("only root may ask" in told) == reachable, told
    assert ("refused" in told) == (not reachable), told


# -- a container that has got at the run dir -------------------------------------------------------


@pytest.fixture
def without_bundle(tmp_path: Path, launcher: Path, unharmed: Agent) -> Path:
    """Return a launcher that asks the agent and has nothing else to start."""
    program = install(tmp_path / "bin", launcher, unharmed.socket)
    (tmp_path / "bin" / "istio-cni.d" / "current").unlink()
    return program


@pytest.mark.parametrize("target", ["another pod", "itself", "the host"])
@pytest.mark.parametrize("backend", ["nftables", "iptables"])
def test_a_container_with_the_run_dir_has_nothing_programmed(
    local: Node,
    new_netns: Callable[[], str],
    without_bundle: Path,
    target: str,
    backend: str,
) -> None:
    """Neither another pod's namespace, nor its own, nor the host's: it is not on the host's net."""
    local.way = Way(without_bundle)
    attacker, victim = new_netns(), new_netns()
    local.add_pod()
    path = {"another pod": victim, "itself": attacker, "the host": "/proc/1/ns/net"}[target]
    host = subprocess.check_output(["nft", "list", "ruleset"])
    wrapper = ["nsenter", f"--net={attacker}"]
    answer = local.call("ADD", path, config=local.config(backend=backend), wrapper=wrapper)
    assert (answer.status, answer.code) == (1, 5)
    assert "declined: the caller is not in the host's network namespace" in answer.msg
    assert (listing(attacker), listing(victim)) == ("", "")
    assert subprocess.check_output(["nft", "list", "ruleset"]) == host
    assert local.records == []


def test_a_container_cannot_undo_another_pods_capture(
    local: Node, new_netns: Callable[[], str], without_bundle: Path
) -> None:
    """DEL is declined, too; without a bundle it succeeds and does nothing."""
    local.way = Way(without_bundle)
    attacker, victim = new_netns(), new_netns()
    give_address(victim, "10.1.0.5/24")
    local.add_pod()
    config = local.config(backend="nftables")
    assert local.call("ADD", victim, config=config).status == 0
    before = listing(victim)
    wrapper = ["nsenter", f"--net={attacker}"]
    for verb in ("DEL", "GC"):
        whole = {**config, "cni.dev/valid-attachments": []}
        assert local.call(verb, victim, config=whole, wrapper=wrapper).silent
    assert (listing(victim), local.records) == (before, ["c0ffee-eth0"])


# -- an agent that is not on the host's network ----------------------------------------------------


@pytest.fixture
def agents_netns(new_netns: Callable[[], str]) -> str:
    """Return the namespace of an agent on the pod network."""
    return new_netns()


@pytest.fixture
def distant(tmp_path: Path, agents_netns: str) -> Iterator[Agent]:
    """Run an agent in a namespace of its own."""
    directory = tmp_path / "distant"
    directory.mkdir()
    host = os.stat(OWN_NETNS)
    wrapper = ["nsenter", f"--net={agents_netns}"]
    with Agent(directory, f"--host={host.st_dev}:{host.st_ino}", wrapper=wrapper) as agent:
        yield agent


@pytest.mark.parametrize("backend", ["nftables", "iptables"])
def test_an_agent_on_the_pod_network_captures(
    tmp_path: Path, launcher: Path, distant: Agent, pod_netns: str, local: Node, backend: str
) -> None:
    """For callers on the host's network; and undoes."""
    local.way = Way(install(tmp_path / "bin", launcher, distant.socket), distant.log)
    before = distant.rest()
    local.add_pod()
    config = local.config(backend=backend)
    answer = local.call("ADD", pod_netns, config=config)
    assert (answer.status, answer.logged("captured")) == (0, True)
    assert not any("fallback" in line for line in answer.log)
    assert listing(pod_netns)
    assert is_captured(pod_netns) == (backend == "iptables")
    assert local.call("CHECK", pod_netns, config=config).silent
    assert local.call("DEL", pod_netns, config=config).silent
    assert (listing(pod_netns).count("ISTIO"), local.records) == (0, [])
    assert distant.rest(before) == before


@pytest.mark.parametrize("target", ["its own", "the host's"])
def test_an_agent_on_the_pod_network_leaves_itself_and_the_host_alone(
    local: Node, distant: Agent, agents_netns: str, target: str
) -> None:
    """Code 8 for both, whoever asks."""
    local.add_pod()
    path = agents_netns if target == "its own" else OWN_NETNS
    data = call(environment("ADD", path), stdin(local.config(backend="nftables")))
    with opened(path, OWN_NETNS) as descriptors:
        reply = ask(distant.socket, data, descriptors)
    assert reply is not None
    assert (reply.kind, reply.status, reply.json["code"]) == (DONE, 1, 8)
    assert listing(agents_netns) == ""


def test_an_agent_on_the_pod_network_does_not_serve_its_neighbours(
    local: Node, distant: Agent, agents_netns: str, netns: str
) -> None:
    """Whoever shares its namespace is no runtime either."""
    with opened(netns, agents_netns) as descriptors:
        reply = ask(distant.socket, add(local, netns), descriptors)
    assert reply is not None
    assert reply.is_declined
    assert listing(netns) == ""
