"""The two nf_tables layouts, and where they differ."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from cases import ALL_DNS, CASES, CNI, DUAL, TPROXY, Case
from istio_cni.capture.settings import Value
from istio_cni.rules.model import (
    RETURN,
    Family,
    Match,
    PortRange,
    Rule,
    Ruleset,
    Table,
    Verdict,
    VerdictKind,
    destination,
    destination_port,
    destination_ports,
    in_interface,
    jump,
    owner_gid,
    owner_uid,
    redirect,
    source,
    tcp,
    udp,
)
from istio_cni.rules.nftables import (
    CHAINS,
    HOOKS,
    TABLES,
    NftRule,
    NftTable,
    additions,
    complete,
    reference,
    render,
    render_complete,
    rule_text,
)
from istio_cni.rules.sidecar import generate

LAYOUTS = pytest.mark.parametrize("layout", [reference, complete])
EVERY_CASE = pytest.mark.parametrize("name", CASES)
NAT = "istio-proxy-nat"
GUARD = "meta nfproto ipv6 counter return"


def ruleset(name: str) -> Ruleset:
    """Return the rules of a case."""
    return generate(CASES[name].config)


def made_of(**settings: Value) -> Ruleset:
    """Return the rules of the plugin's defaults with some settings changed."""
    return generate(Case({**CNI, **settings}).config)


def listed(*items: object) -> str:
    """Write a list as settings take it."""
    return ",".join(map(str, items))


def texts(tables: Iterable[NftTable], chain: str, table: str = NAT) -> list[str]:
    """Return the rules of a chain as text, in the order in which they are sent."""
    return [
        rule_text(one.name, rule)
        for one in tables
        for rule in one.rules
        if (one.name, rule.chain) == (table, chain)
    ]


def in_order(table: NftTable) -> dict[str, list[NftRule]]:
    """Carry out additions and insertions as nft does, which refuses an index behind the end."""
    chains: dict[str, list[NftRule]] = {chain: [] for chain in table.chains}
    for rule in table.rules:
        rules = chains[rule.chain]
        assert rule.at is None or 0 <= rule.at < len(rules)
        rules.insert(len(rules) if rule.at is None else rule.at, rule._replace(at=None))
    return chains


# -- both layouts ------------------------------------------------------------------------------


@EVERY_CASE
@LAYOUTS
def test_tables_and_chains_come_in_their_order(name: str, layout: object) -> None:
    """Those with rules, and no others."""
    tables = layout(ruleset(name))  # type: ignore[operator] # one of two functions
    order = {TABLES[table]: chains for table, chains in CHAINS.items()}
    assert [table.name for table in tables] == [
        name for name in order if name in {table.name for table in tables}
    ]
    for table in tables:
        filled = {rule.chain for rule in table.rules}
        assert table.chains == tuple(chain for chain in order[table.name] if chain in filled)


@EVERY_CASE
@LAYOUTS
def test_every_jump_leads_to_a_chain_of_the_table(name: str, layout: object) -> None:
    """Also where the only DNS servers are of a family that is not captured; to no base chain."""
    for table in layout(ruleset(name)):  # type: ignore[operator] # one of two functions
        for rule in table.rules:
            if rule.verdict.kind is VerdictKind.JUMP:
                target = rule_text(table.name, rule).rpartition(" ")[2]
                assert target in table.chains
                assert (table.name, target) not in HOOKS


SHORTENED = ("groups-included-at-the-limit", "groups-excluded")
"""Cases with lists long enough to be written differently where they are programmed."""


