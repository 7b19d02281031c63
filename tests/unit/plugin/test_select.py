"""Which pods are captured: the decisions, in the order in which they are taken."""

from __future__ import annotations

import pytest

from istio_cni.cni.request import Request
from istio_cni.errors import InvalidNetconf
from istio_cni.plugin.netconf import Netconf
from istio_cni.plugin.pod import Pod
from istio_cni.plugin.select import after_look_up, before_look_up, handed_over

JSON = dict[str, object]
STATUS = "sidecar.istio.io/status"
INJECT = "sidecar.istio.io/inject"
MODE = "sidecar.istio.io/interceptionMode"
SOURCE = "kubernetes.io/config.source"
CAPABILITY = "io.kubernetes.cri.pod-annotations"
ASK = ""  # no reason to leave the pod alone yet
CAPTURE = ""


def call(pod: str = "shop/web", handed: object = None, **keys: object) -> tuple[Request, Netconf]:
    """Make a request for a pod, with what the runtime hands over, and a configuration."""
    namespace, _, name = pod.partition("/")
    request = Request(
        "ADD",
        args={"K8S_POD_NAMESPACE": namespace, "K8S_POD_NAME": name},
        runtime_config={} if handed is None else {CAPABILITY: handed},
    )
    return request, Netconf({"pod_namespace": "istio-system", **keys})


def reason(request: Request, netconf: Netconf) -> str:
    """Return why a pod is left alone without look-up; "" if it must be looked up."""
    skip = before_look_up(request, netconf)
    return skip.reason if skip else ASK


# -- before the look-up ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "pod_namespace", "expected"),
    [
        ("istio-system/istio-cni-node-x2x4z", "istio-system", "own pod"),
        ("istio-system/istio-cni-node-", "istio-system", "own pod"),
        ("/istio-cni-node-x2x4z", "", "own pod"),
        ("istio-system/istio-cni-node", "istio-system", ASK),
        ("istio-system/my-istio-cni-node-x", "istio-system", ASK),
        ("shop/istio-cni-node-x2x4z", "istio-system", ASK),
        ("shop/istio-cni-node-x2x4z", "", ASK),
    ],
)
def test_the_agent_s_own_pod_is_known_by_name_and_namespace(
    pod: str, pod_namespace: str, expected: str
) -> None:
    """It has to start before there is a kubeconfig; a name alone anybody may choose."""
    request, netconf = call(pod, pod_namespace=pod_namespace)
    found = reason(request, netconf)
    assert (expected in found) if expected else (found == ASK)


@pytest.mark.parametrize("pod", ["/", "shop/", "/web"])
def test_a_call_without_pod_is_left_alone(pod: str) -> None:
    """Not Kubernetes, or a runtime that says half of it."""
    assert "not a Kubernetes pod" in reason(*call(pod))


@pytest.mark.parametrize(
    ("excluded", "skipped"),
    [
        (["shop"], True),
        (["kube-system", "shop"], True),
        (["Shop"], False),
        ([], False),
        (None, False),
    ],
)
def test_an_excluded_namespace_is_left_alone(excluded: object, skipped: bool) -> None:
    """By its exact name."""
    assert bool(reason(*call(exclude_namespaces=excluded))) is skipped


API, FILE = {SOURCE: "api"}, {SOURCE: "file"}


@pytest.mark.parametrize(
    ("handed", "expected"),
    [
        (None, ASK),
        ({}, ASK),
        ([], ASK),
        ("text", ASK),
        ({"other": "x"}, ASK),
        ({SOURCE: None}, ASK),
        ({SOURCE: ""}, ASK),
        ({SOURCE: 5}, ASK),
        ({**API, STATUS: "{}"}, ASK),
        ({**API, STATUS: ""}, ASK),
        ({**API, STATUS: None}, ASK),
        ({**FILE, STATUS: "{}"}, ASK),
        (API, f"no annotation {STATUS}"),
        ({**API, INJECT: "true", "traffic.sidecar.istio.io/x": "y"}, f"no annotation {STATUS}"),
        (FILE, "static pod"),
        ({SOURCE: "http"}, "static pod"),
    ],
)
def test_handed_over_annotations_decide_if_they_are_evidence(handed: object, expected: str) -> None:
    """They are with the kubelet's own annotation in them; the status annotation means: ask."""
    found = reason(*call(handed=handed))
    assert (expected in found) if expected else (found == ASK)


@pytest.mark.parametrize(
    ("handed", "expected"), [(API, ASK), (FILE, "static pod"), ({**API, STATUS: ""}, ASK)]
)
def test_in_ambient_mode_the_status_annotation_is_not_the_whole_story(
    handed: JSON, expected: str
) -> None:
    """A pod without sidecar may be ambient; a static pod has no object to find that out by."""
    found = reason(*call(handed=handed, ambient_enabled=True))
    assert (expected in found) if expected else (found == ASK)


def test_the_first_decision_wins() -> None:
    """Agent, no pod, namespace, annotations."""
    agent = "istio-system/istio-cni-node-a"
    everything: JSON = {"exclude_namespaces": ["istio-system", "shop", ""]}
    assert "own pod" in reason(*call(agent, API, **everything))
    assert "not a Kubernetes pod" in reason(*call("/web", API, **everything))
    assert "excluded" in reason(*call("shop/web", API, **everything))


def test_a_mistaken_configuration_decides_nothing_it_might_change() -> None:
    """The agent, what is no pod and excluded namespaces pass; for the rest it is an error."""
    for pod in ("istio-system/istio-cni-node-a", "shop/", "kube-system/x"):
        assert reason(*call(pod, exclude_namespaces=["kube-system"], ambient_enabled="no"))
    with pytest.raises(InvalidNetconf, match="ambient_enabled"):
        before_look_up(*call("shop/web", API, ambient_enabled="no"))


