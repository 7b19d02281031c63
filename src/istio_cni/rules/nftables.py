"""Rules as nf_tables has them: tables of our own in the `inet` family, laid out and printed.

The generator knows nothing of this. Chains get lower-case names, every rule a counter, both address
families share one table, and matches stand in the order in which nft prints and compiles them.

Two layouts come from the same rules. `reference` is what Istio sends, line for line; people and
tools compare it. `complete` is what is programmed here: the same rules in matching order, plus
those that close what the reference leaves open (docs/departures.md).

Source: istio tools/istio-nftables, pkg/builder and pkg/capture; nft(8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import (
    IPv4Address,
    IPv6Address,
    ip_network,
    summarize_address_range,
)
from itertools import groupby
from typing import NamedTuple, TypeAlias

from istio_cni import constants
from istio_cni.rules.model import (
    DROP,
    RETURN,
    Address,
    ConntrackState,
    Family,
    Interface,
    Mark,
    Match,
    MatchKind,
    Owner,
    PortRange,
    Ports,
    Protocol,
    Rule,
    Ruleset,
    Table,
    Verdict,
    VerdictKind,
    conntrack_state,
    kernel_order,
    tcp,
)

FAMILY = constants.NFT_FAMILY
TABLES = {
    Table.NAT: constants.NFT_NAT,
    Table.MANGLE: constants.NFT_MANGLE,
    Table.RAW: constants.NFT_RAW,
}
"""Our tables, in the order in which they are sent."""


class Hook(NamedTuple):
    """Where a base chain is called: chain type, hook, priority."""

    type: str
    name: str
    priority: int


HOOKS = {
    (constants.NFT_NAT, "prerouting"): Hook("nat", "prerouting", -100),
    (constants.NFT_NAT, "output"): Hook("nat", "output", -100),
    (constants.NFT_MANGLE, "prerouting"): Hook("filter", "prerouting", -150),
    (constants.NFT_MANGLE, "output"): Hook("route", "output", -150),  # a new mark is routed anew
    (constants.NFT_RAW, "prerouting"): Hook("filter", "prerouting", -300),
    (constants.NFT_RAW, "output"): Hook("filter", "output", -300),  # before conntrack, for zones
    (constants.NFT_GUARD, "input"): Hook("filter", "input", 0),
    (constants.NFT_GUARD, "forward"): Hook("filter", "forward", 0),
    (constants.NFT_GUARD, "output"): Hook("filter", "output", 0),
}
CHAINS = {
    Table.NAT: (
        *("prerouting", "output", "istio-inbound", "istio-redirect", "istio-in-redirect"),
        *("istio-output", "istio-output-dns"),
    ),
    Table.MANGLE: (
        *("prerouting", "output", "istio-divert", "istio-tproxy", "istio-inbound", "istio-drop"),
    ),
    Table.RAW: ("prerouting", "output", "istio-inbound", "istio-output-dns"),
}
"""The chains of each table, in the order in which they are made."""

FOLD_ABOVE = 16  # values in a row that become one set (ours)
EXPRESSIONS_MAX = 128  # of one rule, in the kernel

Interval: TypeAlias = tuple[int, int]


class OneOf(NamedTuple):
    """Any of some values of one kind, as intervals with both ends; `family` is that of addresses.

    Ports, ids, and addresses as numbers.
    """

    kind: MatchKind
    intervals: tuple[Interval, ...]
    family: Family | None = None
    negate: bool = False


class OfFamily(NamedTuple):
    """Packets of one address family."""

    family: Family


NftMatch: TypeAlias = Match | OneOf | OfFamily


class NftRule(NamedTuple):
    """One rule: its chain, matches in nft's order, what it does.

    `protocol` is what its ports belong to, `family` that of a TPROXY, `at` where to insert it
    (0-based) or None for the end.
    """

    chain: str
    matches: tuple[NftMatch, ...]
    verdict: Verdict
    protocol: str = ""
    family: Family | None = None
    at: int | None = None


class NftTable(NamedTuple):
    """One of our tables: its name, its chains and its rules in the order in which they are sent."""

    name: str
    chains: tuple[str, ...]
    rules: tuple[NftRule, ...]


_GUARDED = ("input", "forward", "output")
_NEW = NftRule("", (conntrack_state("NEW"),), DROP)
GUARD = NftTable(
    constants.NFT_GUARD, _GUARDED, tuple(_NEW._replace(chain=chain) for chain in _GUARDED)
)
"""Lets no connection begin while our tables are replaced.

