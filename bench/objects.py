"""Pods as an API server has them: as many as fill a node, of the size that real ones have.

One is that of the examples, one is outside the mesh. The others are like the first, but each has a
configuration of its own, so that there is always one that the agent has not met yet.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "examples" / "pods" / "web.yaml"  # both families, DNS
AGENT_NAMESPACE = "istio-system"
PODS = 110  # what a node takes, unless told otherwise
SMALLEST_BYTES, MORE_BYTES = 10_000, 200  # to 32 kB
FIRST_PORT = 20_000  # left out by the first pod with a configuration of its own
PLAIN = 1  # the number of the pod outside the mesh
SOURCE = "kubernetes.io/config.source"  # which the kubelet sets

Object = dict[str, Any]


class Name(NamedTuple):
    """What a runtime says of a pod."""

    namespace: str
    name: str
    uid: str

    @property
    def arguments(self) -> str:
        """CNI_ARGS, as containerd writes it."""
        about = f"K8S_POD_NAMESPACE={self.namespace};K8S_POD_NAME={self.name}"
        return f"IgnoreUnknown=1;{about};K8S_POD_UID={self.uid}"


def name(number: int) -> Name:
    """Name a pod: 0 is that of the examples, `PLAIN` the one outside the mesh."""
    called = {0: "web", PLAIN: "plain"}.get(number, f"web-{number:03}")
    return Name("shop", called, f"0f9e8d7c-6b5a-4c3d-8e1f-{number:012x}")


def own(round_number: int) -> int:
    """Return the number of a round's pod with a configuration of its own; there are 108."""
    return PLAIN + 1 + round_number % (PODS - PLAIN - 1)


def port(number: int) -> str:
    """Return the port that only this pod leaves out."""
    return str(FIRST_PORT + number)


def handed_over(pod: Object) -> dict[str, str]:
    """Return what containerd hands over of a pod, which the kubelet has told it."""
    found: dict[str, str] = pod["metadata"]["annotations"]
    return found


def pods(node: str) -> list[Object]:
    """Make the pods of a node."""
    return [pod(number, node) for number in range(PODS)]


@cache
def _manifest() -> Object:
    made: Object = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    return made


def pod(number: int, node: str = "") -> Object:
    """Make one pod, of a size of its own."""
    made = copy.deepcopy(_manifest())
    about, spec = made["metadata"], made["spec"]
    _, about["name"], about["uid"] = name(number)
    about["labels"] = {"app": "web", "pod-template-hash": "7d9c5b8f6", "version": f"v{number % 3}"}
    about["annotations"] |= {
        SOURCE: "api",
        "kubectl.kubernetes.io/last-applied-configuration": json.dumps(spec) * 2,
        "prometheus.io/scrape": "true",
    }
    spec["nodeName"] = node
    if number == PLAIN:
        del about["annotations"]["sidecar.istio.io/status"]
        spec["containers"] = spec["containers"][:1]
    else:
        _inject(spec)
    if number > PLAIN:
        about["annotations"]["traffic.sidecar.istio.io/excludeInboundPorts"] = port(number)
    _grow(made, SMALLEST_BYTES + MORE_BYTES * number)
    return made


def _inject(spec: Object) -> None:
    """Add what an injector adds beside what capture looks at."""
    proxy = spec["containers"][1]
    proxy["env"] += [
        {"name": f"ISTIO_META_SETTING_{each}", "value": f"value {each} of every proxy"}
        for each in range(30)
    ]
    proxy["env"].append(
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    )
    proxy["volumeMounts"] = [
        {"name": f"volume-{each}", "mountPath": f"/{each}"} for each in range(8)
    ]
    validation = copy.deepcopy({**proxy, "name": "istio-validation", "args": ["istio-iptables"]})
    spec["initContainers"] = [validation]
    spec["volumes"] = [{"name": f"volume-{each}", "emptyDir": {}} for each in range(8)]


def _grow(made: Object, size: int) -> None:
    """Note who last wrote which field, until the object has its size, as real ones have it."""
    fields: Object = {}
    made["metadata"]["managedFields"] = [{"manager": "kubelet", "fieldsV1": fields}]
    content: Object = {f"k:{each}": {"f:name": {}} for each in range(20)}
    left, one = size - len(json.dumps(made)), len(json.dumps(content))
    for number in range(-(-left // one)):
        fields[f"f:field-{number}"] = content
