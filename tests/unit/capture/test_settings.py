"""Settings by name: every key, its default, its refusal, and the way back."""

from __future__ import annotations

import json

import pytest

from cases import CASES
from istio_cni.capture.settings import SETTINGS, Value, read_settings, to_settings
from istio_cni.errors import InvalidParameter
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import PortRange

KEYS = [setting.key for setting in SETTINGS]
BOOLEANS = [setting.key for setting in SETTINGS if setting.parse is None]
LISTED = [setting.key for setting in SETTINGS if setting.listed]
TEXTS = [key for key in KEYS if key not in BOOLEANS and key not in LISTED]


def refusal(key: str, value: object) -> str:
    """Return the message with which a value is refused."""
    with pytest.raises(InvalidParameter) as caught:
        read_settings({key: value})
    return str(caught.value)


def test_the_keys_are_the_references_names() -> None:
    """Complete configurations that people and tools have written go on to be read."""
    assert set(KEYS) == {
        *("PROXY_PORT", "INBOUND_CAPTURE_PORT", "INBOUND_TUNNEL_PORT", "PROXY_UID", "PROXY_GID"),
        *("INBOUND_INTERCEPTION_MODE", "INBOUND_TPROXY_MARK", "INBOUND_TPROXY_ROUTE_TABLE"),
        *("INBOUND_PORTS_INCLUDE", "INBOUND_PORTS_EXCLUDE", "OUTBOUND_OWNER_GROUPS_INCLUDE"),
        *("OUTBOUND_OWNER_GROUPS_EXCLUDE", "OUTBOUND_PORTS_INCLUDE", "OUTBOUND_PORTS_EXCLUDE"),
        *("OUTBOUND_IPRANGES_INCLUDE", "OUTBOUND_IPRANGES_EXCLUDE", "KUBE_VIRT_INTERFACES"),
        *("EXCLUDE_INTERFACES", "REDIRECT_DNS", "CAPTURE_ALL_DNS", "DROP_INVALID", "DUAL_STACK"),
        *("ENABLE_INBOUND_IPV6", "DNS_SERVERS_V4", "DNS_SERVERS_V6", "HOST_IPV4_LOOPBACK_CIDR"),
        *("NATIVE_NFTABLES", "FORCE_IPTABLES_BINARY", "BACKEND"),
    }


def test_nothing_said_is_the_default() -> None:
    """Each setting that is left out takes the program's."""
    assert read_settings({}) == CaptureConfig()


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_survives_the_way_through_settings(name: str) -> None:
    """As values, and as the JSON of a record."""
    config = CASES[name].config
    assert read_settings(to_settings(config)) == config
    assert read_settings(json.loads(json.dumps(to_settings(config)))) == config


