"""Processes beside the agent that do tasks inside pods' namespaces, iptables' programs among them.

The agent has threads and a good part of a hundred megabytes: forking it takes longer than a call of
iptables-restore, and what comes out holds locks of threads that are not there. The workshop is
forked from it before either, has one thread, and keeps a few processes that take the agent's tasks
one after the other: what one of them has touched or worked out for a pod is there for the next pod.

All of them end with the agent. They live in a sandbox of the node's files, iptables among them,
which is made once: a copy of all mounts for each task would cost more than the task.
"""

from __future__ import annotations

import array
import errno
import math
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from istio_cni.agent.memory import look_seldom
from istio_cni.constants import LATE_ROLLBACK_S
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
HANDS, HANDS_MAX = 3, 16  # processes that take tasks, of 7 MiB each: always, and while all wait
TASKS_MAX = 1000  # of one process: what it may have gathered goes with it
TASK_MAX_BYTES = 1 << 18  # as much as all annotations of a pod may have
TAKE_S = 0.3  # for somebody to take a task; the plugin in process needs time, too
_EXTRA_S = 2.0  # that a process beyond `HANDS` waits for a task
_LOOK_EVERY_S = 1.0  # whether somebody is overdue
_LATE_S = LATE_ROLLBACK_S + 0.5  # for what was begun and nobody waits for
_FORK_PAUSE_S = 0.2
_REST_S = 0.02  # before another process takes the place of one that has ended
_SO_SNDBUFFORCE = 32
_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
_MORE, _MOUNTS = b"+", b"m"
_DESCRIPTORS_MAX = 3  # where the answer goes, the namespace, the caller
_NOBODY, _WAITS = -math.inf, math.inf


class WorkshopClosed(TryAgainLater):
    """Nobody has begun the task, nor will anybody; the plugin in process can do it."""


class _Memory:
    """What the agent and all of the workshop see: one writes it, nobody waits for anybody.

    `until` is an instant of CLOCK_MONOTONIC for each process's place: by then it is done with its
    task; `_WAITS` if it has none, `_NOBODY` if there is none. `taken` tells of each task by number
    whether somebody has begun with it.
    """

    __slots__ = ("taken", "until")

    def __init__(self) -> None:
        shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        size = HANDS_MAX * 8
        self.until = shared[:size].cast("d")  # written at once, unlike by `struct`
        self.taken = shared[size : size + 4 * HANDS_MAX]
        for place in range(HANDS_MAX):
            self.until[place] = _NOBODY