A batch is one to whoever lists tables, not to a packet: that meets one base chain after the other,
and may meet one before the change and the next one after it.
"""


# -- layouts -----------------------------------------------------------------------------------


def reference(ruleset: Ruleset) -> tuple[NftTable, ...]:
    """Lay rules out as the reference does: emission order, insertions by index.

    An insertion that the chain is too short for is an addition: nft refuses such an index.
    """
    tables = []
    for table, name in TABLES.items():
        rules: list[NftRule] = []
        lengths: dict[str, int] = {}
        for rule in ruleset.rules:
            if rule.table is table:
                line = _lowered(rule)
                length = lengths.get(line.chain, 0)
                if line.at is not None and line.at >= length:
                    line = line._replace(at=None)
                lengths[line.chain] = length + 1
                rules.append(_within_limit(line))
        chains = tuple(chain for chain in CHAINS[table] if chain in lengths)
        if rules:
            tables.append(NftTable(name, chains, tuple(rules)))
    return tuple(tables)


def complete(ruleset: Ruleset) -> tuple[NftTable, ...]:
    """Lay rules out as they are programmed: matching order, with the reference's gaps closed.

    A family that is not captured is left alone; a TPROXY without a listener drops; long lists are
    sets.
    """
    spared = [family for family in Family if family not in ruleset.families]
    held, tables = kernel_order(ruleset.rules), []
    for table, name in TABLES.items():
        named = {chain_name(chain): rules for chain, rules in held.get(table, {}).items()}
        present = tuple(chain for chain in CHAINS[table] if chain in named)
        rules: list[NftRule] = []
        for chain in present:
            if (name, chain) in HOOKS:
                rules += (NftRule(chain, (OfFamily(family),), RETURN) for family in spared)
            rules += _mended(_lowered(rule) for rule in named[chain])
        if rules:
            tables.append(NftTable(name, present, tuple(rules)))
    return tuple(tables)


def additions(ruleset: Ruleset) -> tuple[str, ...]:
    """Return the rules of `complete` that the reference does not have, as text."""
    known = {
        (table.name, rule.chain, rule_text(table.name, rule))
        for table in reference(ruleset)
        for rule in table.rules
    }
    return tuple(
        f"{FAMILY} {table.name} {rule.chain} {rule_text(table.name, rule)}"
        for table in complete(ruleset)
        for rule in table.rules
        if (table.name, rule.chain, rule_text(table.name, rule)) not in known
    )


def chain_name(chain: str) -> str:
    """Return what a chain of iptables is called in our tables."""
    return chain.lower().replace("_", "-")


_ADDRESSES = (MatchKind.SOURCE, MatchKind.DESTINATION)
_PORTS = (MatchKind.SOURCE_PORT, MatchKind.DESTINATION_PORT)


def _ranks(*headers: MatchKind) -> dict[MatchKind, int]:
    """Return where each kind of match stands in a rule, given the order of those of headers."""
    first = (MatchKind.IN_INTERFACE, MatchKind.OUT_INTERFACE)
    early = (MatchKind.PROTOCOL, MatchKind.CONNTRACK_STATE)
    owners, marks = (MatchKind.OWNER_UID, MatchKind.OWNER_GID), (MatchKind.MARK,)
    order = (*first, *early, *headers, *owners, *marks, MatchKind.CONNECTION_MARK)
    return {kind: rank for rank, kind in enumerate(order)}


_RANKS = _ranks(*_ADDRESSES, *_PORTS)
_RANKS_RAW = _ranks(*_PORTS, *_ADDRESSES)


def _lowered(rule: Rule) -> NftRule:
    """Turn a rule of the model into one of nf_tables; its position becomes an index."""
    matches = list(rule.matches)
    kinds = {match.kind for match in matches}
    if MatchKind.CONNTRACK_STATE in kinds and MatchKind.PROTOCOL not in kinds:
        matches.append(tcp())  # the reference drops invalid packets of TCP only here
    protocol = next((match.name for match in matches if isinstance(match, Protocol)), "")
    if not kinds.isdisjoint(_PORTS) and not _spells_protocol(rule, protocol, kinds):
        matches = [match for match in matches if not isinstance(match, Protocol)]
    ranks = _RANKS_RAW if rule.table is Table.RAW else _RANKS
    matches.sort(key=lambda match: ranks[match.kind])
    index = None if rule.position is None else rule.position - 1
    ordered = tuple(map(_with_set, matches))
    return NftRule(chain_name(rule.chain), ordered, rule.verdict, protocol, rule.family, index)


def _spells_protocol(rule: Rule, protocol: str, kinds: set[MatchKind]) -> bool:
    """Tell whether `meta l4proto` stands before the ports, which imply it."""
    if protocol != "tcp":
        return False
    if rule.chain == "ISTIO_OUTPUT":
        return MatchKind.OUT_INTERFACE in kinds
    return rule.chain != "ISTIO_OUTPUT_DNS" or kinds.isdisjoint(_ADDRESSES)


def _with_set(match: Match) -> NftMatch:
    """Write several ports as a set."""
    if isinstance(match, Ports) and len(match.ranges) > 1:
        intervals = tuple((ports.first, ports.last) for ports in match.ranges)
        return OneOf(match.kind, intervals, negate=match.negate)
    return match


# -- what the reference leaves open ------------------------------------------------------------


def _mended(rules: Iterable[NftRule]) -> Iterator[NftRule]:
    for rule in _folded(rules):
        yield _owners_folded(rule) if len(rule.matches) > FOLD_ABOVE else rule
        if rule.verdict.kind is VerdictKind.TPROXY:  # with no listener the packet would go on
            yield NftRule(rule.chain, rule.matches, DROP)


def _folded(rules: Iterable[NftRule]) -> Iterator[NftRule]:
    """Make one rule with a set of many that differ in one value only.

    Among rules in a row that do the same, order does not matter: these need not be neighbours.
    """
    for _, group in groupby(rules, lambda rule: rule.verdict):
        run = list(group)
        alike: dict[object, list[NftRule]] = {}
        for rule in run:
            alike.setdefault(_but_one_value(rule), []).append(rule)
        alike.pop(None, None)
        long = {key: some for key, some in alike.items() if len(some) > FOLD_ABOVE}
        for rule in run:
            some = long.get(_but_one_value(rule)) if long else None
            if some is None:
                yield rule
            elif rule is some[0]:
                yield _one_rule(some)


def _but_one_value(rule: NftRule) -> object:
    """Return what rules that can share a set have in common; None if a rule shares none."""
    places = [place for place, match in enumerate(rule.matches) if _is_value(match)]
    if len(places) != 1 or rule.verdict.kind not in (VerdictKind.RETURN, VerdictKind.JUMP):
        return None
    matches = list(rule.matches)
    match = matches.pop(places[0])
    family = _family_of(match) if isinstance(match, Address) else None
    return places[0], getattr(match, "kind", None), family, rule._replace(matches=tuple(matches))


def _is_value(match: NftMatch) -> bool:
    """Tell whether a match is for one value or range of those that sets hold."""
    if isinstance(match, Owner):
        return not match.negate and _is_number(match)
    return isinstance(match, Address | Ports) and not match.negate


def _is_number(owner: Owner) -> bool:
    return owner.id.replace("-", "").isdigit()


def _one_rule(alike: list[NftRule]) -> NftRule:
    first = alike[0]
    place = next(place for place, match in enumerate(first.matches) if _is_value(match))
    matches = list(first.matches)
    matches[place] = _one_of([rule.matches[place] for rule in alike])
    return first._replace(matches=tuple(matches))


def _owners_folded(rule: NftRule) -> NftRule:
    """Make one match with a set of a rule's many negated ones; names that are no ids yet stay."""
    if not all(_is_stranger(match) for match in rule.matches):
        return rule
    return rule._replace(matches=(_one_of(rule.matches),))