@EVERY_CASE
def test_what_is_programmed_is_the_reference_in_matching_order_and_additions(name: str) -> None:
    """Each chain has the same rules in the same order; only long lists are written shorter."""
    sent = {table.name: in_order(table) for table in reference(ruleset(name))}
    programmed = {table.name: in_order(table) for table in complete(ruleset(name))}
    added = set(additions(ruleset(name)))
    shortened = False
    assert sent.keys() == programmed.keys()
    for table, chains in programmed.items():
        assert [*chains] == [*sent[table]]
        for chain, rules in chains.items():
            whole = [rule_text(table, rule) for rule in rules]
            kept = [text for text in whole if f"inet {table} {chain} {text}" not in added]
            known = [rule_text(table, rule) for rule in sent[table][chain]]
            assert kept == [text for text in known if text in whole]
            shortened |= kept != known
    assert shortened is (name in SHORTENED)


# -- the reference's ---------------------------------------------------------------------------


def test_insertions_behind_the_end_are_additions() -> None:
    """Positions count from 1 in the model and from 0 in nft, which refuses such an index."""
    rules = tuple(
        Rule(Table.NAT, "PREROUTING", (in_interface(name),), RETURN, position=position)
        for name, position in (("a", 1), ("b", 1), ("c", 3), ("d", 3), ("e", 9), ("f", None))
    )
    (table,) = reference(Ruleset((Family.V4,), rules))
    assert [rule.at for rule in table.rules] == [None, 0, None, 2, None, None]
    assert render((table,)).splitlines()[3:] == [
        "add rule inet istio-proxy-nat prerouting iifname a counter return",
        "insert rule inet istio-proxy-nat prerouting index 0 iifname b counter return",
        "add rule inet istio-proxy-nat prerouting iifname c counter return",
        "insert rule inet istio-proxy-nat prerouting index 2 iifname d counter return",
        "add rule inet istio-proxy-nat prerouting iifname e counter return",
        "add rule inet istio-proxy-nat prerouting iifname f counter return",
    ]


def test_places_are_counted_in_each_chain() -> None:
    """Rules of other chains and tables in between do not count."""
    first = Rule(Table.NAT, "OUTPUT", (), jump("ISTIO_OUTPUT"))
    others = [first._replace(chain="ISTIO_OUTPUT", verdict=RETURN), first._replace(table=Table.RAW)]
    inserted = Rule(Table.NAT, "OUTPUT", (), RETURN, position=2)
    (table, _) = reference(Ruleset((Family.V4,), (first, *others, inserted)))
    assert table.rules[-1].at is None


def test_included_groups_stand_side_by_side_as_long_as_the_kernel_takes_them() -> None:
    """A rule has at most 128 expressions, two of them its counter and verdict."""

    def groups(*names: object) -> str:
        tables = reference(made_of(OUTBOUND_OWNER_GROUPS_INCLUDE=listed(*names)))
        (found,) = [
            text
            for text in texts(tables, "istio-output")
            if text.startswith("skgid !=") and "oifname" not in text
        ]
        return found

    even = range(3000, 3126, 2)
    assert groups(*even) == " ".join(f"skgid != {gid}" for gid in even) + " counter return"
    joined = ", ".join(map(str, (*even, 4000)))
    assert groups(4000, *even) == f"skgid != {{ {joined} }} counter return"
    ranges = [f"{first}-{first + 5}" for first in range(1000, 1420, 10)]
    assert len(ranges) == 42  # a range takes three expressions
    assert groups(*ranges) == " ".join(f"skgid != {gids}" for gids in ranges) + " counter return"
    assert groups(*ranges, 5).startswith("skgid != { 5, 1000-1005, ")
    assert groups(*range(3000, 3064)) == "skgid != 3000-3063 counter return"
    names = [f"group{number}" for number in range(64)]
    assert groups(*names) == " ".join(f"skgid != {name}" for name in names) + " counter return"


def test_names_of_interfaces_are_written_bare() -> None:
    """With nft's wildcard for that of iptables."""
    tables = reference(ruleset("interfaces-by-prefix"))
    assert texts(tables, "prerouting")[:2] == [
        "iifname eth* counter return",
        "iifname veth0@if3 counter return",
    ]
    assert '"' not in render(tables)


