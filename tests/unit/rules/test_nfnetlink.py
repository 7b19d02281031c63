"""Rules as nf_tables messages: what is sent in which order, and what it is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import pytest

from cases import CASES, CNI, Case
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import (
    RETURN,
    Family,
    MatchKind,
    Table,
    VerdictKind,
    destination,
    destination_port,
    jump,
    tcp,
)
from istio_cni.rules.netlink import (
    DELTABLE,
    NEWCHAIN,
    NEWRULE,
    NEWSET,
    NEWSETELEM,
    NEWTABLE,
    attributes,
    comment,
    string,
    text,
)
from istio_cni.rules.nfnetlink import (
    CREATE,
    ELEMENTS_PER_MESSAGE,
    EXCL,
    Message,
    fingerprint,
    messages,
    transaction,
)
from istio_cni.rules.nftables import (
    TABLES,
    NftRule,
    NftTable,
    OneOf,
    complete,
    render_complete,
)
from istio_cni.rules.sidecar import generate

EVERY_CASE = pytest.mark.parametrize("name", CASES)
IDS = {"envoy": "2337", "mesh": "2338", "java": "2020", "ftp": "2121"}
"""Ids in the place of names, as whoever programs rules resolves them."""


def resolved(config: CaptureConfig) -> CaptureConfig:
    """Put ids in the place of names."""

    def ids(owners: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(IDS.get(owner, owner) for owner in owners)

    groups = config.owner_groups
    return config._replace(
        proxy_uids=ids(config.proxy_uids),
        proxy_gids=ids(config.proxy_gids),
        owner_groups=groups if isinstance(groups, str) else ids(groups),
        owner_groups_excluded=ids(config.owner_groups_excluded),
    )


def tables(case: Case) -> tuple[NftTable, ...]:
    """Return the tables that are programmed for a case."""
    return complete(generate(resolved(case.config)))


def said(message: Message) -> dict[int, bytes]:
    """Return the attributes of a message."""
    return dict(attributes(message.body))


def one_chain(*rules: NftRule) -> tuple[Message, ...]:
    """Return the messages that make a table with one chain."""
    return messages([NftTable("istio-proxy-nat", ("istio-output",), rules)])


def rule_of(match: OneOf) -> NftRule:
    """Make a rule with a set."""
    return NftRule("istio-output", (match,), RETURN, "tcp")


# -- order -------------------------------------------------------------------------------------


@EVERY_CASE
def test_objects_come_before_what_refers_to_them(name: str) -> None:
    """Tables before chains, chains before jumps, a set and its elements right before its rule."""
    made: set[tuple[str, str]] = set()
    waiting: list[bytes] = []
    for message in messages(tables(CASES[name])):
        if message.kind == NEWTABLE:
            made.add((message.table, ""))
        elif message.kind == NEWCHAIN:
            assert (message.table, "") in made
            made.add((message.table, message.chain))
        elif message.kind == NEWSET:
            waiting.append(said(message)[10])
        elif message.kind == NEWSETELEM:
            assert said(message)[4] == waiting[-1]
        else:
            assert message.kind == NEWRULE
            assert message.rule is not None
            assert len(waiting) == sum(isinstance(match, OneOf) for match in message.rule.matches)
            waiting.clear()
            assert (message.table, message.chain) in made
            if message.rule.verdict.kind is VerdictKind.JUMP:
                target = message.rule.verdict.chain.lower().replace("_", "-")
                assert (message.table, target) in made
    assert waiting == []


@EVERY_CASE
def test_only_tables_must_be_new(name: str) -> None:
    """Whoever made one of ours meanwhile is noticed, and nothing is added to it."""
    for message in messages(tables(CASES[name])):
        assert message.flags & CREATE
        assert bool(message.flags & EXCL) is (message.kind == NEWTABLE)


def test_a_transaction_deletes_what_is_there_first() -> None:
    """The tables named, in their order, then all that is wanted."""
    wanted = messages(tables(CASES["dns-all"]))
    batch = transaction(wanted, present=("istio-proxy-mangle", "istio-proxy-nat"))
    assert batch[:2] == tuple(
        Message(DELTABLE, 0, string(1, name), name)
        for name in ("istio-proxy-mangle", "istio-proxy-nat")
    )
    assert batch[2:] == wanted
    assert transaction(wanted) == wanted
    assert transaction((), present=("istio-proxy-raw",), comment="x") == (
        Message(DELTABLE, 0, string(1, "istio-proxy-raw"), "istio-proxy-raw"),
    )
    assert transaction(()) == ()


def test_only_new_tables_carry_the_comment() -> None:
    """Each of them; nothing else of the batch changes."""
    wanted = messages(tables(CASES["everything"]))
    batch = transaction(wanted, present=("istio-proxy-raw",), comment="istio-cni 0123")
    commented = [message for message in batch if b"istio-cni 0123" in message.body]
    assert [message.table for message in commented] == [*TABLES.values()]
    assert {message.kind for message in commented} == {NEWTABLE}
    assert {comment(said(message)[6]) for message in commented} == {"istio-cni 0123"}
    others = [message for message in wanted if message.kind != NEWTABLE]
    assert [m for m in batch if m.kind not in (NEWTABLE, DELTABLE)] == others


# -- fingerprint -------------------------------------------------------------------------------


def test_fingerprints_are_equal_for_equal_rules_only() -> None:
    """Of any two cases: equal if and only if their whole texts are."""
    found = {}
    for name, case in CASES.items():
        made = tables(case)
        found[name] = fingerprint(messages(made)), render_complete(made, "")
    for (one, one_text), (other, other_text) in combinations(found.values(), 2):
        assert (one == other) is (one_text == other_text)
    assert len({mark for mark, _ in found.values()}) > len(CASES) * 3 / 4


@EVERY_CASE
def test_every_rule_and_its_place_count(name: str) -> None:
    """Without one of the messages, or with two of them swapped, it is another rule set's."""
    wanted = messages(tables(CASES[name]))
    whole = fingerprint(wanted)
    for at, message in enumerate(wanted):
        assert fingerprint((*wanted[:at], *wanted[at + 1 :])) != whole
        after = wanted[at + 1 : at + 2]
        if after and after[0][:3] != message[:3]:
            assert fingerprint((*wanted[:at], *after, message, *wanted[at + 2 :])) != whole


