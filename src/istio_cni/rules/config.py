"""The capture configuration as a value, and the grammar of what people may write into it.

Flags, environment variables, the JSON of `--config`, pod annotations and attachment records all end
in one `CaptureConfig`; each list grammar stands here once. Items are trimmed, duplicates dropped in
first-seen order; what is refused is refused with its name, the offending item and what is allowed.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import NamedTuple, TypeAlias

from istio_cni import constants
from istio_cni.errors import InvalidParameter, quoted
from istio_cni.rules.model import Family, PortRange

ALL = "*"
MODES = ("REDIRECT", "TPROXY")
BLANKS = " \t"  # trimmed around items; a line break is refused, it could end a line of rule text

PortSelection: TypeAlias = str | tuple[PortRange, ...]
"""`ALL`, or the ports meant; an empty tuple means none."""
RangeSelection: TypeAlias = str | tuple[str, ...]
"""`ALL`, or CIDRs of either family; an empty tuple means none."""
GroupSelection: TypeAlias = str | tuple[str, ...]
"""`ALL`, or groups by name or id; an empty tuple means nobody."""


class CaptureConfig(NamedTuple):
    """Everything the rules of one pod depend on, with the defaults of `istio-iptables`.

    Source: istio tools/istio-iptables, pkg/config and pkg/constants.
    """

    outbound_port: int = constants.OUTBOUND_PORT
    inbound_port: int = constants.INBOUND_PORT
    tunnel_port: int = constants.TUNNEL_PORT
    proxy_uids: tuple[str, ...] = (constants.PROXY_ID,)
    proxy_gids: tuple[str, ...] = (constants.PROXY_ID,)
    mode: str = "REDIRECT"
    tproxy_mark: int = constants.TPROXY_MARK
    tproxy_table: int = constants.TPROXY_TABLE
    inbound_ports: PortSelection = ()
    inbound_ports_excluded: tuple[PortRange, ...] = ()
    owner_groups: GroupSelection = ALL
    owner_groups_excluded: tuple[str, ...] = ()
    outbound_ports: tuple[PortRange, ...] = ()
    outbound_ports_excluded: tuple[PortRange, ...] = ()
    outbound_ranges: RangeSelection = ()
    outbound_ranges_excluded: tuple[str, ...] = ()
    reroute_interfaces: tuple[str, ...] = ()
    excluded_interfaces: tuple[str, ...] = ()
    redirect_dns: bool = False
    capture_all_dns: bool = False
    drop_invalid: bool = False
    dual_stack: bool = False
    ipv6: bool = False
    dns_servers_v4: tuple[str, ...] = ()
    dns_servers_v6: tuple[str, ...] = ()
    loopback_v4: str = constants.LOOPBACK_V4
    backend: str = "auto"
    iptables_variant: str = ""

    @property
    def entries(self) -> int:
        """How many items all its lists have."""
        return sum(len(value) for value in self if isinstance(value, tuple))

    @property
    def tproxy(self) -> bool:
        """Whether inbound traffic goes through TPROXY instead of REDIRECT."""
        return self.mode == "TPROXY"

    @property
    def dns(self) -> bool:
        """Whether DNS is captured: asked for, and with a server known or all of them meant."""
        servers = self.dns_servers_v4 or self.dns_servers_v6
        return self.redirect_dns and bool(self.capture_all_dns or servers)

    @property
    def families(self) -> tuple[Family, ...]:
        """The families that get rules: IPv4 always, IPv6 when the pod has an address."""
        return (Family.V4, Family.V6) if self.ipv6 else (Family.V4,)

    @property
    def routes_inbound(self) -> bool:
        """Whether diverted packets need a policy rule and a local route."""
        return self.tproxy and self.inbound_ports != ()


def refuse(where: str, value: object, allowed: str) -> InvalidParameter:
    """Build the one-line refusal of a value: where it stands, what it is, what is allowed."""
    return InvalidParameter(f"{where}: {quoted(value)} is not allowed; allowed: {allowed}")


def items(text: str, where: str, allowed: str) -> tuple[str, ...]:
    """Split a comma list: "" is empty; items are trimmed, empty ones and later duplicates dropped.

    Blanks or commas alone are refused: they are neither a list nor the empty value.
    """
    if text == "":
        return ()
    found = dict.fromkeys(item.strip(BLANKS) for item in text.split(","))
    found.pop("", None)
    if not found:
        raise refuse(where, text, f"{allowed}, or the empty string for none")
    return tuple(found)


def number(text: str, low: int, high: int) -> int | None:
    """Read an unsigned decimal within bounds; None if it is none."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    value = int(text)
    return value if low <= value <= high else None