@pytest.mark.parametrize(
    ("key", "value", "field", "meant"),
    [
        ("PROXY_PORT", "16001", "outbound_port", 16001),
        ("INBOUND_CAPTURE_PORT", "16006", "inbound_port", 16006),
        ("INBOUND_TUNNEL_PORT", "16008", "tunnel_port", 16008),
        ("PROXY_UID", "1,2", "proxy_uids", ("1", "2")),
        ("PROXY_GID", "3", "proxy_gids", ("3",)),
        ("INBOUND_INTERCEPTION_MODE", "TPROXY", "mode", "TPROXY"),
        ("INBOUND_INTERCEPTION_MODE", "REDIRECT", "mode", "REDIRECT"),
        ("INBOUND_INTERCEPTION_MODE", "", "mode", "REDIRECT"),
        ("INBOUND_TPROXY_MARK", "4294967295", "tproxy_mark", 4294967295),
        ("INBOUND_TPROXY_ROUTE_TABLE", "252", "tproxy_table", 252),
        ("INBOUND_PORTS_INCLUDE", "*", "inbound_ports", "*"),
        ("INBOUND_PORTS_INCLUDE", "80:90", "inbound_ports", (PortRange(80, 90),)),
        ("INBOUND_PORTS_INCLUDE", "", "inbound_ports", ()),
        ("INBOUND_PORTS_EXCLUDE", " 80 , ", "inbound_ports_excluded", (PortRange(80, 80),)),
        ("OUTBOUND_IPRANGES_INCLUDE", "*", "outbound_ranges", "*"),
        ("OUTBOUND_IPRANGES_EXCLUDE", "FD00::/8", "outbound_ranges_excluded", ("fd00::/8",)),
        ("OUTBOUND_PORTS_INCLUDE", "1-2", "outbound_ports", (PortRange(1, 2),)),
        ("OUTBOUND_PORTS_EXCLUDE", "0", "outbound_ports_excluded", (PortRange(0, 0),)),
        ("OUTBOUND_OWNER_GROUPS_INCLUDE", "*", "owner_groups", "*"),
        ("OUTBOUND_OWNER_GROUPS_INCLUDE", "", "owner_groups", ()),
        ("OUTBOUND_OWNER_GROUPS_INCLUDE", "java,202", "owner_groups", ("java", "202")),
        ("OUTBOUND_OWNER_GROUPS_EXCLUDE", "ftp", "owner_groups_excluded", ("ftp",)),
        ("DNS_SERVERS_V4", ["10.0.0.1", "10.0.0.1"], "dns_servers_v4", ("10.0.0.1",)),
        ("DNS_SERVERS_V6", ["FD00::1"], "dns_servers_v6", ("fd00::1",)),
        ("EXCLUDE_INTERFACES", "eth+", "excluded_interfaces", ("eth+",)),
        ("KUBE_VIRT_INTERFACES", "tap0,tap1", "reroute_interfaces", ("tap0", "tap1")),
        ("ENABLE_INBOUND_IPV6", True, "ipv6", True),
        ("DUAL_STACK", "1", "dual_stack", True),
        ("DROP_INVALID", "false", "drop_invalid", False),
        ("HOST_IPV4_LOOPBACK_CIDR", "127.0.0.0/8", "loopback_v4", "127.0.0.0/8"),
        ("BACKEND", "iptables", "backend", "iptables"),
        ("BACKEND", "", "backend", "auto"),
        ("FORCE_IPTABLES_BINARY", "legacy", "iptables_variant", "legacy"),
        ("NATIVE_NFTABLES", True, "backend", "nftables"),
        ("NATIVE_NFTABLES", False, "backend", "auto"),
    ],
)
def test_what_a_setting_means(key: str, value: Value, field: str, meant: object) -> None:
    """One key changes one field, except that the group follows the user."""
    config = read_settings({key: value})
    assert getattr(config, field) == meant
    changed = {
        name for name in config._fields if getattr(config, name) != getattr(CaptureConfig(), name)
    }
    assert changed <= {field, *(["proxy_gids"] if key == "PROXY_UID" else [])}


def test_the_group_is_a_copy_of_the_user() -> None:
    """List and all, unless it is given; empty counts as not given."""
    assert read_settings({"PROXY_UID": "1,2"}).proxy_gids == ("1", "2")
    assert read_settings({"PROXY_UID": "1,2", "PROXY_GID": ""}).proxy_gids == ("1", "2")
    assert read_settings({"PROXY_UID": "1,2", "PROXY_GID": "3"}).proxy_gids == ("3",)
    assert read_settings({"PROXY_UID": ""}).proxy_uids == ("1337",)


def test_native_nftables_wins() -> None:
    """Over a back end named beside it."""
    assert read_settings({"NATIVE_NFTABLES": True, "BACKEND": "iptables"}).backend == "nftables"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("PROXY_PROT", "did you mean PROXY_PORT?"),
        ("proxy_port", "did you mean PROXY_PORT?"),
        ("INBOUND_PORTS", "did you mean INBOUND_PORTS_INCLUDE?"),
        ("DRY_RUN", "allowed: BACKEND, CAPTURE_ALL_DNS, "),
        ("\x1b[2J\n", "allowed: "),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(key: str, hint: str) -> None:
    """Or with all of them, where none is near."""
    message = refusal(key, "1")
    assert message.startswith(f"unknown setting {json.dumps(key)}; {hint}")
    assert message.isprintable()


