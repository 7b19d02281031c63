"""A whole cluster of one node: started in order, each wait bounded, each step timed."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from . import build, components, configs, needs, pki
from .addresses import API_URL, NODE_ADDRESSES, NODE_NAME
from .image import Image
from .locks import locked
from .needs import ClusterFailed
from .node import Node

JSON = dict[str, object]
BUSYBOX_IMAGE = "e2e/busybox:1"
WAIT_S = 60.0
KUBELET_HEALTH = ("busybox", "wget", "-qO-", "http://127.0.0.1:10248/healthz")
FOLLOWERS = ("controller-manager", "scheduler", "kube-proxy")
LISTINGS = {  # what shows the rules of each back end, and no other's
    "nft": ("iptables-nft-save",),
    "legacy": ("iptables-legacy-save",),
    "nftables": ("nft", "list", "ruleset", "inet"),
}
OURS = re.compile("ISTIO_|istio-proxy-")  # chains of iptables, tables of nftables


class Cluster:
    """A node that is Ready, and kubectl for it. Waits raise ClusterFailed when time is over."""

    node_addresses = NODE_ADDRESSES
    api_url = API_URL

    def __init__(
        self, node: Node, programs: Path, *, iptables: bool = True, modern: bool = False
    ) -> None:
        self.node = node
        self.programs = programs
        self.has_iptables = iptables
        self.is_modern = modern
        self.network = [str(plugin["type"]) for plugin in configs.network(iptables=iptables)]
        self.took_s: dict[str, float] = {}
        state = node.state
        self._commands = {
            "containerd": components.containerd(state),
            "etcd": components.etcd(state),
            "apiserver": components.apiserver(state, programs),
            "controller-manager": components.controller_manager(state, programs),
            "scheduler": components.scheduler(state, programs),
            "kubelet": components.kubelet(state, programs),
            "kube-proxy": components.kube_proxy(state, programs, iptables=iptables),
        }

    @classmethod
    @contextmanager
    def started(cls, *, iptables: bool = True, modern: bool = False) -> Iterator[Self]:
        """Make a cluster and end it; raises ClusterFailed that names all that is missing here.

        Without `iptables` its node has no program for packet filters, and only kube-proxy sees one.
        A `modern` one has containerd 2 and CNI 1.1, which are built, in place of the machine's.
        Only one at a time runs on a machine: its kernel's connection tracking is shared.
        """
        cache = build.cache_dir()
        sources = [build.kubernetes(), *([build.containerd()] if modern else [])]
        go_versions = {each.module: each.go_version for each in sources}
        parent = needs.check([Path(tempfile.gettempdir()), cache], go_versions)
        cache.mkdir(parents=True, exist_ok=True)
        programs, *runtime = (build.binaries(each, cache) for each in sources)
        with locked(cache / "run.lock"):
            started = time.monotonic()
            parent.mkdir(parents=True, exist_ok=True)
            node = Node(parent, *runtime, iptables=iptables)
            try:
                cluster = cls(node, programs, iptables=iptables, modern=modern)
                cluster.took_s["namespaces"] = time.monotonic() - started
                cluster._start()
                yield cluster
            finally:
                node.close()

    def _start(self) -> None:
        with self._timed("keys"):
            pki.make(self.node.state / "pki", self.node.state / "etc")
            self._write_configs()
        with self._timed("containerd"):
            self.start("etcd")
            self.start("apiserver", wait=False)
            self.start("containerd")
            self.load(_busybox(), [configs.PAUSE_IMAGE, BUSYBOX_IMAGE])
            conflist = f"{self.node.state}/etc/conflist"
            self.node.succeed("cp", conflist, configs.CONFLIST)
        with self._timed("API server"):
            self.wait_for("apiserver")
        with self._timed("node"):
            for name in ("controller-manager", "scheduler", "kubelet", "kube-proxy"):
                self.start(name, wait=False)
            self.wait(self._is_ready, what="the node is Ready", of="kubelet")

    def _write_configs(self) -> None:
        etc = self.node.state / "etc"
        (etc / "containerd.toml").write_text(configs.containerd(modern=self.is_modern))
        (etc / "kubelet.yaml").write_text(configs.kubelet(self.node.state, self.node.cgroup))
        (etc / "proxy.yaml").write_text(configs.kube_proxy(self.node.state))
        conflist = configs.conflist(iptables=self.has_iptables, modern=self.is_modern)
        (etc / "conflist").write_text(conflist)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.took_s[step] = time.monotonic() - started

    def _is_ready(self) -> bool:
        """Whether pods can be made: the node is Ready, and so is the default account."""
        path = "{.status.conditions[?(@.type=='Ready')].status}"
        ready = self._try_kubectl("get", "node", NODE_NAME, f"-ojsonpath={path}")
        return ready == "True" and self._try_kubectl("get", "serviceaccount", "default") != ""

    # -- components ----------------------------------------------------------------------------

    def start(self, name: str, *, wait: bool = True) -> None:
        """Start a component and wait until it serves."""
        self.node.start(name, self._commands[name])
        if wait:
            self.wait_for(name)
        if name == "apiserver":
            self._restart_followers()

    def _restart_followers(self) -> None:
        """Restart those who would look for a new API server only after a minute.

        Their pause grows with each failed attempt. Elsewhere they end by themselves when they
        cannot renew their leases; here they have none. The kubelet has such a pause, too, but what
        it does by itself is for stories to see; those who do not care restart it.
        """
        for name in FOLLOWERS:
            if self.node.runs(name):
                self.kill(name)
                self.start(name)

    def stop(self, name: str) -> None:
        """End a component in order."""
        self.node.stop(name)

    def kill(self, name: str) -> None:
        """End a component on the spot."""
        self.node.stop(name, signal.SIGKILL)

    def wait_for(self, name: str) -> None:
        """Wait until a component serves, as far as that is to be seen from outside."""
        serves = {
            "apiserver": lambda: self._try_kubectl("get", "--raw", "/readyz") == "ok",
            "containerd": lambda: self.node.run("ctr", "version").returncode == 0,
            "kubelet": self._kubelet_serves,
        }.get(name, lambda: True)
        self.wait(serves, what=f"{name} serves", of=name)

    def _kubelet_serves(self) -> bool:
        """Whether the kubelet is up and, where it can be told, knows all pods of its node."""
        if not self.node.runs("apiserver"):
            return self.node.run(*KUBELET_HEALTH).returncode == 0
        here = f"--field-selector=spec.nodeName={NODE_NAME}"
        names = self._try_kubectl("get", "pods", "-A", here, "-ojsonpath={.items[*].metadata.name}")
        known = self._try_kubectl("get", "--raw", f"/api/v1/nodes/{NODE_NAME}/proxy/pods")
        return known != "" and all(f'"name":"{name}"' in known for name in names.split())

    def wait(
        self, is_so: Callable[[], object], *, what: str, timeout_s: float = WAIT_S, of: str = ""
    ) -> None:
        """Poll until something is so."""
        self.node.wait(is_so, what=what, timeout_s=timeout_s, of=of)

    def load(self, image: Image, tags: list[str], **start: object) -> None:
        """Make an image known to the runtime, as if it had been pulled."""
        archive = self.node.state / "image.tar"
        how = {
            "command": ["/bin/sleep", "2147483647"],
            "env": {"PATH": "/usr/local/bin:/usr/sbin:/bin"},
        }
        image.write(archive, tags, **{**how, **start})  # type: ignore[arg-type]
        self.node.succeed("ctr", "-n", "k8s.io", "images", "import", "--snapshotter", "overlayfs",
                          str(archive))  # fmt: skip
        archive.unlink()

    # -- objects -------------------------------------------------------------------------------

    def kubectl(self, *argv: str, stdin: str = "", timeout_s: float = WAIT_S) -> str:
        """Run kubectl as the cluster's administrator and return what it prints."""
        return self.node.succeed(*self._kubectl(), *argv, stdin=stdin, timeout_s=timeout_s)

    def _kubectl(self) -> list[str]:
        kubeconfig = f"{self.node.state}/etc/admin.kubeconfig"
        return [f"{self.programs}/kubectl", f"--kubeconfig={kubeconfig}"]

    def _try_kubectl(self, *argv: str) -> str:
        done = self.node.run(*self._kubectl(), "--request-timeout=5s", *argv)
        return done.stdout.strip() if done.returncode == 0 else ""

    def apply(self, *objects: JSON) -> None:
        """Create or change objects."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "-f", "-", stdin=text)

    def get(self, kind: str, name: str, namespace: str = "default") -> JSON:
        """Return an object; raises ClusterFailed if there is none."""
        document: JSON = json.loads(self.kubectl("-n", namespace, "get", kind, name, "-ojson"))
        return document

    def exists(self, kind: str, name: str, namespace: str = "default") -> bool:
        """Tell whether there is such an object."""
        argv = ("-n", namespace, "get", kind, name, "--ignore-not-found", "-oname")
        return self.kubectl(*argv).strip() != ""

    def wait_ready(self, *pods: str, namespace: str = "default", timeout_s: float = WAIT_S) -> None:
        """Wait until pods are Ready; the error has their events."""
        argv = ["-n", namespace, "wait", "--for=condition=Ready", f"--timeout={timeout_s:.0f}s"]
        names = [f"pod/{pod}" for pod in pods]
        try:
            self.kubectl(*argv, *names, timeout_s=timeout_s + 10)
        except ClusterFailed as error:
            events = "\n".join(event for pod in pods for event in self.events(pod, namespace))
            raise ClusterFailed(f"{error}\n{events}") from error

    def events(self, pod: str, namespace: str = "default") -> list[str]:
        """Return the messages of a pod's events."""
        selector = f"--field-selector=involvedObject.name={pod}"
        path = "-ojsonpath={range .items[*]}{.message}{'\\n'}{end}"
        return self.kubectl("-n", namespace, "get", "events", selector, path).splitlines()

    def delete(
        self, kind: str, *names: str, namespace: str = "default", wait: bool = False
    ) -> None:
        """Delete objects; `wait` until they are gone, network and all."""
        grace = ["--grace-period=1"] if kind == "pod" else []
        argv = ["-n", namespace, "delete", kind, *names, "--ignore-not-found", *grace]
        self.kubectl(*argv, f"--wait={str(wait).lower()}")

    def exec(
        self, pod: str, *argv: str, container: str = "client", namespace: str = "default"
    ) -> str:
        """Run a program in a container and return what it prints."""
        return self.kubectl("-n", namespace, "exec", pod, "-c", container, "--", *argv)

    def logs(self, pod: str, container: str, namespace: str = "default") -> str:
        """Return what a container has printed."""
        return self.kubectl("-n", namespace, "logs", pod, "-c", container)

    def netns(self, pod: str, namespace: str = "default") -> str:
        """Return the name of a pod's network namespace on the node."""
        wanted = self.addresses(pod, namespace)[0]
        for path in self.node.path("/run/netns").iterdir():
            if f" {wanted}/" in self.node.run("ip", "-n", path.name, "-o", "addr").stdout:
                return path.name
        raise ClusterFailed(f"no network namespace has the address {wanted} of {pod}")

    def rules(self, pod: str, namespace: str = "default") -> dict[str, str]:
        """Return the rules in a pod's network namespace, by variant of iptables or back end."""
        netns = f"/run/netns/{self.netns(pod, namespace)}"
        return {kind: self.node.look(netns, *command) for kind, command in LISTINGS.items()}

    def is_captured(self, pod: str, namespace: str = "default") -> bool:
        """Tell whether there are rules of the mesh in a pod's network namespace."""
        return self.holders(pod, namespace) != []

    def holders(self, pod: str, namespace: str = "default") -> list[str]:
        """Return the back ends that hold rules of the mesh in a pod's network namespace."""
        return [kind for kind, text in self.rules(pod, namespace).items() if OURS.search(text)]

    def addresses(self, pod: str, namespace: str = "default") -> list[str]:
        """Return a pod's addresses, IPv4 first."""
        path = "-ojsonpath={.status.podIPs[*].ip}"
        return self.kubectl("-n", namespace, "get", "pod", pod, path).split()


def _busybox() -> Image:
    image = Image()
    image.add_busybox()
    return image
