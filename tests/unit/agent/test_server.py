"""The threads behind the socket: one caller each, none of whom costs the next one anything."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from istio_cni.agent.lead import Turn
from istio_cni.agent.server import Answer, Server
from istio_cni.edge import proc
from istio_cni.edge.callers import Caller
from istio_cni.errors import DecodingFailure
from waiting import wait

WAIT_S = 10.0
CLONE_NEWNET = 0x40000000


@contextmanager
def serving(directory: Path, answer: Answer, workers: int = 2) -> Iterator[tuple[Server, str]]:
    """Run a server at a path, and stop it."""
    path = str(directory / "agent" / "agent.sock")
    server = Server(path, answer, workers)
    try:
        yield server, path
    finally:
        assert server.stop(WAIT_S)


def connect(path: str) -> socket.socket:
    """Call a server."""
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(WAIT_S)
    caller.connect(path)
    return caller


def ask(path: str, data: bytes = b"!") -> bytes:
    """Send a call of one byte and return what is answered until the connection ends."""
    with connect(path) as caller:
        caller.sendall(data)
        return b"".join(iter(lambda: caller.recv(1 << 16), b""))


def echo(caller: Caller, _: Turn) -> None:
    """Answer with what was asked."""
    caller.answer(caller.read(1))


def workers() -> list[str]:
    """Return the names of the threads that serve."""
    threads = (thread.name for thread in threading.enumerate())
    return sorted(name for name in threads if name.startswith("worker-"))


def test_callers_are_answered_one_after_the_other_and_side_by_side(tmp_path: Path) -> None:
    """More of them than threads."""
    with serving(tmp_path, echo) as (_, path):
        assert [ask(path, bytes([number])) for number in range(20)] == [
            bytes([number]) for number in range(20)
        ]
        calls = [connect(path) for _ in range(8)]
        for number, caller in enumerate(calls):
            caller.sendall(bytes([number]))
        for number, caller in enumerate(calls):
            with caller:
                assert caller.recv(1) == bytes([number])
    assert workers() == []


@pytest.mark.parametrize("tells", [False, True])
def test_a_call_that_waits_holds_up_no_other(tmp_path: Path, tells: bool) -> None:
    """As long as there is a thread left, and also if it has not told that it is going to wait."""
    slow = threading.Event()

    def answer(caller: Caller, turn: Turn) -> None:
        asked = caller.read(1)
        if asked == b"s":
            with turn.let_go() if tells else nullcontext():
                slow.wait(WAIT_S)
        caller.answer(asked)

    with serving(tmp_path, answer) as (_, path), connect(path) as first:
        first.sendall(b"s")
        assert [ask(path) for _ in range(5)] == [b"!"] * 5
        slow.set()
        assert first.recv(1) == b"s"


@pytest.mark.parametrize(
    "fault",
    [
        ValueError("oops"),
        DecodingFailure("garbage"),
        OSError(9, "EBADF"),
        MemoryError(),
        KeyError(),
    ],
    ids=repr,
)
def test_a_fault_costs_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    """The connection ends, which sends the launcher to its bundle; the log has the fault."""

    def answer(caller: Caller, _: Turn) -> None:
        if caller.read(1) == b"x":
            raise fault
        caller.answer(b"fine")

    with serving(tmp_path, answer, workers=1) as (_, path):
        for _ in range(3):
            assert ask(path, b"x") == b""
            assert ask(path) == b"fine"
    assert caplog.text.count("a call was given up") == 3


def test_a_caller_that_leaves_costs_nothing(tmp_path: Path) -> None:
    """Before, while and after it is answered."""
    with serving(tmp_path, echo, workers=1) as (_, path):
        for data in (b"", b"!"):
            for _ in range(50):
                with connect(path) as caller:
                    caller.sendall(data)
        assert ask(path) == b"!"


def take_all_descriptors() -> Callable[[], None]:
    """Let this process have no more of them; return what gives them back."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
    taken: list[int] = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))

    def give_back() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)

    return give_back


