"""Where a pod's object comes from, and what each way of not getting it means for the pod."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fake_apiserver import FakeApiServer, Reply, write_kubeconfig
from istio_cni.constants import LOOK_UP_TIMEOUT_S
from istio_cni.edge.kube.lookup import LAG_MAX_S
from netns.plugin import STATUS, WEB, Answer, Node, Pod, handed_over, is_captured, rules

pytestmark = pytest.mark.netns

AGENT = Pod("istio-cni-node-x7x2k", "istio-system", "u-agent", "a9e27")
SYSTEM = Pod("kube-proxy", "kube-system", "u-proxy", "5f5")
STATIC = Pod("static-web-node1", "shop", "5ca1ab1e", "57a71c")
CONFIG_SOURCE = "kubernetes.io/config.source"
PASSING_MAX_S = LOOK_UP_TIMEOUT_S + 2
LAGGING_MAX_S = LAG_MAX_S + 2
QUICK_S = 2.0


# -- without credentials ---------------------------------------------------------------------------


def test_what_needs_no_credentials_starts_without_them(node: Node, netns: str) -> None:
    """The agent's own pod, excluded namespaces and calls without a pod's name."""
    node.kubeconfig.unlink()
    agent = node.call("ADD", netns, AGENT)
    assert (agent.status, agent.logged("own pod", "info")) == (0, True)
    system = node.call("ADD", netns, SYSTEM)
    assert (system.status, system.logged('"kube-system" is excluded', "info")) == (0, True)
    nobody = node.call("ADD", netns, env={"CNI_ARGS": None})
    assert (nobody.status, nobody.logged("not a Kubernetes pod", "info")) == (0, True)
    assert node.api.requests == []


def test_a_pod_that_must_be_looked_up_names_the_missing_kubeconfig(node: Node, netns: str) -> None:
    """Code 101 with its path; nothing is programmed and nothing recorded."""
    node.kubeconfig.unlink()
    answer = node.call("ADD", netns)
    assert (answer.status, answer.code) == (1, 101)
    assert str(node.kubeconfig) in answer.msg
    assert (rules(netns), node.records) == ([], [])


def test_only_the_agent_s_own_namespace_makes_an_agent(node: Node, netns: str) -> None:
    """A pod of that name elsewhere is any pod, which has to be looked up."""
    node.kubeconfig.unlink()
    elsewhere = AGENT._replace(namespace="shop")
    assert node.call("ADD", netns, elsewhere).code == 101


@pytest.mark.parametrize("key", ["backend", "exclude_namespaces", "cni_agent_run_dir"])
def test_a_mistaken_key_fails_pods_but_not_the_agent(node: Node, netns: str, key: str) -> None:
    """Code 7 naming the key; the agent must start, as it can mend the configuration."""
    node.add_pod()
    config = node.config(**{key: 5})
    answer = node.call("ADD", netns, config=config)
    assert (answer.code, f"{key}: 5 is not allowed" in answer.msg) == (7, True)
    assert node.call("ADD", netns, AGENT, config=config).status == 0
    assert rules(netns) == []


# -- what the runtime hands over -------------------------------------------------------------------


def test_pods_outside_the_mesh_start_while_the_api_server_is_down(node: Node, netns: str) -> None:
    """The annotations that containerd hands over say so; there is no request."""
    node.api.mute = True
    config = node.config(runtimeConfig=handed_over())
    answer = node.call("ADD", netns, config=config)
    assert (answer.status, answer.logged(f"no annotation {STATUS}", "info")) == (0, True)
    assert answer.took_s < QUICK_S
    assert node.api.requests == []


def test_what_is_handed_over_never_decides_about_rules(node: Node, pod_netns: str) -> None:
    """Redirect parameters come from the API server, where nobody on the node could change them."""
    node.add_pod(annotations={"traffic.sidecar.istio.io/excludeInboundPorts": "3306"})
    mine = {STATUS: "{}", "traffic.sidecar.istio.io/excludeInboundPorts": "9999"}
    answer = node.call("ADD", pod_netns, config=node.config(runtimeConfig=handed_over(**mine)))
    assert answer.status == 0
    there = "\n".join(rules(pod_netns))
    assert "--dport 3306 -j RETURN" in there
    assert "9999" not in there


@pytest.mark.parametrize(
    "annotations",
    [None, {}, {"other": "x"}, {CONFIG_SOURCE: None}, {CONFIG_SOURCE: ""}, [], "text"],
)
def test_what_is_no_evidence_is_asked_for(node: Node, pod_netns: str, annotations: object) -> None:
    """Without the kubelet's own annotation the map is one that some runtime made up."""
    node.add_pod()
    config = node.config(runtimeConfig={"io.kubernetes.cri.pod-annotations": annotations})
    assert node.call("ADD", pod_netns, config=config).status == 0
    assert len(node.api.requests) == 1
    assert is_captured(pod_netns)