class Workshop:
    """The workshop as the agent sees it. Make it before any thread is started."""

    def __init__(self) -> None:
        self._tasks, tasks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._memory = _Memory()
        self._process = os.fork()
        if self._process == 0:
            try:
                self._tasks.close()
                self._orders.close()
                _serve(orders, tasks, self._memory)
            finally:
                os._exit(0)
        tasks.close()
        orders.close()
        with suppress(PermissionError):  # then long tasks are the plugin's own
            self._tasks.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2 * TASK_MAX_BYTES)
        self._sending = threading.Lock()
        self._numbers = deque(range(len(self._memory.taken)))  # of tasks to come
        self._is_open = True

    @property
    def is_free(self) -> bool:
        """Whether a process waits for a task, as far as the agent knows."""
        return self._is_open and _WAITS in self._memory.until.tolist()

    def run(
        self,
        task: Task,
        netns: int,
        caller: int,
        log: Log,
        *,
        take_s: float = TAKE_S,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> object:
        """Have a task done in a namespace, and return its result; its errors are raised here.

        `caller` is the connection of whoever asked; this waits within `waiting()`. Raises
        WorkshopClosed if nobody has begun with it within `take_s`, nor will.
        """
        if not self.is_free:
            self._hand_over(self._orders, _MORE)
        number = self._numbers.popleft()
        try:
            receive = self._put_out(task, number, netns, caller)
            with waiting():
                with receive:  # closed as soon as nobody waits: whoever takes it later sees that
                    messages = self._answers(receive, task, number, take_s)
                is_taken = bool(messages or self._memory.taken[number])
            if not is_taken:
                raise WorkshopClosed("nobody takes the task")
        finally:
            self._numbers.append(number)
        return namespaces.outcome(messages, task.deadline, log)

    def _put_out(self, task: Task, number: int, *descriptors: int) -> socket.socket:
        """Give a task to whoever takes it; return where it is answered."""
        receive, send = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._memory.taken[number] = 0
            with send:
                what = pickle.dumps((number, task))
                self._hand_over(self._tasks, what, send.fileno(), *descriptors)
        except BaseException:
            receive.close()
            raise
        return receive

    def _answers(
        self, receive: socket.socket, task: Task, number: int, take_s: float
    ) -> list[dict[str, object]]:
        """Return what is told of a task; nothing if nobody takes it in time."""
        poll = select.poll()
        poll.register(receive, select.POLLIN)
        if not (poll.poll(take_s * 1000) or self._memory.taken[number]):
            return []
        return namespaces.collect(receive.fileno(), task.deadline)

    def begin(self, mounts: int | None) -> None:
        """Begin; `mounts` is a descriptor of the node's mount namespace, None where that is ours.

        Raises WorkshopClosed.
        """
        self._hand_over(self._orders, _MOUNTS, *(() if mounts is None else (mounts,)))

    def _hand_over(self, channel: socket.socket, what: bytes, *descriptors: int) -> None:
        rights = [(*_RIGHTS, array.array("i", descriptors))] if descriptors else []
        if len(what) > TASK_MAX_BYTES:
            raise WorkshopClosed(f"a task of {len(what)} bytes is too long")
        try:
            with self._sending:
                channel.sendmsg([what], rights, socket.MSG_DONTWAIT)
        except OSError as error:
            self._is_open &= error.errno not in (errno.EPIPE, errno.ECONNRESET)
            raise WorkshopClosed(f"the workshop takes no task: {error.strerror}") from error

    def find_backend(self, log: Log, wait_s: float = FIND_S) -> str:
        """Find out what `auto` means on this node: one of `netconf.NODE_BACKENDS`."""
        task = Task(work.FIND, "", time.monotonic() + wait_s)
        caller, stays = socket.socketpair()  # one that does not leave
        with caller, stays, open(proc.OWN_NETNS, "rb") as own:
            answer = self.run(task, own.fileno(), caller.fileno(), log, take_s=wait_s)
        return str(answer["backend"]) if isinstance(answer, dict) else ""

    def close(self) -> None:
        """End the workshop, and wait for it."""
        self._tasks.close()
        self._orders.close()
        with suppress(ChildProcessError):
            os.waitpid(self._process, 0)


# -- in the workshop -------------------------------------------------------------------------------


def _serve(orders: socket.socket, tasks: socket.socket, memory: _Memory) -> None:
    """Keep processes for tasks until the agent closes its end."""
    namespaces.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent ends when it has finished
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _load()
    what, descriptors = _receive(orders, bytearray(1))
    if what == _MOUNTS:
        namespaces.enter_sandbox(next(iter(descriptors), None), _complain)
        look_seldom()  # it would copy what processes share
        _Hands(orders, tasks, memory).keep()


def _load() -> None:
    """Load what tasks need: the files of the programs may be out of sight in a task."""
    from istio_cni.capture import iptables, native  # noqa: F401
    from istio_cni.rules import nfdump  # noqa: F401

    netfilter.load()


def _receive(channel: socket.socket, into: bytearray) -> tuple[bytes, array.array[int]]:
    """Wait for one message, b"" if there will be none, and the descriptors that came with it."""
    room = socket.CMSG_SPACE(4 * _DESCRIPTORS_MAX)
    size, rights, _, _ = channel.recvmsg_into([into], room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, _, content in rights:
        descriptors.frombytes(content)
    return bytes(into[:size]), descriptors


def _complain(_: str, message: str) -> None:
    sys.stderr.write(f"install-cni: {message}\n")


class _Hands:
    """The processes that take tasks, each with a place of its own."""

    def __init__(self, orders: socket.socket, tasks: socket.socket, memory: _Memory) -> None:
        self._orders = orders
        self._tasks = tasks
        self._memory = memory
        self._processes: dict[int, int] = {}  # by place
        self._ends: dict[int, int] = {}  # places, by the pipe that ends with the process
        self._overdue: dict[int, float] = {}  # since when that was seen: all may have been stopped
        self._poll = select.poll()
        self._poll.register(orders, select.POLLIN)

    def keep(self) -> None:
        """Replace those that end, end those that are overdue, and add some when all are busy."""
        wanted = HANDS
        while True:
            pause_s = _LOOK_EVERY_S
            try:
                for place in range(HANDS_MAX):
                    if place not in self._processes and len(self._processes) < wanted:
                        self._fork(place)
            except OSError as error:
                _complain("", f"no process for iptables: {error.strerror}")
                pause_s = _FORK_PAUSE_S
            wanted = HANDS
            for descriptor, _ in self._poll.poll(pause_s * 1000):
                if descriptor != self._orders.fileno():
                    self._bury(descriptor)
                elif self._orders.recv(1) == _MORE:
                    wanted = min(len(self._processes) + 1, HANDS_MAX)
                else:
                    return
            self._end_overdue()

    def _fork(self, place: int) -> None:
        end, held = os.pipe()
        is_extra = len(self._processes) >= HANDS
        try:
            process = namespaces.fork(
                lambda: _take_tasks(self._tasks, self._memory, place, is_extra=is_extra),
                self._tasks.fileno(),
                held,
            )
        except OSError:
            os.close(end)
            raise
        finally:
            os.close(held)
        self._processes[place], self._ends[end] = process, place
        self._poll.register(end, 0)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for end, place in list(self._ends.items()):
            if not _NOBODY < self._memory.until[place] <= now:
                self._overdue.pop(end, None)
            elif now - self._overdue.setdefault(end, now) >= _LATE_S:
                self._bury(end)

    def _bury(self, end: int) -> None:
        place = self._ends.pop(end)
        self._overdue.pop(end, None)
        self._poll.unregister(end)
        os.close(end)
        namespaces.end(self._processes.pop(place))
        self._memory.until[place] = _NOBODY
        time.sleep(_REST_S)  # whoever asked is being answered; and what cannot live forks no storm


def _take_tasks(tasks: socket.socket, memory: _Memory, place: int, *, is_extra: bool) -> None:
    """Take one task after the other, while the agent is there and this process as it was.

    One that is extra takes one task, if there is any.
    """
    room, home = bytearray(TASK_MAX_BYTES), namespaces.open_home()
    poll = select.poll()
    poll.register(tasks, select.POLLIN)
    for _ in range(1 if is_extra else TASKS_MAX):
        memory.until[place] = _WAITS
        if is_extra and not poll.poll(_EXTRA_S * 1000):
            return
        message, descriptors = _receive(tasks, room)
        if not message:
            return
        number, task = pickle.loads(message)  # noqa: S301 – the agent's, whose fork this is
        if not callers.has_left(descriptors[0]):  # else its number may be another's by now
            memory.until[place] = task.deadline
            memory.taken[number] = 1  # from now on something may be touched
            if not _do(task, home, *descriptors):
                return
        for descriptor in descriptors:
            os.close(descriptor)


def _do(task: Task, home: int, answer: int, netns: int, caller: int) -> bool:
    """Do a task and answer; False if this process must do no other one."""

    def confirm() -> None:
        callers.confirm(task.deadline, caller, answer)  # the agent may have given it up

    def inside(inside: Inside) -> object:
        return work.run(task, inside, confirm, prove=False)

    return namespaces.visit_and_report(inside, netns, answer, home, for_good=not task.in_passing)
