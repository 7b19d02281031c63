"""What the injector's own containers make of the plugin: they prove it, or do without it."""

from __future__ import annotations

from e2e.cluster import Cluster
from e2e.cluster.cluster import JSON
from e2e.install import Mesh
from e2e.mesh import (
    APP_PORT,
    METRICS_PORT,
    host_port,
    init_container,
    mesh_pod,
    validation_container,
)
from e2e.nodes import on_every_node
from e2e.traffic import V4, captures, get


def init_status(cluster: Cluster, pod: str) -> JSON:
    """Return the state of a pod's only init container."""
    status = cluster.get("pod", pod)["status"]
    assert isinstance(status, dict)
    (found,) = status["initContainerStatuses"]
    return dict(found)


def exit_code(status: JSON) -> object:
    """Return the exit status of an init container that has ended, now or the last time."""
    for key in ("state", "lastState"):
        state = status[key]
        if isinstance(state, dict) and "terminated" in state:
            return state["terminated"]["exitCode"]
    return None


@on_every_node
def test_a_pod_from_before_the_plugin_is_found_out(
    cluster: Cluster, early: str, mesh: Mesh
) -> None:
    """Its istio-validation ends with 126 and says so, which repair looks for."""
    cluster.wait(lambda: exit_code(init_status(cluster, early)), what="the validation has ended")
    assert exit_code(init_status(cluster, early)) == 126
    told = "have no redirect rules"
    cluster.wait(lambda: told in cluster.logs(early, "istio-validation"), what="it says why")
    assert not cluster.is_captured(early)
    cluster.delete("pod", early)


@on_every_node
def test_a_captured_pod_passes(cluster: Cluster, mesh: Mesh) -> None:
    """Its istio-validation ends with 0, without any right, and its other containers start."""
    cluster.apply(mesh_pod("validated", init=[validation_container()]))
    cluster.wait_ready("validated")
    status = init_status(cluster, "validated")
    assert exit_code(status) == 0
    assert status["restartCount"] == 0
    cluster.delete("pod", "validated")


def test_an_init_container_programs_a_pod_that_the_plugin_skips(
    cluster: Cluster, mesh: Mesh
) -> None:
    """`istio-iptables` with NET_ADMIN makes the same rules, and the plugin leaves it to it."""
    traffic = {"excludeInboundPorts": str(METRICS_PORT), "excludeOutboundPorts": ""}
    cluster.apply(mesh_pod("old-style", init=[init_container()]), mesh_pod("new", traffic=traffic))
    cluster.wait_ready("old-style", "new")
    assert exit_code(init_status(cluster, "old-style")) == 0
    assert any("istio-init programs the pod itself" in line for line in mesh.said("old-style"))
    there = cluster.addresses("new")[V4]
    assert get(cluster, "old-style", there, APP_PORT) == "new"
    assert captures(cluster, "old-style", "outbound", host_port(there, APP_PORT))
    assert captures(cluster, "new", "inbound", host_port(there, APP_PORT))
    assert own_rules(cluster, "old-style") == own_rules(cluster, "new") != []
    cluster.delete("pod", "old-style", "new")


def own_rules(cluster: Cluster, pod: str) -> list[str]:
    """Return the rules of ours in a pod, whichever variant has them, in no order."""
    lines = "\n".join(cluster.rules(pod).values()).splitlines()
    return sorted(line for line in lines if line.startswith("-A") and "ISTIO_" in line)