def test_what_the_kernel_does_not_see_does_not_count() -> None:
    """Host bits, which the kernel would clear; and the comment, which the fingerprint becomes."""
    one, other = (
        messages(tables(Case({**CNI, "OUTBOUND_IPRANGES_INCLUDE": prefix})))
        for prefix in ("10.1.2.3/8", "10.0.0.0/8")
    )
    assert fingerprint(one) == fingerprint(other)


def test_fingerprint_fits_a_comment() -> None:
    """It says whose it is, and is the same in every process."""
    assert fingerprint(()) == "istio-cni e3b0c44298fc1c149afbf4c8996fb924"


# -- sets --------------------------------------------------------------------------------------


def elements(batch: Iterable[Message]) -> list[list[tuple[bytes, int]]]:
    """Return the elements of each message: value and flags."""
    found = []
    for message in batch:
        if message.kind == NEWSETELEM:
            one = []
            for _, raw in attributes(said(message)[3]):
                parts = dict(attributes(raw))
                value = dict(attributes(parts[1]))[1]
                one.append((value, int.from_bytes(parts.get(3, b""), "big")))
            found.append(one)
    return found


def test_long_lists_of_elements_are_split() -> None:
    """An attribute takes 64 KB, so there are a thousand to a message, of the same set."""
    ports = OneOf(MatchKind.DESTINATION_PORT, tuple((port, port) for port in range(0, 4002, 2)))
    batch = one_chain(rule_of(ports))
    kinds = Counter(message.kind for message in batch)
    assert (kinds[NEWSET], kinds[NEWSETELEM], kinds[NEWRULE]) == (1, 3, 1)
    assert [len(one) for one in elements(batch)] == [1000, 1000, 1]
    assert [value for one in elements(batch) for value in one] == [
        (port.to_bytes(2, "big"), 0) for port in range(0, 4002, 2)
    ]
    assert len({said(message)[4] for message in batch if message.kind == NEWSETELEM}) == 1
    wide = tuple((low << 64, (low << 64) + 5) for low in range(3, 3003, 2))
    batch = one_chain(rule_of(OneOf(MatchKind.SOURCE, wide, Family.V6)))
    assert [len(one) for one in elements(batch)] == [1000, 1000, 1000, 1]
    assert all(len(raw) < 1 << 16 for message in batch for raw in said(message).values())
    assert ELEMENTS_PER_MESSAGE == 1000