_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))


def parse_bool(text: str) -> bool | None:
    """Read a boolean as Go's strconv.ParseBool does; None if it is neither."""
    return True if text in _TRUE else False if text in _FALSE else None


PORT_LIST = "ports 0-65535 and ranges such as 8000-8100, separated by commas"


def parse_port(text: str, where: str) -> int:
    """Read one TCP port to listen on or to connect to, 1-65535."""
    port = number(text.strip(BLANKS), 1, 65535)
    if port is None:
        raise refuse(where, text, "a port 1-65535")
    return port


def parse_ports(text: str, where: str, *, colon: bool = False) -> tuple[PortRange, ...]:
    """Read a list of ports and ranges; `colon` also allows `a:b`, as iptables writes ranges."""
    ranges: dict[PortRange, None] = {}
    for item in items(text, where, PORT_LIST):
        separator = ":" if colon and ":" in item else "-"
        first, _, last = item.partition(separator)
        low = number(first.strip(BLANKS), 0, 65535)
        high = number(last.strip(BLANKS), 0, 65535) if separator in item else low
        if low is None or high is None or low > high:
            raise refuse(where, item, PORT_LIST)
        ranges[PortRange(low, high)] = None
    return tuple(ranges)


def parse_port_selection(text: str, where: str, *, colon: bool = False) -> PortSelection:
    """Read `*`, or a list of ports and ranges."""
    if text.strip(BLANKS) == ALL:
        return ALL
    return parse_ports(text, where, colon=colon)


CIDR_LIST = "CIDRs such as 10.0.0.0/8 or fd00::/8, separated by commas"


def parse_prefix(text: str, where: str, allowed: str = CIDR_LIST) -> str:
    """Read `address/length`; host bits are kept, IPv6 is written in its canonical form."""
    address, slash, length = text.partition("/")
    try:
        parsed = ip_address(address)
    except ValueError:
        raise refuse(where, text, allowed) from None
    size = number(length, 0, parsed.max_prefixlen)
    if not slash or size is None or str(size) != length or "%" in address:
        raise refuse(where, text, allowed)
    return f"{canonical_address(str(parsed))}/{size}"


def canonical_address(text: str) -> str:
    """Write an address canonically; an IPv4-mapped one keeps its dotted tail, on every Python."""
    address = ip_address(text)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return f"::ffff:{address.ipv4_mapped}"
    return str(address)


def parse_ranges(text: str, where: str) -> tuple[str, ...]:
    """Read a list of CIDRs of either family."""
    found = items(text, where, CIDR_LIST)
    return tuple(dict.fromkeys(parse_prefix(item, where) for item in found))


def parse_range_selection(text: str, where: str) -> RangeSelection:
    """Read `*`, or a list of CIDRs of either family."""
    return ALL if text.strip(BLANKS) == ALL else parse_ranges(text, where)


def family_of(prefix: str) -> Family:
    """Tell the family of a prefix or address; IPv4-mapped IPv6 is IPv6."""
    return Family.V6 if ":" in prefix else Family.V4


