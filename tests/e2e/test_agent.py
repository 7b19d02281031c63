"""The node agent at work for the plugin: who does what, and what happens without it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster
from e2e.install import NAMESPACE, Mesh
from e2e.mesh import mesh_pod, plain_pod
from e2e.nodes import on_every_node

SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def metrics(mesh: Mesh) -> dict[str, float]:
    """Scrape the agent as Prometheus does: series by name and labels."""
    (pod,) = mesh.pods()
    port = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:15014"
    text = mesh.kubectl("get", "--raw", f"{port}/proxy/metrics")
    return {f"{name}{{{labels}}}": float(value) for name, labels, value in SERIES.findall(text)}


def count(series: dict[str, float], name: str, *labels: str) -> float:
    """Add up the series of a name that have these labels."""
    return sum(
        value
        for key, value in series.items()
        if key.startswith(f"{name}{{") and all(label in key for label in labels)
    )


def processes(cluster: Cluster) -> set[str]:
    """Return the ids of the agent's processes."""
    return set(cluster.node.run("pgrep", "-f", "^install-cni").stdout.split())


@pytest.fixture
def stopped(cluster: Cluster, mesh: Mesh) -> Iterator[None]:
    """Stop the agent's processes as a debugger does, and let them go on afterwards."""
    cluster.node.succeed("pkill", "-STOP", "-f", "^install-cni")
    yield
    cluster.node.succeed("pkill", "-CONT", "-f", "^install-cni")
    mesh.restart()  # the kubelet may have told it to end meanwhile


@on_every_node
def test_the_agent_does_the_work_of_the_plugin(cluster: Cluster, mesh: Mesh) -> None:
    """Pods come from its watch; both logs have the same lines, by the same request id."""
    before = metrics(mesh)
    cluster.apply(mesh_pod("served"), plain_pod("passed"))
    cluster.wait_ready("served", "passed")
    after = metrics(mesh)
    adds = "istio_cni_plugin_requests_total", 'verb="ADD"', 'code="0"'
    assert count(after, *adds) >= count(before, *adds) + 2
    assert count(after, "istio_cni_plugin_fallbacks_total") == count(
        before, "istio_cni_plugin_fallbacks_total"
    )
    assert count(after, "istio_cni_pod_cache_size") >= 3  # these two, and the agent itself
    assert count(after, "istio_cni_pod_cache_age_seconds") < 120
    assert cluster.is_captured("served")
    (line,) = mesh.programmed("served")
    assert "fallback" not in line
    agents = [json.loads(line) for line in mesh.log().splitlines()]
    assert [one["msg"] for one in agents if one.get("request_id") == line["request_id"]] == [
        line["msg"]
    ]
    cluster.delete("pod", "served", "passed", wait=True)


@on_every_node
def test_an_agent_that_hangs_costs_time_and_nothing_else(
    cluster: Cluster, mesh: Mesh, stopped: None
) -> None:
    """The launcher waits its time, then the plugin's own process captures the pod."""
    cluster.apply(mesh_pod("alone"))
    cluster.wait_ready("alone", timeout_s=60)
    assert cluster.is_captured("alone")
    (line,) = mesh.programmed("alone")
    words = [one["fallback"] for one in mesh.of_call(line["request_id"]) if "fallback" in one]
    assert words == ["timeout"]
    cluster.delete("pod", "alone", wait=True)


@on_every_node
def test_an_agent_that_is_killed_comes_back(cluster: Cluster, mesh: Mesh) -> None:
    """Pods that start meanwhile are captured, and the next one is served again."""
    killed = processes(cluster)
    cluster.node.succeed("kill", "-9", *killed)
    cluster.apply(mesh_pod("between"))
    cluster.wait_ready("between")
    assert cluster.is_captured("between")
    cluster.wait(lambda: processes(cluster) - killed, what="the agent is back")
    mesh.wait_ready()
    cluster.apply(mesh_pod("afterwards"))
    cluster.wait_ready("afterwards")
    assert cluster.is_captured("afterwards")
    (line,) = mesh.programmed("afterwards")
    assert "fallback" not in line
    cluster.delete("pod", "between", "afterwards", wait=True)