@pytest.mark.parametrize(
    ("intervals", "wanted"),
    [
        (((80, 80), (443, 443)), [(80, 0), (443, 0)]),
        (((80, 90), (443, 443)), [(0, 1), (80, 0), (91, 1), (443, 0), (444, 1)]),
        (((0, 9), (20, 29)), [(0, 0), (10, 1), (20, 0), (30, 1)]),
        (((0, 0), (9, 65535)), [(0, 0), (1, 1), (9, 0)]),
        (((5, 6), (7, 8)), [(0, 1), (5, 0), (7, 0), (9, 1)]),
    ],
)
def test_intervals_are_their_first_value_and_the_one_after(
    intervals: tuple[tuple[int, int], ...], wanted: list[tuple[int, int]]
) -> None:
    """Before the first one nothing is; one up to the highest value has no end."""
    batch = one_chain(rule_of(OneOf(MatchKind.DESTINATION_PORT, intervals)))
    (found,) = elements(batch)
    assert [(int.from_bytes(value, "big"), flags) for value, flags in found] == wanted


def test_sets_of_a_table_have_numbers_of_their_own() -> None:
    """By them a rule finds the set before it, since all have the same name."""
    ports = OneOf(MatchKind.DESTINATION_PORT, ((80, 80), (443, 443)))
    made = one_chain(rule_of(ports), rule_of(ports))
    sets = [said(message) for message in made if message.kind == NEWSET]
    assert [text(one[2]) for one in sets] == ["__set%d"] * 2
    assert [int.from_bytes(one[10], "big") for one in sets] == [1, 2]


# -- words -------------------------------------------------------------------------------------


def test_messages_say_what_they_are_about() -> None:
    """The object that they make: rules by table, chain, place in it, and text."""
    ports = OneOf(MatchKind.DESTINATION_PORT, ((80, 80), (443, 443)))
    plain = NftRule("istio-output", (tcp(), destination_port(53)), jump("ISTIO_X"), "tcp")
    named = "`tcp dport { 80, 443 } counter return`"
    assert [message.about for message in one_chain(plain, rule_of(ports))] == [
        "table istio-proxy-nat",
        "table istio-proxy-nat chain istio-output",
        "istio-proxy-nat istio-output rule 1: `meta l4proto tcp tcp dport 53 counter jump istio-x`",
        f"istio-proxy-nat istio-output rule 2 (its set): {named}",
        f"istio-proxy-nat istio-output rule 2 (its set): {named}",
        f"istio-proxy-nat istio-output rule 2: {named}",
    ]


@EVERY_CASE
def test_rules_are_counted_in_their_chains(name: str) -> None:
    """From one, whatever chains the rules in between belong to."""
    places: Counter[tuple[str, str]] = Counter()
    for message in messages(tables(CASES[name])):
        if message.kind == NEWRULE:
            places[message.table, message.chain] += 1
            assert message.number == places[message.table, message.chain]


def test_a_rule_compares_family_and_protocol_before_it_reads_headers() -> None:
    """Else an IPv4 match would read IPv6 headers, and a port match any protocol's."""
    both = NftRule("istio-output", (destination("10.0.0.0/8"), destination_port(80)), RETURN, "udp")
    *_, message = one_chain(both)
    names = [text(dict(attributes(raw))[1]) for _, raw in attributes(said(message)[4])]
    assert names == [
        *("meta", "cmp", "payload", "cmp"),
        *("meta", "cmp", "payload", "cmp"),
        *("counter", "immediate"),
    ]


def test_cases_meet_every_table_and_kind_of_message() -> None:
    """What is claimed of every case here is claimed of all there is."""
    made = [message for case in CASES.values() for message in messages(tables(case))]
    assert {message.kind for message in made} == {NEWTABLE, NEWCHAIN, NEWSET, NEWSETELEM, NEWRULE}
    assert {message.table for message in made} == {TABLES[table] for table in TABLES}
    assert Table.FILTER not in TABLES
    assert {message.rule.verdict.kind for message in made if message.rule is not None} == set(
        VerdictKind
    )
