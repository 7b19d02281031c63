"""The capture configuration in the reference's names: flags, environment, JSON and records.

Each row says under which names a setting is known, how its text is read and what it means.
`--config`, the command line, the environment and the attachment records of the plugin are all read
through it, and `to_settings` writes a configuration back in the same terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from istio_cni import constants
from istio_cni.errors import InvalidParameter, quoted
from istio_cni.rules import config as grammar
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import Family, PortRange

Value: TypeAlias = "str | bool | list[str]"
Parse: TypeAlias = Callable[[str, str], object]

_KERNEL_TABLES = (253, 254, 255)  # default, main, local


class Setting(NamedTuple):
    """One setting: its key in `--config`, its field, flag and variables, and its meaning.

    `parse` reads text; None marks a boolean, and `listed` a list of JSON strings. `default` is the
    text that stands for a missing value, as help shows it.
    """

    key: str
    field: str
    parse: Parse | None
    group: str
    help: str
    flag: str = ""
    short: str = ""
    env: tuple[str, ...] = ()
    default: str = ""
    listed: bool = False


def _mode(text: str, where: str) -> str:
    if text in ("", *grammar.MODES):
        return text or "REDIRECT"
    raise grammar.refuse(where, text, " or ".join(grammar.MODES))


def _uint32(text: str, where: str) -> int:
    value = grammar.number(text.strip(grammar.BLANKS), 1, 2**32 - 1)
    if value is None:
        raise grammar.refuse(where, text, "a decimal number 1-4294967295")
    return value


def _table(text: str, where: str) -> int:
    allowed = "a decimal number 1-4294967295, but not 253, 254 or 255, the kernel's own tables"
    value = grammar.number(text.strip(grammar.BLANKS), 1, 2**32 - 1)
    if value is None or value in _KERNEL_TABLES:
        raise grammar.refuse(where, text, allowed)
    return value


def _variant(text: str, where: str) -> str:
    if text not in ("", "legacy", "nft"):
        raise grammar.refuse(where, text, "legacy or nft, or the empty string to detect it")
    return text


def _backend(text: str, where: str) -> str:
    if text not in ("", "auto", "iptables", "nftables"):
        raise grammar.refuse(where, text, "auto, iptables or nftables")
    return text or "auto"


def _ports(text: str, where: str) -> tuple[PortRange, ...]:
    return grammar.parse_ports(text, where, colon=True)


def _port_selection(text: str, where: str) -> grammar.PortSelection:
    return grammar.parse_port_selection(text, where, colon=True)


PROXY, INBOUND, OUTBOUND = "proxy", "inbound capture", "outbound capture"
DNS, SPECIAL, BACKEND = "DNS capture", "special cases", "back end"

SETTINGS = (
    Setting(
        "PROXY_PORT", "outbound_port", grammar.parse_port, PROXY,
        "TCP port of the proxy's outbound listener",
        "envoy-port", "p", default=str(constants.OUTBOUND_PORT),
    ),
    Setting(
        "INBOUND_CAPTURE_PORT", "inbound_port", grammar.parse_port, PROXY,
        "TCP port of the proxy's inbound listener",
        "inbound-capture-port", "z", ("INBOUND_CAPTURE_PORT",), str(constants.INBOUND_PORT),
    ),
    Setting(
        "INBOUND_TUNNEL_PORT", "tunnel_port", grammar.parse_port, PROXY,
        "TCP port of the HBONE tunnel, which is never captured",
        "inbound-tunnel-port", "e", ("INBOUND_TUNNEL_PORT",), str(constants.TUNNEL_PORT),
    ),
    Setting(
        "PROXY_UID", "proxy_uids", grammar.parse_owners, PROXY,
        "users whose traffic is not captured: names, ids, ranges of ids "
        f"(default: the user in ENVOY_USER, else {constants.PROXY_ID})",
        "proxy-uid", "u", ("PROXY_UID",),
    ),
    Setting(
        "PROXY_GID", "proxy_gids", grammar.parse_owners, PROXY,
        "groups whose traffic is not captured (default: the value of --proxy-uid)",
        "proxy-gid", "g", ("PROXY_GID",),
    ),
    Setting(
        "INBOUND_INTERCEPTION_MODE", "mode", _mode, INBOUND,
        "REDIRECT, or TPROXY to keep the client's address",
        "istio-inbound-interception-mode", "m", ("ISTIO_INBOUND_INTERCEPTION_MODE",), "REDIRECT",
    ),
    Setting(
        "INBOUND_TPROXY_MARK", "tproxy_mark", _uint32, INBOUND,
        "packet mark of diverted connections, decimal (TPROXY)",
        "istio-inbound-tproxy-mark", "t", ("ISTIO_INBOUND_TPROXY_MARK",),
        str(constants.TPROXY_MARK),
    ),
    Setting(
        "INBOUND_TPROXY_ROUTE_TABLE", "tproxy_table", _table, INBOUND,
        "number of the routing table that delivers them locally (TPROXY)",
        "istio-inbound-tproxy-route-table", "r", ("ISTIO_INBOUND_TPROXY_ROUTE_TABLE",),
        str(constants.TPROXY_TABLE),
    ),
    Setting(
        "INBOUND_PORTS_INCLUDE", "inbound_ports", _port_selection, INBOUND,
        "ports to capture: *, a list with ranges, or nothing",
        "istio-inbound-ports", "b", ("ISTIO_INBOUND_PORTS",),
    ),
    Setting(
        "INBOUND_PORTS_EXCLUDE", "inbound_ports_excluded", _ports, INBOUND,
        "ports not to capture; counts only with --istio-inbound-ports=*",
        "istio-local-exclude-ports", "d", ("ISTIO_LOCAL_EXCLUDE_PORTS",),
    ),
    Setting(
        "OUTBOUND_IPRANGES_INCLUDE", "outbound_ranges", grammar.parse_range_selection, OUTBOUND,
        "destinations to capture: *, a list of CIDRs, or nothing",
        "istio-service-cidr", "i", ("ISTIO_SERVICE_CIDR",),
    ),
    Setting(
        "OUTBOUND_IPRANGES_EXCLUDE", "outbound_ranges_excluded", grammar.parse_ranges, OUTBOUND,
        "destinations not to capture: a list of CIDRs",
        "istio-service-exclude-cidr", "x", ("ISTIO_SERVICE_EXCLUDE_CIDR",),
    ),
    Setting(
        "OUTBOUND_PORTS_INCLUDE", "outbound_ports", _ports, OUTBOUND,
        "destination ports to capture whatever the address: a list with ranges",
        "istio-outbound-ports", "q", ("ISTIO_OUTBOUND_PORTS",),
    ),
    Setting(
        "OUTBOUND_PORTS_EXCLUDE", "outbound_ports_excluded", _ports, OUTBOUND,
        "destination ports not to capture, TCP and UDP: a list with ranges",
        "istio-local-outbound-ports-exclude", "o", ("ISTIO_LOCAL_OUTBOUND_PORTS_EXCLUDE",),
    ),
    Setting(
        "OUTBOUND_OWNER_GROUPS_INCLUDE", "owner_groups", grammar.parse_group_selection, OUTBOUND,
        "groups whose traffic is captured: *, names or ids (at most "
        f"{constants.MAX_OWNER_GROUPS_IPTABLES} with iptables); nobody's if empty",
        env=("ISTIO_OUTBOUND_OWNER_GROUPS",), default="*",
    ),
    Setting(
        "OUTBOUND_OWNER_GROUPS_EXCLUDE", "owner_groups_excluded", grammar.parse_owners, OUTBOUND,
        "groups whose traffic is not captured; counts only while all groups are included",
        env=("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE",),
    ),
    Setting(
        "REDIRECT_DNS", "redirect_dns", None, DNS,
        f"send DNS of applications to the proxy's port {constants.DNS_LISTENER_PORT}",
        "redirect-dns", env=("REDIRECT_DNS", "ISTIO_META_DNS_CAPTURE"),
    ),
    Setting(
        "CAPTURE_ALL_DNS", "capture_all_dns", None, DNS,
        "to any server, not only those of /etc/resolv.conf; needs --redirect-dns",
        "capture-all-dns", env=("CAPTURE_ALL_DNS",),
    ),
    Setting(
        "DNS_SERVERS_V4", "dns_servers_v4", grammar.parse_server, DNS,
        "IPv4 servers whose DNS is captured (flags: read from /etc/resolv.conf)", listed=True,
    ),
    Setting(
        "DNS_SERVERS_V6", "dns_servers_v6", grammar.parse_server, DNS,
        "IPv6 servers whose DNS is captured (flags: read from /etc/resolv.conf)", listed=True,
    ),
    Setting(
        "EXCLUDE_INTERFACES", "excluded_interfaces", grammar.parse_interfaces, SPECIAL,
        "interfaces whose traffic is left alone both ways",
        "istio-exclude-interfaces", "c", ("ISTIO_EXCLUDE_INTERFACES",),
    ),
    Setting(
        "KUBE_VIRT_INTERFACES", "reroute_interfaces", grammar.parse_interfaces, SPECIAL,
        "interfaces of virtual machines: what comes in there counts as outbound",
        "kube-virt-interfaces", "k", ("KUBE_VIRT_INTERFACES",),
    ),
    Setting(
        "DROP_INVALID", "drop_invalid", None, SPECIAL,
        "drop packets that conntrack calls INVALID",
        "drop-invalid", env=("DROP_INVALID", "INVALID_DROP"),
    ),
    Setting(
        "DUAL_STACK", "dual_stack", None, SPECIAL,
        "capture IPv6 also when the first address of the pod is IPv4",
        "dual-stack", env=("DUAL_STACK", "ISTIO_DUAL_STACK"),
    ),
    Setting(
        "ENABLE_INBOUND_IPV6", "ipv6", None, SPECIAL,
        "capture IPv6 (flags: found out from the addresses here)",
    ),
    Setting(
        "HOST_IPV4_LOOPBACK_CIDR", "loopback_v4", grammar.parse_loopback, SPECIAL,
        "IPv4 destinations that count as loopback: a CIDR inside 127.0.0.0/8",
        env=("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR",), default=constants.LOOPBACK_V4,
    ),
    Setting(
        "BACKEND", "backend", _backend, BACKEND,
        "auto, iptables or nftables, which programs the kernel without any program; auto takes "
        "iptables where it is installed", "backend", default="auto",
    ),
    Setting(
        "FORCE_IPTABLES_BINARY", "iptables_variant", _variant, BACKEND,
        "legacy or nft: use this variant of iptables instead of the one detected",
        "force-iptables-binary", env=("FORCE_IPTABLES_BINARY",),
    ),
    Setting(
        "NATIVE_NFTABLES", "native_nftables", None, BACKEND,
        "the same as --backend=nftables",
        "native-nftables", env=("NATIVE_NFTABLES",),
    ),
)  # fmt: skip


def _key(setting: Setting) -> str:
    return setting.key


def read_settings(
    values: Mapping[str, object], where: Callable[[Setting], str] = _key
) -> CaptureConfig:
    """Read settings by key into a configuration; `where` names a setting for messages.

    A key that is missing takes its default; PROXY_GID copies PROXY_UID. Raises InvalidParameter.
    """
    _refuse_unknown(values)
    fields: dict[str, object] = {}
    for setting in SETTINGS:
        if setting.key in values:
            fields[setting.field] = _read(setting, values[setting.key], where(setting))
    if fields.pop("native_nftables", False):
        fields["backend"] = "nftables"
    if not fields.get("proxy_uids"):
        fields["proxy_uids"] = (constants.PROXY_ID,)
    if not fields.get("proxy_gids"):
        fields["proxy_gids"] = fields["proxy_uids"]
    return CaptureConfig()._replace(**fields)  # type: ignore[arg-type] # each row's parser fits its field


def _refuse_unknown(values: Mapping[str, object]) -> None:
    known = {setting.key for setting in SETTINGS}
    for key in values:
        if key not in known:
            from difflib import get_close_matches  # a mistake only

            near = get_close_matches(key.upper(), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(sorted(known))}"
            raise InvalidParameter(f"unknown setting {quoted(key)}; {hint}")


def _read(setting: Setting, value: object, where: str) -> object:
    if setting.listed:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _mistyped(where, value, "a list of strings")
        return _servers(setting, value, where)
    if setting.parse is None:
        return _read_bool(value, where)
    if not isinstance(value, str):
        raise _mistyped(where, value, "a string")
    return setting.parse(value, where)


def _mistyped(where: str, value: object, allowed: str) -> InvalidParameter:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    kinds |= {list: "a list", dict: "an object"}
    kind = kinds.get(type(value), "null")
    return InvalidParameter(f"{where}: {kind} is not allowed; allowed: {allowed}")


def _servers(setting: Setting, value: list[str], where: str) -> tuple[str, ...]:
    wanted = Family.V6 if setting.field.endswith("v6") else Family.V4
    servers = dict.fromkeys(grammar.parse_server(item, where) for item in value)
    for server in servers:
        if grammar.family_of(server) is not wanted:
            raise grammar.refuse(where, server, f"IPv{wanted.value} addresses")
    return tuple(servers)


def _read_bool(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise _mistyped(where, value, "true or false")
    parsed = grammar.parse_bool(value)
    if parsed is None:
        raise grammar.refuse(where, value, "true or false")
    return parsed


def to_settings(config: CaptureConfig) -> dict[str, Value]:
    """Write a configuration as settings: `read_settings(to_settings(c)) == c`."""
    written: dict[str, Value] = {}
    for setting in SETTINGS:
        if setting.field == "native_nftables":
            continue
        value = getattr(config, setting.field)
        if setting.listed:
            written[setting.key] = list(value)
        elif isinstance(value, tuple):
            written[setting.key] = ",".join(map(_item_text, value))
        else:
            written[setting.key] = value if isinstance(value, bool) else str(value)
    return written


def _item_text(item: str | PortRange) -> str:
    if isinstance(item, str):
        return item
    return str(item.first) if item.first == item.last else f"{item.first}-{item.last}"
