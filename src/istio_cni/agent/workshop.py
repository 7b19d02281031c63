"""A small process beside the agent that starts those which run iptables inside pods' namespaces.

The agent has threads and a good part of a hundred megabytes: forking it takes longer than a call of
iptables-restore, and what comes out holds locks of threads that are not there. The workshop is
forked from it before either, has one thread, and forks one process for each task; that one works as
the plugin does in process (netns/child.py), and sees the node's files, iptables among them, if the
agent itself is in a container.

It ends with the agent, and everything under way with it. It lives in a sandbox of the node's files,
made once: a copy of all mounts for each task would cost more than the task.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from istio_cni.edge import callers, netfilter, proc
from istio_cni.edge import netns as namespaces
from istio_cni.errors import TryAgainLater
from istio_cni.plugin import work
from istio_cni.plugin.work import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.edge.netns import Inside

Log = Callable[[str, str], None]
FIND_S = 15.0  # for the trial of each variant, kernel modules included
GRACE_S = 0.5  # after a task's deadline, for the tale of its end
_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
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
            receive.sendall(json.dumps(task.to_json()).encode() + b"\n")
            messages = namespaces.collect(receive.fileno(), task.deadline + GRACE_S)
        return namespaces.outcome(messages, task.deadline, log)

    def open(self, mounts: int | None) -> None:
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
            raise WorkshopClosed(f"the agent cannot run iptables: {error.strerror}") from error

    def find_backend(self, log: Log, wait_s: float = FIND_S) -> str:
        """Find out what `auto` means on this node: one of `netconf.NODE_BACKENDS`."""
        task = Task(work.FIND, "", time.monotonic() + wait_s)
        own = os.open(proc.OWN_NETNS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with self._nobody() as caller:
                answer = self.run(task, own, caller, log)
        finally:
            os.close(own)
        return str(answer["backend"]) if isinstance(answer, dict) else ""

    @staticmethod
    @contextmanager
    def _nobody() -> Iterator[int]:
        """Be a caller that does not leave."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            yield ours.fileno()

    def close(self) -> None:
        """End the workshop, and wait for it."""
        self._socket.close()
        with suppress(ChildProcessError):
            os.waitpid(self._process, 0)


# -- in the workshop -------------------------------------------------------------------------------


def _serve(tasks: socket.socket) -> None:
    """Fork a process for each task until the agent closes its end."""
    namespaces.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent ends when it has finished
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _load()
    while True:
        what, descriptors = _receive(tasks)
        if not what:
            return
        if what == _MOUNTS:
            namespaces.enter_sandbox(next(iter(descriptors), None), _complain)
        elif os.fork() == 0:
            try:
                tasks.close()
                _do(*descriptors)
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        _reap()


def _receive(tasks: socket.socket) -> tuple[bytes, array.array[int]]:
    room = socket.CMSG_SPACE(4 * _TASK_DESCRIPTORS)
    what, rights, _, _ = tasks.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, _, content in rights:
        descriptors.frombytes(content)
    return what, descriptors


def _complain(_: str, message: str) -> None:
    sys.stderr.write(f"install-cni: {message}\n")


def _load() -> None:
    """Load what tasks need: the files of the programs may be out of sight in a task."""
    from istio_cni.capture import iptables, native  # noqa: F401
    from istio_cni.rules import nfdump  # noqa: F401

    netfilter.load()


def _reap() -> None:
    """Take note of those that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _do(answer: int, netns: int, caller: int) -> None:
    """Have a child of this process do one task and report, and see that it ends."""
    namespaces.die_with_parent()
    task = Task.of_json(json.loads(_read_line(answer)))

    def may_commit() -> None:
        if time.monotonic() >= task.deadline or callers.has_left(caller):
            raise TryAgainLater("the caller has gone; nothing is changed any more")

    def inside(inside: Inside) -> object:
        return work.run(task, inside, may_commit, prove=False)

    namespaces.run_and_report(inside, netns, answer, deadline=task.deadline, keep=caller)


def _read_line(descriptor: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            os._exit(1)
        data += piece
    return data
