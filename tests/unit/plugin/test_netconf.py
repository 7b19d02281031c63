"""Our keys of the network configuration: defaults, spellings, and what is refused how."""

from __future__ import annotations

import pytest

from istio_cni.errors import InvalidNetconf
from istio_cni.plugin.netconf import Netconf

JSON = dict[str, object]

DEFAULTS: JSON = {
    "ambient_enabled": False,
    "backend": "auto",
    "cni_agent_run_dir": "/var/run/istio-cni",
    "exclude_namespaces": frozenset(),
    "host_ipv4_loopback_cidr": "",
    "iptables_variant": "",
    "node_backend": "",
    "outbound_owner_groups": "*",
    "outbound_owner_groups_exclude": "",
    "plugin_log_level": "info",
    "pod_namespace": "",
    "pod_source": "kubernetes",
    "status_strict": False,
    "strict_annotations": False,
}
GIVEN: JSON = {
    "ambient_enabled": True,
    "backend": "iptables",
    "cni_agent_run_dir": "/run/x",
    "exclude_namespaces": ["a", "b"],
    "host_ipv4_loopback_cidr": "127.0.0.0/8",
    "iptables_variant": "legacy",
    "node_backend": "iptables-legacy",
    "outbound_owner_groups": "1,2",
    "outbound_owner_groups_exclude": "3",
    "plugin_log_level": "debug",
    "pod_namespace": "istio-system",
    "pod_source": "manifests:/etc/pods",
    "status_strict": True,
    "strict_annotations": True,
}
NULL_OR_EMPTY = {
    "backend": "auto",
    "cni_agent_run_dir": "",
    "plugin_log_level": "",
    "pod_source": "",
    "exclude_namespaces": [],
}


def values(netconf: Netconf) -> JSON:
    """Return all keys that concern us."""
    return {name: getattr(netconf, name) for name in Netconf.__slots__}


def test_without_any_key_of_ours_defaults_apply() -> None:
    """Other plugins' keys are not looked at."""
    netconf = Netconf({"name": "k8s", "kubernetes": {"kubeconfig": 5}, "backends": 1})
    assert values(netconf) == DEFAULTS
    assert (netconf.manifests, netconf.problems) == ("", [])


@pytest.mark.parametrize("key", DEFAULTS)
def test_null_is_absent(key: str) -> None:
    """Go writes it for what nobody set; an empty string often means the same."""
    assert values(Netconf({key: None})) == DEFAULTS
    if key in NULL_OR_EMPTY:
        assert values(Netconf({key: NULL_OR_EMPTY[key]})) == DEFAULTS


@pytest.mark.parametrize("spell", [str, str.upper, str.title])
def test_keys_are_read_in_any_case(spell: type[str]) -> None:
    """As the reference's decoder does."""
    netconf = Netconf({spell(key): value for key, value in GIVEN.items()})
    assert values(netconf) == GIVEN | {"exclude_namespaces": frozenset("ab")}
    assert netconf.manifests == "/etc/pods"
    assert netconf.problems == []


@pytest.mark.parametrize(
    ("keys", "backend"),
    [
        ({"backend": "nftables"}, "nftables"),
        ({"native_nftables": True}, "nftables"),
        ({"native_nftables": True, "backend": "iptables"}, "nftables"),
        ({"native_nftables": False, "backend": "iptables"}, "iptables"),
        ({"native_nftables": False}, "auto"),
    ],
)
def test_nftables_has_two_names(keys: dict[str, object], backend: str) -> None:
    """`native_nftables` is true on clusters that were installed that way; it wins."""
    netconf = Netconf(keys)
    assert netconf.problems == []
    assert values(netconf) == {**DEFAULTS, "backend": backend}
    assert Netconf({"native_nftables": False, "backend": "iptables"}).problems == []


STRING, BOOLEAN = "a string", "true or false"
BACKENDS, SOURCES = "auto, iptables, nftables", '"kubernetes" or "manifests:<directory>"'


@pytest.mark.parametrize(
    ("key", "value", "shown", "allowed"),
    [
        ("plugin_log_level", 5, "5", STRING),
        ("plugin_log_level", ["info"], '["info"]', STRING),
        ("cni_agent_run_dir", True, "true", STRING),
        ("cni_agent_run_dir", "/a\0b", r'"/a\u0000b"', "a path"),
        ("cni_agent_run_dir", "/\ud800", r'"/\ud800"', "a path"),
        ("ambient_enabled", "true", '"true"', BOOLEAN),
        ("ambient_enabled", 1, "1", BOOLEAN),
        ("exclude_namespaces", "kube-system", '"kube-system"', "a list of strings"),
        ("exclude_namespaces", ["a", 5], '["a", 5]', "a list of strings"),
        ("exclude_namespaces", {"a": 1}, '{"a": 1}', "a list of strings"),
        ("pod_namespace", {}, "{}", STRING),
        ("pod_source", False, "false", STRING),
        ("pod_source", "ftp:x", '"ftp:x"', SOURCES),
        ("pod_source", "manifests:", '"manifests:"', SOURCES),
        ("pod_source", "Kubernetes", '"Kubernetes"', SOURCES),
        ("pod_source", "manifests:/a\0", r'"manifests:/a\u0000"', "a path"),
        ("backend", "ipvs", '"ipvs"', BACKENDS),
        ("backend", "", '""', BACKENDS),
        ("backend", 1.5, "1.5", STRING),
        ("native_nftables", "yes", '"yes"', BOOLEAN),
        ("iptables_variant", "NFT", '"NFT"', "legacy, nft"),
        ("iptables_variant", [], "[]", STRING),
        ("strict_annotations", 0, "0", BOOLEAN),
        ("status_strict", "", '""', BOOLEAN),
        ("outbound_owner_groups", 5, "5", STRING),
        ("outbound_owner_groups_exclude", ["5"], '["5"]', STRING),
        ("host_ipv4_loopback_cidr", 127, "127", STRING),
    ],
)
def test_a_value_that_cannot_be_used_is_named(
    key: str, value: object, shown: str, allowed: str
) -> None:
    """Key, value as JSON has it, and what is allowed; the default stands in for it."""
    netconf = Netconf({key: value})
    (problem,) = netconf.problems
    assert isinstance(problem, InvalidNetconf)
    assert problem.msg == (
        f"network configuration, {key}: {shown} is not allowed; allowed: {allowed}"
    )
    assert values(netconf) == DEFAULTS


def test_every_mistake_is_found_and_every_other_key_read() -> None:
    """So that one look at the log is enough, and that DEL finds its records."""
    netconf = Netconf({**GIVEN, "backend": 1, "status_strict": 2, "pod_namespace": 3})
    assert len(netconf.problems) == 3
    assert netconf.cni_agent_run_dir == "/run/x"


def test_a_value_is_quoted_and_cut() -> None:
    """It may come from anywhere."""
    (problem,) = Netconf({"backend": "\x1b[2J" + "x" * 10_000}).problems
    assert r'"\u001b[2Jxxx' in problem.msg
    assert "(10004 characters)" in problem.msg
    assert len(problem.msg) < 400
