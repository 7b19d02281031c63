"""The mesh on the cluster: put there, changed and taken away as its users do it, by kubectl."""

from __future__ import annotations

import json
from pathlib import Path

from e2e.cluster import Cluster
from e2e.cluster.configs import CONFLIST
from istio_cni.constants import LOG_FILE, VERSION

MANIFEST = Path(__file__).resolve().parents[2] / "deploy" / "daemonset.yaml"
INSTALLER = f"istio-cni/install-cni:{VERSION}"
NAMESPACE = "istio-system"
LABEL = "k8s-app=istio-cni-node"
DAEMONSET = "daemonset/istio-cni-node"
RUN_DIR = "/run/istio-cni"
KUBECONFIG = f"{RUN_DIR}/istio-cni-kubeconfig"


class Mesh:
    """The DaemonSet on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def install(self) -> None:
        """Apply the manifest and wait until every node has the plugin."""
        self._cluster.kubectl("apply", "-f", str(MANIFEST))
        self.wait_ready()

    def uninstall(self) -> None:
        """Delete what is in the manifest, all but the namespace, and wait until it is gone."""
        self._cluster.kubectl("delete", "-f", str(MANIFEST), f"-l{LABEL}", timeout_s=90)
        self._cluster.wait(lambda: not self.pods(), what="the DaemonSet's pods are gone")

    def wait_ready(self) -> None:
        """Wait until the DaemonSet's present state is everywhere."""
        self.kubectl("rollout", "status", DAEMONSET, "--timeout=60s")

    def configure(self, **settings: str) -> None:
        """Change settings in the ConfigMap and restart the pods; an empty value takes one out."""
        data = {name: value or None for name, value in settings.items()}
        self.kubectl("patch", "configmap", "istio-cni-config", "-p", json.dumps({"data": data}))
        self.restart()

    def patch(self, **pod: object) -> None:
        """Change fields of the DaemonSet's pods; None takes one out."""
        spec = {"spec": {"template": {"spec": pod}}}
        self.kubectl("patch", DAEMONSET, "-p", json.dumps(spec))
        self.wait_ready()

    def restart(self) -> None:
        """Roll the DaemonSet out anew."""
        self.kubectl("rollout", "restart", DAEMONSET)
        self.wait_ready()

    def delete(self) -> None:
        """Delete the DaemonSet and wait until its pods are gone."""
        self.kubectl("delete", DAEMONSET)
        self._cluster.wait(lambda: not self.pods(), what="the DaemonSet's pods are gone")

    def pods(self) -> list[str]:
        """Return the names of the DaemonSet's pods."""
        names = self.kubectl("get", "pods", f"-l{LABEL}", "-oname").split()
        return [name.removeprefix("pod/") for name in names]

    def log(self) -> str:
        """Return what the node agent says."""
        return self.kubectl("logs", DAEMONSET)

    def said(self, pod: str) -> list[str]:
        """Return what the plugin's log on the node says of a pod of this name."""
        return [str(line["msg"]) for line in self.lines(pod)]

    def failures(self, pod: str) -> list[dict[str, object]]:
        """Return the lines of failed calls for a pod of this name."""
        return [line for line in self.lines(pod) if "code" in line]

    def programmed(self, pod: str) -> list[dict[str, object]]:
        """Return the lines that say what was programmed for a pod of this name."""
        return [line for line in self.lines(pod) if str(line["msg"]).startswith("captured: ")]

    def warnings(self, verb: str) -> list[dict[str, object]]:
        """Return the lines with which calls of a verb complain without failing."""
        lines = self._log_lines()
        return [line for line in lines if (line["level"], line.get("verb")) == ("warn", verb)]

    def lines(self, pod: str) -> list[dict[str, object]]:
        """Return what the plugin's log on the node has of a pod of this name, line by line."""
        return [line for line in self._log_lines()
                if str(line.get("pod", "")).endswith(f"/{pod}")]  # fmt: skip

    def of_call(self, request_id: object) -> list[dict[str, object]]:
        """Return what the plugin's log on the node has of one call."""
        return [line for line in self._log_lines() if line.get("request_id") == request_id]

    def _log_lines(self) -> list[dict[str, object]]:
        text = self._cluster.node.path(f"{RUN_DIR}/{LOG_FILE}").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def chain(self) -> list[str]:
        """Return the types of the plugins that the runtime calls for a pod, in order."""
        document = json.loads(self._cluster.node.path(CONFLIST).read_text())
        return [plugin["type"] for plugin in document["plugins"]]

    def kubectl(self, *argv: str) -> str:
        """Run kubectl in the mesh's own namespace."""
        return self._cluster.kubectl("-n", NAMESPACE, *argv, timeout_s=90)
