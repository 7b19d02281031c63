"""A trimmed pod decides as the whole one does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from istio_cni import constants
from istio_cni.agent.trim import Strings, trim
from istio_cni.errors import IstioCNIError
from istio_cni.plugin import annotations, select
from istio_cni.plugin.netconf import Netconf
from istio_cni.plugin.pod import Pod

COUNT = 400
NAMES = [
    *(row.name for row in annotations.ANNOTATIONS),
    *sorted(annotations.OTHER_KNOWN),
    *(constants.STATUS_ANNOTATION, constants.INJECT_KEY, constants.MODE_ANNOTATION),
    *("traffic.sidecar.istio.io/includeInboundPort", "sidecar.istio.io/new"),
    annotations.KUBEVIRT,
    *(constants.MIRROR_ANNOTATION, constants.CONFIG_SOURCE_ANNOTATION),
    *("prometheus.io/scrape", "kubectl.kubernetes.io/last-applied-configuration", "name"),
]
VALUES = ["", "*", "true", "false", "NONE", "TPROXY", "8080", "8000-8100,1", "10.0.0.0/8", "eth0"]
VARIABLES = ["DISABLE_ENVOY", "ISTIO_META_DNS_CAPTURE", "ISTIO_DUAL_STACK", "INVALID_DROP", "PATH"]
ODD = [None, 0, 1337, True, 1.5, "x", [], {}, [1], {"a": "b"}, [None], ["proxy", "sidecar"]]


class Draw:
    """Makes pods of every shape, some of them odd; the same ones for a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 – test data

    def odd(self, value: object, share: float = 0.04) -> object:
        """Return a value, or now and then one of another type."""
        return self.random.choice(ODD) if self.random.random() < share else value

    def some(self, values: list[str], most: int) -> list[str]:
        """Return some of the values."""
        return self.random.sample(values, self.random.randint(0, min(most, len(values))))

    def texts(self, most: int) -> dict[str, object]:
        """Make labels or annotations."""
        return {name: self.odd(self.random.choice(VALUES)) for name in self.some(NAMES, most)}

    def variable(self) -> object:
        """Make a variable of a container."""
        made: dict[str, object] = {"name": self.odd(self.random.choice(VARIABLES))}
        kind = self.random.randrange(5)
        if kind < 3:
            made["value"] = self.odd(self.random.choice(VALUES))
        if kind > 2:
            made["valueFrom"] = self.odd({"fieldRef": {"fieldPath": "status.podIP"}}, 0.2)
        return self.odd(made)

    def container(self) -> object:
        """Make a container, often a proxy."""
        names = ["istio-proxy", "istio-proxy", "istio-init", "app", "istio-validation"]
        made: dict[str, object] = {"name": self.odd(self.random.choice(names)), "image": "x"}
        if self.random.random() < 0.7:
            words = ["proxy", self.random.choice(["sidecar", "router"]), "--domain", "x"]
            made["args"] = self.odd(words[: self.random.randint(0, 4)])
        if self.random.random() < 0.7:
            ids = {"runAsUser": self.odd(1337, 0.2), "runAsGroup": self.odd(1337, 0.2)}
            made["securityContext"] = self.odd({**ids, "privileged": False})
        made["env"] = self.odd([self.variable() for _ in range(self.random.randint(0, 6))])
        return self.odd(made)

    def pod(self) -> dict[str, Any]:
        """Make a pod."""
        containers = [self.container() for _ in range(self.random.randint(0, 3))]
        metadata = {
            "namespace": self.odd("shop"),
            "name": self.odd("web"),
            "uid": self.odd(self.random.choice(["u1", "u2", ""]), 0.1),
            "labels": self.odd(self.texts(3)),
            "annotations": self.odd(self.texts(12)),
            "managedFields": [{"manager": "kubelet"}],
        }
        spec = {
            "hostNetwork": self.odd(self.random.random() < 0.1),
            "initContainers": self.odd(containers[:1]),
            "containers": self.odd(containers[1:]),
            "volumes": [{"name": "x"}],
        }
        return {"metadata": self.odd(metadata, 0.01), "spec": self.odd(spec, 0.01), "status": {}}


def facts(pod: Pod) -> dict[str, object]:
    """Return all that a pod's object says, annotations apart."""
    shown = {name: getattr(pod, name) for name in Pod.__slots__ if name != "annotations"}
    proxy = pod.proxy
    shown["proxy"] = proxy and {name: getattr(proxy, name) for name in proxy.__slots__}
    return shown


def decision(pod: Pod, *, strict: bool) -> object:
    """Return what becomes of a pod: its reason to be left alone, its configuration, a refusal."""
    skip = select.after_look_up(pod)
    try:
        configured = annotations.capture_config(pod, Netconf({"strict_annotations": strict}))
    except IstioCNIError as error:
        return skip and skip.reason, type(error), error.msg
    return skip and skip.reason, configured


@pytest.mark.parametrize("seed", range(4))
def test_a_trimmed_pod_says_the_same(seed: int) -> None:
    """Field by field; and what is decided, warned about and refused is the same."""
    draw, share = Draw(seed), Strings(50)
    decided = set()
    for _ in range(COUNT):
        document = draw.pod()
        whole, trimmed = Pod(document), trim(document, share).pod
        assert facts(whole) == facts(trimmed), document
        assert trimmed.annotations.items() <= whole.annotations.items()
        for strict in (False, True):
            assert decision(whole, strict=strict) == decision(trimmed, strict=strict), document
        decided.add(str(decision(whole, strict=False))[:20])
    assert len(decided) > 5


def test_a_trimmed_pod_is_known_by_all_its_uids() -> None:
    """Its own, and the kubelet's for a static pod, whose annotation is not kept."""
    static = {"uid": "own", "annotations": {constants.MIRROR_ANNOTATION: "kubelet's"}}
    assert trim({"metadata": static}, Strings()).uids == ("own", "kubelet's")
    assert trim({"metadata": static}, Strings()).pod.annotations == {}
    assert trim({"metadata": {"uid": "own"}}, Strings()).uids == ("own",)
    assert trim({"metadata": {"uid": ""}}, Strings()).uids == ()


@pytest.mark.parametrize("name", NAMES[:-5])
def test_annotations_that_matter_are_kept(name: str) -> None:
    """Those that shape rules, and those that may be warned about."""
    document = {"metadata": {"annotations": {name: "x"}}}
    assert trim(document, Strings()).pod.annotations == {name: "x"}


def test_what_is_large_is_let_go() -> None:
    """Status, volumes, who wrote what, other containers' environment, other annotations."""
    app = {"name": "app", "env": [{"name": "SECRET", "value": "SECRET"}], "image": "SECRET"}
    document = {
        "metadata": {
            "name": "web",
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "SECRET"},
            "managedFields": ["SECRET"],
        },
        "spec": {"containers": [app], "volumes": ["SECRET"]},
        "status": "SECRET",
    }
    assert "SECRET" not in str(facts(trim(document, Strings()).pod))
    assert not trim(document, Strings()).pod.annotations


def test_equal_strings_are_one_object() -> None:
    """Up to a number of them; then sharing begins anew."""
    share = Strings(2)
    one, same = "".join(["a", "b"]), "".join(["a", "b"])
    assert share(one) is share(same) is one
    assert share("c") == "c"
    assert share("d") == "d"
    assert share(same) is same