@EVERY_CASE
def test_reference_flushes_each_table_and_fills_it(name: str) -> None:
    """Table by table: made if it is not there, emptied, chains, then rules."""
    tables = reference(ruleset(name))
    lines = iter(render(tables).splitlines())
    for table in tables:
        assert next(lines) == f"add table inet {table.name}"
        assert next(lines) == f"flush table inet {table.name}"
        for chain in table.chains:
            assert next(lines).startswith(f"add chain inet {table.name} {chain}")
        for rule in table.rules:
            assert next(lines).split()[1:5] == ["rule", "inet", table.name, rule.chain]
    assert list(lines) == []


# -- what is added -----------------------------------------------------------------------------


@EVERY_CASE
def test_base_chains_leave_a_family_alone_that_is_not_captured(name: str) -> None:
    """By their first rule; where both are captured no rule speaks of a whole family."""
    rules = ruleset(name)
    for table in complete(rules):
        for chain in table.chains:
            guards = [text == GUARD for text in texts((table,), chain, table.name)]
            here = (table.name, chain) in HOOKS and rules.families == (Family.V4,)
            assert guards == [here, *[False] * (len(guards) - 1)]


@EVERY_CASE
def test_tproxy_without_a_listener_drops(name: str) -> None:
    """The rule after each has the same matches; the packet would go on uncaptured."""
    for table in complete(ruleset(name)):
        pairs = zip(table.rules, (*table.rules[1:], None), strict=True)
        for rule, after in pairs:
            if rule.verdict.kind is VerdictKind.TPROXY:
                assert after is not None
                assert (after.chain, after.matches) == (rule.chain, rule.matches)
                assert rule_text(table.name, after).endswith(" counter drop")
    assert not any("drop" in text for text in additions(ruleset("cni-defaults")))


def test_additions_are_named_with_their_chains() -> None:
    """Those of the defaults, of TPROXY, of a long list; none where nothing is open."""
    assert additions(made_of()) == (
        f"inet istio-proxy-nat prerouting {GUARD}",
        f"inet istio-proxy-nat output {GUARD}",
    )
    assert additions(made_of(**DUAL)) == ()
    assert additions(made_of(**{**TPROXY, **DUAL})) == (
        "inet istio-proxy-mangle istio-tproxy "
        "meta l4proto tcp ip daddr != 127.0.0.1/32 counter drop",
        "inet istio-proxy-mangle istio-tproxy meta l4proto tcp ip6 daddr != ::1/128 counter drop",
    )
    even = [f"10.0.0.{host}/32" for host in range(0, 40, 2)]
    hosts = ", ".join([*even, "127.0.0.1/32"])  # the loopback address is left out likewise
    assert additions(made_of(**DUAL, OUTBOUND_IPRANGES_EXCLUDE=listed(*even, "fd00::/8"))) == (
        f"inet istio-proxy-nat istio-output ip daddr {{ {hosts} }} counter return",
    )


@pytest.mark.parametrize("count", [16, 17, 64])
def test_groups_by_name_can_be_many(count: int) -> None:
    """They are resolved where rules are programmed; what is added can be told before."""
    groups = listed("java", *range(3000, 3000 + 2 * count, 2))
    guard = f"inet istio-proxy-nat output {GUARD}"
    assert guard in additions(made_of(OUTBOUND_OWNER_GROUPS_INCLUDE=groups))
    assert guard in additions(made_of(OUTBOUND_OWNER_GROUPS_EXCLUDE=groups))


# -- sets --------------------------------------------------------------------------------------


def programmed(*rules: tuple[tuple[Match, ...], Verdict]) -> list[str]:
    """Return what becomes of rules in a row."""
    row = tuple(Rule(Table.NAT, "ISTIO_OUTPUT", matches, to) for matches, to in rules)
    return texts(complete(Ruleset(tuple(Family), row)), "istio-output")


def in_a_row(matches: Iterable[Match], *others: Match, to: Verdict = RETURN) -> list[str]:
    """Return what becomes of rules that differ in one match only."""
    return programmed(*(((*others, match), to) for match in matches))


