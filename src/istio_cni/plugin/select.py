"""Which pods are captured: first match wins, and what needs no credentials is decided first.

Pure functions from what the runtime says and what the pod's object says to a reason for leaving the
pod alone, or None.

Source: istio cni/pkg/plugin (doAddRun); the order before the look-up is ours, docs/decisions/0003.
"""

from __future__ import annotations

from istio_cni import constants
from istio_cni.errors import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from istio_cni.cni.request import Request
    from istio_cni.plugin.netconf import Netconf
    from istio_cni.plugin.pod import Pod

# Go's strconv.ParseBool, as in rules.config, which is too heavy for pods that are not ours
TRUE = ("1", "t", "T", "TRUE", "true", "True")
FALSE = ("0", "f", "F", "FALSE", "false", "False")


class Skip:
    """A decision to leave a pod alone, with its reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


def before_look_up(request: Request, netconf: Netconf) -> Skip | None:
    """Decide what can be decided without asking anybody; None: the pod must be looked up.

    Raises InvalidNetconf where a key that cannot be used might change the decision.
    """
    if is_own_agent(request, netconf):
        return Skip("the node agent's own pod")
    if not request.pod_name or not request.pod_namespace:
        return Skip("not a Kubernetes pod: no pod name or namespace in CNI_ARGS")
    if request.pod_namespace in netconf.exclude_namespaces:
        return Skip(f"namespace {quoted(request.pod_namespace)} is excluded")
    if netconf.problems:
        raise netconf.problems[0]
    annotations = handed_over(request)
    if annotations is None or constants.STATUS_ANNOTATION in annotations:
        return None
    if annotations[constants.CONFIG_SOURCE_ANNOTATION] != "api":
        return Skip(f"static pod without annotation {constants.STATUS_ANNOTATION}")
    if netconf.ambient_enabled:
        return None
    return Skip(f"no annotation {constants.STATUS_ANNOTATION}")


def is_own_agent(request: Request, netconf: Netconf) -> bool:
    """Tell whether this is the node agent's pod, which must start without credentials."""
    named = request.pod_name.startswith(constants.AGENT_POD_PREFIX)
    return named and request.pod_namespace == netconf.pod_namespace


def handed_over(request: Request) -> Mapping[str, object] | None:
    """Return the annotations that the runtime hands over, if they are evidence.

    They are only with `kubernetes.io/config.source` in them, which the kubelet sets on every pod:
    runtimes also send null or an empty map. They never carry redirect parameters.
    """
    annotations = request.runtime_config.get(constants.POD_ANNOTATIONS_CAPABILITY)
    if not isinstance(annotations, dict):
        return None
    source = annotations.get(constants.CONFIG_SOURCE_ANNOTATION)
    return annotations if isinstance(source, str) and source else None


def after_look_up(pod: Pod) -> Skip | None:
    """Decide by the pod's object; None: its traffic is to be captured."""
    if pod.host_network:
        return Skip("the pod is on the host's network")
    if constants.INIT_CONTAINER in pod.containers:
        return Skip(f"container {constants.INIT_CONTAINER} programs the pod itself")
    if pod.proxy is None:
        return Skip(f"no container {constants.PROXY_CONTAINER}")
    if pod.proxy.env.get("DISABLE_ENVOY") in TRUE:
        return Skip("DISABLE_ENVOY is set on the proxy")
    if pod.proxy.kind not in ("", "sidecar"):
        return Skip(f"the proxy is no sidecar but {quoted(pod.proxy.kind)}")
    key = constants.INJECT_KEY
    if pod.labels.get(key, pod.annotations.get(key)) in FALSE:
        return Skip(f"{key} is false")
    if constants.STATUS_ANNOTATION not in pod.annotations:
        return Skip(f"no annotation {constants.STATUS_ANNOTATION}")
    if pod.annotations.get(constants.MODE_ANNOTATION) == "NONE":
        return Skip(f"{constants.MODE_ANNOTATION} is NONE")
    return None
