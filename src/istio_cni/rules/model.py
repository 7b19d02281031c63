"""The one rule model: table, chain, matches, one verdict.

Generators make these values, renderers print them, comparisons and undo derive from them, so no
rule is written twice and no renderer sees an option string. A rule carries the address family it
belongs to, or none when both families hold the same rule; that is enough for iptables (two lists)
and for an nf_tables `inet` table (one list), whose orders agree.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

from istio_cni.constants import CHAIN_PREFIX


class Family(Enum):
    """An address family; the value is the IP version."""

    V4 = 4
    V6 = 6


class Table(Enum):
    """A netfilter table, by its iptables name."""

    FILTER = "filter"
    MANGLE = "mangle"
    NAT = "nat"
    RAW = "raw"


BUILT_IN_CHAINS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")


class MatchKind(Enum):
    """What a match looks at; the order is the one in which rules are compared."""

    IN_INTERFACE = 1
    OUT_INTERFACE = 2
    SOURCE = 3
    DESTINATION = 4
    PROTOCOL = 5
    SOURCE_PORT = 6
    DESTINATION_PORT = 7
    OWNER_UID = 8
    OWNER_GID = 9
    CONNTRACK_STATE = 10
    MARK = 11
    CONNECTION_MARK = 12


class PortRange(NamedTuple):
    """Ports `first` to `last`, both included; a single port is a range of one."""

    first: int
    last: int


ALL_PORTS = PortRange(0, 65535)


class Interface(NamedTuple):
    """A network interface by name; a trailing `+` matches every name that begins so."""

    kind: MatchKind
    name: str
    negate: bool = False


class Address(NamedTuple):
    """A source or destination prefix, `address/length`, host bits as the user gave them."""

    kind: MatchKind
    prefix: str
    negate: bool = False


class Protocol(NamedTuple):
    """A transport protocol: `tcp` or `udp`."""

    kind: MatchKind
    name: str
    negate: bool = False


class Ports(NamedTuple):
    """Source or destination ports of the transport protocol; any of the ranges."""

    kind: MatchKind
    ranges: tuple[PortRange, ...]
    negate: bool = False


class Owner(NamedTuple):
    """The user or group of a socket: an id, a range `a-b` of ids, or a name not yet resolved."""

    kind: MatchKind
    id: str
    negate: bool = False


class ConntrackState(NamedTuple):
    """Any of some conntrack states, in the kernel's upper-case names."""

    kind: MatchKind
    states: tuple[str, ...]
    negate: bool = False


class Mark(NamedTuple):
    """The mark of the packet, or of its connection."""

    kind: MatchKind
    value: int
    negate: bool = False


Match: TypeAlias = Interface | Address | Protocol | Ports | Owner | ConntrackState | Mark


class VerdictKind(Enum):
    """What a rule does with a packet."""

    ACCEPT = "accept"
    DROP = "drop"
    RETURN = "return"
    JUMP = "jump"
    REDIRECT = "redirect"
    TPROXY = "tproxy"
    SET_MARK = "set mark"
    SAVE_MARK = "save mark"
    RESTORE_MARK = "restore mark"
    ZONE = "zone"


class Verdict(NamedTuple):
    """What a rule does: its kind, and the chain, port or number (mark, zone) the kind needs."""

    kind: VerdictKind
    chain: str = ""
    port: int = 0
    value: int = 0


class Rule(NamedTuple):
    """One rule. `family` None means both; `position` is where to insert (1-based) or None."""

    table: Table
    chain: str
    matches: tuple[Match, ...]
    verdict: Verdict
    family: Family | None = None
    position: int | None = None


class Ruleset(NamedTuple):
    """Rules in emission order, all of them for families that are to be captured."""

    families: tuple[Family, ...]
    rules: tuple[Rule, ...]

    def of(self, family: Family) -> tuple[Rule, ...]:
        """Return the rules of one family, none if that family is not captured."""
        if family not in self.families:
            return ()
        return tuple(rule for rule in self.rules if rule.family in (None, family))


def in_interface(name: str) -> Interface:
    """Match packets that came in through an interface."""
    return Interface(MatchKind.IN_INTERFACE, name)


def out_interface(name: str) -> Interface:
    """Match packets that leave through an interface."""
    return Interface(MatchKind.OUT_INTERFACE, name)


def source(prefix: str) -> Address:
    """Match a source prefix."""
    return Address(MatchKind.SOURCE, prefix)


def destination(prefix: str, *, negate: bool = False) -> Address:
    """Match a destination prefix, or everything but it."""
    return Address(MatchKind.DESTINATION, prefix, negate)


def tcp() -> Protocol:
    """Match TCP."""
    return Protocol(MatchKind.PROTOCOL, "tcp")