def test_what_is_handed_over_is_shown_as_it_came() -> None:
    """Only where it is evidence."""
    assert handed_over(call(handed=API)[0]) == API
    assert handed_over(call(handed={"a": "b"})[0]) is None


# -- after the look-up -----------------------------------------------------------------------------

PROXY: JSON = {"name": "istio-proxy", "args": ["proxy", "sidecar"]}


def pod(
    *,
    containers: tuple[JSON, ...] = ({"name": "app"}, PROXY),
    init: tuple[JSON, ...] = (),
    labels: JSON | None = None,
    annotations: JSON | None = None,
    **spec: object,
) -> Pod:
    """Make a pod, by default one that is captured."""
    notes = {STATUS: "{}"} if annotations is None else annotations
    metadata = {"name": "web", "annotations": notes, "labels": labels or {}}
    return Pod(
        {
            "metadata": metadata,
            "spec": {"containers": [*containers], "initContainers": [*init], **spec},
        }
    )


def proxy(*args: str, **env: object) -> tuple[JSON, ...]:
    """Make a proxy container."""
    variables = [{"name": name, "value": value} for name, value in env.items()]
    return ({"name": "istio-proxy", "args": [*args], "env": variables},)


APP: tuple[JSON, ...] = ({"name": "app"},)
INIT: tuple[JSON, ...] = ({"name": "istio-init"},)
EVERYTHING = pod(
    containers=(*APP, *INIT, *proxy("proxy", "router", DISABLE_ENVOY="true")),
    labels={INJECT: "false"},
    annotations={MODE: "NONE"},
    hostNetwork=True,
)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (EVERYTHING, "host's network"),
        (pod(hostNetwork=True), "host's network"),
        (pod(hostNetwork=False), CAPTURE),
        (pod(hostNetwork="true"), CAPTURE),  # no API server stores that
        (pod(containers=(*APP, PROXY, *INIT)), "istio-init"),
        (pod(init=INIT), "istio-init"),
        (pod(init=({"name": "istio-validation"},)), CAPTURE),
        (pod(init=INIT, containers=APP), "istio-init"),
        (pod(containers=APP), "no container istio-proxy"),
        (pod(containers=APP, annotations={}), "no container istio-proxy"),
        (pod(containers=()), "no container istio-proxy"),
        (pod(containers=APP, init=(PROXY,)), CAPTURE),  # a native sidecar
        (pod(containers=APP, ephemeralContainers=[PROXY]), "no container istio-proxy"),
        (pod(containers=proxy("proxy", "router", DISABLE_ENVOY="1")), "DISABLE_ENVOY"),
        (pod(containers=proxy("proxy", "sidecar", DISABLE_ENVOY="T")), "DISABLE_ENVOY"),
        (pod(containers=proxy(DISABLE_ENVOY="false")), CAPTURE),
        (pod(containers=proxy(DISABLE_ENVOY="yes")), CAPTURE),
        (pod(containers=proxy(DISABLE_ENVOY="")), CAPTURE),
        (pod(containers=proxy(DISABLE_ENVOY=None)), CAPTURE),
        (pod(containers=proxy("proxy", "router")), "router"),
        (pod(containers=proxy("proxy", "waypoint"), labels={INJECT: "false"}), "waypoint"),
        (pod(containers=proxy("proxy", "")), CAPTURE),
        (pod(containers=proxy("proxy")), CAPTURE),
        (pod(containers=proxy("sidecar", "router")), CAPTURE),
        (pod(containers=proxy()), CAPTURE),
        (pod(labels={INJECT: "false"}), f"{INJECT} is false"),
        (pod(labels={INJECT: "0"}), f"{INJECT} is false"),
        (pod(labels={INJECT: "no"}), CAPTURE),
        (pod(annotations={STATUS: "", INJECT: "false"}), f"{INJECT} is false"),
        (pod(annotations={STATUS: "", INJECT: "F"}), f"{INJECT} is false"),
        (pod(labels={INJECT: "true"}, annotations={STATUS: "", INJECT: "false"}), CAPTURE),
        (pod(labels={INJECT: ""}, annotations={STATUS: "", INJECT: "false"}), CAPTURE),
        (pod(labels={INJECT: "false"}, annotations={STATUS: "", INJECT: "true"}), "is false"),
        (pod(labels={INJECT: "false"}, annotations={}), "is false"),
        (pod(annotations={}), f"no annotation {STATUS}"),
        (pod(annotations={INJECT: "true", MODE: "NONE"}), f"no annotation {STATUS}"),
        (pod(annotations={STATUS: ""}), CAPTURE),
        (pod(annotations={STATUS: "", MODE: "NONE"}), f"{MODE} is NONE"),
        (pod(annotations={STATUS: "", MODE: "none"}), CAPTURE),  # refused as a value later
        (pod(annotations={STATUS: "", MODE: ""}), CAPTURE),
        (pod(), CAPTURE),
    ],
)
def test_the_pod_s_object_decides_in_this_order(subject: Pod, expected: str) -> None:
    """Host network, istio-init, proxy, DISABLE_ENVOY, proxy type, inject, status, mode."""
    skip = after_look_up(subject)
    assert (skip is None) if not expected else (skip is not None and expected in skip.reason)


def test_a_proxy_type_cannot_forge_the_log() -> None:
    """It is quoted, as everything that comes from a pod."""
    skip = after_look_up(pod(containers=proxy("proxy", "a\n\x1b[2J")))
    assert skip is not None
    assert r'"a\n\u001b[2J"' in skip.reason
