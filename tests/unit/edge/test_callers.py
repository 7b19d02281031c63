"""The socket for the launcher: who asks, what comes with a call, how a path is taken and left."""

from __future__ import annotations

import array
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from istio_cni.edge import callers
from istio_cni.edge.callers import BACKLOG, DESCRIPTORS_MAX, Caller, Listener, has_left
from istio_cni.errors import DecodingFailure, IOFailure

WAIT_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[Caller, socket.socket]]:
    """Return a caller as the agent has it, and its other end."""
    ours, theirs = socket.socketpair()
    with Caller(ours) as caller, theirs:
        yield caller, theirs


def send(connection: socket.socket, data: bytes, *descriptors: int) -> None:
    """Send bytes with descriptors beside the first."""
    rights = array.array("i", descriptors)
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def opened() -> set[str]:
    """Return the descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))


def ended(function: object, *args: object) -> threading.Thread:
    """Do something on a thread."""
    thread = threading.Thread(target=function, args=args)  # type: ignore[arg-type]
    thread.start()
    return thread


# -- reading ---------------------------------------------------------------------------------------


def test_a_call_is_read_in_pieces(pair: tuple[Caller, socket.socket]) -> None:
    """However it comes."""
    caller, theirs = pair

    def dribble() -> None:
        for byte in b"abcdef":
            theirs.send(bytes([byte]))
            time.sleep(0.005)

    thread = ended(dribble)
    assert [caller.read(count) for count in (1, 0, 3, 2)] == [b"a", b"", b"bcd", b"ef"]
    thread.join()


def test_descriptors_are_kept_until_the_caller_is_answered(
    pair: tuple[Caller, socket.socket],
) -> None:
    """In their order, not inherited by programs, and all closed afterwards."""
    caller, theirs = pair
    first, second = os.pipe()
    before = opened()
    send(theirs, b"call", first, second)
    assert caller.read(4) == b"call"
    assert [os.fstat(fd).st_ino for fd in caller.descriptors] == [
        os.fstat(first).st_ino,
        os.fstat(second).st_ino,
    ]
    assert not any(map(os.get_inheritable, caller.descriptors))
    caller.__exit__()
    assert caller.descriptors == []
    assert opened() < before  # the connection, too
    os.close(first)
    os.close(second)


@pytest.mark.parametrize("count", [DESCRIPTORS_MAX + 1, 100, 253])
def test_too_many_descriptors_are_refused_and_closed(
    pair: tuple[Caller, socket.socket], count: int
) -> None:
    """The kernel drops what finds no room, the caller's end is the same afterwards."""
    caller, theirs = pair
    before = opened()
    send(theirs, b"call", *[theirs.fileno()] * count)
    with pytest.raises(DecodingFailure, match="too many descriptors"):
        caller.read(4)
    caller.__exit__()
    assert opened() < before


def test_too_many_descriptors_in_many_messages_are_closed(
    pair: tuple[Caller, socket.socket],
) -> None:
    """They may come with every byte."""
    caller, theirs = pair
    before = opened()
    for _ in range(10):
        send(theirs, b".", 0, 1, 2)
    theirs.close()
    with pytest.raises(DecodingFailure):
        caller.read(40)
    caller.__exit__()
    assert opened() < before


def test_descriptors_of_all_messages_count(pair: tuple[Caller, socket.socket]) -> None:
    """Else a caller may take all that this process can have."""
    caller, theirs = pair
    for _ in range(10):
        send(theirs, b".", *[theirs.fileno()] * 3)
    with pytest.raises(DecodingFailure, match="too many descriptors"):
        caller.read(10)


def test_a_call_that_ends_in_the_middle_is_refused(pair: tuple[Caller, socket.socket]) -> None:
    """At once."""
    caller, theirs = pair
    theirs.send(b"abc")
    theirs.close()
    with pytest.raises(DecodingFailure, match="ended in the middle"):
        caller.read(4)


def test_a_caller_that_aborts_is_refused(pair: tuple[Caller, socket.socket]) -> None:
    """With unread bytes at its end the kernel says so in another way."""
    caller, theirs = pair
    caller._connection.send(b"unread")  # noqa: SLF001 – nobody sends before a call is read
    theirs.close()
    with pytest.raises(DecodingFailure, match="cannot be read: Connection reset by peer"):
        caller.read(4)


@pytest.mark.parametrize("dribbles", [False, True])
def test_a_slow_caller_is_refused_in_time(
    pair: tuple[Caller, socket.socket], monkeypatch: pytest.MonkeyPatch, dribbles: bool
) -> None:
    """A byte now and then buys no time."""
    monkeypatch.setattr(callers, "_READ_WAIT_S", 0.2)
    ours, theirs = socket.socketpair()
    stopping = threading.Event()

    def dribble() -> None:
        while dribbles and not stopping.wait(0.02):
            theirs.send(b".")

    with Caller(ours) as caller:
        begun = time.monotonic()
        thread = ended(dribble)
        with pytest.raises(DecodingFailure, match="took too long to come"):
            caller.read(1 << 20)
        assert 0.2 <= time.monotonic() - begun < WAIT_S
        stopping.set()
        thread.join()
    theirs.close()


# -- answering -------------------------------------------------------------------------------------