def udp() -> Protocol:
    """Match UDP."""
    return Protocol(MatchKind.PROTOCOL, "udp")


def source_port(port: int) -> Ports:
    """Match one source port."""
    return Ports(MatchKind.SOURCE_PORT, (PortRange(port, port),))


def destination_port(*ports: int, negate: bool = False) -> Ports:
    """Match any of some destination ports, or all but them."""
    ranges = tuple(PortRange(port, port) for port in ports)
    return Ports(MatchKind.DESTINATION_PORT, ranges, negate)


def destination_ports(ports: PortRange) -> Ports:
    """Match a range of destination ports."""
    return Ports(MatchKind.DESTINATION_PORT, (ports,))


def owner_uid(uid: str, *, negate: bool = False) -> Owner:
    """Match packets of a user's sockets, or of everybody else's."""
    return Owner(MatchKind.OWNER_UID, uid, negate)


def owner_gid(gid: str, *, negate: bool = False) -> Owner:
    """Match packets of a group's sockets, or of everybody else's."""
    return Owner(MatchKind.OWNER_GID, gid, negate)


def conntrack_state(*states: str) -> ConntrackState:
    """Match packets in any of some conntrack states."""
    return ConntrackState(MatchKind.CONNTRACK_STATE, states)


def mark(value: int, *, negate: bool = False) -> Mark:
    """Match the packet mark."""
    return Mark(MatchKind.MARK, value, negate)


def connection_mark(value: int) -> Mark:
    """Match the connection mark."""
    return Mark(MatchKind.CONNECTION_MARK, value)


ACCEPT = Verdict(VerdictKind.ACCEPT)
DROP = Verdict(VerdictKind.DROP)
RETURN = Verdict(VerdictKind.RETURN)
SAVE_MARK = Verdict(VerdictKind.SAVE_MARK)
RESTORE_MARK = Verdict(VerdictKind.RESTORE_MARK)


def jump(chain: str) -> Verdict:
    """Go on in another chain of the same table."""
    return Verdict(VerdictKind.JUMP, chain=chain)


def redirect(port: int) -> Verdict:
    """Send the connection to a local port, keeping the original destination readable."""
    return Verdict(VerdictKind.REDIRECT, port=port)


def tproxy(port: int, value: int) -> Verdict:
    """Hand the packet to a transparent socket on a local port and mark it."""
    return Verdict(VerdictKind.TPROXY, port=port, value=value)


def set_mark(value: int) -> Verdict:
    """Set the whole packet mark and go on."""
    return Verdict(VerdictKind.SET_MARK, value=value)


def zone(number: int) -> Verdict:
    """Track the packet in a conntrack zone and go on."""
    return Verdict(VerdictKind.ZONE, value=number)


def is_ours(chain: str) -> bool:
    """Tell whether a chain carries our prefix."""
    return chain.startswith(CHAIN_PREFIX)


def kernel_order(rules: tuple[Rule, ...]) -> dict[Table, dict[str, list[Rule]]]:
    """Return the rules as the kernel holds them: table, chain, rules in matching order.

    Chains that are only jumped to appear empty; positions are resolved, so every rule stands where
    it is met.
    """
    tables: dict[Table, dict[str, list[Rule]]] = {}
    for rule in rules:
        chain = tables.setdefault(rule.table, {}).setdefault(rule.chain, [])
        at = len(chain) if rule.position is None else rule.position - 1
        chain.insert(at, rule._replace(position=None))
    for rule in rules:
        if rule.verdict.kind is VerdictKind.JUMP:
            tables[rule.table].setdefault(rule.verdict.chain, [])
    return tables


def canonical(rule: Rule) -> Rule:
    """Return the rule in the form in which two writings of the same rule are equal.

    Kernels and tools reorder matches, clear host bits, and drop prefixes and port ranges that match
    everything.
    """
    matches: list[Match] = []
    for match in rule.matches:
        if isinstance(match, Address):
            prefix = _masked(match.prefix)
            if prefix.endswith("/0") and not match.negate:
                continue
            matches.append(match._replace(prefix=prefix))
        elif isinstance(match, Ports) and match.ranges == (ALL_PORTS,) and not match.negate:
            continue
        elif isinstance(match, ConntrackState):
            matches.append(match._replace(states=tuple(sorted(match.states))))
        else:
            matches.append(match)
    matches.sort(key=lambda match: match.kind.value)
    return rule._replace(matches=tuple(matches), family=None, position=None)


def _masked(prefix: str) -> str:
    from ipaddress import ip_network  # comparisons only: a first ADD never needs it

    return str(ip_network(prefix, strict=False))
