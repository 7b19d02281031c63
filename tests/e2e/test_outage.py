"""The API server is away: who starts all the same, who waits, and that all can be deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster
from e2e.cluster.addresses import NODE_NAME
from e2e.cluster.configs import STATIC_PODS
from e2e.install import Mesh
from e2e.mesh import mesh_pod, plain_pod
from e2e.nodes import on_every_node

OUTSIDER, MEMBER = "outsider", "member"
FIXED, FIXED_MEMBER = "fixed", "fixed-member"
LEAVING = "leaving"


def sandboxes(cluster: Cluster, *pods: str) -> dict[str, str]:
    """Return the ids of pods' running sandboxes, as the runtime has them, by the pod's name."""
    listed = cluster.node.succeed("ctr", "-n", "k8s.io", "tasks", "list").splitlines()[1:]
    running = {line.split()[0] for line in listed if line.split()[2] == "RUNNING"}
    found = {}
    for each in running:
        info = cluster.node.run("ctr", "-n", "k8s.io", "containers", "info", each).stdout
        labels = json.loads(info or "{}").get("Labels") or {}
        if labels.get("io.cri-containerd.kind") == "sandbox":
            found[labels["io.kubernetes.pod.name"]] = each
    return {pod: found[pod] for pod in pods if pod in found}


def manifest(cluster: Cluster, name: str) -> str:
    """Return the path of a static pod's manifest."""
    return str(cluster.node.path(f"{STATIC_PODS}/{name}.yaml"))


@pytest.fixture
def restored(cluster: Cluster) -> Iterator[None]:
    """See that the API server is back afterwards, whatever the story made of it.

    The kubelet starts anew, too: after outages it looks for new pods only once in a minute.
    """
    yield
    if not cluster.node.runs("apiserver"):
        cluster.start("apiserver")
    cluster.stop("kubelet")
    cluster.start("kubelet")


def test_pods_outside_the_mesh_start_and_the_others_wait(
    cluster: Cluster, mesh: Mesh, restored: None
) -> None:
    """Sandboxes that die are made anew, captured by what the agent knows; static pods need nobody.

    Only a pod of the mesh that the agent has never heard of has to wait.
    """
    scheduled = (MEMBER, OUTSIDER)
    cluster.apply(mesh_pod(MEMBER), plain_pod(OUTSIDER))
    cluster.wait_ready(*scheduled)
    cluster.stop("apiserver")
    before = sandboxes(cluster, *scheduled)
    for each in before.values():
        cluster.node.succeed("ctr", "-n", "k8s.io", "tasks", "kill", "-s", "KILL", each)
    for pod in (plain_pod(FIXED), mesh_pod(FIXED_MEMBER)):
        name = pod["metadata"]["name"]  # type: ignore[index]
        with open(manifest(cluster, name), "w") as file:
            file.write(f"# a manifest\n{json.dumps(pod)}\n")
    static = {name: f"{name}-{NODE_NAME}" for name in (FIXED, FIXED_MEMBER)}
    cluster.wait(
        lambda: (
            {OUTSIDER, MEMBER, static[FIXED]}
            <= sandboxes(cluster, OUTSIDER, MEMBER, static[FIXED]).keys()
            and not before.items() & sandboxes(cluster, *scheduled).items()
        ),
        what="pods that are known, or not of the mesh, start without the API server",
        timeout_s=60,
    )
    waiting = static[FIXED_MEMBER]
    cluster.wait(lambda: mesh.failures(waiting), what="the unknown pod's ADD fails", timeout_s=60)
    assert not sandboxes(cluster, waiting)
    assert mesh.failures(waiting)[0]["code"] == 11
    cluster.start("apiserver")
    cluster.wait_ready(MEMBER, OUTSIDER, timeout_s=120)
    for mirror in static.values():
        cluster.wait(lambda mirror=mirror: cluster.exists("pod", mirror), what=f"{mirror} is there")
    cluster.wait_ready(*static.values(), timeout_s=120)
    assert cluster.is_captured(MEMBER)
    assert cluster.is_captured(static[FIXED_MEMBER])
    assert not cluster.is_captured(OUTSIDER)
    assert not cluster.is_captured(static[FIXED])
    for name in (FIXED, FIXED_MEMBER):
        cluster.node.succeed("rm", f"{STATIC_PODS}/{name}.yaml")
    cluster.delete("pod", *scheduled, wait=True)
    for mirror in static.values():
        cluster.wait(lambda mirror=mirror: not cluster.exists("pod", mirror), what="no mirror")


@on_every_node
def test_pods_go_while_the_api_server_is_away(cluster: Cluster, mesh: Mesh, restored: None) -> None:
    """A captured static pod is undone and its network freed: DEL asks nobody."""
    with open(manifest(cluster, LEAVING), "w") as file:
        file.write(f"# a manifest\n{json.dumps(mesh_pod(LEAVING))}\n")
    mirror = f"{LEAVING}-{NODE_NAME}"
    cluster.wait(lambda: cluster.exists("pod", mirror), what="the mirror is there")
    cluster.wait_ready(mirror)
    netns = cluster.node.path(f"/run/netns/{cluster.netns(mirror)}")
    cluster.stop("apiserver")
    cluster.node.succeed("rm", f"{STATIC_PODS}/{LEAVING}.yaml")
    cluster.wait(lambda: not netns.exists(), what="its network is gone")
    assert not [line for line in mesh.failures(mirror) if line["verb"] == "DEL"]
    cluster.start("apiserver")
    cluster.wait(lambda: not cluster.exists("pod", mirror), what="its mirror is gone")