def test_a_runtime_that_hands_over_nothing_is_asked_for(node: Node, pod_netns: str) -> None:
    """No runtimeConfig at all: one request."""
    node.add_pod(sidecar=False)
    answer = node.call("ADD", pod_netns)
    assert (answer.status, answer.logged("no container istio-proxy", "info")) == (0, True)
    (request,) = node.api.requests
    assert (request.method, request.path) == ("GET", "/api/v1/namespaces/shop/pods/web")
    assert request.headers["authorization"] == "Bearer token-1"


# -- static pods -----------------------------------------------------------------------------------


def test_a_static_pod_outside_the_mesh_is_never_looked_up(node: Node, netns: str) -> None:
    """Its mirror object may not exist yet, and need not: also when the API server is down."""
    over = handed_over(**{CONFIG_SOURCE: "file"})
    answer = node.call("ADD", netns, STATIC, config=node.config(runtimeConfig=over))
    assert (answer.status, answer.logged("static pod", "info")) == (0, True)
    node.api.mute = True
    assert node.call("ADD", netns, STATIC, config=node.config(runtimeConfig=over)).status == 0
    assert node.api.requests == []


def test_a_static_pod_is_captured_by_its_mirror(node: Node, pod_netns: str) -> None:
    """The runtime's uid is the kubelet's, which the mirror object keeps in an annotation."""
    node.add_pod(STATIC, mirror_of=STATIC.uid)
    config = node.config(runtimeConfig=handed_over(**{CONFIG_SOURCE: "file", STATUS: "{}"}))
    assert node.call("ADD", pod_netns, STATIC, config=config).status == 0
    assert is_captured(pod_netns)


# -- the API server's answers ----------------------------------------------------------------------


def test_a_yaml_kubeconfig_works(node: Node, pod_netns: str) -> None:
    """People and kubectl write YAML."""
    node.api.write_kubeconfig(node.kubeconfig, yaml=True)
    node.add_pod()
    assert node.call("ADD", pod_netns).status == 0
    assert is_captured(pod_netns)


def test_forbidden_is_final(node: Node, netns: str) -> None:
    """Code 102 at once, with the server's words."""
    node.api.always = Reply(403, 'pods "web" is forbidden')
    answer = node.call("ADD", netns)
    assert (answer.status, answer.code) == (1, 102)
    assert "is forbidden" in answer.msg
    assert answer.took_s < QUICK_S
    assert len(node.api.requests) == 1


def test_credentials_that_were_renewed_meanwhile_work(node: Node, pod_netns: str) -> None:
    """401: the kubeconfig is read again, as the agent replaces it in place."""
    server = node.api
    node.add_pod()
    server.tokens = {"token-2"}

    def renew() -> None:
        server.write_kubeconfig(node.kubeconfig, token="token-2")  # noqa: S106 - a test's

    server.script.append(Reply(401, "Unauthorized", before=renew))
    answer = node.call("ADD", pod_netns)
    assert answer.status == 0
    assert is_captured(pod_netns)
    assert "token-" not in answer.stderr


def test_credentials_that_stay_bad_are_named_without_being_told(node: Node, netns: str) -> None:
    """Code 102 after one more try; the token is nowhere."""
    node.api.tokens = set()
    answer = node.call("ADD", netns)
    assert (answer.status, answer.code) == (1, 102)
    assert len(node.api.requests) == 2
    assert "token-1" not in answer.stdout + answer.stderr


