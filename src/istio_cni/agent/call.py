"""One call of the launcher, carried out here: the plugin's verbs with the agent as their host.

The agent must never work for somebody who has gone: whoever gave up runs the plugin by itself, or
has told DEL meanwhile. So it ends a second before its caller stops waiting, and looks for a hang-up
right before each change.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from istio_cni.agent import frame, metrics
from istio_cni.agent.lead import Turn
from istio_cni.agent.metrics import Metrics
from istio_cni.agent.workshop import Workshop, WorkshopClosed
from istio_cni.cni.serve import serve
from istio_cni.edge import callers
from istio_cni.edge import netns as namespaces
from istio_cni.edge.callers import Caller
from istio_cni.errors import DecodingFailure, GivenUp, IstioCNIError
from istio_cni.plugin.host import DECIDE, Host
from istio_cni.plugin.log import Log
from istio_cni.plugin.netconf import Netconf
from istio_cni.plugin.verbs import Verbs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.cni.request import Request
    from istio_cni.plugin.pod import Pod
    from istio_cni.plugin.work import Task

    Cached = Callable[[str, str, str], Pod | None]
    Namespace = tuple[int, int]

LOG = logging.getLogger("cni-agent")
MARGIN_S = 1.0  # before the caller stops waiting; half of the time if that is less


class Declined(Exception):
    """A call that is not for this agent; nothing was touched, and the message says why.

    `word` is that for the metrics; `request_id` is "" before it is known.
    """

    request_id = ""

    def __init__(self, word: str, why: str) -> None:
        super().__init__(why)
        self.word = word


class Node(NamedTuple):
    """What all calls of an agent share; `sink` takes the lines of their logs.

    `own_netns` is the agent's own, which may be a pod's; `cached(namespace, name, uid)` finds a pod
    without asking anybody; `node_backend` is what `auto` means here. `run_dir` is all that is seen
    of the node's files, "" if they are all seen.
    """

    host_netns: Namespace
    own_netns: Namespace
    workshop: Workshop
    cached: Cached
    sink: Callable[[str, str], object]
    metrics: Metrics
    node_backend: str = ""
    run_dir: str = ""


class Serving(Host):
    """The agent as the verbs' host for one call.

    `netns` is the caller's descriptor of the pod's namespace, or why it has none; `turn` is
    let go of while this waits for somebody else.
    """

    __slots__ = ("_caller", "_deadline", "_netns", "_node", "_turn", "declined", "phases")

    may_be_left = True

    def __init__(
        self,
        node: Node,
        caller: Caller,
        turn: Turn,
        header: frame.Header,
        netns: int | OSError,
        log: Log,
    ) -> None:
        super().__init__(log)
        left = header.deadline - time.monotonic()
        self._node = node
        self._caller = caller
        self._netns = netns
        self._deadline = header.deadline - min(MARGIN_S, left / 2)
        self._turn = turn
        self.node_backend = node.node_backend
        self.declined = ""
        self.phases: list[tuple[str, float]] = []

    def limit(self, seconds: float, share: float = 1.0) -> float:
        """Return when work must end, before the caller stops waiting."""
        now = time.monotonic()
        return min(now + seconds, now + share * (self._deadline - now))

    def decline(self, why: str) -> NoReturn:
        """End the call, which has touched nothing; its launcher runs the plugin instead."""
        self.declined = why
        raise GivenUp(why)

    def begin(self, netconf: Netconf) -> None:
        """Leave a call to the plugin's process that needs files which only that one sees."""
        run_dir = self._node.run_dir
        if run_dir and netconf.manifests:
            self.decline("pods come from files of the node, which this agent does not see")
        if run_dir and os.path.normpath(netconf.cni_agent_run_dir) != os.path.normpath(run_dir):
            self.decline(f"its run dir is not {run_dir}")

    def enter(self, phase: str) -> None:
        """Note when a phase begins."""
        self.phases.append((phase, time.monotonic()))

    def pin(self, request: Request) -> int | OSError:
        """Hand out the caller's descriptor; its path may lead elsewhere here, or nowhere."""
        return os.dup(self._netns) if isinstance(self._netns, int) else self._netns

    def find_pod(self, request: Request, netconf: Netconf, deadline: float) -> Pod:
        """Take the pod from the cache, else ask for it."""
        if not netconf.manifests:
            name, uid = request.pod_name, request.pod_uid
            pod = self._node.cached(request.pod_namespace, name, uid)
            if pod is not None:
                return pod
        with self._turn.let_go():
            return super().find_pod(request, netconf, deadline)

    def is_node_s(self, netns: int) -> bool:
        """Tell whether a namespace is the host's, in which this agent may not be."""
        return namespaces.identity(netns) == self._node.host_netns

    def is_refused(self, netns: int) -> bool:
        """Tell whether a namespace is the host's or the agent's own."""
        return self.is_node_s(netns) or namespaces.identity(netns) == self._node.own_netns

    def run_elsewhere(self, task: Task, netns: int) -> object:
        """Have a task done by the workshop if others wait for this thread, and it has time."""
        if not (self._turn.is_wanted() and self._node.workshop.is_free):
            return None
        with suppress(WorkshopClosed):
            return self._in_workshop(task, netns)
        return None

    def run_inside(self, task: Task, netns: int) -> object:
        """Have a task done by a process of the workshop's."""
        try:
            return self._in_workshop(task, netns)
        except WorkshopClosed as error:
            self.decline(error.msg)

    def _in_workshop(self, task: Task, netns: int) -> object:
        caller, log = self._caller.fileno(), self.log.write
        return self._node.workshop.run(task, netns, caller, log, waiting=self._turn.let_go)

    def confirm(self) -> None:
        """Raise GivenUp once the caller has gone, or is about to."""
        callers.confirm(self._deadline, self._caller.fileno())


