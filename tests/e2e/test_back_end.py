"""Which back end a node gets, what its log says of it, and what CHECK and DEL make of the rules."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster
from e2e.cluster.configs import CONFLIST
from e2e.install import Mesh
from e2e.mesh import mesh_pod
from e2e.nodes import on_bare_nodes, on_every_node
from istio_cni.constants import ATTACHMENTS_DIR

PLUGIN = "/opt/cni/bin/istio-cni"
RECORDS = f"/run/istio-cni/{ATTACHMENTS_DIR}"
FLUSH = {  # takes the heart out of the rules
    "nft": ("iptables-nft", "-t", "nat", "-F", "ISTIO_OUTPUT"),
    "nftables": ("nft", "flush", "chain", "inet", "istio-proxy-nat", "istio-output"),
}


@pytest.fixture
def chosen(cluster: Cluster, mesh: Mesh) -> Iterator[str]:
    """Run a pod of the mesh on a node whose settings say nothing of back ends."""
    cluster.apply(mesh_pod("chosen"))
    cluster.wait_ready("chosen")
    yield "chosen"
    cluster.delete("pod", "chosen", wait=True)


def record(cluster: Cluster, pod: str) -> dict[str, object]:
    """Return what the plugin has written down of a pod's attachment, {} if there is nothing."""
    for path in cluster.node.path(RECORDS).glob("*-eth0"):
        document: dict[str, object] = json.loads(path.read_text())
        if document["pod"] == f"default/{pod}":
            return document
    return {}


def call(cluster: Cluster, verb: str, of: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """Call the plugin on the node as its runtime does, for the attachment of a record."""
    document = json.loads(cluster.node.path(CONFLIST).read_text())
    entry = {**document["plugins"][-1], "cniVersion": document["cniVersion"], "name": "e2e"}
    pod_namespace, pod = str(of["pod"]).split("/")
    env = {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": of["container_id"],
        "CNI_NETNS": of["netns"],
        "CNI_IFNAME": of["ifname"],
        "CNI_ARGS": f"K8S_POD_NAMESPACE={pod_namespace};K8S_POD_NAME={pod}",
        "CNI_PATH": "/opt/cni/bin",
    }
    variables = [f"{name}={value}" for name, value in env.items()]
    return cluster.node.run("env", *variables, PLUGIN, stdin=json.dumps(entry))


@on_every_node
def test_the_node_decides_and_the_log_says_why(cluster: Cluster, mesh: Mesh, chosen: str) -> None:
    """Nobody has to know what is on a node: iptables where it works, nftables elsewhere."""
    backend, holder, reason = (
        ("iptables", "nft", "iptables") if cluster.has_iptables else
        ("nftables", "nftables", "no iptables")
    )  # fmt: skip
    line = mesh.programmed(chosen)[-1]
    assert line["backend"] == backend
    assert reason in str(line["reason"])
    assert cluster.holders(chosen) == [holder]


@on_every_node
def test_check_proves_a_pod_and_del_undoes_it(cluster: Cluster, chosen: str) -> None:
    """CHECK names what somebody took out; DEL leaves neither rules nor a record."""
    attachment = record(cluster, chosen)
    done = call(cluster, "CHECK", attachment)
    assert (done.returncode, done.stdout) == (0, "")
    (holder,) = cluster.holders(chosen)
    cluster.node.look(f"/run/netns/{cluster.netns(chosen)}", *FLUSH[holder])
    done = call(cluster, "CHECK", attachment)
    assert (done.returncode, json.loads(done.stdout)["code"]) == (1, 107)
    assert FLUSH[holder][-1] in json.loads(done.stdout)["msg"]
    done = call(cluster, "DEL", attachment)
    assert (done.returncode, done.stdout) == (0, "")
    assert (cluster.holders(chosen), record(cluster, chosen)) == ([], {})


@on_bare_nodes
def test_iptables_that_is_not_there_is_missed_by_name(cluster: Cluster, mesh: Mesh) -> None:
    """Who insists on it gets no uncaptured pod; the event says what is missing."""
    mesh.configure(BACKEND="iptables")
    try:
        cluster.apply(mesh_pod("insisting"))

        def complaint() -> str:
            events = cluster.events("insisting")
            return next((event for event in events if "no usable iptables" in event), "")

        cluster.wait(complaint, what="an event says what is missing")
        assert mesh.failures("insisting")[0]["code"] == 106
    finally:
        cluster.delete("pod", "insisting", wait=True)  # else it starts while no agent is there
        mesh.configure(BACKEND="")
    cluster.apply(mesh_pod("insisting"))
    cluster.wait_ready("insisting")
    assert cluster.holders("insisting") == ["nftables"]
    cluster.delete("pod", "insisting")
