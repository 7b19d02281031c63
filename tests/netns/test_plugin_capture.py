"""What the plugin makes of a pod's object in the kernel, and what it refuses to make of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_apiserver import Reply
from netns.plugin import JSON, WEB, Node, give_address, is_captured, rules

pytestmark = pytest.mark.netns

TRAFFIC = "traffic.sidecar.istio.io/"
DUAL_STACK: JSON = {"name": "ISTIO_DUAL_STACK", "value": "true"}


# -- what is captured ------------------------------------------------------------------------------


def test_a_pod_with_sidecar_is_captured(node: Node, pod_netns: str) -> None:
    """Both ways, with the proxy's own ports left out, and the log says by which variant."""
    node.add_pod(env=[DUAL_STACK])
    answer = node.call("ADD", pod_netns)
    assert answer.status == 0
    assert answer.json == {"cniVersion": "1.1.0"}
    there = rules(pod_netns)
    assert "-A OUTPUT -j ISTIO_OUTPUT" in there
    assert "-A PREROUTING -p tcp -j ISTIO_INBOUND" in there
    for port in (15020, 15021, 15090):
        assert f"-A ISTIO_INBOUND -p tcp -m tcp --dport {port} -j RETURN" in there
    (line,) = answer.log
    assert line["msg"] == "captured: container istio-proxy, annotation sidecar.istio.io/status"
    assert line["pod"] == "shop/web"
    assert "iptables: nft" in str(line["variants"])


@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_the_variant_that_the_installer_found_is_used(
    node: Node, pod_netns: str, variant: str
) -> None:
    """It is a key of the configuration, and proven by CHECK as by anybody."""
    node.add_pod(env=[DUAL_STACK])
    config = node.config(iptables_variant=variant)
    answer = node.call("ADD", pod_netns, config=config)
    assert answer.status == 0
    assert answer.log[0]["variants"] == f"iptables: {variant}, ip6tables: {variant}"
    assert is_captured(pod_netns)
    assert node.call("CHECK", pod_netns, config=config).silent


@pytest.mark.parametrize(
    ("addresses", "env", "captured"),
    [
        (["10.1.0.5/24"], [], (True, False)),
        (["10.1.0.5/24"], [DUAL_STACK], (True, False)),
        (["10.1.0.5/24", "fd00::5/64"], [], (True, False)),
        (["10.1.0.5/24", "fd00::5/64"], [DUAL_STACK], (True, True)),
        (["fd00::5/64"], [], (True, True)),
        (["fd00::5/64"], [DUAL_STACK], (True, True)),
    ],
)
def test_the_pod_s_addresses_say_which_families_are_captured(
    node: Node, netns: str, addresses: list[str], env: list[JSON], captured: tuple[bool, bool]
) -> None:
    """IPv4 always; IPv6 if the first address is one, or any with dual stack."""
    give_address(netns, *addresses)
    node.add_pod(env=env)
    assert node.call("ADD", netns).status == 0
    assert (is_captured(netns, 4), is_captured(netns, 6)) == captured
    assert node.call("CHECK", netns).silent


def test_ipv6_that_is_left_out_is_pointed_out(node: Node, pod_netns: str) -> None:
    """As in the reference the first address decides; whoever reads the log should know."""
    node.add_pod()
    answer = node.call("ADD", pod_netns)
    assert (is_captured(pod_netns), is_captured(pod_netns, 6)) == (True, False)
    assert answer.logged("IPv6 is not captured: the pod's first address is IPv4", "warn")


def test_a_pod_without_address_is_refused(node: Node, netns: str) -> None:
    """Nobody could talk to it, and nothing tells which families it will have."""
    node.add_pod()
    answer = node.call("ADD", netns)
    assert (answer.status, answer.code) == (1, 106)
    assert "no valid local address" in answer.msg
    assert '"shop/web"' in answer.msg
    assert (rules(netns), node.records) == ([], [])


# -- the proxy's environment -----------------------------------------------------------------------


def test_a_switch_of_the_proxy_makes_its_rules(node: Node, pod_netns: str) -> None:
    """INVALID_DROP and DNS capture, in any of Go's spellings."""
    node.add_pod(
        env=[
            {"name": "INVALID_DROP", "value": "TRUE"},
            {"name": "ISTIO_META_DNS_CAPTURE", "value": "t"},
            DUAL_STACK,
        ]
    )
    answer = node.call("ADD", pod_netns)
    assert (answer.status, answer.stderr.count("warn")) == (0, 0)
    there = "\n".join(rules(pod_netns))
    assert "--ctstate INVALID -j ISTIO_DROP" in there
    assert "--dport 53 -j REDIRECT --to-ports 15053" in there