def test_an_object_that_catches_up_is_used(node: Node, pod_netns: str) -> None:
    """The former pod's object is passed over until the cache has the runtime's."""
    server = node.api
    node.add_pod(WEB._replace(uid="former"), sidecar=False)

    def catch_up() -> None:
        server.script.append(Reply(before=lambda: node.add_pod(WEB)))

    server.script.append(Reply(before=catch_up))
    assert node.call("ADD", pod_netns).status == 0
    assert len(server.requests) == 2
    assert is_captured(pod_netns)


def test_patience_ends_in_time(tmp_path: Path, netns: str) -> None:
    """What passes by itself is waited for, what lags shortly: codes 11 and 102, within 20 s.

    All at once, since each takes its time: an API server that fails, one that is not there, one
    that accepts and says nothing, a pod that was replaced, static pods without mirror, one whose
    API server is down.
    """
    with FakeApiServer() as good, FakeApiServer() as failing, FakeApiServer() as mute:
        failing.always = Reply(500, "etcdserver: request timed out")
        mute.mute = True
        node = Node(tmp_path, good)
        node.add_pod(WEB._replace(uid="former"))
        servers = {"failing": failing, "mute": mute, "good": good, "none": None}
        cases = [
            ("failing", WEB, 11, "HTTP 500", PASSING_MAX_S),
            ("none", WEB, 11, "Connection refused", PASSING_MAX_S),
            ("mute", WEB, 11, "timed out", PASSING_MAX_S),
            ("good", WEB, 102, "uid mismatch", LAGGING_MAX_S),
            ("good", STATIC, 102, "not found", LAGGING_MAX_S),
            ("none", STATIC, 11, "Connection refused", PASSING_MAX_S),
        ]
        for name, server in servers.items():
            (tmp_path / name).mkdir()
            path = tmp_path / name / "istio-cni-kubeconfig"
            if server is None:
                write_kubeconfig(path, {"server": "http://127.0.0.1:1"}, {"token": "t"})
            else:
                server.write_kubeconfig(path)

        def call(name: str, pod: Pod) -> Answer:
            source = "file" if pod is STATIC else "api"
            over = handed_over(**{CONFIG_SOURCE: source, STATUS: "{}"})
            run_dir = str(tmp_path / name)
            config = node.config(cni_agent_run_dir=run_dir, runtimeConfig=over)
            return node.call("ADD", netns, pod, config=config)

        with ThreadPoolExecutor(len(cases)) as pool:
            answers = list(pool.map(lambda case: call(case[0], case[1]), cases))
        for (name, pod, code, text, limit_s), answer in zip(cases, answers, strict=True):
            assert (answer.status, answer.code) == (1, code), name
            assert text in answer.msg
            assert f'"{pod.namespace}/{pod.name}"' in answer.msg
            assert answer.took_s < limit_s, name
        assert len(failing.requests) > 5
        assert len(good.requests) > 8
    assert rules(netns) == []


# -- manifests -------------------------------------------------------------------------------------


def test_pods_may_be_files(tmp_path: Path, pod_netns: str) -> None:
    """A node without API server: found by name, captured, and nothing else is asked."""
    node = Node(tmp_path)
    node.add_pod()
    assert not node.kubeconfig.exists()
    assert node.call("ADD", pod_netns).status == 0
    assert is_captured(pod_netns)
    missing = node.call("ADD", pod_netns, WEB._replace(name="wbe", container_id="b"))
    assert missing.code == 102
    assert str(node.manifests) in missing.msg
    assert '"shop/web"' in missing.msg


def test_a_person_s_yaml_is_understood(tmp_path: Path, pod_netns: str) -> None:
    """No uid, several documents, and a switch that YAML makes a boolean of."""
    node = Node(tmp_path)
    (node.manifests / "pods.yml").write_text(
        "kind: ConfigMap\n---\nkind: Pod\nmetadata:\n  name: web\n  namespace: shop\n"
        '  annotations: {sidecar.istio.io/status: "{}"}\n'
        "spec:\n  containers:\n  - name: istio-proxy\n    env:\n"
        "    - {name: INVALID_DROP, value: true}\n"
    )
    assert node.call("ADD", pod_netns).status == 0
    assert any("INVALID" in rule for rule in rules(pod_netns))
