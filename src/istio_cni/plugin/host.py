"""The process in which the verbs run: the plugin's own, or the node agent (agent/call.py).

There is one implementation of the verbs and there are two hosts for it. What differs between them
is here: how they get at the pod's namespace and at its object, how long they may go on, and whether
whoever asked still wants the work.
"""

from __future__ import annotations

import time

from istio_cni.edge import proc
from istio_cni.plugin import source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.cni.request import Request
    from istio_cni.plugin.log import Log
    from istio_cni.plugin.netconf import Netconf
    from istio_cni.plugin.pod import Pod
    from istio_cni.plugin.work import Task

LOOK_UP, DECIDE, PROGRAM = "lookup", "decide", "program"
"""The phases of an ADD, each of which may be entered several times."""


class Host:
    """The plugin's own process, which lives for one call.

    `netns_override` allows its own network namespace, never the host's. `node_backend` is what
    `auto` means on this node (`netconf.NODE_BACKENDS`), "" if nobody has found out.
    """

    __slots__ = ("_override", "log", "node_backend")

    may_be_left = False  # whoever asked may go on alone meanwhile, and `confirm` tells

    def __init__(self, log: Log, *, netns_override: bool = False) -> None:
        self.log = log
        self.node_backend = ""
        self._override = netns_override

    def limit(self, seconds: float, share: float = 1.0) -> float:
        """Return when work must end that may take so long; an instant of CLOCK_MONOTONIC.

        It is given at most this share of the time that whoever asked is going to wait.
        """
        return time.monotonic() + seconds

    def begin(self, netconf: Netconf) -> None:
        """Note what the network configuration says, before anything is done or logged."""

    def enter(self, phase: str) -> None:
        """Note that a phase of the call begins, and the one before ends."""

    def pin(self, request: Request) -> int | OSError:
        """Open the request's network namespace, or say why it cannot be; the caller closes it."""
        return proc.pin(request.netns)

    def find_pod(self, request: Request, netconf: Netconf, deadline: float) -> Pod:
        """Return the request's pod; see `source.find_pod`."""
        from istio_cni.plugin.pod import Pod  # pods that must be looked up only

        return Pod(source.find_pod(request, netconf, deadline))

    def is_node_s(self, netns: int) -> bool:
        """Tell whether a namespace is the host's, whose traffic must never be captured."""
        return proc.namespace(netns) == proc.namespace(proc.HOST_NETNS)

    def is_refused(self, netns: int) -> bool:
        """Tell whether a namespace is the host's, or the plugin's own.

        Where the host's cannot be read, the plugin's own may well be it: no override then.
        """
        if self.is_node_s(netns):
            return True
        allowed = self._override and proc.namespace(proc.HOST_NETNS) is not None
        return not allowed and proc.namespace(netns) == proc.namespace(proc.OWN_NETNS)

    def run_elsewhere(self, task: Task, netns: int) -> object:
        """Have another process do in passing what this thread could do itself.

        None says that nothing was changed, and this thread is to do it.
        """
        return None

    def run_inside(self, task: Task, netns: int) -> object:
        """Do a task in a child process inside a namespace, and return what it reports."""
        from istio_cni.edge import netns as namespaces  # captured pods only
        from istio_cni.plugin import work

        return namespaces.run_inside(
            lambda inside: work.run(task, inside),
            netns,
            deadline=task.deadline,
            log=self.log.write,
        )

    def confirm(self) -> None:
        """Raise GivenUp if whoever asked has gone; this process does all that is done."""
