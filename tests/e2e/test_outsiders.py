"""Pods that are not captured, and those that cannot be."""

from __future__ import annotations

import json

import pytest

from e2e.cluster import Cluster
from e2e.cluster.addresses import NODE_NAME
from e2e.cluster.cluster import OURS
from e2e.cluster.configs import STATIC_PODS
from e2e.install import Mesh
from e2e.mesh import (
    APP_PORT,
    BUSYBOX,
    TRAFFIC,
    captured,
    host_port,
    mesh_pod,
    plain_pod,
    pod,
    proxy_container,
)
from e2e.nodes import on_every_node
from e2e.traffic import V4, captures


@on_every_node
def test_a_pod_outside_the_mesh_starts_untouched(cluster: Cluster, mesh: Mesh) -> None:
    """It has no rules, and its traffic goes as without us."""
    cluster.apply(plain_pod("plain"))
    cluster.wait_ready("plain")
    assert not cluster.is_captured("plain")
    cluster.delete("pod", "plain")


def test_an_excluded_namespace_is_left_alone(cluster: Cluster, mesh: Mesh) -> None:
    """Even a pod of the mesh, there."""
    cluster.apply(mesh_pod("excluded", namespace="kube-system"))
    cluster.wait_ready("excluded", namespace="kube-system")
    assert not cluster.is_captured("excluded", "kube-system")
    cluster.delete("pod", "excluded", namespace="kube-system")


@on_every_node
def test_a_pod_on_the_hosts_network_never_touches_it(cluster: Cluster, mesh: Mesh) -> None:
    """The node's own namespace has no rule of the mesh."""
    sleeper = {"name": "client", "image": BUSYBOX, "imagePullPolicy": "Never"}
    marks = mesh_pod("host")["metadata"]["annotations"]  # type: ignore[index]
    cluster.apply(pod("host", [sleeper, proxy_container()], marks=marks, hostNetwork=True))
    cluster.wait_ready("host")
    for command in (("nft", "list", "ruleset"), ("iptables-legacy-save",)):
        assert not OURS.search(cluster.node.look("/proc/1/ns/net", *command))
    cluster.delete("pod", "host")


def test_static_pods_start(cluster: Cluster, mesh: Mesh) -> None:
    """One outside the mesh untouched, one of the mesh captured, by its mirror's annotations."""
    names = ("fixed", "fixed-mesh")
    for manifest in (plain_pod(names[0]), mesh_pod(names[1])):
        name = manifest["metadata"]["name"]  # type: ignore[index]
        path = cluster.node.path(f"{STATIC_PODS}/{name}.yaml")
        path.write_text(f"# a manifest\n{json.dumps(manifest)}\n")
    mirrors = [f"{name}-{NODE_NAME}" for name in names]
    for mirror in mirrors:
        cluster.wait(lambda mirror=mirror: cluster.exists("pod", mirror), what=f"{mirror} is there")
    cluster.wait_ready(*mirrors)
    assert [cluster.is_captured(mirror) for mirror in mirrors] == [False, True]
    for name in names:
        cluster.node.path(f"{STATIC_PODS}/{name}.yaml").unlink()
    for mirror in mirrors:
        cluster.wait(lambda mirror=mirror: not cluster.exists("pod", mirror), what="no mirror")


def test_a_job_runs_through_its_proxy_and_ends(cluster: Cluster, mesh: Mesh) -> None:
    """The proxy is an init container that stays, so that the Job can complete."""
    cluster.apply(plain_pod("server"))
    cluster.wait_ready("server")
    there = host_port(cluster.addresses("server")[V4], APP_PORT)
    work = {
        "name": "work",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", f"timeout 5 wget -qO- http://{there}/ && sleep 1"],
    }
    proxy = proxy_container()
    proxy |= {"restartPolicy": "Always", "startupProbe": proxy["readinessProbe"]}
    template = mesh_pod("unused")
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "initContainers": [proxy],
        "containers": [work],
    }
    marks = template["metadata"]["annotations"]  # type: ignore[index]
    metadata = {"annotations": marks, "labels": {"work": "batch"}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "batch"},
        "spec": {"backoffLimit": 0, "template": {"metadata": metadata, "spec": spec}},
    }
    cluster.apply(job)
    cluster.kubectl("wait", "--for=condition=Complete", "--timeout=30s", "job/batch")
    name = cluster.kubectl("get", "pods", "-lwork=batch", "-oname").strip().removeprefix("pod/")
    assert cluster.logs(name, "work").strip() == "server"
    original = [line.original for line in captured(cluster.logs(name, "istio-proxy"))]
    assert there in original
    cluster.delete("job", "batch")
    cluster.delete("pod", "server")


@on_every_node
def test_a_pod_of_another_user_namespace(cluster: Cluster, mesh: Mesh) -> None:
    """With `hostUsers: false`, where the runtime can."""
    status = cluster.get("node", NODE_NAME)["status"]
    assert isinstance(status, dict)
    features = [handler.get("features") or {} for handler in status.get("runtimeHandlers", [])]
    if not any(feature.get("userNamespaces") for feature in features):
        pytest.skip("this node's containerd and runc make no user namespaces")
    cluster.apply(mesh_pod("remapped", hostUsers=False))
    cluster.wait_ready("remapped")
    here = host_port(cluster.addresses("remapped")[V4], APP_PORT)
    assert captures(cluster, "remapped", "inbound", here)
    cluster.delete("pod", "remapped")


def test_a_bad_annotation_is_named_and_can_be_mended(cluster: Cluster, mesh: Mesh) -> None:
    """The pod's event has annotation, value and what is allowed; a new template puts it right."""
    key = f"{TRAFFIC}excludeOutboundPorts"
    template = mesh_pod("unused", traffic={"excludeOutboundPorts": "8080,http"})
    metadata = {**template["metadata"], "labels": {"app": "typo"}}  # type: ignore[dict-item]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "typo"},
        "spec": {
            "selector": {"matchLabels": {"app": "typo"}},
            "template": {"metadata": metadata, "spec": template["spec"]},
        },
    }
    cluster.apply(deployment)

    def names() -> list[str]:
        found = cluster.kubectl("get", "pods", "-lapp=typo", "-oname").split()
        return [name.removeprefix("pod/") for name in found]

    cluster.wait(names, what="the pod is there")
    (stuck,) = names()

    def complaint() -> str:
        return next((event for event in cluster.events(stuck) if key in event), "")

    cluster.wait(complaint, what="an event names the annotation")
    assert '"http" is not allowed; allowed: ports' in complaint()
    mended = {"metadata": {"annotations": {key: "8080"}}}
    patch = json.dumps({"spec": {"template": mended}})
    cluster.kubectl("patch", "deployment", "typo", "-p", patch)
    cluster.kubectl("rollout", "status", "deployment/typo", "--timeout=60s", timeout_s=70)
    (mended_pod,) = [name for name in names() if name != stuck]
    assert cluster.is_captured(mended_pod)
    cluster.delete("deployment", "typo")
    cluster.wait(lambda: not names(), what="its pods are gone")
