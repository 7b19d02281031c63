"""STATUS, which containerd 2 asks of the plugins of a CNI 1.1 network, and what it does to a node.

A failing STATUS makes the node NotReady, and what is not on the host's network then cannot start:
an agent on the pod network would never come back. So ours fails only where somebody wants that.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from e2e.cluster import Cluster
from e2e.cluster.addresses import NODE_NAME
from e2e.cluster.configs import CONFLIST
from e2e.install import KUBECONFIG, RUN_DIR, Mesh
from e2e.mesh import mesh_pod, plain_pod
from e2e.nodes import on_modern_nodes
from istio_cni.constants import POD_ANNOTATIONS_CAPABILITY

pytestmark = on_modern_nodes

PLUGIN = "/opt/cni/bin/istio-cni"
AWAY_S = 16.0  # the kubelet asks the runtime every 5 s, and tells of its node every 4 s
ASKED_S = 15.0
CALLS = "/run/spy.calls"
SPY = f"""#!{sys.executable} -I
import json, os, sys
told = {{name: value for name, value in os.environ.items() if name.startswith("CNI_")}}
document = json.load(sys.stdin)
with open("{CALLS}", "a") as calls:
    calls.write(json.dumps([told, document]) + "\\n")
if told["CNI_COMMAND"] == "ADD":
    json.dump(document["prevResult"], sys.stdout)
"""


class Call(NamedTuple):
    """What the runtime has told a plugin: CNI_* variables and standard input."""

    env: dict[str, str]
    document: dict[str, object]

    @property
    def args(self) -> dict[str, str]:
        """Return what CNI_ARGS says of the pod, nothing for verbs that are about none."""
        pairs = self.env.get("CNI_ARGS", "").split(";")
        return dict(pair.split("=", 1) for pair in pairs if pair)


class Ready(NamedTuple):
    """The node's condition of this name, as the API server has it."""

    status: str
    since: str
    message: str


def ready(cluster: Cluster) -> Ready:
    """Ask for the node's condition; one that went and came back has another `since`."""
    text = cluster.kubectl("get", "node", NODE_NAME, "-ojsonpath={.status.conditions}")
    (found,) = [each for each in json.loads(text) if each["type"] == "Ready"]
    return Ready(found["status"], found["lastTransitionTime"], found["message"])


@pytest.fixture(scope="module")
def calls(cluster: Cluster, mesh: Mesh) -> Iterator[Callable[[str], list[Call]]]:
    """Put a plugin before ours that writes down how it is called; return its calls of a verb.

    The runtime asks for STATUS in the order of the list, so who is asked after it is ours.
    """
    program = cluster.node.path("/opt/cni/bin/spy")
    program.write_text(SPY)
    program.chmod(0o755)
    path = cluster.node.path(CONFLIST)
    document = json.loads(path.read_text())
    *others, ours = document["plugins"]
    spy = {"type": "spy", "capabilities": {POD_ANNOTATIONS_CAPABILITY: True}}
    path.write_text(json.dumps({**document, "plugins": [*others, spy, ours]}))
    log = cluster.node.path(CALLS)

    def seen(verb: str) -> list[Call]:
        lines = log.read_text().splitlines() if log.exists() else []
        found = [Call(*json.loads(line)) for line in lines]
        return [call for call in found if call.env["CNI_COMMAND"] == verb]

    yield seen
    document = json.loads(path.read_text())
    plugins = [plugin for plugin in document["plugins"] if plugin["type"] != "spy"]
    path.write_text(json.dumps({**document, "plugins": plugins}))


@pytest.fixture(params=["pod network", "host network"])
def place(request: pytest.FixtureRequest, mesh: Mesh) -> Iterator[str]:
    """Run the agent on the pod network, as the manifest has it, or on the host's."""
    if request.param == "host network":
        mesh.patch(hostNetwork=True)
    yield request.param
    if request.param == "host network":
        mesh.patch(hostNetwork=None)


@contextmanager
def agent_away(cluster: Cluster, mesh: Mesh) -> Iterator[None]:
    """Take the agent's pod away, sockets and all, and let it come back afterwards.

    The agent has no time to take the plugin off the node, for it does not run any more when it is
    told to end. Without a scheduler its pod has no successor.
    """
    cluster.stop("scheduler")
    try:
        pids = cluster.node.succeed("pgrep", "-f", "^install-cni").split()
        cluster.node.succeed("kill", "-STOP", *pids)
        mesh.kubectl("delete", "pod", "--grace-period=1", *mesh.pods())
        assert cluster.node.run("pgrep", "-f", "^install-cni").stdout == ""
        cluster.node.succeed("find", RUN_DIR, "-type", "s", "-delete")
        yield
    finally:
        cluster.start("scheduler")
        mesh.wait_ready()


