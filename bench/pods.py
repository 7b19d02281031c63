"""From `kubectl apply` of a pod to Ready on a real node, without the plugin and with it.

Containers without probes, so that nothing but starting them takes time. A pod that is not captured
and one that is take turns; those without plugin come first, on the same node before the DaemonSet.
"""

from __future__ import annotations

import time

from e2e import images, install
from e2e.cluster import Cluster
from e2e.mesh import annotations, client_container, pod

WITHOUT, OUTSIDE, CAPTURED = (
    f"pod apply to Ready, {how}" for how in ("no plugin", "not captured", "captured")
)
ROWS = (WITHOUT, OUTSIDE, CAPTURED)


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the samples of each row, in seconds. Raises ClusterFailed, which names what lacks."""
    samples: dict[str, list[float]] = {row: [] for row in ROWS}
    with Cluster.started() as cluster:
        cluster.load(images.installer(), [install.INSTALLER], command=["install-cni"])
        _sample(cluster, captured=False)  # the first pod of a node meets cold caches
        for _ in range(rounds):
            samples[WITHOUT].append(_sample(cluster, captured=False))
        mesh = install.Mesh(cluster)
        mesh.install()
        _sample(cluster, captured=True, prove=True)
        for _ in range(rounds):
            samples[OUTSIDE].append(_sample(cluster, captured=False))
            samples[CAPTURED].append(_sample(cluster, captured=True))
    return samples


def _sample(cluster: Cluster, *, captured: bool, prove: bool = False) -> float:
    """Start a pod, and return how long it took; it is gone afterwards."""
    containers = [client_container(), {**client_container(), "name": "istio-proxy"}]
    subject = pod("subject", containers, marks=annotations() if captured else {})
    started = time.monotonic()
    cluster.apply(subject)
    cluster.wait_ready("subject")
    took_s = time.monotonic() - started
    if prove and not cluster.is_captured("subject"):
        raise AssertionError("the pod is not captured")
    cluster.delete("pod", "subject", wait=True)
    return took_s