def test_no_descriptors_are_no_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next caller waits until there are some again."""
    give_back: list[Callable[[], None]] = []

    def answer(caller: Caller, turn: Turn) -> None:
        with caller:
            echo(caller, turn)
        if not give_back:
            give_back.append(take_all_descriptors())

    with serving(tmp_path, answer, workers=1) as (_, path):
        second = socket.socket(socket.AF_UNIX)
        second.settimeout(WAIT_S)
        assert ask(path) == b"!"
        try:
            second.connect(path)
            second.sendall(b"2")
            wait(lambda: "no caller can be taken in" in caplog.text, "an accept fails")
        finally:
            give_back[0]()
        with second:
            assert second.recv(1) == b"2"


def test_a_stranded_thread_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would work for the next pod in the wrong namespace."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    libc = ctypes.CDLL(None, use_errno=True)
    where: list[object] = []

    def answer(caller: Caller, _: Turn) -> None:
        where.append(proc.namespace(proc.THREAD_NETNS))
        if caller.read(1) == b"x":
            assert libc.unshare(CLONE_NEWNET) == 0
        caller.answer(b"fine")

    with serving(tmp_path, answer, workers=1) as (_, path):
        assert [ask(path, asked) for asked in (b"!", b"x", b"!", b"!")] == [b"fine"] * 4
        wait(lambda: workers() == ["worker-0"], "the other has ended")
        assert set(where) == {proc.namespace(proc.OWN_NETNS)}
    assert caplog.text.count("cannot get back") == 1


def test_stopping_finishes_what_was_taken_in(tmp_path: Path) -> None:
    """Those who are not yet are let go at once, and nobody new gets in."""
    going, begun = threading.Event(), threading.Event()

    def answer(caller: Caller, turn: Turn) -> None:
        begun.set()
        going.wait(WAIT_S)
        echo(caller, turn)

    path = str(tmp_path / "agent.sock")
    server = Server(path, answer, workers=1)
    first, queued = connect(path), connect(path)
    first.sendall(b"1")
    begun.wait(WAIT_S)
    stopped: list[bool] = []
    thread = threading.Thread(target=lambda: stopped.append(server.stop(WAIT_S)))
    thread.start()
    with queued, pytest.raises(ConnectionResetError):
        queued.recv(1)
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(FileNotFoundError):
        late.connect(path)
    assert stopped == []
    going.set()
    with first:
        assert first.recv(1) == b"1"
    thread.join(WAIT_S)
    assert stopped == [True]


def test_stopping_does_not_wait_longer_than_it_may(tmp_path: Path) -> None:
    """Whoever is late is told of."""
    going, begun = threading.Event(), threading.Event()

    def answer(_: Caller, __: Turn) -> None:
        begun.set()
        going.wait(WAIT_S)

    server = Server(str(tmp_path / "agent.sock"), answer, workers=3)
    with connect(str(tmp_path / "agent.sock")):
        assert begun.wait(WAIT_S)
        since = time.monotonic()
        assert not server.stop(0.1)
        assert time.monotonic() - since < WAIT_S / 2
        going.set()
        wait(lambda: workers() == [], "the last one ends")


def test_stopping_again_and_again_leaves_nothing(tmp_path: Path) -> None:
    """Neither threads, descriptors nor files, also under callers."""
    path = str(tmp_path / "agent.sock")
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        server = Server(path, echo, workers=4)
        callers = [connect(path) for _ in range(6)]
        for caller in callers[::2]:
            caller.close()
        for caller in callers[1::2]:
            caller.send(b"!")
        assert server.stop(WAIT_S)
        for caller in callers:
            caller.close()
    assert (len(os.listdir("/proc/self/fd")), workers()) == (len(before), [])
    assert os.listdir(tmp_path) == []