def _is_stranger(match: NftMatch) -> bool:
    return isinstance(match, Owner) and match.negate and _is_number(match)


def _within_limit(rule: NftRule) -> NftRule:
    """Leave a rule as the reference writes it, unless no kernel would take it."""
    owners = [match for match in rule.matches if isinstance(match, Owner)]
    size = sum(3 if "-" in owner.id else 2 for owner in owners)
    return _owners_folded(rule) if size + 2 > EXPRESSIONS_MAX else rule


def _one_of(matches: Iterable[NftMatch]) -> NftMatch:
    """Gather values of one kind in a set, sorted and without overlaps; one value needs no set."""
    first, *_ = found = list(matches)
    intervals = _joined(found)
    low, high = intervals[0]
    if isinstance(first, Address):
        family = _family_of(first)
        only: NftMatch = first._replace(prefix=_interval_text((low, high), family))
    elif isinstance(first, Owner):
        family, only = None, first._replace(id=f"{low}-{high}")
    elif isinstance(first, Ports):
        family, only = None, first._replace(ranges=(PortRange(low, high),))
    else:
        raise TypeError(first)
    if len(intervals) == 1 and (family is None or "-" not in _interval_text(intervals[0], family)):
        return only
    return OneOf(first.kind, intervals, family, first.negate)


