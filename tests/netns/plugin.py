"""A container runtime for tests: calls `istio-cni` as a process, as containerd does.

    node = Node(tmp_path, server)
    node.add_pod(WEB)
    answer = node.call("ADD", netns, WEB)
    assert answer.status == 0
    assert "ISTIO_OUTPUT" in rules(netns)

Nothing of the test's own environment reaches the plugin. A `Node` has its run dir and, as the
source of its pods, a fake API server over HTTPS or a directory of manifests. Its calls go to the
installed program, or one of the two ways through the launcher (netns/ways.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fake_apiserver import FakeApiServer
from namespaces import inside

JSON = dict[str, object]
PROGRAM = Path(sys.executable).with_name("istio-cni")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
TIMEOUT_S = 60.0
STATUS = "sidecar.istio.io/status"
CAPABILITY = "io.kubernetes.cri.pod-annotations"


class Pod(NamedTuple):
    """A pod as the runtime knows it, with one of its attachments."""

    name: str = "web"
    namespace: str = "shop"
    uid: str = "0a1b"
    container_id: str = "c0ffee"
    ifname: str = "eth0"

    @property
    def args(self) -> str:
        """CNI_ARGS, as Kubernetes' runtimes write it."""
        return (
            f"IgnoreUnknown=1;K8S_POD_NAMESPACE={self.namespace};K8S_POD_NAME={self.name};"
            f"K8S_POD_INFRA_CONTAINER_ID={self.container_id};K8S_POD_UID={self.uid}"
        )


WEB = Pod()


class Answer(NamedTuple):
    """What the runtime sees of a call, and how long it took."""

    status: int
    stdout: str
    stderr: str
    took_s: float

    @property
    def json(self) -> JSON:
        """The one JSON document on stdout."""
        document: JSON = json.loads(self.stdout)
        return document

    @property
    def code(self) -> object:
        """The code of the error on stdout; None if the call succeeded."""
        return self.json["code"] if self.status else None

    @property
    def msg(self) -> str:
        """The message of the error on stdout."""
        return str(self.json["msg"])

    @property
    def log(self) -> list[JSON]:
        """The lines on stderr, each of which is a JSON object."""
        return [json.loads(line) for line in self.stderr.splitlines()]

    def logged(self, text: str, level: str = "") -> bool:
        """Tell whether a line of the log, of this level, has a text in its message."""
        return any(
            text in str(line["msg"]) and (not level or line["level"] == level) for line in self.log
        )

    @property
    def silent(self) -> bool:
        """Whether this is a success without output, as every verb but ADD has it."""
        return self.status == 0 and self.stdout == ""


def environment(
    verb: str, netns: str = "", pod: Pod = WEB, changes: Mapping[str, str | None] | None = None
) -> dict[str, str]:
    """Make a call's environment; a change to None takes a variable away."""
    env: dict[str, str | None] = {
        "PATH": PATH,
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": pod.container_id,
        "CNI_NETNS": netns,
        "CNI_IFNAME": pod.ifname,
        "CNI_ARGS": pod.args,
        "CNI_PATH": "/opt/cni/bin",
        **(changes or {}),
    }
    return {name: value for name, value in env.items() if value is not None}


class Way(NamedTuple):
    """How calls get to the verbs: the program, and the log of the agent that may serve it."""

    program: Path = PROGRAM
    agent_log: Path | None = None


