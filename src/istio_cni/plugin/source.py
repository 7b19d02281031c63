"""Where a pod's object comes from: the API server, or a directory of manifests."""

from __future__ import annotations

import os

from istio_cni.constants import KUBECONFIG_FILE
from istio_cni.plugin.identity import is_same_manifest, is_same_pod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.cni.request import Request
    from istio_cni.plugin.netconf import Netconf


def kubeconfig_path(netconf: Netconf) -> str:
    """Return the path of the kubeconfig that the installer keeps in the run dir."""
    return os.path.join(netconf.cni_agent_run_dir, KUBECONFIG_FILE)


def find_pod(request: Request, netconf: Netconf, deadline: float) -> dict[str, object]:
    """Return the object of the request's pod, and of no other one of the same name.

    `deadline` is an instant of CLOCK_MONOTONIC in seconds. Raises KubeconfigUnusable,
    PodLookupFailed, TryAgainLater.
    """
    namespace, name, uid = request.pod_namespace, request.pod_name, request.pod_uid
    if netconf.manifests:
        from istio_cni.edge import manifests  # nodes without an API server only

        directory = netconf.manifests
        return manifests.load_pod(
            directory, namespace, name, lambda pod: is_same_manifest(pod, uid)
        )
    from istio_cni.edge import kube  # pods that must be looked up only

    path = kubeconfig_path(netconf)
    return kube.fetch_pod(path, namespace, name, deadline, lambda pod: is_same_pod(pod, uid))
