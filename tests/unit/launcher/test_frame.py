"""What the launcher sends: every byte of it, and the descriptors beside."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from launcher_agent import LIMIT, REPLY, REQUEST, FakeAgent, Frame, Installation, done

pytestmark = pytest.mark.usefixtures("root")
OWN_NETNS = os.stat("/proc/self/ns/net")


def sent(installed: Installation, command: str = "ADD", **options: object) -> Frame:
    """Return what an agent gets of a call."""
    with FakeAgent(installed.socket, done()) as agent:
        answer = installed.call(command, **options)  # type: ignore[arg-type] # passed on
    assert (answer.status, answer.stdout, answer.stderr) == (0, b"", b"")
    return agent.call


def test_the_structures_have_no_padding() -> None:
    """Their sizes are those that frame.h states."""
    assert (REQUEST.size, REPLY.size) == (40, 8)
    assert LIMIT["MAGIC"] == int.from_bytes(b"ICNI", "little")


def test_a_call_is_a_head_the_variables_and_stdin(installed: Installation) -> None:
    """Byte for byte, in the order of frame.h."""
    frame = sent(installed, "DEL", stdin=b'{"a": 1}', env={"CNI_IFNAME": "eth0", "LANG": "C"})
    variables = b"CNI_COMMAND=DEL\0CNI_IFNAME=eth0\0"
    assert frame.body == variables + b'{"a": 1}'
    deadline = frame.deadline_ns.to_bytes(8, "little")
    assert frame.head == (
        b"ICNI\x01\x00\x02\x00"  # ENOENT: there is no CNI_NETNS
        + bytes.fromhex(frame.request_id)
        + deadline
        + len(variables).to_bytes(4, "little")
        + (8).to_bytes(4, "little")
    )


@pytest.mark.parametrize(
    ("command", "patience_s"),
    [
        ("ADD", 10.0),
        ("CHECK", 5.0),
        ("DEL", 2.0),
        ("GC", 2.0),
        ("STATUS", 0.5),
        ("VERSION", 0.5),
        ("ADDS", 0.5),
    ],
)
def test_the_deadline_is_the_verbs(
    command: str, patience_s: float, installed: Installation
) -> None:
    """What the agent is told is how long the launcher waits."""
    before = time.monotonic()
    frame = sent(installed, command)
    after = time.monotonic()
    assert before + patience_s <= frame.deadline_ns / 1e9 <= after + patience_s


def test_each_call_has_an_id_of_its_own(installed: Installation) -> None:
    """Logs of launcher, agent and bundle are matched by it."""
    first, second = sent(installed).request_id, sent(installed).request_id
    assert first != second
    assert int(first, 16)


def test_only_cni_variables_are_sent(installed: Installation) -> None:
    """The rest of the runtime's environment is none of the agent's business."""
    env = {"CNI_ARGS": "A=1;B=ü", "XCNI_A": "", "CNI": "", "cni_a": "", "LD_PRELOAD": ""}
    frame = sent(installed, env=env)
    assert frame.environment == {"CNI_COMMAND": "ADD", "CNI_ARGS": "A=1;B=ü"}


def test_version_does_not_wait_for_stdin(installed: Installation) -> None:
    """A runtime may leave it open."""
    reader, writer = os.pipe()
    with FakeAgent(installed.socket, done(b"{}")) as agent:
        process = installed.start("VERSION", stdin=reader)
        assert process.wait(10) == 0
    os.close(reader)
    os.close(writer)
    assert agent.call.stdin == b""


@pytest.mark.parametrize("size", [0, 1, 4096, LIMIT["STDIN_MAX"]])
def test_stdin_is_sent_whole(size: int, installed: Installation) -> None:
    """Up to 16 MiB of it."""
    stdin = os.urandom(size)
    assert sent(installed, stdin=stdin).stdin == stdin


def test_more_stdin_is_refused(installed: Installation) -> None:
    """In the plugin's own words, and nobody is asked."""
    size = LIMIT["STDIN_MAX"] + 1
    with FakeAgent(installed.socket, done()) as agent:
        answer = installed.call("ADD", bytes(size))
    assert answer.msg == "the network configuration on stdin has more than 16777216 bytes"
    assert agent.calls == []


def test_stdin_that_cannot_be_read_is_an_error(installed: Installation) -> None:
    """A directory, say."""
    directory = os.open("/", os.O_RDONLY)
    process = installed.start("ADD", stdin=directory, stdout=-1)
    stdout, _ = process.communicate(timeout=10)
    os.close(directory)
    assert process.returncode == 1
    assert b"cannot read the network configuration from stdin: Is a directory" in stdout


# -- descriptors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "directory", "fifo", "socket link"])
def test_netns_is_opened_whatever_it_is(kind: str, installed: Installation, tmp_path: Path) -> None:
    """It is the agent that looks what it got; nothing blocks on the way."""
    path = tmp_path / "netns"
    if kind == "file":
        path.touch()
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/proc/self/ns/net")
    frame = sent(installed, env={"CNI_NETNS": str(path)})
    wanted, own = os.stat(path), OWN_NETNS
    assert frame.netns_error == 0
    assert frame.files == [(wanted.st_dev, wanted.st_ino), (own.st_dev, own.st_ino)]


def test_a_relative_netns_is_the_callers(installed: Installation, tmp_path: Path) -> None:
    """The launcher changes no directory."""
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "netns"
    path.touch()
    frame = sent(installed, env={"CNI_NETNS": "netns"}, cwd=path.parent)
    assert frame.files[0] == (path.stat().st_dev, path.stat().st_ino)


@pytest.mark.parametrize(
    ("netns", "error"),
    [
        (None, errno.ENOENT),
        ("", errno.ENOENT),
        ("/nowhere/netns", errno.ENOENT),
        ("/etc/passwd/netns", errno.ENOTDIR),
        ("/" + "x" * 300, errno.ENAMETOOLONG),
    ],
)
def test_a_netns_that_cannot_be_opened_is_said_to_be_so(
    netns: str | None, error: int, installed: Installation
) -> None:
    """Then the launcher's own namespace is the only descriptor."""
    frame = sent(installed, "DEL", env={} if netns is None else {"CNI_NETNS": netns})
    assert frame.netns_error == error
    assert frame.files == [(OWN_NETNS.st_dev, OWN_NETNS.st_ino)]