def start(
    env: Mapping[str, str], stdin: bytes, *, wrapper: Sequence[str] = (), program: Path = PROGRAM
) -> subprocess.Popen[bytes]:
    """Start the plugin and give it its stdin; `wrapper` is a command that runs it."""
    process = subprocess.Popen(
        [*wrapper, str(program)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.close()
    process.stdin = None
    return process


def finish(process: subprocess.Popen[bytes], started: float) -> Answer:
    """Wait for a plugin that was started at an instant of the monotonic clock."""
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    took_s = time.monotonic() - started
    return Answer(process.returncode, stdout.decode(), stderr.decode(), took_s)


def run(
    env: Mapping[str, str], stdin: bytes, *, wrapper: Sequence[str] = (), way: Way | None = None
) -> Answer:
    """Run the plugin to its end; what the agent logs of it meanwhile counts as its stderr."""
    program, agent_log = way or Way()
    before = 0 if agent_log is None else agent_log.stat().st_size
    started = time.monotonic()
    answer = finish(start(env, stdin, wrapper=wrapper, program=program), started)
    if agent_log is None:
        return answer
    with agent_log.open() as log:
        log.seek(before)
        lines = [line for line in log if '"scope": "cni-plugin"' in line]
    return answer._replace(stderr=answer.stderr + "".join(lines))


class Node:
    """A node as the plugin finds it: a run dir, a network configuration, a source of pods.

    With a server, pods are on it and the run dir holds its kubeconfig; without one, they are files.
    """

    def __init__(
        self, directory: Path, server: FakeApiServer | None = None, way: Way | None = None
    ) -> None:
        self.way = way or Way()
        self.run_dir = directory / "run"
        self.run_dir.mkdir()
        self.server = server
        self.manifests = directory / "manifests"
        self.manifests.mkdir()
        self.kubeconfig = self.run_dir / "istio-cni-kubeconfig"
        self.attachments = self.run_dir / "attachments"
        if server is not None:
            server.write_kubeconfig(self.kubeconfig)

    @property
    def api(self) -> FakeApiServer:
        """The node's API server; a node with manifests has none."""
        assert self.server is not None
        return self.server

    def config(self, version: str = "1.1.0", /, **keys: object) -> JSON:
        """Write the network configuration of a call; keys that are None are left out."""
        source = "kubernetes" if self.server else f"manifests:{self.manifests}"
        config: JSON = {
            "cniVersion": version,
            "name": "k8s-pod-network",
            "type": "istio-cni",
            "cni_agent_run_dir": str(self.run_dir),
            "exclude_namespaces": ["kube-system"],
            "pod_namespace": "istio-system",
            "pod_source": source,
            **keys,
        }
        return {key: value for key, value in config.items() if value is not None}

    def add_pod(self, pod: Pod = WEB, **changes: object) -> JSON:
        """Let a pod exist; `changes` are those of `manifest`."""
        document = manifest(pod, **changes)  # type: ignore[arg-type] # passed on as they are
        if self.server is not None:
            self.server.pods[pod.namespace, pod.name] = document
        else:
            path = self.manifests / f"{pod.namespace}.{pod.name}.json"
            path.write_text(json.dumps(document))
        return document

    def call(
        self,
        verb: str,
        netns: str = "",
        pod: Pod = WEB,
        *,
        config: JSON | None = None,
        prev_result: object = None,
        env: Mapping[str, str | None] | None = None,
        wrapper: Sequence[str] = (),
    ) -> Answer:
        """Call the plugin for one of a pod's attachments, by default in the newest version."""
        config = self.config() if config is None else config
        call = environment(verb, netns, pod, env)
        return run(call, stdin(config, prev_result), wrapper=wrapper, way=self.way)

    def start(
        self, verb: str, netns: str, pod: Pod = WEB, *, config: JSON | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a call that the test will kill, or wait for by itself."""
        config = self.config() if config is None else config
        call = environment(verb, netns, pod)
        return start(call, stdin(config, None), program=self.way.program)

    def record(self, pod: Pod = WEB) -> JSON | None:
        """Read the record of a pod's attachment; None if there is none."""
        path = self.attachments / f"{pod.container_id}-{pod.ifname}"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def records(self) -> list[str]:
        """The names of all files beside the records, the records included."""
        return sorted(path.name for path in self.attachments.glob("*"))


def stdin(config: JSON, prev_result: object = None) -> bytes:
    """Write what a call reads."""
    whole = config if prev_result is None else {**config, "prevResult": prev_result}
    return json.dumps(whole).encode()


def manifest(
    pod: Pod = WEB,
    *,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    env: Sequence[JSON] = (),
    sidecar: bool = True,
    mirror_of: str = "",
    **spec: object,
) -> JSON:
    """Write a pod's object, of a pod with sidecar unless said otherwise.

    `mirror_of` is the kubelet's uid of a static pod; the object has a uid of its own then.
    """
    notes = {STATUS: "{}"} if sidecar else {}
    notes |= annotations or {}
    if mirror_of:
        notes["kubernetes.io/config.mirror"] = mirror_of
    proxy: JSON = {"name": "istio-proxy", "args": ["proxy", "sidecar"], "env": list(env)}
    application: JSON = {"name": "app"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod.name,
            "namespace": pod.namespace,
            "uid": "api-server-s-own" if mirror_of else pod.uid,
            "annotations": notes,
            "labels": dict(labels or {}),
        },
        "spec": {"containers": [application, proxy] if sidecar else [application], **spec},
    }


def handed_over(**annotations: str) -> JSON:
    """Make the runtimeConfig by which containerd hands over annotations, the kubelet's included."""
    return {CAPABILITY: {"kubernetes.io/config.source": "api", **annotations}}


def give_address(netns: str, *addresses: str, interface: str = "eth0") -> None:
    """Attach an interface with addresses to a pod, as the plugin before ours does."""
    lines = [
        f"link add {interface} type veth peer name {interface}p",
        *(f"addr add {one} dev {interface} {'nodad' * (':' in one)}" for one in addresses),
        f"link set {interface}p up",
        f"link set {interface} up",
    ]
    inside(netns, ["ip", "-batch", "-"], stdin="\n".join(lines))


def rules(netns: str, family: int = 4) -> list[str]:
    """List the rules in a namespace, of both variants of iptables, as `-save` prints them."""
    base = {4: "iptables", 6: "ip6tables"}[family]
    texts = (inside(netns, [f"{base}-{variant}-save"]) for variant in ("nft", "legacy"))
    return [line for text in texts for line in text.splitlines() if line.startswith("-A")]


def is_captured(netns: str, family: int = 4) -> bool:
    """Tell whether a family's outbound traffic goes to the proxy."""
    return "-A OUTPUT -j ISTIO_OUTPUT" in rules(netns, family)