def test_a_switch_that_cannot_be_read_is_off_and_reported(node: Node, pod_netns: str) -> None:
    """Neither a word that is no boolean nor a value that is elsewhere is guessed at."""
    field: JSON = {"fieldRef": {"fieldPath": "metadata.labels['dns']"}}
    node.add_pod(
        env=[
            {"name": "INVALID_DROP", "value": "yes"},
            {"name": "ISTIO_META_DNS_CAPTURE", "valueFrom": field},
        ]
    )
    answer = node.call("ADD", pod_netns)
    assert answer.status == 0
    assert answer.logged('INVALID_DROP of the proxy: "yes" is not a boolean: off', "warn")
    assert answer.logged("ISTIO_META_DNS_CAPTURE of the proxy comes from a reference", "warn")
    there = "\n".join(rules(pod_netns))
    assert "INVALID" not in there
    assert "15053" not in there


# -- annotations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("excludeInterfaces", "eth1 -j ACCEPT", '"eth1 -j ACCEPT"'),
        ("excludeInterfaces", "eth0,--help", '"--help"'),
        ("kubevirtInterfaces", "$(reboot)", '"$(reboot)"'),
        ("includeInboundPorts", "80\n-A INPUT -j ACCEPT", r'"80\n-A INPUT -j ACCEPT"'),
        ("excludeOutboundPorts", "80,\x1b[2J\x07", r'"\u001b[2J\u0007"'),
        ("excludeInboundPorts", "22 -j ACCEPT", '"22 -j ACCEPT"'),
        ("includeOutboundIPRanges", "10.0.0.0/8,all", '"all"'),
        ("excludeOutboundIPRanges", "*", '"*"'),
        ("excludeOutboundIPRanges", "9" * 10_000, f'"{"9" * 254}…" (10000 characters)'),
    ],
)
def test_a_value_outside_its_grammar_is_refused_by_name(
    node: Node, pod_netns: str, name: str, value: str, shown: str
) -> None:
    """Code 105: pod, annotation, item, and what is allowed; quoted and cut, nothing programmed."""
    node.add_pod(annotations={f"{TRAFFIC}{name}": value})
    answer = node.call("ADD", pod_netns)
    assert (answer.status, answer.code) == (1, 105)
    assert f'pod "shop/web": annotation {TRAFFIC}{name}: {shown} is not allowed' in answer.msg
    assert "allowed: " in answer.msg
    assert len(answer.msg) < 700
    assert answer.log[-1]["msg"] == answer.msg
    for raw in ("\x1b", "\x07", "\x7f"):
        assert raw not in answer.stdout + answer.stderr
    assert answer.stderr.count("\n") == len(answer.log)
    assert (rules(pod_netns), node.records) == ([], [])


def test_an_unknown_annotation_is_pointed_out(node: Node, pod_netns: str) -> None:
    """A typing mistake would silently capture what should not be; or be refused, if wanted."""
    node.add_pod(annotations={f"{TRAFFIC}excludeInboundPort": "22"})
    lenient = node.call("ADD", pod_netns)
    assert lenient.status == 0
    assert lenient.logged(f"did you mean {TRAFFIC}excludeInboundPorts?", "warn")
    strict = node.call("ADD", pod_netns, config=node.config(strict_annotations=True))
    assert (strict.code, "excludeInboundPort" in strict.msg) == (105, True)
    assert is_captured(pod_netns)  # by the first one: a refused repetition takes nothing away


def test_thousands_of_unknown_annotations_cost_no_time(node: Node, pod_netns: str) -> None:
    """A few are named, the rest is counted."""
    node.add_pod(annotations={f"{TRAFFIC}{'ports' * 40}{number}": "" for number in range(3000)})
    answer = node.call("ADD", pod_netns)
    assert answer.status == 0
    assert answer.took_s < 3
    assert answer.stderr.count("unknown annotation") == 6
    assert answer.logged("and 2995 more")


# -- what is left alone ----------------------------------------------------------------------------


def test_mode_none_leaves_a_pod_alone(node: Node, netns: str) -> None:
    """The pod's author says that it takes care of itself; the log repeats it."""
    node.add_pod(annotations={"sidecar.istio.io/interceptionMode": "NONE"})
    answer = node.call("ADD", netns)
    assert (answer.status, answer.logged("interceptionMode is NONE", "info")) == (0, True)
    assert rules(netns) == []


def test_a_pod_on_the_host_s_network_is_left_alone(node: Node, netns: str) -> None:
    """Its traffic is the node's."""
    node.add_pod(hostNetwork=True)
    answer = node.call("ADD", netns)
    assert (answer.status, answer.logged("on the host's network", "info")) == (0, True)
    assert rules(netns) == []


