"""Programs and child processes that end in time, and with the demo whatever ends it.

Work for a pod runs in a child that enters the pod's network namespace: a process that came back
from there might leave something behind, a child cannot.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import NamedTuple, NoReturn

PROGRAM_TIMEOUT_S = 25.0  # an ADD may take 20
CHILD_TIMEOUT_S = 10.0
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)

Tell = Callable[[object], None]
"""What a child calls with its answer, a JSON value."""

_libc = ctypes.CDLL(None, use_errno=True)


class DemoFailed(Exception):
    """Something the demo is built on did not work; the message is one line for a person."""


class Stopped(BaseException):
    """A signal asks the demo to end; derived as KeyboardInterrupt is, so that nobody eats it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop_on_signals() -> None:
    """Raise Stopped at the first signal that asks for the end."""

    def stop(number: int, _: FrameType | None) -> None:
        ignore_signals()
        raise Stopped(number)

    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)


def ignore_signals() -> None:
    """Let nothing interrupt from here on: the end has begun."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_held() -> Iterator[None]:
    """Keep signals waiting, so that no child is started without being known."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class Done(NamedTuple):
    """How a program ended and what it printed."""

    status: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str],
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    netns: int | None = None,
    timeout_s: float = PROGRAM_TIMEOUT_S,
) -> Done:
    """Run a program, inside a network namespace if one is given; kill it when time is over."""
    parent = os.getpid()
    pipe = subprocess.PIPE
    program = None
    try:
        with signals_held():
            program = subprocess.Popen(
                argv,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=env,
                text=True,
                process_group=0,  # a Ctrl-C in the terminal is the demo's business
                preexec_fn=lambda: _become_child(parent, netns),
            )
        stdout, stderr = program.communicate(stdin, timeout_s)
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"{' '.join(argv)} has not ended after {timeout_s:g} s") from None
    finally:
        if program is not None and program.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # what it started, too
            program.communicate()
    return Done(program.returncode, stdout, stderr)


def succeed(argv: Sequence[str], *, stdin: str = "", netns: int | None = None) -> str:
    """Run a program that must succeed; return what it prints."""
    done = run(argv, stdin=stdin, netns=netns)
    if done.status != 0:
        reason = " ".join(done.stderr.split()) or f"exit status {done.status}"
        raise DemoFailed(f"{' '.join(argv)}: {reason}")
    return done.stdout


def call(work: Callable[[], object], netns: int, uid: int) -> object:
    """Run `work` in a child inside a network namespace as a user; return its JSON-able result."""
    with ExitStack() as undo:
        return _answer(_fork(lambda tell: tell(work()), netns, uid, undo))


def start(work: Callable[[Tell], None], netns: int, uid: int, undo: ExitStack) -> None:
    """Start lasting `work` likewise, until `undo`; return once it has told that it is ready."""
    _answer(_fork(work, netns, uid, undo))


def set_namespace(netns: int) -> None:
    """Move this process into a network namespace."""
    if _libc.setns(netns, CLONE_NEWNET) != 0:
        raise _os_error("cannot enter a network namespace")


def unshare_namespace() -> None:
    """Move this process into a network namespace of its own."""
    if _libc.unshare(CLONE_NEWNET) != 0:
        raise _os_error("cannot make a network namespace")


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _fork(work: Callable[[Tell], None], netns: int, uid: int, undo: ExitStack) -> int:
    """Start a child that `undo` ends; return the pipe that its answer comes through."""
    receive, send = os.pipe()
    undo.callback(os.close, receive)
    parent = os.getpid()
    sys.stdout.flush()
    with signals_held():
        child = os.fork()
        if child == 0:
            _live(work, netns, uid, send, parent)
        undo.callback(_end, child)
    os.close(send)
    return receive


def _end(child: int) -> None:
    """Kill a child and reap it."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)


def _live(work: Callable[[Tell], None], netns: int, uid: int, send: int, parent: int) -> NoReturn:
    """Do the child's whole life: the parent's clean-up is none of its business."""

    def tell(answer: object) -> None:
        os.write(send, json.dumps({"answer": answer}).encode() + b"\n")

    try:
        os.setpgid(0, 0)
        _become_child(parent, netns)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _die_with(parent)  # once more: changing the user has cleared it
        work(tell)
    except OSError as error:
        os.write(send, json.dumps({"error": str(error)}).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _become_child(parent: int, netns: int | None) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _die_with(parent)
    if netns is not None:
        set_namespace(netns)


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, even by SIGKILL."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _answer(receive: int) -> object:
    """Read a child's one line; raises DemoFailed for its error, its death or its silence."""
    data = b""
    limit = time.monotonic() + CHILD_TIMEOUT_S
    while not data.endswith(b"\n"):
        if not select.select([receive], [], [], max(0.0, limit - time.monotonic()))[0]:
            raise DemoFailed(f"a child process has not answered for {CHILD_TIMEOUT_S:g} s")
        piece = os.read(receive, 1 << 16)
        if not piece:
            raise DemoFailed("a child process died without an answer")
        data += piece
    message: dict[str, object] = json.loads(data)
    if "error" in message:
        raise DemoFailed(str(message["error"]))
    return message["answer"]
