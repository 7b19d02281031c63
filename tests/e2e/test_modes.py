"""TPROXY, DNS capture and every back end, each with a real proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster
from e2e.install import Mesh
from e2e.mesh import APP_PORT, DNS_ANSWER, DNS_NAME, host_port, mesh_pod, plain_pod
from e2e.nodes import on_every_node
from e2e.traffic import V4, V6, captures, get

SETTINGS = {  # which back end they choose
    "nft": {"FORCE_IPTABLES_BINARY": "nft"},
    "legacy": {"FORCE_IPTABLES_BINARY": "legacy"},
    "nftables": {"BACKEND": "nftables"},
}


@pytest.fixture(scope="module")
def peer(cluster: Cluster, mesh: Mesh) -> Iterator[str]:
    """Run a pod outside the mesh."""
    cluster.apply(plain_pod("peer"))
    cluster.wait_ready("peer")
    yield "peer"
    cluster.delete("pod", "peer")


@pytest.fixture(params=SETTINGS)
def back_end(request: pytest.FixtureRequest, mesh: Mesh) -> Iterator[str]:
    """Tell the plugin which back end to use; afterwards it chooses by itself again."""
    chosen: str = request.param
    try:
        mesh.configure(**SETTINGS[chosen])
        yield chosen
    finally:
        mesh.configure(**dict.fromkeys(SETTINGS[chosen], ""))


@on_every_node
def test_tproxy_keeps_the_clients_address(cluster: Cluster, peer: str) -> None:
    """The application, behind the proxy, sees who really asks; in both families."""
    cluster.apply(mesh_pod("transparent", tproxy=True))
    cluster.wait_ready("transparent")
    for family in (V4, V6):
        here, client = cluster.addresses("transparent")[family], cluster.addresses(peer)[family]
        assert get(cluster, peer, here, APP_PORT) == "transparent"
        assert captures(cluster, "transparent", "inbound", host_port(here, APP_PORT), client=client)
        seen = [line.split("]:")[0] for line in cluster.logs("transparent", "app").splitlines()]
        assert f"[{'::ffff:' if family == V4 else ''}{client}" in seen
        there = cluster.addresses(peer)[family]
        assert get(cluster, "transparent", there, APP_PORT) == peer
        assert captures(cluster, "transparent", "outbound", host_port(there, APP_PORT))
    cluster.delete("pod", "transparent")


@on_every_node
def test_names_are_resolved_by_the_proxy(cluster: Cluster, peer: str) -> None:
    """A query to the cluster's DNS server, which does not exist here, is answered by the proxy."""
    cluster.apply(mesh_pod("resolving", env={"ISTIO_META_DNS_CAPTURE": "true"}))
    cluster.wait_ready("resolving")
    answer = cluster.exec("resolving", "nslookup", "-type=a", DNS_NAME)
    assert DNS_ANSWER in answer
    cluster.delete("pod", "resolving")


def test_every_back_end_captures(cluster: Cluster, back_end: str, peer: str) -> None:
    """The rules are where the settings want them, and nowhere else."""
    name = f"by-{back_end}"
    cluster.apply(mesh_pod(name))
    cluster.wait_ready(name)
    for family in (V4, V6):
        there = cluster.addresses(peer)[family]
        assert get(cluster, name, there, APP_PORT) == peer
        assert captures(cluster, name, "outbound", host_port(there, APP_PORT))
    assert cluster.holders(name) == [back_end]
    cluster.delete("pod", name)
