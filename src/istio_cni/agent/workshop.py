"""A small process beside the agent that starts those which run iptables inside pods' namespaces.

The agent has threads and a good part of a hundred megabytes: forking it takes longer than a call of
iptables-restore, and what comes out holds locks of threads that are not there. The workshop is
forked from it before either, and has one thread. It keeps a few processes that wait for a task; one
that has got one does as the plugin does in process (netns/child.py), answers and ends, and the
workshop forks the next. So a call waits for no fork, and what was worked out for one pod's
configuration is there for the next pod.

All of them end with the agent. They live in a sandbox of the node's files, iptables among them,
which is made once: a copy of all mounts for each task would cost more than the task.
"""

from __future__ import annotations

import array
import gc
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from istio_cni.edge import callers, netfilter, proc
from istio_cni.edge import netns as namespaces
from istio_cni.errors import IstioCNIError, TryAgainLater
from istio_cni.plugin import work
from istio_cni.plugin.work import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.edge.netns import Inside

Log = Callable[[str, str], None]
FIND_S = 15.0  # for the trial of each variant, kernel modules included
GRACE_S = 0.5  # after a task's deadline, for the tale of its end
_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
IDLE = 3  # processes that wait for a task
_REST_S = 0.02  # after a task: its caller is still being answered
_FORK_PAUSE_S = 0.2
_LINE_MAX_BYTES = 4000  # of a task, for the workshop; a longer one it need not know whole
_TAKEN = b'{"log": "debug", "msg": "a process of the workshop has taken the task"}\n'
_TASK, _MOUNTS = b"t", b"m"
_TASK_DESCRIPTORS = 3  # where the answer goes, the namespace, the caller


class WorkshopClosed(TryAgainLater):
    """The workshop has died; the plugin in process can do without."""