def test_more_than_sixteen_rules_that_differ_in_one_value_become_one() -> None:
    """Of addresses, ports, users or groups, with whatever else they match."""
    hosts = [destination(f"10.0.0.{host}/32") for host in range(0, 34, 2)]
    ids = ", ".join(str(number) for number in range(0, 34, 2))
    prefixes = ", ".join(match.prefix for match in hosts)
    assert in_a_row(hosts[:16]) == [
        f"ip daddr {match.prefix} counter return" for match in hosts[:16]
    ]
    assert in_a_row(hosts) == [f"ip daddr {{ {prefixes} }} counter return"]
    sources = [source(match.prefix) for match in hosts]
    assert in_a_row(sources) == [f"ip saddr {{ {prefixes} }} counter return"]
    ports = [destination_port(port) for port in range(0, 34, 2)]
    assert in_a_row(ports, udp(), to=jump("ISTIO_REDIRECT")) == [
        f"udp dport {{ {ids} }} counter jump istio-redirect"
    ]
    users = [owner_uid(str(uid)) for uid in range(0, 34, 2)]
    assert in_a_row(users, in_interface("lo")) == [f"iifname lo skuid {{ {ids} }} counter return"]
    groups = [owner_gid(str(gid)) for gid in range(0, 34, 2)]
    assert in_a_row(groups[:16]) == [f"skgid {match.id} counter return" for match in groups[:16]]
    assert in_a_row(groups) == [f"skgid {{ {ids} }} counter return"]


def test_sets_hold_ranges_without_overlaps_and_neighbours() -> None:
    """As few as cover the same values, in ascending order, as prefixes where they are some."""
    prefixes = [
        *("10.2.0.0/16", "10.1.2.3/8", "192.168.1.0/24", "192.168.0.0/24", "172.16.0.255/32"),
        *(f"172.16.1.{host}/32" for host in range(12)),
    ]
    assert in_a_row(map(destination, prefixes)) == [
        "ip daddr { 10.0.0.0/8, 172.16.0.255-172.16.1.11, 192.168.0.0/23 } counter return"
    ]
    ports = [PortRange(80, 80), PortRange(70, 90), PortRange(91, 99), PortRange(0, 0)]
    ports += [PortRange(port, port) for port in range(65523, 65536)]
    assert in_a_row(map(destination_ports, ports), tcp()) == [
        "tcp dport { 0, 70-99, 65523-65535 } counter return"
    ]
    wide = [f"fd00:{number:x}::/32" for number in range(0, 34, 2)]
    assert in_a_row(map(destination, (*wide, "::/0"))) == ["ip6 daddr ::/0 counter return"]


def test_what_one_range_covers_needs_no_set() -> None:
    """Whether or not it is a prefix."""
    numbers = range(100, 132)
    hosts = [destination(f"10.0.0.{host}/32") for host in range(32)]
    assert in_a_row(hosts) == ["ip daddr 10.0.0.0/27 counter return"]
    assert in_a_row(hosts[:17]) == ["ip daddr 10.0.0.0-10.0.0.16 counter return"]
    assert in_a_row(map(destination_port, numbers), tcp()) == ["tcp dport 100-131 counter return"]
    assert in_a_row(owner_uid(str(uid)) for uid in numbers) == ["skuid 100-131 counter return"]


def test_rules_that_are_not_alike_stay_rules() -> None:
    """Another verdict ends a row; negated values and names never join."""
    v4 = [((destination(f"10.0.0.{host}/32"),), RETURN) for host in range(0, 32, 2)]
    v6 = [((destination(f"fd00::{host}/128"),), RETURN) for host in range(10, 20)]
    assert len(programmed(*v4, *v6)) == 26
    assert len(programmed(*v4, (v4[0][0], jump("ISTIO_REDIRECT")), *v4)) == 33
    assert len(in_a_row(map(destination_port, range(0, 40, 2)), tcp(), to=redirect(15001))) == 20
    assert len(in_a_row(destination(f"10.0.{n}.0/24", negate=True) for n in range(20))) == 20
    assert len(in_a_row(owner_gid(str(gid), negate=True) for gid in range(0, 40, 2))) == 20
    assert len(in_a_row(owner_gid(f"g{gid}") for gid in range(20))) == 20


