"""The six verbs: ask an edge, ask the core, tell an edge.

Errors are raised as they are; the dispatcher turns them into the one object that the runtime reads.
What a pod outside the mesh does not need is imported where it is needed.
"""

from __future__ import annotations

import time

from istio_cni import constants
from istio_cni.cni import result
from istio_cni.cni.request import valid_attachments
from istio_cni.edge import proc
from istio_cni.errors import (
    GivenUp,
    InvalidNetconf,
    InvalidNetns,
    IOFailure,
    IstioCNIError,
    PluginNotAvailable,
    RulesAltered,
    TryAgainLater,
    UnknownContainer,
    quoted,
)
from istio_cni.plugin import select, source
from istio_cni.plugin.host import DECIDE, LOOK_UP, PROGRAM
from istio_cni.plugin.netconf import Netconf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from istio_cni.cni.document import JSON
    from istio_cni.cni.request import Request
    from istio_cni.plugin.attachments import Attachment, Attachments
    from istio_cni.plugin.host import Host
    from istio_cni.plugin.pod import Pod
    from istio_cni.rules.config import CaptureConfig

NO_AMBIENT = (
    "network configuration, ambient_enabled: true is not supported by this version; allowed: false"
)


class Verbs:
    """The verbs, run by a host."""

    __slots__ = ("_host", "_log")

    def __init__(self, host: Host) -> None:
        self._host = host
        self._log = host.log

    def table(self) -> dict[str, Callable[[Request], JSON | None]]:
        """Return the verbs by name, as the dispatcher wants them."""
        return {
            "ADD": self.add,
            "DEL": self.delete,
            "CHECK": self.check,
            "GC": self.collect_garbage,
            "STATUS": self.status,
        }

    def add(self, request: Request) -> JSON:
        """Capture the pod's traffic, if it is ours to capture; return the result to pass on."""
        deadline = self._host.limit(constants.ADD_TIMEOUT_S)
        netconf = self._begin(request)
        answer = result.convert(request.prev_result, request.cni_version)
        netns = self._host.pin(request)
        try:
            self._refuse_host(request, netns)
            skip = self._add(request, netconf, netns, deadline)
        finally:
            proc.release(netns)
        if skip is not None:
            self._log.info(f"not captured: {skip.reason}")
        return answer

    def delete(self, request: Request) -> None:
        """Forget the attachment; undo its rules if it made them and the namespace is there."""
        deadline = self._host.limit(constants.DEL_UNDO_TIMEOUT_S)
        netconf = self._begin(request)
        attachments = self._attachments(netconf)
        if not attachments.has_traces(request.container_id, request.ifname):
            return
        with attachments.lock(request.container_id, deadline):
            self._host.confirm()
            record = attachments.read(request.container_id, request.ifname)
            if record is None:
                attachments.remove(request.container_id, request.ifname)
                return
            try:
                self._forget(request, attachments, record, deadline)
            except GivenUp:
                raise  # the record stays, for whoever goes on
            except Exception:
                attachments.drop(record)
                raise
            attachments.drop(record)

    def check(self, request: Request) -> None:
        """Prove that the kernel holds what ADD programmed; raise RulesAltered if not."""
        deadline = self._host.limit(constants.CHECK_TIMEOUT_S)
        netconf = self._begin(request)
        record = self._attachments(netconf).read(request.container_id, request.ifname)
        if record is None and self._skipped(request, netconf):
            return
        import os

        netns = self._open_netns(request)
        try:
            if record is None:
                self._derive_check(request, netconf, netns, deadline)
            else:
                self._prove(record, netns, deadline)
        finally:
            os.close(netns)

    def collect_garbage(self, request: Request) -> None:
        """Drop this network's records of attachments that the runtime does not know any more."""
        netconf = self._begin(request)
        valid = valid_attachments(request)
        if valid is None:
            return
        attachments = self._attachments(netconf)
        for record in list(attachments.all()):
            if record.network != request.name or (record.container_id, record.ifname) in valid:
                continue
            try:
                with attachments.lock(record.container_id, time.monotonic()):
                    self._host.confirm()
                    attachments.drop(record)
            except GivenUp:
                raise
            except (IOFailure, TryAgainLater) as error:
                self._log.failure(error)
            else:
                gone = f"{record.container_id}-{record.ifname}"
                self._log.info(f"stale attachment {quoted(gone)} dropped")

    def status(self, request: Request) -> None:
        """Say whether the next ADD would work: always, unless `status_strict` asks for more.

        A failing STATUS takes the node's network away from every pod that is not on the host's, the
        agent that would mend it included.
        """
        netconf = self._begin(request)
        trouble = self._trouble(netconf)
        if trouble and netconf.status_strict:
            raise PluginNotAvailable(trouble)
        if trouble:
            self._log.warn(f"not every pod would start: {trouble}")

    # -- steps -------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> Netconf:
        """Bind the call to the log and read our keys of the configuration."""
        self._log.bind(
            verb=request.command,
            container_id=request.container_id,
            ifname=request.ifname,
            netns=request.netns,
            pod="/".join(filter(None, (request.pod_namespace, request.pod_name))),
        )
        netconf = Netconf(request.config)
        self._host.begin(netconf)
        self._host.node_backend = netconf.node_backend or self._host.node_backend
        self._log.configure(netconf.plugin_log_level, netconf.cni_agent_run_dir)
        if netconf.problems:
            self._log.warn("; ".join(problem.msg for problem in netconf.problems))
        return netconf

    def _attachments(self, netconf: Netconf) -> Attachments:
        from istio_cni.plugin.attachments import Attachments  # not for pods outside the mesh

        return Attachments(netconf.cni_agent_run_dir, self._log.write)

    def _add(
        self, request: Request, netconf: Netconf, netns: int | OSError, deadline: float
    ) -> select.Skip | None:
        """Decide about a pod, and capture it unless there is a reason not to."""
        skip = select.before_look_up(request, netconf)
        if skip is not None:
            return skip
        limit = self._host.limit(constants.LOOK_UP_TIMEOUT_S, share=constants.LOOK_UP_SHARE)
        pod = self._look_up(request, netconf, limit)
        skip = self._after_look_up(pod, netconf)
        if skip is None:
            self._capture(request, netconf, pod, netns, deadline)
        return skip

    def _refuse_host(self, request: Request, netns: int | OSError) -> None:
        """Refuse the host's namespace, before anything is done there.

        One that is not there fails where it is needed.
        """
        if isinstance(netns, int) and self._host.is_refused(netns):
            raise InvalidNetns(
                f"CNI_NETNS {quoted(request.netns)} is the host's network namespace; "
                "a pod's own is needed"
            )

    def _look_up(self, request: Request, netconf: Netconf, limit: float) -> Pod:
        self._host.enter(LOOK_UP)
        pod = self._host.find_pod(request, netconf, limit)
        self._host.enter(DECIDE)
        if self._log.wants("debug"):
            self._log.debug(
                "pod looked up",
                uid=quoted(pod.uid),
                containers=quoted(", ".join(pod.containers)),
                annotations=quoted(", ".join(sorted(pod.annotations))),
            )
        return pod

    def _after_look_up(self, pod: Pod, netconf: Netconf) -> select.Skip | None:
        if netconf.ambient_enabled and constants.STATUS_ANNOTATION not in pod.annotations:
            name = quoted(f"{pod.namespace}/{pod.name}")
            raise InvalidNetconf(f"pod {name} has no sidecar, and {NO_AMBIENT}")
        return select.after_look_up(pod)

    def _configuration(self, pod: Pod, netconf: Netconf) -> CaptureConfig:
        from istio_cni.plugin.annotations import capture_config  # captured pods only

        config, warnings = capture_config(pod, netconf)
        if warnings:
            self._log.warn("; ".join(warnings))
        return config

    def _capture(
        self, request: Request, netconf: Netconf, pod: Pod, netns: int | OSError, deadline: float
    ) -> None:
        """Program the pod's namespace and leave the record."""
        from istio_cni.plugin import program  # captured pods only

        host, attachments = self._host, self._attachments(netconf)
        try:
            config = self._configuration(pod, netconf)
            host.enter(PROGRAM)
            report = program.capture(host, request, config, pod.uid, netns, attachments, deadline)
        except IstioCNIError as error:
            error.msg = f"pod {quoted(f'{pod.namespace}/{pod.name}')}: {error.msg}"
            raise
        changed = ", ".join(report.changed) or "nothing: all was in place"
        variants = ", ".join(f"{name}: {variant}" for name, variant in report.variants.items())
        reason = f"container {constants.PROXY_CONTAINER}, annotation {constants.STATUS_ANNOTATION}"
        self._log.info(
            f"captured: {reason}",
            changed=changed,
            backend=report.backend,
            reason=report.reason,
            **({"variants": variants} if variants else {}),
        )

    def _forget(
        self, request: Request, attachments: Attachments, record: Attachment, deadline: float
    ) -> None:
        """Undo what an attachment has made, unless that is somebody else's by now."""
        heir = attachments.heir(record)
        if heir is not None:
            self._log.info(f"the pod stays captured: {heir.ifname} is still attached")
        elif attachments.is_taken_over(record):
            self._log.info("nothing to undo: the namespace is another pod's by now")
        elif record.made_rules and request.netns:
            self._undo(request, record, deadline)

    def _undo(self, request: Request, record: Attachment, deadline: float) -> None:
        from istio_cni.plugin import program  # captured pods only

        netns = self._host.pin(request)
        try:
            undone = program.undo(self._host, request.netns, netns, record, deadline)
        except InvalidNetns as error:  # what DEL is most often told: the sandbox is gone
            self._log.debug(f"nothing to undo: {error.msg}")
            return
        finally:
            proc.release(netns)
        self._log.info("capture undone" if undone else "nothing to undo: this is another namespace")

    def _open_netns(self, request: Request) -> int:
        """Open the namespace of a CHECK; raises UnknownContainer if it is gone."""
        from istio_cni.edge import netns as namespaces  # pods that may be captured

        pinned = self._host.pin(request)
        try:
            return namespaces.open_netns(request.netns, pinned)
        except InvalidNetns as error:
            if not _is_gone(error.__cause__):
                raise
            raise UnknownContainer(error.msg) from error
        finally:
            proc.release(pinned)

    def _skipped(self, request: Request, netconf: Netconf) -> bool:
        """Tell whether a pod without record needs no proof."""
        try:
            skip = select.before_look_up(request, netconf)
        except InvalidNetconf:  # logged when it was read
            return False
        if skip is not None:
            self._log.debug(f"nothing to prove: {skip.reason}")
        return skip is not None

    def _prove(self, record: Attachment, netns: int, deadline: float) -> None:
        from istio_cni.plugin import program  # captured pods only

        try:
            found = program.difference(self._host, record, netns, deadline)
        except IstioCNIError as error:  # trouble of ours says nothing about the rules
            error.msg = f"the rules could not be checked: {error.msg}"
            self._log.failure(error)
            return
        if found:
            raise RulesAltered(f"the pod's traffic is not captured as it was: {found}")

    def _derive_check(
        self, request: Request, netconf: Netconf, netns: int, deadline: float
    ) -> None:
        """Check a pod without record against today's object; logged only: it may have changed."""
        from istio_cni.plugin import program  # captured pods only

        try:
            limit = self._host.limit(constants.CHECK_TIMEOUT_S / 2, share=constants.LOOK_UP_SHARE)
            pod = self._look_up(request, netconf, limit)
            skip = self._after_look_up(pod, netconf)
            if skip is not None:
                self._log.info(f"no record, and nothing to prove: {skip.reason}")
                return
            config = self._configuration(pod, netconf)
            found = program.derived_difference(self._host, config, netns, deadline)
            self._log.warn(f"no record of this attachment; derived: {found or 'captured'}")
        except IstioCNIError as error:
            self._log.warn(f"no record of this attachment, and none can be derived: {error.msg}")

    def _trouble(self, netconf: Netconf) -> str:
        """Say what would keep a pod of the mesh from starting; "" if nothing is known to."""
        import os

        if netconf.problems:
            return netconf.problems[0].msg
        if netconf.ambient_enabled:
            return NO_AMBIENT
        from istio_cni.capture import apply  # STATUS only: what every captured pod would meet
        from istio_cni.plugin.annotations import capture_config
        from istio_cni.plugin.pod import Pod

        try:
            apply.refuse_impossible(capture_config(Pod({}), netconf)[0])
        except IstioCNIError as error:
            return error.msg
        if netconf.manifests:
            there = os.path.isdir(netconf.manifests)
            return "" if there else f"no directory {quoted(netconf.manifests)}"
        from istio_cni.edge import kube  # STATUS only: the kubeconfig is really read

        try:
            kube.load_kubeconfig(source.kubeconfig_path(netconf))
        except IstioCNIError as error:
            return error.msg
        return ""


def _is_gone(cause: BaseException | None) -> bool:
    """Tell whether a namespace that cannot be opened is not there any more."""
    return cause is None or isinstance(cause, (FileNotFoundError, NotADirectoryError))