def answer(node: Node, caller: Caller, turn: Turn) -> None:
    """Carry out one call and answer it, or decline it untouched."""
    try:
        call = _Call(node, caller, turn)
        status, stdout = call.run()
    except Declined as refused:
        node.metrics.declined(refused.word)
        extra = {"request_id": refused.request_id} if refused.request_id else {}
        LOG.warning("a call is declined: %s", refused, extra=extra)
        caller.answer(frame.reply(frame.DECLINED, 0, str(refused).encode()))
    else:
        caller.answer(frame.reply(frame.DONE, status, stdout))
        call.count(status)


class _Call:
    """One call as it was asked for."""

    def __init__(self, node: Node, caller: Caller, turn: Turn) -> None:
        """Read it. Raises Declined."""
        if caller.uid != 0:
            raise Declined(metrics.UNTRUSTED, "only root may ask")
        try:
            header = frame.read_header(caller.read(frame.HEADER_BYTES))
            netns = _namespace_of(node, caller, header)  # strangers need not say more
            self._env = frame.read_environment(caller.read(header.environment_bytes))
            self._stdin = caller.read(header.stdin_bytes)
        except frame.OtherVersion as error:
            raise Declined(metrics.UNKNOWN_VERSION, error.msg) from error
        except DecodingFailure as error:
            raise Declined(metrics.MALFORMED, error.msg) from error
        _count_descriptors(caller, header)
        self._node = node
        self._caller = caller
        self._request_id = header.request_id
        self._verb = self._env.get("CNI_COMMAND", "")
        self._log = Log(sink=node.sink, request_id=header.request_id)
        self._host = Serving(node, caller, turn, header, netns, self._log)
        self._host.phases = [(metrics.QUEUE, header.begun(self._verb))]
        self._code = 0

    def run(self) -> tuple[int, bytes]:
        """Carry it out; return exit status and stdout. Raises Declined."""
        stdout, stderr = io.StringIO(), io.StringIO()
        verbs = Verbs(self._host).table()
        self._host.enter(DECIDE)
        if self._caller.has_left():
            raise Declined(metrics.OTHER, "the caller has gone")
        status = serve(self._env, lambda: self._stdin, stdout, stderr, verbs, self._report, "")
        if self._host.declined:
            declined = Declined(metrics.OTHER, self._host.declined)
            declined.request_id = self._request_id
            raise declined
        return status, stdout.getvalue().encode()

    def count(self, status: int) -> None:
        """Count the call, and how long its phases took."""
        self._node.metrics.request(self._verb, self._code if status else 0)
        if self._verb == "ADD":
            took = metrics.durations(self._host.phases, time.monotonic())
            self._node.metrics.add_took(took)

    def _report(self, verb: str, container_id: str, error: IstioCNIError) -> None:
        if self._host.declined:
            return  # somebody else's business
        self._code = error.code
        self._log.bind(verb=verb, container_id=container_id)
        self._log.failure(error)


def _namespace_of(node: Node, caller: Caller, header: frame.Header) -> int | OSError:
    """Return the descriptor of the pod's namespace, once the caller has proved where it is.

    Whoever is not on the host's network is no container runtime: a container that has got at the
    socket can send no namespace but its own.
    """
    _count_descriptors(caller, header)
    *pod, own = caller.descriptors
    if not namespaces.is_netns(own) or namespaces.identity(own) != node.host_netns:
        raise Declined(metrics.UNTRUSTED, "the caller is not in the host's network namespace")
    if header.netns_error:
        return OSError(header.netns_error, os.strerror(header.netns_error))
    return pod[0]


def _count_descriptors(caller: Caller, header: frame.Header) -> None:
    found = len(caller.descriptors)
    if found != (1 if header.netns_error else 2):
        raise Declined(metrics.MALFORMED, f"{found} descriptors came with the call")