def ask(cluster: Cluster) -> object:
    """Ask our plugin for its STATUS as the runtime does; return its error's code, 0 for none."""
    document = json.loads(cluster.node.path(CONFLIST).read_text())
    entry = {**document["plugins"][-1], "cniVersion": document["cniVersion"], "name": "e2e"}
    variables = ("CNI_COMMAND=STATUS", "CNI_PATH=/opt/cni/bin")
    done = cluster.node.run("env", *variables, PLUGIN, stdin=json.dumps(entry))
    return json.loads(done.stdout)["code"] if done.returncode else 0


def test_the_runtime_asks_for_status(
    cluster: Cluster, mesh: Mesh, calls: Callable[[str], list[Call]]
) -> None:
    """Time and again, of a chain that ends with ours, and the node is Ready."""
    assert mesh.chain() == [*cluster.network, "spy", "istio-cni"]
    before = len(calls("STATUS"))
    cluster.wait(
        lambda: len(calls("STATUS")) > before + 1, what="STATUS is asked for", timeout_s=ASKED_S
    )
    assert calls("STATUS")[-1].document["cniVersion"] == "1.1.0"
    assert ask(cluster) == 0
    assert ready(cluster).status == "True"


def test_the_runtime_says_which_pod_it_is_about(
    cluster: Cluster, mesh: Mesh, calls: Callable[[str], list[Call]]
) -> None:
    """The uid, and all annotations with the kubelet's own, so that few pods need a look-up."""
    cluster.apply(plain_pod("told", marks={"example.com/mark": "kept"}))
    cluster.wait_ready("told")
    metadata = cluster.get("pod", "told")["metadata"]
    (add,) = [call for call in calls("ADD") if call.args["K8S_POD_NAME"] == "told"]
    assert add.args["K8S_POD_UID"] == metadata["uid"]  # type: ignore[index]
    handed_over = add.document["runtimeConfig"][POD_ANNOTATIONS_CAPABILITY]  # type: ignore[index]
    assert handed_over["example.com/mark"] == "kept"
    assert handed_over["kubernetes.io/config.source"] == "api"
    cluster.delete("pod", "told", wait=True)


def test_the_node_stays_ready_without_the_agent(cluster: Cluster, mesh: Mesh, place: str) -> None:
    """Pods are captured, STATUS has something to complain about, and the agent comes back."""
    then = ready(cluster)
    assert then.status == "True"
    with agent_away(cluster, mesh):
        cluster.apply(mesh_pod("meanwhile", nodeName=NODE_NAME))
        cluster.wait_ready("meanwhile")
        assert cluster.is_captured("meanwhile")
        cluster.node.path(KUBECONFIG).unlink()  # no pod of the mesh can start
        before, until = len(mesh.warnings("STATUS")), time.monotonic() + AWAY_S
        while time.monotonic() < until:
            assert ready(cluster) == then
            time.sleep(0.5)
        assert len(mesh.warnings("STATUS")) > before + 1
        assert ask(cluster) == 0
    assert ready(cluster) == then
    cluster.delete("pod", "meanwhile", wait=True)


def test_a_strict_status_takes_the_node_away(cluster: Cluster, mesh: Mesh) -> None:
    """With `status_strict` and without kubeconfig; the agent, which would mend both, is away."""
    kubeconfig, conflist = cluster.node.path(KUBECONFIG), cluster.node.path(CONFLIST)
    with agent_away(cluster, mesh):
        text = conflist.read_text()
        aside = kubeconfig.with_suffix(".aside")
        kubeconfig.rename(aside)
        try:
            document = json.loads(text)
            document["plugins"][-1]["status_strict"] = True
            conflist.write_text(json.dumps(document))
            assert ask(cluster) == 50
            cluster.wait(lambda: ready(cluster).status == "False", what="the node is NotReady")
            assert "NetworkReady=false" in ready(cluster).message
        finally:
            aside.rename(kubeconfig)
            conflist.write_text(text)
        assert ask(cluster) == 0
        cluster.wait(lambda: ready(cluster).status == "True", what="the node is Ready again")