def _joined(matches: Iterable[NftMatch]) -> tuple[Interval, ...]:
    """Return the fewest intervals that cover the same values."""
    intervals: list[Interval] = []
    for low, high in sorted(map(interval, matches)):
        if intervals and low <= intervals[-1][1] + 1:
            intervals[-1] = intervals[-1][0], max(high, intervals[-1][1])
        else:
            intervals.append((low, high))
    return tuple(intervals)


def interval(match: NftMatch) -> Interval:
    """Return the lowest and the highest value that a match for an address, port or id accepts."""
    match match:
        case Address(prefix=prefix):
            network = ip_network(prefix, strict=False)
            return int(network.network_address), int(network.broadcast_address)
        case Ports(ranges=(PortRange(first=first, last=last),)):
            return first, last
        case Owner(id=identity):
            low, _, high = identity.partition("-")
            return int(low), int(high or low)
    raise TypeError(match)


def _family_of(match: Address) -> Family:
    return Family.V6 if ":" in match.prefix else Family.V4


# -- text --------------------------------------------------------------------------------------


def render(tables: Iterable[NftTable]) -> str:
    """Return the standard input of `nft -f -` as the reference writes it: flush, then fill."""
    lines: list[str] = []
    for table in tables:
        lines += (f"add table {FAMILY} {table.name}", f"flush table {FAMILY} {table.name}")
        lines += _table_lines(table, quote=False)
    return "".join(f"{line}\n" for line in lines)


def render_complete(tables: Iterable[NftTable], comment: str) -> str:
    """Return text that does what is sent over netlink: every table of ours anew, or gone."""
    lines = [
        f"{verb} table {FAMILY} {name}" for name in TABLES.values() for verb in ("add", "delete")
    ]
    for table in tables:
        lines.append(f'add table {FAMILY} {table.name} {{ comment "{comment}" ; }}')
        lines += _table_lines(table, quote=True)
    return "".join(f"{line}\n" for line in lines)


def _table_lines(table: NftTable, *, quote: bool) -> Iterator[str]:
    for chain in table.chains:
        yield f"add chain {FAMILY} {table.name} {chain}{_hook_text(table.name, chain)}"
    for rule in table.rules:
        where = f"{FAMILY} {table.name} {rule.chain}"
        text = rule_text(table.name, rule, quote=quote)
        if rule.at is None:
            yield f"add rule {where} {text}"
        else:
            yield f"insert rule {where} index {rule.at} {text}"