def as_host(then: str = "") -> list[str]:
    """Make a wrapper in which a fresh namespace is that of process 1, as on a node of its own."""
    script = f'"$0"; status=$?; {then}; exit $status'
    return ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", script]


@pytest.mark.parametrize("path", ["/proc/1/ns/net", "/proc/self/ns/net"])
@pytest.mark.parametrize("override", [None, "1"])
def test_the_host_s_namespace_is_never_programmed(
    tmp_path: Path, path: str, override: str | None
) -> None:
    """Code 8, whatever the override says; not even a table is made."""
    node = Node(tmp_path)
    node.add_pod()
    state = tmp_path / "state"
    then = f"{{ nft list ruleset; cat /proc/net/ip_tables_names; ip rule; }} >{state} 2>&1"
    answer = node.call("ADD", path, env={"CNI_NETNS_OVERRIDE": override}, wrapper=as_host(then))
    assert (answer.status, answer.code) == (1, 8)
    assert f'"{path}"' in answer.msg
    assert node.records == []
    assert [line.split()[-1] for line in state.read_text().splitlines()] == [
        *("local", "main", "default")
    ]


def test_the_namespace_is_the_one_that_the_call_began_with(
    node: Node, new_netns: Callable[[], str], tmp_path: Path
) -> None:
    """A path may lead elsewhere after the look-up, to the host even: process ids are used again."""
    meant, other = new_netns(), new_netns()
    for path in (meant, other):
        give_address(path, "10.1.0.5/24")
    link = tmp_path / "netns"
    link.symlink_to(meant)

    def lead_elsewhere() -> None:
        link.unlink()
        link.symlink_to(other)

    node.add_pod()
    node.api.script.append(Reply(before=lead_elsewhere))
    assert node.call("ADD", str(link)).status == 0
    assert (is_captured(meant), is_captured(other)) == (True, False)


def test_the_plugin_s_own_namespace_needs_the_override(tmp_path: Path, pod_netns: str) -> None:
    """A runtime inside a namespace of its own may mean it, and says so."""
    node = Node(tmp_path)
    node.add_pod()
    own, name = "/proc/self/ns/net", os.path.basename(pod_netns)
    script = f'ip netns exec {name} "$0"; exit $?'
    inside = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", script]
    assert node.call("ADD", own, wrapper=inside).code == 8
    assert rules(pod_netns) == []
    meant = node.call("ADD", own, wrapper=inside, env={"CNI_NETNS_OVERRIDE": "TRUE"})
    assert meant.status == 0
    assert is_captured(pod_netns)


def test_the_override_is_void_where_the_host_s_namespace_is_unknown(
    tmp_path: Path, pod_netns: str
) -> None:
    """Then the plugin's own may be the host's."""
    node = Node(tmp_path)
    node.add_pod()
    script = f'mount -t tmpfs none /proc/1; ip netns exec {os.path.basename(pod_netns)} "$0"'
    hidden = ["unshare", "-m", "sh", "-c", script]
    override = {"CNI_NETNS_OVERRIDE": "1"}
    assert node.call("ADD", "/proc/self/ns/net", wrapper=hidden, env=override).code == 8
    assert rules(pod_netns) == []


@pytest.mark.parametrize("kind", ["missing", "file", "directory", "other namespace"])
def test_a_namespace_that_cannot_be_opened_fails_captured_pods_only(
    node: Node, tmp_path: Path, kind: str
) -> None:
    """Code 8 with the path; a pod that is not ours does not care."""
    paths = {
        "missing": str(tmp_path / "gone"),
        "file": __file__,
        "directory": str(tmp_path),
        "other namespace": "/proc/self/ns/uts",
    }
    node.add_pod()
    answer = node.call("ADD", paths[kind])
    assert (answer.status, answer.code) == (1, 8)
    assert paths[kind] in answer.msg
    assert node.records == []
    node.add_pod(sidecar=False)
    assert node.call("ADD", paths[kind]).status == 0


# -- ambient mode ----------------------------------------------------------------------------------


def test_ambient_mode_is_refused_where_it_would_be_needed(
    node: Node, pod_netns: str, new_netns: Callable[[], str]
) -> None:
    """Pods with sidecar are captured, others refused with code 7; agent and exclusions pass."""
    config = node.config(ambient_enabled=True)
    node.add_pod()
    assert node.call("ADD", pod_netns, config=config).status == 0
    assert is_captured(pod_netns)
    plain = WEB._replace(name="plain", container_id="b1a")
    node.add_pod(plain, sidecar=False)
    other = new_netns()
    answer = node.call("ADD", other, plain, config=config)
    assert (answer.status, answer.code) == (1, 7)
    assert "ambient_enabled: true is not supported" in answer.msg
    assert '"shop/plain"' in answer.msg
    agent = WEB._replace(name="istio-cni-node-abcde", namespace="istio-system")
    assert node.call("ADD", other, agent, config=config).status == 0
    system = WEB._replace(namespace="kube-system")
    assert node.call("ADD", other, system, config=config).status == 0