def test_alike_rules_need_not_be_neighbours() -> None:
    """As long as all between them do the same."""
    v4 = [((destination(f"10.0.0.{host}/32"),), RETURN) for host in range(0, 32, 2)]
    others = [((source("10.0.0.99/32"),), RETURN), ((), RETURN)]
    assert len(programmed(*v4, *others, *v4)) == 3
    ports = [
        ((kind, destination_port(port)), RETURN) for port in range(20) for kind in (tcp(), udp())
    ]
    assert len(programmed(*ports)) == 2


def test_many_included_groups_become_one_match() -> None:
    """From the seventeenth on, unlike in the reference's text."""
    even = range(3000, 3034, 2)
    joined = ", ".join(map(str, even))
    few = complete(made_of(OUTBOUND_OWNER_GROUPS_INCLUDE=listed(*even[:16])))
    many = complete(made_of(OUTBOUND_OWNER_GROUPS_INCLUDE=listed(*even)))
    side_by_side = " ".join(f"skgid != {gid}" for gid in even[:16])
    assert f"{side_by_side} counter return" in texts(few, "istio-output")
    assert f"skgid != {{ {joined} }} counter return" in texts(many, "istio-output")


# -- the complete text -------------------------------------------------------------------------


@EVERY_CASE
def test_complete_text_puts_names_of_interfaces_in_quotes(name: str) -> None:
    """All of them: some are words of nft, or begin with a digit."""
    for line in render_complete(complete(ruleset(name)), "x").splitlines():
        words = line.split()
        for word, after in pairwise(words):
            if word in ("iifname", "oifname"):
                assert after[0] == after[-1] == '"'


def test_wildcards_stay_wildcards_in_quotes() -> None:
    """As nft takes them."""
    text = render_complete(complete(ruleset("interfaces-by-prefix")), "x")
    assert 'prerouting iifname "eth*" counter return\n' in text
    assert 'output oifname "veth0@if3" counter return\n' in text


@EVERY_CASE
def test_complete_text_makes_every_table_anew(name: str) -> None:
    """All of ours go first, whether they are there or not; rules are only added, in order."""
    tables = complete(ruleset(name))
    lines = render_complete(tables, "what it says").splitlines()
    assert lines[:6] == [
        "add table inet istio-proxy-nat",
        "delete table inet istio-proxy-nat",
        "add table inet istio-proxy-mangle",
        "delete table inet istio-proxy-mangle",
        "add table inet istio-proxy-raw",
        "delete table inet istio-proxy-raw",
    ]
    assert [line for line in lines[6:] if line.startswith("add table ")] == [
        f'add table inet {table.name} {{ comment "what it says" ; }}' for table in tables
    ]
    assert not [line for line in lines[6:] if not line.startswith("add ")]


def test_dns_of_a_family_that_is_not_captured_is_left_alone() -> None:
    """With servers of that family only there is no jump, and no chain, for them in nat."""
    only_v6: dict[str, Value] = {"REDIRECT_DNS": True, "DNS_SERVERS_V6": ["fd00::53"]}
    for layout in (reference, complete):
        nat, _ = layout(made_of(**only_v6))
        assert "istio-output-dns" not in nat.chains
        assert not [text for text in texts((nat,), "istio-output") if "dns" in text]
        nat, _ = layout(made_of(**only_v6, **DUAL))
        assert "counter jump istio-output-dns" in texts((nat,), "istio-output")
        nat, _ = layout(made_of(**ALL_DNS))
        assert "istio-output-dns" in nat.chains