@pytest.mark.parametrize("key", TEXTS)
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (15001, "a number"),
        (1.5, "a number"),
        (True, "a boolean"),
        (None, "null"),
        ({}, "an object"),
    ],
)
def test_a_text_is_written_as_a_string(key: str, value: object, kind: str) -> None:
    """Numbers, too; the message names what stands there instead."""
    assert refusal(key, value) == f"{key}: {kind} is not allowed; allowed: a string"


@pytest.mark.parametrize("key", BOOLEANS)
def test_a_boolean_is_true_or_false(key: str) -> None:
    """As JSON or in Go's spellings."""
    assert refusal(key, 1) == f"{key}: a number is not allowed; allowed: true or false"
    assert refusal(key, "yes") == f'{key}: "yes" is not allowed; allowed: true or false'
    for value in (True, "true", "1", "T"):
        assert read_settings({key: value}) != CaptureConfig()
        assert read_settings({key: not value}) == CaptureConfig()


@pytest.mark.parametrize(
    ("key", "other"), [("DNS_SERVERS_V4", "fd00::53"), ("DNS_SERVERS_V6", "10.0.0.1")]
)
def test_servers_are_addresses_of_their_family(key: str, other: str) -> None:
    """In a list."""
    assert refusal(key, other) == f"{key}: a string is not allowed; allowed: a list of strings"
    assert refusal(key, [1]) == f"{key}: a list is not allowed; allowed: a list of strings"
    assert refusal(key, [other]) == (
        f'{key}: "{other}" is not allowed; allowed: IPv{key[-1]} addresses'
    )
    assert refusal(key, ["x"]) == f'{key}: "x" is not allowed; allowed: IP addresses'


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("INBOUND_INTERCEPTION_MODE", "tproxy"),
        ("INBOUND_INTERCEPTION_MODE", "NONE"),
        ("INBOUND_TPROXY_MARK", "0"),
        ("INBOUND_TPROXY_MARK", "0x539"),
        ("INBOUND_TPROXY_MARK", "4294967296"),
        ("INBOUND_TPROXY_ROUTE_TABLE", "main"),
        ("INBOUND_TPROXY_ROUTE_TABLE", "0"),
        ("INBOUND_TPROXY_ROUTE_TABLE", "253"),
        ("INBOUND_TPROXY_ROUTE_TABLE", "254"),
        ("INBOUND_TPROXY_ROUTE_TABLE", "255"),
        ("BACKEND", "iptables-nft"),
        ("FORCE_IPTABLES_BINARY", "iptables-legacy"),
        ("PROXY_PORT", ""),
        ("HOST_IPV4_LOOPBACK_CIDR", ""),
        ("OUTBOUND_IPRANGES_EXCLUDE", "*"),
        ("INBOUND_PORTS_EXCLUDE", "*"),
    ],
)
def test_what_is_refused_is_named(key: str, value: str) -> None:
    """The key, the value and what is allowed."""
    assert refusal(key, value).startswith(f'{key}: "{value}" is not allowed; allowed: ')


@pytest.mark.parametrize("key", TEXTS)
def test_long_and_foul_values_are_refused_on_one_line(key: str) -> None:
    """Whatever the setting, nothing of ten kilobytes or with escapes passes or is repeated."""
    for value in ("x\n" * 5000, "\x1b[2J", "1\n", "eth0\r\n"):
        message = refusal(key, value)
        assert message.startswith(f"{key}: ")
        assert message.isprintable()
        assert len(message) < 600