# -- a run dir that is no use ----------------------------------------------------------------------


def test_a_run_dir_that_cannot_be_written_costs_the_record_only(
    tmp_path: Path, pod_netns: str
) -> None:
    """Captured, with a warning; CHECK and DEL say what they miss and succeed."""
    node = Node(tmp_path)
    node.add_pod()
    read_only = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o ro none "$1" && exec "$2"', "sh"]
    wrapper = [*read_only, str(node.run_dir)]
    answer = node.call("ADD", pod_netns, wrapper=wrapper)
    assert (answer.status, answer.logged("no record of this attachment", "warn")) == (0, True)
    assert answer.logged("Read-only file system", "warn")
    assert is_captured(pod_netns)
    checked = node.call("CHECK", pod_netns, wrapper=wrapper)
    assert checked.silent
    assert checked.logged("derived: captured", "warn")
    assert node.call("DEL", pod_netns, wrapper=wrapper).silent


def test_a_run_dir_that_is_missing_is_made(tmp_path: Path, pod_netns: str) -> None:
    """Nobody needs to prepare it, and nobody else can read it."""
    node = Node(tmp_path)
    node.add_pod(env=[DUAL_STACK])
    run_dir = tmp_path / "new" / "run"
    answer = node.call("ADD", pod_netns, config=node.config(cni_agent_run_dir=str(run_dir)))
    assert (answer.status, answer.logged("", "warn")) == (0, False)
    records = run_dir / "attachments"
    assert [path.name for path in records.iterdir()] == ["c0ffee-eth0"]
    assert records.stat().st_mode & 0o777 == 0o700
    assert (records / "c0ffee-eth0").stat().st_mode & 0o777 == 0o600


def test_a_run_dir_that_is_a_file_costs_the_record_only(tmp_path: Path, pod_netns: str) -> None:
    """The same with any other mistake."""
    node = Node(tmp_path)
    node.add_pod()
    config = node.config(cni_agent_run_dir=__file__)
    answer = node.call("ADD", pod_netns, config=config)
    assert (answer.status, answer.logged("no record", "warn")) == (0, True)
    assert node.call("CHECK", pod_netns, config=config).silent
    assert node.call("DEL", pod_netns, config=config).silent
    valid = config | {"cni.dev/valid-attachments": []}
    assert node.call("GC", config=valid).silent


def test_decisions_are_in_the_run_dir_s_log(node: Node, pod_netns: str) -> None:
    """One JSON object a line with the call's identity, failures included; nobody else's to read."""
    node.add_pod(annotations={f"{TRAFFIC}includeInboundPorts": "http"})
    refused = node.call("ADD", pod_netns)
    system = node.call("ADD", pod_netns, WEB._replace(namespace="kube-system"))
    log = node.run_dir / "istio-cni.log"
    assert log.read_text() == refused.stderr + system.stderr
    assert log.stat().st_mode & 0o777 == 0o600
    (line,) = refused.log
    assert set(line) >= {"time", "level", "scope", "msg", "verb", "container_id", "netns", "pod"}
    assert (line["level"], line["code"], line["verb"]) == ("error", 105, "ADD")


def test_a_pod_name_cannot_forge_the_log(node: Node, netns: str) -> None:
    """What comes in CNI_ARGS is escaped and cut like everything else."""
    name = "a\n\x1b[2J\x7f" + "b" * 1000
    args = f"K8S_POD_NAMESPACE=kube-system;K8S_POD_NAME={name}"
    answer = node.call("ADD", netns, env={"CNI_ARGS": args})
    assert answer.status == 0
    (line,) = answer.log
    assert len(str(line["pod"])) == 256
    assert not {"\x1b", "\x7f"} & set(answer.stderr)


def test_a_pod_name_that_is_no_text_is_one_that_nobody_has(node: Node, netns: str) -> None:
    """Code 102, not a fault of ours; the server is asked for that name and for no other path."""
    node.api.always = Reply(403, "no")
    args = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=a/../b?\udcff\n"
    answer = node.call("ADD", netns, env={"CNI_ARGS": args})
    assert (answer.status, answer.code) == (1, 102)
    (request,) = node.api.requests
    assert request.path == "/api/v1/namespaces/shop/pods/a%2F..%2Fb%3F%FF%0A"