def is_loopback(prefix: str) -> bool:
    """Tell whether the address part is a loopback address, IPv4-mapped ones included."""
    address = ip_address(prefix.partition("/")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NAME = _LETTERS | frozenset("0123456789_.-")
STRICT_INTERFACES = (
    f"interface names of at most {constants.MAX_INTERFACE_NAME} characters, "
    "a letter first, then letters, digits, '_', '.' and '-', separated by commas"
)
INTERFACES = (
    f"interface names of at most {constants.MAX_INTERFACE_NAME} characters, "
    "letters, digits, '_', '.', '@' and '-', a trailing '+' for any name that begins so"
)


def parse_strict_interfaces(text: str, where: str) -> tuple[str, ...]:
    """Read interface names that a pod's author wrote, as the reference's annotations allow."""
    found = items(text, where, STRICT_INTERFACES)
    for name in found:
        too_long = len(name) > constants.MAX_INTERFACE_NAME
        if too_long or name[0] not in _LETTERS or not _NAME.issuperset(name):
            raise refuse(where, name, STRICT_INTERFACES)
    return found


def parse_interfaces(text: str, where: str) -> tuple[str, ...]:
    """Read interface names that an operator wrote: what iptables cannot misread."""
    found = items(text, where, INTERFACES)
    for name in found:
        stem = name.removesuffix("+")
        good = stem and stem[0] not in "-." and (_NAME | {"@"}).issuperset(stem)
        if len(name) > constants.MAX_INTERFACE_NAME or not good:
            raise refuse(where, name, INTERFACES)
    return found


_MAX_ID = 2**32 - 2  # (uid_t)-1 means "no change" to the kernel
OWNERS = "names, ids 0-4294967294 and ranges of ids such as 1000-1999, separated by commas"


def parse_owners(text: str, where: str) -> tuple[str, ...]:
    """Read users or groups: ids, ranges of ids, names."""
    return tuple(dict.fromkeys(_owner(item, where) for item in items(text, where, OWNERS)))


def _owner(item: str, where: str) -> str:
    ids = _ids(item)
    if ids is None and not is_owner_name(item):
        raise refuse(where, item, OWNERS)
    return ids or item


def is_id(text: str) -> bool:
    """Tell whether an owner is an id or a range of ids."""
    return _ids(text) is not None


def _ids(text: str) -> str | None:
    """Write an id or a range of ids as iptables prints it; to iptables 010 would be 8."""
    first, dash, last = text.partition("-")
    low = number(first, 0, _MAX_ID)
    high = number(last, 0, _MAX_ID) if dash else low
    if low is None or high is None or low > high:
        return None
    return str(low) if low == high else f"{low}-{high}"


def is_owner_name(text: str) -> bool:
    """Tell whether an owner can be the name of a user or group."""
    return len(text) <= 32 and (text[0] in _LETTERS or text[0] == "_") and _NAME.issuperset(text)


def parse_group_selection(text: str, where: str) -> GroupSelection:
    """Read `*`, or groups; how many there may be is the back end's business."""
    return ALL if text.strip(BLANKS) == ALL else parse_owners(text, where)


def parse_loopback(text: str, where: str) -> str:
    """Read the IPv4 loopback CIDR: inside 127.0.0.0/8, length 8 to 32."""
    allowed = "an IPv4 CIDR inside 127.0.0.0/8, such as 127.0.0.1/32"
    prefix = parse_prefix(text.strip(BLANKS), where, allowed)
    length = int(prefix.partition("/")[2])
    if family_of(prefix) is not Family.V4 or not is_loopback(prefix) or length < 8:
        raise refuse(where, text, allowed)
    return prefix


def parse_server(text: str, where: str) -> str:
    """Read the address of a DNS server, without prefix length or zone."""
    try:
        if "%" in text:
            raise ValueError(text)
        return canonical_address(text.strip(BLANKS))
    except ValueError:
        raise refuse(where, text, "IP addresses") from None
