"""Work inside a namespace: a child process does it and answers over a pipe.

A process, not a thread: the child enters the namespace for good, has a mount namespace of its own,
may enter the user namespace that owns the pod's, and can be ended as a whole when time is over. It
dies with its parent, and the programs it runs die with it, because it is the first of a process
namespace: a killed plugin leaves nobody programming behind.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from contextlib import suppress

from istio_cni import errors
from istio_cni.constants import ROLLBACK_RESERVE_S
from istio_cni.edge.netns import entry, namespace
from istio_cni.errors import (
    Interrupted,
    IstioCNIError,
    ProgrammingFailed,
    TryAgainLater,
    as_ours,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Log = Callable[[str, str], None]

EXIT_S = 0.5  # between a child's answer and its end
REAP_S = 2.0  # between a kill and the end: the kernel may be at work for a dying process


class Inside:
    """What work in a namespace may use of the process that runs it.

    `log(level, message)` reaches the caller's log; `shadow_lock(path)` puts a file over the
    node-wide xtables lock for iptables versions that know no other way, and tells whether it could.
    A shared sandbox is left for one of its own first.
    """

    __slots__ = ("is_shared", "log", "sandboxed")

    def __init__(self, log: Log, *, sandboxed: bool = False, shared: bool = False) -> None:
        self.log = log
        self.sandboxed = sandboxed
        self.is_shared = shared

    def shadow_lock(self, path: str) -> bool:
        """Bind a file over the xtables lock, in the sandbox only."""
        if self.is_shared:
            self.sandboxed, self.is_shared = entry.enter_sandbox(self.log), False
        return self.sandboxed and entry.shadow_lock(path, self.log)


def run_inside(
    work: Callable[[Inside], object],
    netns: int | None,
    *,
    deadline: float,
    log: Log,
    sandbox: bool = True,
) -> object:
    """Run `work` in a child process inside a namespace and return its JSON-able result.

    `netns` None means the present namespace. The child enters the owning user namespace too, if
    that is not ours: the kernel takes owner matches only from there. It keeps no descriptor of its
    parent's but the standard ones and `netns`. Its errors are raised here; at `deadline`
    (CLOCK_MONOTONIC seconds) it is killed with all it started.
    """

    def inside(log: Log) -> Inside:
        return Inside(log, sandboxed=sandbox and entry.enter_sandbox(log))

    receive, send = os.pipe()
    try:
        child = entry.fork_apart()
    except OSError as error:
        os.close(receive)
        os.close(send)
        raise TryAgainLater(
            f"cannot start a process to program the network namespace: {error.strerror}"
        ) from error
    if child == 0:
        _be_child(work, inside, netns, send)
    os.close(send)
    try:
        messages = collect(receive, deadline)
    except BaseException:  # an interrupt: the child gets it too, and brings the former state back
        os.kill(child, signal.SIGINT)
        _end(child, ROLLBACK_RESERVE_S)
        raise
    finally:
        os.close(receive)
    _end(child, EXIT_S if _is_answered(messages) else 0)
    return outcome(messages, deadline, log)


def visit_and_report(
    work: Callable[[Inside], object], netns: int, send: int, home: int, *, for_good: bool
) -> bool:
    """Do the same in this process, which is in a shared sandbox, and report to `send`.

    With `for_good` it enters the owning user namespace too, if that is not ours, from which there
    is no way back. False if it is not at `home` any more, or in a sandbox of its own, and must do
    no more.
    """
    is_foreign = for_good and namespace.is_foreign(netns)
    sandbox: list[Inside] = []

    def live(log: Log) -> object:
        sandbox.append(Inside(log, sandboxed=True, shared=True))
        if not is_foreign:
            with entry.visiting(netns, home):
                return work(sandbox[0])
        entry.enter(netns)
        _die_with_reader_of(send)
        return work(sandbox[0])

    report(send, live)
    return sandbox[0].is_shared and namespace.here() == namespace.identity(home)


def fork(live: Callable[[], None], *keep: int) -> int:
    """Fork a process that does one thing and ends; return its id.

    It ends with this one, and what it has started ends with it. It keeps no descriptors but the
    standard ones and `keep`. Raises OSError.
    """
    child = entry.fork_apart()
    if child == 0:
        try:
            _begin(*keep)
            entry.die_with_parent()
            live()
        finally:
            os._exit(0)
    return child


def end(child: int) -> None:
    """Kill a forked process and what it has running, and reap it."""
    _end(child, 0)


def enter_sandbox(mounts: int | None, log: Log) -> bool:
    """Have this process and all that it forks in a sandbox, of `mounts` if that is given."""
    if mounts is not None:
        entry.enter_mounts(mounts)
    return entry.enter_sandbox(log)


def outcome(messages: list[dict[str, object]], deadline: float, log: Log) -> object:
    """Write what was logged and return the result; raise the error, or that there is neither."""
    for message in messages:
        if "log" in message:
            log(str(message["log"]), str(message["msg"]))
    answer = messages[-1] if _is_answered(messages) else {}
    if "error" in answer:
        raise _revived(answer)
    if "result" in answer:
        return answer["result"]
    if time.monotonic() >= deadline:
        raise Interrupted(
            "programming the network namespace took too long and was stopped half way; "
            "repeating the call completes it"
        )
    raise Interrupted(
        "the process that programs the network namespace died without an answer; "
        "repeating the call completes what it left"
    )


def report(send: int, work: Callable[[Log], object]) -> bool:
    """Do work, and tell of it in messages that `collect` reads; False if it failed."""

    def tell(**message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(send, data) :]

    try:
        tell(result=work(lambda level, text: tell(log=level, msg=text)))
    except BaseException as error:
        known = as_ours(error)
        tell(error=type(known).__name__, msg=known.msg, details=known.details)
    else:
        return True
    return False


def _is_answered(messages: list[dict[str, object]]) -> bool:
    return bool(messages) and "log" not in messages[-1]


def collect(descriptor: int, deadline: float) -> list[dict[str, object]]:
    """Read a child's messages, one JSON object a line, until it answers, ends or time is over.

    The end of the stream is not waited for: what another thread forks meanwhile may hold it open.
    """
    messages: list[dict[str, object]] = []
    data, poll = b"", select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    while (left := deadline - time.monotonic()) > 0:
        if not poll.poll(left * 1000):
            continue
        try:
            chunk = os.read(descriptor, 1 << 16)
        except OSError:  # a socket whose other end was killed
            chunk = b""
        *lines, data = (data + chunk).split(b"\n")
        messages += [json.loads(line) for line in lines]
        if not chunk or _is_answered(messages):
            break
    return messages


def _end(child: int, grace_s: float) -> None:
    """Reap the child; if it has not ended after `grace_s`, kill it and what it has running.

    One that the kernel does not let go is left to whoever inherits it.
    """
    if _reaped(child, grace_s):
        return
    programs = _children_of(child)
    os.kill(child, signal.SIGKILL)
    for program in programs:  # outside a process namespace these would live on
        with suppress(OSError):
            os.killpg(program, signal.SIGKILL)
    _reaped(child, REAP_S)


def _reaped(child: int, wait_s: float) -> bool:
    """Wait so long for a child's end; tell whether it has ended."""
    try:
        file = os.pidfd_open(child)
    except OSError:  # a kernel before 5.3, no descriptors left, or reaped already
        return _reaped_by_looking(child, wait_s)
    try:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        poll.poll(max(0.0, wait_s) * 1000)
    finally:
        os.close(file)
    return _reaped_by_looking(child, 0)


