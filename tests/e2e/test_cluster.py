"""The ground that the stories stand on: a node as real as it looks, and gone without a trace."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e import leaks
from e2e.cluster import Cluster, ClusterFailed, build, janitor, needs
from e2e.cluster.addresses import API_SERVICE, NODE_ADDRESSES, NODE_NAME
from e2e.cluster.configs import PACKET_FILTERS, STATIC_PODS
from e2e.cluster.needs import PATH
from e2e.cluster.node import PREFIX, Node
from e2e.mesh import APP_PORT, JSON, client_container, plain_pod, pod
from e2e.nodes import on_bare_nodes, on_every_node, on_modern_nodes
from e2e.traffic import V4, V6, get, reaches

TESTS = Path(__file__).resolve().parents[1]
CHILD = """
import sys
from pathlib import Path
from e2e.cluster.node import Node
node = Node(Path(sys.argv[1]))
into = "for d in /sys/fs/cgroup/*/%s; do mkdir $d/deep; echo $$ > $d/deep/cgroup.procs; done"
node.start("sleeper", ["bash", "-c", into % node.cgroup + "; sleep 600 & exec sleep 601"])
print(node.cgroup, node.init, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def pods(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Run two pods that serve and ask."""
    cluster.apply(plain_pod("one"), plain_pod("two"))
    cluster.wait_ready("one", "two")
    yield "one", "two"
    cluster.delete("pod", "one", "two")


@pytest.fixture
def new_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Node]]:
    """Make namespaces of a node, without components; those still there are closed afterwards."""
    place = needs.check([Path("/tmp"), tmp_path_factory.getbasetemp()], {})
    nodes: list[Node] = []

    def make() -> Node:
        nodes.append(Node(place))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def identity(cluster: Cluster, name: str) -> tuple[str, str, int]:
    """Return what changes when a pod is made anew or restarted."""
    document: dict[str, dict[str, JSON]] = cluster.get("pod", name)  # type: ignore[assignment]
    status = document["status"]
    restarts = sum(each["restartCount"] for each in status["containerStatuses"])  # type: ignore[attr-defined]
    return str(document["metadata"]["uid"]), str(status["podIP"]), restarts


def is_running(pid: str) -> bool:
    """Tell whether a process is more than an entry that its parent has not taken notice of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# -- what pods get -------------------------------------------------------------------------------


@on_every_node
def test_the_node_is_ready(cluster: Cluster) -> None:
    """It has an address of each family."""
    status = cluster.get("node", NODE_NAME)["status"]
    assert isinstance(status, dict)
    assert {each["type"]: each["status"] for each in status["conditions"]}["Ready"] == "True"
    inside = [each["address"] for each in status["addresses"] if each["type"] == "InternalIP"]
    assert inside == list(NODE_ADDRESSES)


@on_every_node
@pytest.mark.parametrize("family", [V4, V6])
def test_pods_reach_each_other(cluster: Cluster, pods: tuple[str, str], family: int) -> None:
    """Over both families, in both directions."""
    one, two = pods
    assert get(cluster, one, cluster.addresses(two)[family], APP_PORT) == two
    assert get(cluster, two, cluster.addresses(one)[family], APP_PORT) == one


def test_exec_and_logs_work(cluster: Cluster, pods: tuple[str, str]) -> None:
    """A failing program is an error with what it said; the application's log has its requests."""
    one, two = pods
    assert cluster.exec(one, "echo", "two words").strip() == "two words"
    with pytest.raises(ClusterFailed, match="no-such-file"):
        cluster.exec(one, "cat", "/no-such-file")
    here = cluster.addresses(one)[V4]
    get(cluster, two, here, APP_PORT)
    cluster.wait(lambda: "response:200" in cluster.logs(one, "app"), what="the request is logged")


@on_every_node
@pytest.mark.parametrize("family", [V4, V6])
def test_services_work(cluster: Cluster, pods: tuple[str, str], family: int) -> None:
    """A pod reaches another, and the API server, by the address of a Service."""
    one, two = pods
    name = f"service-{family}"
    spec = {
        "selector": {"app": two},
        "ports": [{"port": 80, "targetPort": APP_PORT}],
        "ipFamilyPolicy": "SingleStack",
        "ipFamilies": ["IPv4" if family == V4 else "IPv6"],
    }
    metadata = {"name": name}
    cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    address = cluster.kubectl("get", "service", name, "-ojsonpath={.spec.clusterIP}")
    cluster.wait(lambda: reaches(cluster, one, address, 80), what=f"{address} answers")
    assert get(cluster, one, address, 80) == two
    ask = f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | timeout 5 nc {API_SERVICE} 443"
    assert "HTTP request to an HTTPS server" in cluster.exec(one, "sh", "-c", ask)
    cluster.delete("service", name)


def test_the_kubelet_restarts_what_fails_its_probe(cluster: Cluster, pods: tuple[str, str]) -> None:
    """An HTTP probe that nobody answers; those of other pods, which are answered, do no harm."""
    probe = {"httpGet": {"path": "/", "port": 9}, "periodSeconds": 1, "failureThreshold": 1}
    cluster.apply(pod("unwell", [{**client_container(), "livenessProbe": probe}]))
    cluster.wait(
        lambda: any("probe failed" in event for event in cluster.events("unwell")),
        what="the probe has failed",
    )
    cluster.wait(
        lambda: cluster.get("pod", "unwell")["status"]["containerStatuses"][0]["restartCount"],  # type: ignore[index]
        what="the container is restarted",
    )
    cluster.delete("pod", "unwell")
    assert identity(cluster, pods[0])[2] == 0


def test_static_pods_come_and_go_with_their_manifest(cluster: Cluster) -> None:
    """The kubelet watches its directory."""
    manifest = cluster.node.path(f"{STATIC_PODS}/still.yaml")
    aside = manifest.with_name(".still")  # which the kubelet does not read half written
    aside.write_text(f"# a manifest\n{json.dumps(plain_pod('still'))}\n")
    aside.rename(manifest)
    mirror = f"still-{NODE_NAME}"
    cluster.wait(lambda: cluster.exists("pod", mirror), what=f"{mirror} is there")
    cluster.wait_ready(mirror)
    manifest.unlink()
    cluster.wait(lambda: not cluster.exists("pod", mirror), what=f"{mirror} is gone")


@on_bare_nodes
def test_a_bare_node_has_no_program_for_packet_filters(cluster: Cluster) -> None:
    """Under none of their names; Services, which need one, show that kube-proxy sees its own."""
    names = " -o ".join(f"-name {name!r}" for name in PACKET_FILTERS)
    find = rf"find -H {PATH.replace(':', ' ')} -maxdepth 1 \( {names} \)"
    assert cluster.node.succeed("sh", "-c", find) == ""


@on_modern_nodes
def test_a_modern_node_has_the_runtime_that_was_built(cluster: Cluster) -> None:
    """And not the machine's, which comes after it in the path."""
    path = "-ojsonpath={.status.nodeInfo.containerRuntimeVersion}"
    version = cluster.kubectl("get", "node", NODE_NAME, path)
    assert version.startswith(f"containerd://{build.containerd().version.removeprefix('v')}")


# -- what fails and comes back ---------------------------------------------------------------------


def test_pods_serve_without_an_api_server(cluster: Cluster, pods: tuple[str, str]) -> None:
    """It ends and starts in order, and finds everything as it was."""
    one, two = pods
    then, url = identity(cluster, one), f"http://{cluster.addresses(one)[V4]}:{APP_PORT}/"
    cluster.stop("apiserver")
    try:
        with pytest.raises(ClusterFailed, match="refused"):
            cluster.get("pod", one)
        assert cluster.node.succeed("busybox", "wget", "-qO-", url).strip() == one
    finally:
        cluster.start("apiserver")
        cluster.stop("kubelet")
        cluster.start("kubelet")
    assert identity(cluster, one) == then
    assert get(cluster, two, then[1], APP_PORT) == one


def test_pods_outlive_a_killed_runtime(cluster: Cluster, pods: tuple[str, str]) -> None:
    """After SIGKILL and a new start of containerd they are the same pods, and others can start."""
    one, two = pods
    then = [identity(cluster, name) for name in pods]
    cluster.kill("containerd")
    cluster.start("containerd")
    cluster.apply(plain_pod("three"))
    cluster.wait_ready("three")
    assert get(cluster, one, cluster.addresses("three")[V4], APP_PORT) == "three"
    assert get(cluster, "three", cluster.addresses(two)[V6], APP_PORT) == two
    assert [identity(cluster, name) for name in pods] == then
    cluster.delete("pod", "three")


# -- what the machine sees of it -------------------------------------------------------------------


def test_the_machine_is_untouched(
    cluster: Cluster, before: leaks.Seen, pods: tuple[str, str]
) -> None:
    """While pods and services run, its mounts, links, rules, settings and files are as before."""
    assert not leaks.remaining(leaks.machine, before)
    assert all(leaks.of_node(cluster.node.cgroup).values()), "or nothing would ever be found"


def test_a_killed_test_process_leaves_nothing(new_node: Callable[[], Node]) -> None:
    """What it had started ends, too: processes, cgroups and state."""
    place = new_node().state.parent
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(place)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        assert select.select([child.stdout], [], [], 30)[0]
        name, first = child.stdout.readline().split()
        deep = [directory / "deep" for directory in janitor.cgroup_directories(name)]
        deadline = time.monotonic() + 5
        while not all(path.exists() for path in deep) and time.monotonic() < deadline:
            time.sleep(0.05)
        there = leaks.of_node(name)
        assert all(there.values())
        assert len(there["cgroups"]) == len(deep)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    assert not leaks.remaining(lambda: leaks.of_node(name))
    assert not is_running(first)


def test_a_node_whose_first_process_has_ended_is_cleaned_up(new_node: Callable[[], Node]) -> None:
    """The janitor does not need it."""
    node = new_node()
    os.kill(node.init, signal.SIGKILL)
    node.close()
    assert not leaks.remaining(lambda: leaks.of_node(node.cgroup))


def test_a_component_that_ends_is_named_with_its_log(new_node: Callable[[], Node]) -> None:
    """Whatever was being waited for."""
    node = new_node()
    node.start("oven", ["sh", "-c", "echo no gas; exit 1"])
    with pytest.raises(ClusterFailed, match=r"(?s)the cake: oven ended.*no gas"):
        node.wait(lambda: False, what="the cake", timeout_s=10)


def test_a_program_that_takes_too_long_is_ended(new_node: Callable[[], Node]) -> None:
    """It does not stay behind in the node."""
    node = new_node()
    with pytest.raises(ClusterFailed, match="sleep 4242 was at it for"):
        node.run("sleep", "4242", timeout_s=0.2)
    node.wait(
        lambda: node.run("pgrep", "-f", "sleep 4242").returncode == 1,
        what="no sleep",
        timeout_s=5,
    )


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one thing a run."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(needs, "PROGRAMS", ("no-such-program",))
    monkeypatch.setattr(needs, "PLUGINS", Path("/no-such-place"))
    with pytest.raises(ClusterFailed) as raised:
        needs.check([Path("/run/here"), Path("/var/there")], {build.kubernetes().module: "99.1"})
    for word in ("root", "no-such-program", "/no-such-place", "Go 99.1", "here is go1", "TMPDIR",
                 "/var, which the node covers"):  # fmt: skip
        assert word in str(raised.value)
    assert PREFIX.endswith(f"{os.getpid()}-")
