"""A real Kubernetes node for tests: kubelet, containerd, API server, all in private namespaces.

    with Cluster.started() as cluster:
        cluster.apply(pod)
        cluster.wait_ready("pod/web")

The control plane, the runtime and the pods live in one set of mount, network, process, host name
and IPC namespaces. Default paths such as /opt/cni/bin are real inside and untouched outside;
nothing is made in the machine's own network; ending one process ends everything.
"""

from __future__ import annotations

from .cluster import Cluster
from .needs import ClusterFailed

__all__ = ["Cluster", "ClusterFailed"]