def _reaped_by_looking(child: int, wait_s: float) -> bool:
    limit, pause = time.monotonic() + wait_s, 0.0005
    try:
        while os.waitpid(child, os.WNOHANG)[0] != child:
            if time.monotonic() >= limit:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
    except ChildProcessError:  # SIGCHLD is ignored here: the kernel reaps
        return True
    return True


def _children_of(process: int) -> list[int]:
    try:
        with open(f"/proc/{process}/task/{process}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _revived(message: dict[str, object]) -> IstioCNIError:
    """Make the child's error again from its parts."""
    kind = getattr(errors, str(message["error"]), ProgrammingFailed)
    error: IstioCNIError = kind.__new__(kind)
    IstioCNIError.__init__(error, str(message["msg"]), str(message["details"]))
    return error


def _be_child(
    work: Callable[[Inside], object],
    inside: Callable[[Log], Inside],
    netns: int | None,
    send: int,
) -> None:
    """Do the child's whole life; never returns."""

    def live(log: Log) -> object:
        _begin(send, netns)
        _die_with_reader_of(send)
        process = inside(log)
        if netns is not None:
            entry.enter(netns)
            _die_with_reader_of(send)
        return work(process)

    status = 1
    try:
        status = 0 if report(send, live) else 1
    finally:
        os._exit(status)


def _begin(*keep: int | None) -> None:
    """Be a process of its own, with the usual signals, and few descriptors."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _close_all_but(*keep)


def _die_with_reader_of(pipe: int) -> None:
    """End when the parent does.

    One that has ended already has closed its side of the pipe; its process id would not tell, since
    from inside a process namespace it is 0.
    """
    entry.die_with_parent()
    poll = select.poll()
    poll.register(pipe, 0)
    if poll.poll(0):
        os._exit(1)


def _close_all_but(*kept: int | None) -> None:
    """Close what the parent had open: its other pipes must not seem alive, its locks not held."""
    try:
        opened = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        opened = list(range(256))
    for descriptor in opened:
        if descriptor > 2 and descriptor not in kept:
            with suppress(OSError):
                os.close(descriptor)
