"""Load, restarts and roll-backs: what happens to pods when the things around them come and go."""

from __future__ import annotations

import re

from e2e.cluster import Cluster
from e2e.install import Mesh
from e2e.mesh import APP_PORT, host_port, mesh_pod, plain_pod
from e2e.nodes import on_every_node, on_iptables_nodes
from e2e.traffic import V4, captures, get

AT_ONCE = 30
AT_ONCE_ELSEWHERE = 10  # thirty are for the kubelet, which is the same on every node
JUMP = re.compile("^-A OUTPUT -j ISTIO_OUTPUT$| jump istio-output$", re.MULTILINE)


@on_every_node
def test_many_pods_at_once(cluster: Cluster, mesh: Mesh) -> None:
    """All start, all are captured, and each has its rules once."""
    usual = cluster.has_iptables and not cluster.is_modern
    count = AT_ONCE if usual else AT_ONCE_ELSEWHERE
    names = [f"many-{number}" for number in range(count)]
    cluster.apply(*(mesh_pod(name) for name in names))
    cluster.wait_ready(*names, timeout_s=120)
    for name in names:
        assert len(JUMP.findall("".join(cluster.rules(name).values()))) == 1, name
    cluster.delete("pod", *names, wait=True)
    netns = cluster.node.path("/run/netns")
    assert not [path for path in cluster.node.path("/run/istio-cni/attachments").iterdir()
                if path.name.startswith(".")]  # fmt: skip
    records = len(list(cluster.node.path("/run/istio-cni/attachments").iterdir()))
    assert records <= len(list(netns.iterdir()))


@on_iptables_nodes
def test_pods_outlive_a_killed_runtime(cluster: Cluster, mesh: Mesh) -> None:
    """They stay captured while containerd is away, and the next pod is captured, too."""
    cluster.apply(mesh_pod("before"), plain_pod("peer"))
    cluster.wait_ready("before", "peer")
    cluster.kill("containerd")
    assert cluster.is_captured("before")
    cluster.start("containerd")
    cluster.apply(mesh_pod("after"))
    cluster.wait_ready("after")
    there = cluster.addresses("peer")[V4]
    for name in ("before", "after"):
        assert get(cluster, name, there, APP_PORT) == "peer"
        assert captures(cluster, name, "outbound", host_port(there, APP_PORT))
    cluster.delete("pod", "before", "after", "peer", wait=True)


@on_iptables_nodes
def test_without_the_daemonset_pods_start_uncaptured(cluster: Cluster, mesh: Mesh) -> None:
    """Running pods stay captured; the next one is not, and says nothing; with it back, all is."""
    cluster.apply(mesh_pod("running"))
    cluster.wait_ready("running")
    mesh.delete()
    assert mesh.chain() == cluster.network
    left = cluster.node.succeed("ls", "-A", "/opt/cni/bin", "/run/istio-cni").split()
    assert not [name for name in left if name.startswith(("istio-cni.d", "istio-cni-kube"))]
    assert "istio-cni" not in left
    cluster.apply(mesh_pod("uncaptured"))
    cluster.wait_ready("uncaptured")
    assert cluster.is_captured("running")
    assert not cluster.is_captured("uncaptured")
    assert not [event for event in cluster.events("uncaptured") if "istio" in event]
    cluster.delete("pod", "running", wait=True)  # made with the plugin, deleted without
    mesh.install()
    cluster.apply(mesh_pod("captured"))
    cluster.wait_ready("captured")
    assert cluster.is_captured("captured")
    cluster.delete("pod", "uncaptured", "captured", wait=True)  # made without, deleted with


@on_every_node
def test_what_is_deleted_as_the_readme_says_is_gone(cluster: Cluster, mesh: Mesh) -> None:
    """The plugin and every object but the namespace, and it can come back."""
    mesh.uninstall()
    assert mesh.chain() == cluster.network
    assert "istio" not in cluster.node.succeed("ls", "-A", "/opt/cni/bin")
    for kinds in (
        "clusterroles,clusterrolebindings",
        "serviceaccounts,roles,configmaps,daemonsets",
    ):
        assert "istio-cni" not in mesh.kubectl("get", kinds, "-oname")
    assert cluster.exists("namespace", "istio-system")
    mesh.install()
