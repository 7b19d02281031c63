"""What the launcher makes of an agent: one that answers, and all others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher_agent import (
    DECLINED,
    DONE,
    LIMIT,
    REPLY,
    FakeAgent,
    Installation,
    answer,
    declined,
    done,
    read_frame,
)

REPLIES = done(b"{}12", 7)


@pytest.fixture(autouse=True)
def _root(root: None) -> None:
    """Nothing of this can be seen with an agent that is not trusted."""


# -- it answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 126, 255])
def test_an_answer_is_printed_and_its_status_returned(status: int, installed: Installation) -> None:
    """As it is: the launcher reads no JSON."""
    with FakeAgent(installed.socket, done(b"\0not JSON\xff\n", status)):
        result = installed.call()
    assert (result.status, result.stdout, result.stderr) == (status, b"\0not JSON\xff\n", b"")


def test_success_may_be_silent(installed: Installation) -> None:
    """As it is for every verb but ADD."""
    with FakeAgent(installed.socket, done()):
        result = installed.call("DEL")
    assert (result.status, result.stdout, result.stderr) == (0, b"", b"")


def test_the_largest_answer_is_printed_whole(installed: Installation) -> None:
    """It is an ADD's of the largest configuration."""
    body = os.urandom(LIMIT["ANSWER_MAX"])
    with FakeAgent(installed.socket, done(body)):
        assert installed.call().stdout == body


def test_an_answer_of_a_newer_agent_is_taken(installed: Installation) -> None:
    """It speaks our version, and states its own."""
    with FakeAgent(installed.socket, answer(DONE, b"{}", version=9)):
        assert installed.call().stdout == b"{}"


def test_an_answer_may_come_in_pieces(installed: Installation) -> None:
    """A stream has no borders."""

    def dribble(connection: socket.socket) -> None:
        read_frame(connection)
        for byte in REPLIES:
            connection.sendall(bytes([byte]))
            time.sleep(0.01)

    with FakeAgent(installed.socket, dribble):
        result = installed.call()
    assert (result.status, result.stdout) == (7, b"{}12")


def test_an_answer_needs_no_end_of_the_connection(installed: Installation) -> None:
    """The agent may keep it open; descriptors that it sends are not taken."""
    ended = threading.Event()

    def keep(connection: socket.socket) -> None:
        read_frame(connection)
        socket.send_fds(connection, [REPLIES], [0, 1])
        ended.wait(10)

    with FakeAgent(installed.socket, keep):
        result = installed.call()
        ended.set()
    assert (result.status, result.stdout) == (7, b"{}12")
    assert result.took_s < 5