def _hook_text(table: str, chain: str) -> str:
    hook = HOOKS.get((table, chain))
    if hook is None:
        return ""
    return f" {{ type {hook.type} hook {hook.name} priority {hook.priority} ; }}"


def rule_text(table: str, rule: NftRule, *, quote: bool = False) -> str:
    """Return a rule's matches and statements.

    The reference writes interface names bare; `quote` writes them so that nft takes any name.
    """
    owner = "meta " if table == TABLES[Table.RAW] else ""
    words = [_match_text(match, rule.protocol, owner, quote=quote) for match in rule.matches]
    return " ".join((*words, _verdict_text(rule)))


def _match_text(match: NftMatch, protocol: str, owner: str, *, quote: bool) -> str:
    bang = "" if isinstance(match, OfFamily) or not match.negate else "!= "
    match match:
        case OfFamily(family=family):
            return f"meta nfproto ipv{family.value}"
        case Interface(kind=kind, name=name):
            name = f"{name[:-1]}*" if name.endswith("+") else name
            return f"{_WORDS[kind]} {bang}" + (f'"{name}"' if quote else name)
        case Protocol(name=name):
            return f"meta l4proto {bang}{name}"
        case ConntrackState(states=states):
            return f"ct state {bang}{','.join(states).lower()}"
        case Mark(kind=kind, value=value):
            return f"{_WORDS[kind]} {bang}{value}"
        case Address(kind=kind, prefix=prefix):
            return f"{_IP[_family_of(match)]} {_WORDS[kind]} {bang}{prefix}"
        case Ports(kind=kind):
            return f"{protocol} {_WORDS[kind]} {bang}{_interval_text(interval(match))}"
        case Owner(kind=kind, id=identity):
            return f"{owner}{_WORDS[kind]} {bang}{identity}"
        case OneOf(kind=kind, intervals=intervals, family=family):
            values = ", ".join(_interval_text(each, family) for each in intervals)
            before = f"{_IP[family]} " if family else f"{protocol} " if kind in _PORTS else owner
            several = f"{{ {values} }}" if len(intervals) > 1 else values
            return f"{before}{_WORDS[kind]} {bang}{several}"


_IP = {Family.V4: "ip", Family.V6: "ip6"}
_WORDS: Mapping[MatchKind, str] = {
    MatchKind.IN_INTERFACE: "iifname",
    MatchKind.OUT_INTERFACE: "oifname",
    MatchKind.SOURCE: "saddr",
    MatchKind.DESTINATION: "daddr",
    MatchKind.SOURCE_PORT: "sport",
    MatchKind.DESTINATION_PORT: "dport",
    MatchKind.OWNER_UID: "skuid",
    MatchKind.OWNER_GID: "skgid",
    MatchKind.MARK: "mark",
    MatchKind.CONNECTION_MARK: "ct mark",
}


def _interval_text(values: Interval, family: Family | None = None) -> str:
    low, high = values
    if family is None:
        return str(low) if low == high else f"{low}-{high}"
    kind = IPv4Address if family is Family.V4 else IPv6Address
    first, *more = summarize_address_range(kind(low), kind(high))
    return f"{kind(low)}-{kind(high)}" if more else str(first)


def _verdict_text(rule: NftRule) -> str:
    verdict = rule.verdict
    match verdict.kind:
        case VerdictKind.ACCEPT | VerdictKind.DROP | VerdictKind.RETURN:
            return f"counter {verdict.kind.value}"
        case VerdictKind.JUMP:
            return f"counter jump {chain_name(verdict.chain)}"
        case VerdictKind.REDIRECT:
            return f"counter redirect to :{verdict.port}"
        case VerdictKind.TPROXY:
            ip = _IP[rule.family or Family.V4]
            return f"tproxy {ip} to :{verdict.port} meta mark set {verdict.value} counter accept"
        case VerdictKind.SET_MARK:
            return f"counter meta mark set {verdict.value}"
        case VerdictKind.SAVE_MARK:
            return "counter ct mark set mark"
        case VerdictKind.RESTORE_MARK:
            return "counter meta mark set ct mark"
        case VerdictKind.ZONE:
            return f"counter ct zone set {verdict.value}"