class Workshop:
    """The workshop as the agent sees it. Make it before any thread is started."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = os.fork()
        if self._process == 0:
            try:
                ours.close()
                _serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self._socket = ours
        self._sending = threading.Lock()

    def run(self, task: Task, netns: int, caller: int, log: Log) -> object:
        """Have a task done in a namespace, and return its result; its errors are raised here.

        `caller` is the connection of whoever asked. Raises WorkshopClosed if nothing was begun.
        """
        receive, send = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with receive:
            with send:
                self._hand_over(_TASK, send.fileno(), netns, caller)
            try:
                receive.sendall(json.dumps(task.to_json()).encode() + b"\n")
            except OSError as error:  # nobody has taken it
                raise _closed(str(error.strerror)) from error
            messages = namespaces.collect(receive.fileno(), task.deadline + GRACE_S)
        if not messages:
            raise _closed("nobody takes the task")
        return namespaces.outcome(messages, task.deadline, log)

    def begin(self, mounts: int | None) -> None:
        """Begin; `mounts` is a descriptor of the node's mount namespace, None where that is ours.

        Raises WorkshopClosed.
        """
        self._hand_over(_MOUNTS, *(() if mounts is None else (mounts,)))

    def _hand_over(self, what: bytes, *descriptors: int) -> None:
        rights = [(*_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            with self._sending:
                self._socket.sendmsg([what], rights)
        except OSError as error:
            raise _closed(str(error.strerror)) from error

    def find_backend(self, log: Log, wait_s: float = FIND_S) -> str:
        """Find out what `auto` means on this node: one of `netconf.NODE_BACKENDS`."""
        task = Task(work.FIND, "", time.monotonic() + wait_s)
        caller, stays = socket.socketpair()  # one that does not leave
        with caller, stays, open(proc.OWN_NETNS, "rb") as own:
            answer = self.run(task, own.fileno(), caller.fileno(), log)
        return str(answer["backend"]) if isinstance(answer, dict) else ""

    def close(self) -> None:
        """End the workshop, and wait for it."""
        self._socket.close()
        with suppress(ChildProcessError):
            os.waitpid(self._process, 0)


def _closed(why: str) -> WorkshopClosed:
    return WorkshopClosed(f"the agent cannot run iptables: {why}")


# -- in the workshop -------------------------------------------------------------------------------


def _serve(tasks: socket.socket) -> None:
    """Keep processes for tasks until the agent closes its end."""
    namespaces.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent ends when it has finished
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _load()
    what, descriptors = _receive(tasks)
    if what == _MOUNTS:
        namespaces.enter_sandbox(next(iter(descriptors), None), _complain)
        gc.freeze()  # a search for cycles would copy what processes share
        _Pool(tasks).keep()


def _load() -> None:
    """Load what tasks need: the files of the programs may be out of sight in a task."""
    from istio_cni.capture import iptables, native  # noqa: F401
    from istio_cni.rules import nfdump  # noqa: F401

    netfilter.load()


def _receive(tasks: socket.socket) -> tuple[bytes, array.array[int]]:
    room = socket.CMSG_SPACE(4 * _TASK_DESCRIPTORS)
    what, rights, _, _ = tasks.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, _, content in rights:
        descriptors.frombytes(content)
    return what, descriptors


def _complain(_: str, message: str) -> None:
    sys.stderr.write(f"install-cni: {message}\n")


class _Child(NamedTuple):
    """A process for tasks; `deadline` is infinite while it waits for one."""

    process: int
    deadline: float = math.inf


class _Pool:
    """Processes that wait for a task, and those that have one, by the pipe on which they tell.

    While a task is being done, no more is forked than the next one needs: the processors are for
    the programs.
    """

    def __init__(self, tasks: socket.socket) -> None:
        self._tasks = tasks
        self._taken: list[bytes] = []  # tasks whose rules may have to be worked out
        self._children: dict[int, _Child] = {}
        self._poll = select.poll()
        self._poll.register(tasks, 0)  # only its end is told

    def keep(self) -> None:
        """Replace those that have taken a task, end those that take too long."""
        has_rested = True
        while True:
            idle = sum(child.deadline == math.inf for child in self._children.values())
            is_quiet = idle == len(self._children)
            pause_s = _REST_S if is_quiet and not has_rested else math.inf
            try:
                if is_quiet and has_rested:
                    self._prepare()
                for _ in range((IDLE if is_quiet and has_rested else 1) - idle):
                    self._fork()
            except OSError as error:
                _complain("", f"no process for iptables: {error.strerror}")
                pause_s = _FORK_PAUSE_S
            events = self._wait(pause_s)
            if self._tasks.fileno() in events:
                return
            self._hear(events)
            self._end_overdue()
            has_rested = not events

    def _fork(self) -> None:
        tell_end, tell = os.pipe()
        try:
            process = namespaces.fork(
                lambda: _wait_for_task(self._tasks, tell), self._tasks.fileno(), tell
            )
        except OSError:
            os.close(tell_end)
            raise
        finally:
            os.close(tell)
        self._children[tell_end] = _Child(process)
        self._poll.register(tell_end, select.POLLIN)

    def _wait(self, pause_s: float) -> list[int]:
        """Wait so long, or until a deadline, or until something happens on some descriptors."""
        deadlines = (child.deadline for child in self._children.values())
        left_s = max(0.0, min(pause_s, min(deadlines, default=math.inf) - time.monotonic()))
        events = self._poll.poll(None if left_s == math.inf else left_s * 1000)
        return [descriptor for descriptor, _ in events]

    def _hear(self, descriptors: list[int]) -> None:
        """Take note of who has a task now, and of who has ended."""
        for descriptor in descriptors:
            line = os.read(descriptor, 1 << 16)
            if line:
                self._note(descriptor, line)
            else:
                self._forget(descriptor)

    def _note(self, descriptor: int, line: bytes) -> None:
        """Note until when a process may work, and at what."""
        self._poll.modify(descriptor, 0)  # only its end is told from now on
        deadline, _, task = line.partition(b" ")
        self._children[descriptor] = self._children[descriptor]._replace(deadline=float(deadline))
        self._taken.append(task)

    def _prepare(self) -> None:
        """Have the rules of tasks of late ready for the like, in processes still to be forked."""
        while self._taken:
            with suppress(IstioCNIError):  # the one that had the task has said so
                work.prepare(Task.of_json(json.loads(self._taken.pop())))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for descriptor, child in list(self._children.items()):
            if child.deadline <= now:
                namespaces.end(child.process)
                self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        namespaces.end(self._children.pop(descriptor).process)


def _wait_for_task(tasks: socket.socket, tell: int) -> None:
    """Take one task, do it, and report; the pipe tells the workshop that it is taken."""
    what, descriptors = _receive(tasks)
    if what != _TASK:
        return
    answer, netns, caller = descriptors
    line = _read_line(answer)
    os.write(answer, _TAKEN)  # from now on something may be touched
    task = Task.of_json(json.loads(line))
    if len(line) > _LINE_MAX_BYTES:  # more than a pipe takes at once
        line = json.dumps(task._replace(config=None).to_json()).encode()
    os.write(tell, f"{task.deadline} ".encode() + line)

    def inside(inside: Inside) -> object:
        return work.run(task, inside, lambda: callers.confirm(caller, task.deadline), prove=False)

    namespaces.run_and_report(inside, netns, answer)


def _read_line(descriptor: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            os._exit(1)
        data += piece
    return data