def test_signals_that_do_not_kill_do_not_disturb(installed: Installation) -> None:
    """A launcher that was stopped and goes on still waits."""
    asked = threading.Event()
    stopped = threading.Event()

    def slow(connection: socket.socket) -> None:
        read_frame(connection)
        asked.set()
        stopped.wait(10)
        connection.sendall(REPLIES)

    with FakeAgent(installed.socket, slow):
        process = installed.start("ADD", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert asked.wait(10)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        process.send_signal(signal.SIGCONT)
        stopped.set()
        stdout, _ = process.communicate(timeout=10)
    assert (process.returncode, stdout) == (7, b"{}12")


# -- nobody can be asked ---------------------------------------------------------------------------


def fallback(installed: Installation, command: str = "ADD") -> tuple[str, str]:
    """Call, expect the bundle, return why it ran: word and text."""
    reason = installed.call(command, b"the stdin").env["CNI_ISTIO_FALLBACK"]
    word, _, text = reason.partition(": ")
    return word, text


def test_no_link_no_agent(installed: Installation) -> None:
    """An installation without agent has none."""
    (installed.bundles / "agent.sock").unlink()
    assert fallback(installed) == ("absent", "No such file or directory")


def test_a_link_to_nothing(installed: Installation) -> None:
    """After a reboot, before the agent has started."""
    assert fallback(installed) == ("absent", "No such file or directory")


def test_nobody_listens(installed: Installation) -> None:
    """The agent was killed."""
    with FakeAgent(installed.socket, b""):
        pass
    assert fallback(installed) == ("absent", "Connection refused")


@pytest.mark.parametrize("kind", ["file", "directory", "datagram socket"])
def test_no_socket_of_an_agent(kind: str, installed: Installation) -> None:
    """What else may be in its place."""
    if kind == "file":
        installed.socket.touch()
    elif kind == "directory":
        installed.socket.mkdir()
    else:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.bind(str(installed.socket))
    assert fallback(installed)[0] == "absent"


def test_only_roots_agent_is_trusted(installed: Installation) -> None:
    """Nothing is sent to another's."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(directory, 65534, -1)
    link = installed.bundles / "agent.sock"
    link.unlink()
    link.symlink_to(directory / "agent.sock")
    os.seteuid(65534)
    try:
        agent = FakeAgent(directory / "agent.sock", REPLIES)
    finally:
        os.seteuid(0)
    with agent:
        assert fallback(installed)[0] == "untrusted"
    shutil.rmtree(directory)
    assert agent.calls == []


@contextlib.contextmanager
def full(path: Path) -> Iterator[None]:
    """Let an agent be stopped, with as many calls before ours as the kernel keeps."""
    listen = (
        "import os, socket, signal, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]);"
        "s.listen(2); print(flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-ISc", listen, str(path)], stdout=subprocess.PIPE
        ) as agent,
        contextlib.ExitStack() as waiting,
    ):
        waiting.callback(agent.kill)
        assert agent.stdout is not None
        agent.stdout.readline()
        for _ in range(100):
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            try:
                client.connect(str(path))
            except BlockingIOError:
                break
        yield


def test_a_stopped_agent_with_a_full_queue_is_not_waited_for(installed: Installation) -> None:
    """A connect that blocks would have no end."""
    with full(installed.socket):
        started = time.monotonic()
        assert fallback(installed)[0] == "busy"
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("where", ["bin", "run", "target"])
def test_a_socket_path_may_have_any_length(where: str, tmp_path: Path, program: Path) -> None:
    """Addresses of sockets hold 107 bytes."""
    deep = tmp_path.joinpath(*["d" * 100] * 4)
    run_dir = deep if where == "run" else tmp_path / "run"
    installed = Installation(deep if where == "bin" else tmp_path / "bin", program, run_dir)
    if where == "target":
        link = installed.bundles / "agent.sock"
        link.unlink()
        link.symlink_to("../" + "./" * 500 + "../run/agent.sock")
    with FakeAgent(installed.socket, REPLIES):
        assert installed.call().stdout == b"{}12"


def test_too_many_variables_are_the_bundles_business(installed: Installation) -> None:
    """A frame has room for a MiB of them; the kernel passes on more."""
    large = {f"CNI_X{number}": "x" * 100_000 for number in range(11)}
    with FakeAgent(installed.socket, REPLIES) as agent:
        result = installed.call(env=large)
    assert result.env["CNI_ISTIO_FALLBACK"] == (
        "unfit: the CNI_ variables have more than 1048576 bytes"
    )
    assert result.env["CNI_X10"] == large["CNI_X10"]
    assert agent.calls == []


# -- it does not answer ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(len(REPLIES)))
def test_an_agent_that_dies_at_any_byte(size: int, installed: Installation) -> None:
    """Part of an answer is no answer, and nothing of it is printed."""
    with FakeAgent(installed.socket, REPLIES[:size]):
        result = installed.call(stdin=b"the stdin")
    assert result.fallback == "died"
    assert result.told["stdin"] == "the stdin"


def test_an_agent_that_dies_before_it_has_read(installed: Installation) -> None:
    """The rest of the call has no reader then."""
    with FakeAgent(installed.socket, lambda connection: connection.close()):
        result = installed.call(stdin=bytes(1 << 20))
    assert result.fallback == "died"
    assert result.told["stdin"] == 1 << 20


def test_an_agent_may_decline_before_it_has_read(installed: Installation) -> None:
    """Its queue is full: it does not read 16 MiB to say so."""
    with FakeAgent(installed.socket, lambda it: it.sendall(declined("queue full"))):
        result = installed.call(stdin=bytes(1 << 20))
    assert result.env["CNI_ISTIO_FALLBACK"] == "declined: queue full"


def test_why_a_call_is_declined_is_passed_on(installed: Installation) -> None:
    """Cut where it is long; a NUL ends it."""
    with FakeAgent(installed.socket, declined("version 1 is not spoken here\0 at all")):
        assert fallback(installed) == ("declined", "version 1 is not spoken here")
    with FakeAgent(installed.socket, declined("x" * 70_000)):
        assert fallback(installed) == ("declined", "x" * 245)


@pytest.mark.parametrize(
    "reply",
    [
        REPLY.pack(2, 1, 0, 0) + b"{}",
        REPLY.pack(2, 1, DECLINED + 1, 0) + b"{}",
        REPLY.pack(2, 1, 255, 0) + b"{}",
        REPLY.pack(2, 0, DONE, 0) + b"{}",
        REPLY.pack(LIMIT["ANSWER_MAX"] + 1, 1, DONE, 0),
        REPLY.pack(0xFFFFFFFF, 1, DECLINED, 0),
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
    ids=["kind 0", "kind 3", "kind 255", "version 0", "too large", "much too large", "HTTP"],
)
def test_an_answer_of_unknown_form_is_none(reply: bytes, installed: Installation) -> None:
    """Whatever it says."""
    with FakeAgent(installed.socket, reply):
        assert fallback(installed)[0] == "garbled"


def test_an_agent_learns_that_it_is_too_late(installed: Installation) -> None:
    """The connection ends before the bundle starts: whatever it was doing, it stops."""
    heard: list[bytes] = []

    def silent(connection: socket.socket) -> None:
        read_frame(connection)
        heard.append(connection.recv(1))

    with FakeAgent(installed.socket, silent):
        result = installed.call("STATUS", b"the stdin")
    assert result.fallback == "timeout"
    assert result.told["stdin"] == "the stdin"
    assert 0.5 <= result.took_s < 1.5
    assert heard == [b""]


def test_sending_has_the_same_deadline(installed: Installation) -> None:
    """An agent that accepts and never reads cannot hold a large call."""
    ended = threading.Event()

    def wait(_: socket.socket) -> None:
        ended.wait(10)

    with FakeAgent(installed.socket, wait):
        result = installed.call("STATUS", bytes(1 << 20))
        ended.set()
    assert result.env["CNI_ISTIO_FALLBACK"] == "timeout: it did not read the call in time"
    assert 0.5 <= result.took_s < 1.5


def test_an_agent_that_accepts_nothing_has_the_same_deadline(installed: Installation) -> None:
    """It is stopped, and its queue has room: connecting succeeds."""
    with FakeAgent(installed.socket, b"", accepts=False):
        result = installed.call("STATUS")
    assert result.fallback == "timeout"
    assert 0.5 <= result.took_s < 1.5


def test_a_long_answer_that_dribbles_is_cut_off(installed: Installation) -> None:
    """Half an answer, and bytes one at a time until the deadline."""

    def dribble(connection: socket.socket) -> None:
        read_frame(connection)
        connection.sendall(REPLY.pack(1_000_000, 1, DONE, 0))
        while True:
            connection.sendall(b"x")

    with FakeAgent(installed.socket, dribble):
        result = installed.call("STATUS")
    assert result.fallback == "timeout"
    assert 0.5 <= result.took_s < 1.5


# -- the runtime does not listen -------------------------------------------------------------------


def test_a_reader_that_has_gone_is_a_failure_and_no_signal(installed: Installation) -> None:
    """The runtime would take a signal for a crash."""
    reader, writer = os.pipe()
    os.close(reader)
    with FakeAgent(installed.socket, done(b"{}")):
        process = installed.start("ADD", stdin=subprocess.DEVNULL, stdout=writer)
        assert process.wait(10) == 1
    os.close(writer)


def test_a_full_disk_is_a_failure(installed: Installation) -> None:
    """The result of an ADD that nobody has is none."""
    with FakeAgent(installed.socket, done(b"{}")), Path("/dev/full").open("w") as full_disk:
        process = installed.start("ADD", stdin=subprocess.DEVNULL, stdout=full_disk)
        assert process.wait(10) == 1


def test_a_slow_reader_of_a_pipe_that_does_not_block(installed: Installation) -> None:
    """Some runtimes leave their pipes so."""
    body = os.urandom(300_000)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
    with FakeAgent(installed.socket, done(body)):
        process = installed.start("ADD", stdin=subprocess.DEVNULL, stdout=writer)
        os.close(writer)
        time.sleep(0.1)
        with open(reader, "rb") as stream:
            assert stream.read() == body
        assert process.wait(10) == 0
