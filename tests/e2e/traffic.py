"""Requests from pods, and where they turn up."""

from __future__ import annotations

import time

from e2e.cluster import Cluster, ClusterFailed
from e2e.mesh import Captured, captured, host_port

V4, V6 = 0, 1  # indexes into a pod's addresses
LOG_WAIT_S = 5.0


def get(cluster: Cluster, pod: str, address: str, port: int, *, namespace: str = "default") -> str:
    """Ask for a page from a pod's client container and return it.

    Raises ClusterFailed if none comes.
    """
    command = f"timeout 5 wget -qO- http://{host_port(address, port)}/"
    return cluster.exec(pod, "sh", "-c", command, namespace=namespace).strip()


def reaches(cluster: Cluster, pod: str, address: str, port: int) -> bool:
    """Tell whether a page comes."""
    try:
        get(cluster, pod, address, port)
    except ClusterFailed:
        return False
    return True


def captures(
    cluster: Cluster,
    pod: str,
    direction: str,
    original: str,
    *,
    client: str = "",
    wait: bool = True,
) -> list[Captured]:
    """Return the connections to an original destination from a proxy's log.

    The proxy writes a line when a connection has ended; `wait` gives it some time for the first.
    """
    deadline = time.monotonic() + (LOG_WAIT_S if wait else 0.5)
    while True:
        found = [
            line
            for line in captured(cluster.logs(pod, "istio-proxy"))
            if (line.direction, line.original) == (direction, original)
            and (not client or line.client.startswith((f"{client}:", f"[{client}]:")))
        ]
        if (found and wait) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