def test_an_answer_is_sent_whole(pair: tuple[Caller, socket.socket]) -> None:
    """Also one that the socket cannot hold."""
    caller, theirs = pair
    data = os.urandom(1 << 21)
    got = bytearray()

    def take() -> None:
        while len(got) < len(data):
            got.extend(theirs.recv(1 << 16))

    thread = ended(take)
    assert caller.answer(data)
    thread.join(WAIT_S)
    assert bytes(got) == data


def test_who_does_not_take_the_answer_is_left(
    pair: tuple[Caller, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone, or just not reading: nothing is raised, and it takes no longer than that."""
    monkeypatch.setattr(callers, "_ANSWER_WAIT_S", 0.1)
    caller, theirs = pair
    begun = time.monotonic()
    assert not caller.answer(bytes(1 << 22))
    assert time.monotonic() - begun < WAIT_S
    theirs.close()
    assert not caller.answer(b"x")


def test_leaving_is_seen_even_with_bytes_unread(pair: tuple[Caller, socket.socket]) -> None:
    """A call that nobody waits for any more looks like any other until it is asked."""
    caller, theirs = pair
    assert not caller.has_left()
    theirs.send(b"call")
    assert not caller.has_left()
    theirs.close()
    assert caller.has_left()
    assert caller.read(4) == b"call"


@pytest.mark.parametrize("how", [socket.SHUT_WR, socket.SHUT_RDWR])
def test_half_a_goodbye_is_one(pair: tuple[Caller, socket.socket], how: int) -> None:
    """No launcher shuts down a part of its connection."""
    caller, theirs = pair
    theirs.shutdown(how)
    assert caller.has_left()


def test_a_copy_of_the_connection_keeps_the_caller_there(
    pair: tuple[Caller, socket.socket],
) -> None:
    """What counts is the last descriptor of it: the launcher's are not inherited."""
    caller, theirs = pair
    copy = theirs.dup()
    theirs.close()
    assert not caller.has_left()
    copy.close()
    assert caller.has_left()


def test_the_user_is_the_kernels_word(pair: tuple[Caller, socket.socket]) -> None:
    """Whoever connected."""
    caller, _ = pair
    assert caller.uid == os.geteuid()
    assert not has_left(caller.fileno())


# -- listening -------------------------------------------------------------------------------------


def test_the_socket_is_its_users_alone(tmp_path: Path) -> None:
    """0600 in a directory 0700, one that was there included."""
    path = tmp_path / "agent" / "agent.sock"
    path.parent.mkdir(0o777)
    path.parent.chmod(0o777)
    with closing(Listener(str(path))):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert os.listdir(path.parent) == ["agent.sock"]
    assert os.listdir(path.parent) == []


def test_a_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    """107 bytes are not much for a run dir."""
    path = tmp_path / ("x" * 200) / "agent.sock"
    with closing(Listener(str(path))):
        assert stat.S_ISSOCK(path.lstat().st_mode)


@pytest.mark.parametrize("what", ["file", "socket", "link", "dangling link"])
def test_what_had_the_path_goes(tmp_path: Path, what: str) -> None:
    """A killed agent's socket, or anything else but a directory; no link is followed."""
    path, other = tmp_path / "agent.sock", tmp_path / "other"
    other.write_text("untouched")
    if what == "file":
        path.write_text("")
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    else:
        path.symlink_to(other if what == "link" else "nowhere")
    with closing(Listener(str(path))), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
    assert other.read_text() == "untouched"
    assert not os.path.lexists(path)


def test_a_directory_in_the_way_is_told(tmp_path: Path) -> None:
    """Nothing is left of the attempt."""
    (tmp_path / "agent.sock").mkdir()
    before = opened()
    with pytest.raises(IOFailure, match=r"cannot listen at .*agent\.sock"):
        Listener(str(tmp_path / "agent.sock"))
    assert os.listdir(tmp_path) == ["agent.sock"]
    assert opened() == before


def test_a_successor_keeps_its_socket(tmp_path: Path) -> None:
    """Whoever ends removes only what is its own; callers get to the successor at once."""
    path = str(tmp_path / "agent.sock")
    first = Listener(path)
    with closing(Listener(path)) as second:
        first.close()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(path)
            with second.accept():
                pass
    assert os.listdir(tmp_path) == []


def test_closing_wakes_who_waits(tmp_path: Path) -> None:
    """All of them, with an error."""
    listener = Listener(str(tmp_path / "agent.sock"))
    woken: list[OSError] = []

    def wait() -> None:
        try:
            listener.accept()
        except OSError as error:
            woken.append(error)

    threads = [ended(wait) for _ in range(4)]
    time.sleep(0.05)
    listener.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(woken) == 4


def test_callers_queue_in_the_kernel(tmp_path: Path) -> None:
    """One more than fit is told at once; launchers do not block."""
    limit = int(Path("/proc/sys/net/core/somaxconn").read_text())
    path = str(tmp_path / "agent.sock")
    waiting: list[socket.socket] = []
    with closing(Listener(path)):
        try:
            for _ in range(min(BACKLOG, limit) + 1):
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(path)
            with socket.socket(socket.AF_UNIX) as more:
                more.setblocking(False)
                with pytest.raises(BlockingIOError):
                    more.connect(path)
        finally:
            for caller in waiting:
                caller.close()
