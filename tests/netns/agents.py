"""Agents that a test starts, stops, kills and looks at from outside, and callers of its own.

    with Agent(tmp_path) as agent:
        before = agent.rest()
        assert ask(agent.socket, call("ADD", ...), [pod, own]).kind == DONE
        assert agent.rest() == before

Callers speak the frame by the numbers of launcher/frame.h; nothing of the product is imported.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from launcher_agent import LIMIT, REPLY, REQUEST, VERSION
from waiting import wait

CHECKOUT = Path(__file__).resolve().parents[2]
OWN_NETNS = "/proc/self/ns/net"
PATIENCE_S = 30.0
FD_BYTES = array.array("i").itemsize


# -- callers ---------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """What the agent answered."""

    version: int
    kind: int
    status: int
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        """The one document on stdout."""
        document: dict[str, object] = json.loads(self.body)
        return document

    @property
    def is_declined(self) -> bool:
        """Whether the call is said to be untouched."""
        return self.kind == LIMIT["DECLINED"]


def call(
    env: Mapping[str, str],
    stdin: bytes = b"",
    *,
    netns_error: int = 0,
    wait_s: float = 10.0,
    **lies: int,
) -> bytes:
    """Write a call; `lies` replace numbers of its head."""
    variables = b"".join(
        os.fsencode(f"{name}={value}\0") for name, value in env.items() if name[:4] == "CNI_"
    )
    head = {
        "magic": LIMIT["MAGIC"],
        "version": VERSION,
        "netns_error": netns_error,
        "request_id": os.urandom(16),
        "deadline_ns": time.monotonic_ns() + int(wait_s * 1e9),
        "environment_size": len(variables),
        "stdin_size": len(stdin),
        **lies,
    }
    return REQUEST.pack(*head.values()) + variables + stdin


def connect(path: Path) -> socket.socket:
    """Connect to an agent, however long its path is."""
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(PATIENCE_S)
    place = os.open(path, os.O_PATH)
    try:
        caller.connect(f"/proc/self/fd/{place}")
    except BaseException:
        caller.close()
        raise
    finally:
        os.close(place)
    return caller


def send(caller: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send bytes, with descriptors beside the first of them, as far as anybody reads them."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sent = caller.sendmsg([data], rights if descriptors else [])
        caller.sendall(data[sent:])


def receive(caller: socket.socket) -> Reply | None:
    """Read an answer to the end of the connection; None if it has none."""
    data, piece = b"", b"-"
    while piece:
        with contextlib.suppress(ConnectionResetError):  # it was closed with bytes of ours unread
            piece = b""
            piece = caller.recv(1 << 20)
        data += piece
    if not data:
        return None
    size, version, kind, status = REPLY.unpack(data[: REPLY.size])
    assert size == len(data) - REPLY.size
    return Reply(version, kind, status, data[REPLY.size :])


def ask(path: Path, data: bytes, descriptors: Sequence[int] = ()) -> Reply | None:
    """Make a call and wait for the answer."""
    with connect(path) as caller:
        send(caller, data, descriptors)
        return receive(caller)


@contextlib.contextmanager
def opened(*paths: str) -> Iterator[list[int]]:
    """Open files for the time of a block."""
    descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def is_serving(path: Path) -> bool:
    """Tell whether an agent answers VERSION."""
    with opened(OWN_NETNS) as own:
        data = call({"CNI_COMMAND": "VERSION"}, netns_error=2)
        reply = ask(path, data, own)
    return reply is not None and (reply.kind, reply.status) == (LIMIT["DONE"], 0)


# -- agents ----------------------------------------------------------------------------------------


class Rest(NamedTuple):
    """An agent that has nothing to do."""

    descriptors: int
    threads: int
    namespaces: int
    processes: int


class Agent:
    """The serving part of an agent, in a process of its own; a context manager.

    `wrapper` is a command that runs it. `options` are those of agent_process, in whose place
    another `module` may be run.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        wrapper: Sequence[str] = (),
        module: str = "agent_process",
    ) -> None:
        self.socket = directory / "agent" / "agent.sock"
        self.log = directory / "agent.log"
        self._command = [*wrapper, sys.executable, "-m", module, str(self.socket), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it serves."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": str(CHECKOUT / "tests")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", self.log.read_text()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self.process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for process in self.family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)
        self.end()

    def end(self, patience_s: float = PATIENCE_S) -> int:
        """Close its stdin and wait until it has ended; return its status."""
        process = self.process
        try:
            process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return process.returncode

    def kill(self) -> None:
        """Kill the agent, but nothing that it has started."""
        self.process.kill()
        self.process.communicate()

    def workshop(self) -> int:
        """Return the process id of the workshop."""
        (child,) = _children(self.pid)
        return child

    def family(self) -> list[int]:
        """Return its process id and those of all that come from it."""
        return family(self.pid)

    def stop(self) -> list[int]:
        """Stop it and all that it has started, as a frozen machine would; return who that is."""
        stopped: list[int] = []
        while new := [one for one in self.family() if one not in stopped]:
            for process in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)
            stopped += new
            wait(lambda new=new: all(map(is_stopped, new)), "all of them stop")
        return stopped

    def resume(self, stopped: Sequence[int]) -> None:
        """Let them go on."""
        for process in reversed(stopped):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    # -- what is seen of it ------------------------------------------------------------------------

    def now(self) -> Rest:
        """Count what it has at this moment."""
        tasks = Path(f"/proc/{self.pid}/task")
        places = set()
        for task in os.listdir(tasks):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                places.add(os.stat(tasks / task / "ns" / "net").st_ino)
        descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))
        processes = [process for process in self.family() if is_alive(process)]
        return Rest(descriptors, len(os.listdir(tasks)), len(places), len(processes))

    def rest(self, wanted: Rest | None = None, patience_s: float = PATIENCE_S) -> Rest:
        """Wait until it has what it had at rest, or until nothing changes; return what that is."""
        limit, seen = time.monotonic() + patience_s, [self.now()]
        while seen[-1] != wanted and time.monotonic() < limit:
            time.sleep(0.02)
            seen = [*seen[-10:], self.now()]
            if wanted is None and len(seen) > 10 and len(set(seen)) == 1:
                break
        return seen[-1]

    def resident_kib(self) -> int:
        """Return how much memory it has."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

    def lines(self, since: int = 0) -> list[dict[str, object]]:
        """Return the lines of its log, those from an offset on."""
        with self.log.open() as log:
            log.seek(since)
            return [json.loads(line) for line in log]

    def log_size(self) -> int:
        """Return the offset at which the next line begins."""
        return self.log.stat().st_size


def _children(process: int) -> list[int]:
    """Return the children of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{process}/task/{task}/children").read_text()
                found += [int(word) for word in text.split()]
    return found


def family(process: int) -> list[int]:
    """Return a process and all that come from it, parents first."""
    return [process, *(one for child in _children(process) for one in family(child))]


def _state(process: int | str) -> str:
    """Return the letter that says what a process is doing; "X" once it is no more."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_alive(process: int) -> bool:
    """Tell whether a process is there and has not ended."""
    return _state(process) not in "ZX"


def is_stopped(process: int) -> bool:
    """Tell whether all threads of a process were stopped by a signal, or it is gone."""
    try:
        tasks = os.listdir(f"/proc/{process}/task")
    except FileNotFoundError:
        return True
    return all(_state(f"{process}/task/{task}") in "TZX" for task in tasks)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """Run an agent that logs as on a node."""
    with Agent(tmp_path, "--level=info") as running:
        yield running
