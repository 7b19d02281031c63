"""A pod of the mesh on a real node: what its proxy sees, and what goes past it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster
from e2e.cluster.addresses import OUTSIDE_ADDRESSES
from e2e.install import Mesh
from e2e.mesh import APP_PORT, METRICS_PORT, host_port, mesh_pod, plain_pod
from e2e.nodes import on_every_node
from e2e.traffic import V4, V6, captures, get

pytestmark = on_every_node

OUTSIDE_PORT = 8088
EXCLUDED_PORT = 8099


@pytest.fixture(scope="module")
def web(cluster: Cluster, mesh: Mesh) -> Iterator[str]:
    """Run a pod of the mesh beside one outside of it, and a server outside of the cluster."""
    traffic = {
        "excludeOutboundPorts": str(EXCLUDED_PORT),
        "excludeOutboundIPRanges": f"{OUTSIDE_ADDRESSES[V4]}/32,{OUTSIDE_ADDRESSES[V6]}/128",
    }
    cluster.node.succeed("mkdir", "-p", "/run/www")
    cluster.node.succeed("sh", "-c", "echo outside > /run/www/index.html")
    for port in (OUTSIDE_PORT, EXCLUDED_PORT):
        cluster.node.succeed("busybox", "httpd", "-p", f"[::]:{port}", "-h", "/run/www")
    cluster.apply(mesh_pod("web", traffic=traffic), plain_pod("other"))
    cluster.wait_ready("web", "other")
    yield "web"
    cluster.delete("pod", "web", "other")


@pytest.mark.parametrize("family", [V4, V6])
def test_a_request_out_goes_through_the_proxy(cluster: Cluster, web: str, family: int) -> None:
    """The proxy's log has the original destination, and the answer comes back."""
    there = cluster.addresses("other")[family]
    assert get(cluster, web, there, APP_PORT) == "other"
    found = captures(cluster, web, "outbound", host_port(there, APP_PORT))
    assert [line.client.rpartition(":")[0] for line in found] == [
        host_port(cluster.addresses(web)[family], 0).rpartition(":")[0]
    ]


@pytest.mark.parametrize("family", [V4, V6])
def test_a_request_in_goes_through_the_proxy(cluster: Cluster, web: str, family: int) -> None:
    """The proxy's log has the port that the client asked for, not the proxy's."""
    here, client = cluster.addresses(web)[family], cluster.addresses("other")[family]
    assert get(cluster, "other", here, APP_PORT) == web
    found = captures(cluster, web, "inbound", host_port(here, APP_PORT), client=client)
    assert len(found) == 1


@pytest.mark.parametrize("family", [V4, V6])
def test_excluded_ports_and_destinations_go_direct(cluster: Cluster, web: str, family: int) -> None:
    """An excluded inbound port, an excluded outbound port and an excluded CIDR."""
    here, node = cluster.addresses(web)[family], cluster.node_addresses[family]
    assert get(cluster, "other", here, METRICS_PORT) == web
    assert get(cluster, web, node, EXCLUDED_PORT) == "outside"
    assert get(cluster, web, OUTSIDE_ADDRESSES[family], OUTSIDE_PORT) == "outside"
    assert get(cluster, web, node, OUTSIDE_PORT) == "outside"  # captured: the log is up to here
    assert captures(cluster, web, "outbound", host_port(node, OUTSIDE_PORT))
    for direction, address, port in (
        ("inbound", here, METRICS_PORT),
        ("outbound", node, EXCLUDED_PORT),
        ("outbound", OUTSIDE_ADDRESSES[family], OUTSIDE_PORT),
    ):
        assert not captures(cluster, web, direction, host_port(address, port), wait=False)


def test_what_the_pod_says_to_itself_is_left_alone(cluster: Cluster, web: str) -> None:
    """Its application on loopback is reached without the proxy."""
    assert get(cluster, web, "127.0.0.1", APP_PORT) == web
    assert not captures(cluster, web, "outbound", f"127.0.0.1:{APP_PORT}", wait=False)


def test_the_kubelets_probes_pass(cluster: Cluster, web: str) -> None:
    """HTTP and exec probes keep the pod Ready, and nothing has been restarted."""
    status = cluster.get("pod", web)["status"]
    assert isinstance(status, dict)
    states = {each["name"]: each for each in status["containerStatuses"]}
    assert all(each["ready"] and each["restartCount"] == 0 for each in states.values())
    probes = captures(cluster, web, "inbound", host_port(cluster.addresses(web)[V4], APP_PORT))
    assert probes, "the kubelet's HTTP probe goes through the proxy like any other client"


def test_the_pod_needs_no_rights(cluster: Cluster, web: str) -> None:
    """No init container, and no capability but those that every container has."""
    status = cluster.exec(web, "grep", "CapEff", "/proc/1/status", container="istio-proxy")
    assert int(status.split()[1], 16) == 0
    spec = cluster.get("pod", web)["spec"]
    assert isinstance(spec, dict)
    assert "initContainers" not in spec
    assert "NET_ADMIN" not in str(spec)
    net_admin = 1 << 12
    status = cluster.exec(web, "grep", "CapBnd", "/proc/1/status")
    assert int(status.split()[1], 16) & net_admin == 0
