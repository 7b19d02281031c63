"""nf_tables messages in words, and compared."""

from __future__ import annotations

import struct

import pytest

from istio_cni.rules.model import (
    ACCEPT,
    DROP,
    RESTORE_MARK,
    RETURN,
    SAVE_MARK,
    Family,
    MatchKind,
    PortRange,
    Verdict,
    connection_mark,
    conntrack_state,
    destination,
    destination_port,
    destination_ports,
    in_interface,
    jump,
    mark,
    out_interface,
    owner_gid,
    owner_uid,
    redirect,
    set_mark,
    source,
    tcp,
    tproxy,
    zone,
)
from istio_cni.rules.netlink import (
    NEWCHAIN,
    NEWRULE,
    NEWSET,
    NEWSETELEM,
    NEWTABLE,
    attribute,
    attributes,
    nested,
    string,
)
from istio_cni.rules.nfdump import State, describe, difference, read
from istio_cni.rules.nfnetlink import Message, messages, transaction
from istio_cni.rules.nftables import NftMatch, NftRule, NftTable, OfFamily, OneOf

NAT, MANGLE, RAW = "istio-proxy-nat", "istio-proxy-mangle", "istio-proxy-raw"
WEB = OneOf(MatchKind.DESTINATION_PORT, ((80, 80), (443, 443)), negate=True)


def be32(kind: int, value: int) -> bytes:
    """Pack a number as the kernel does."""
    return attribute(kind, struct.pack("!I", value))


def host32(value: int) -> str:
    """Show a number as it stands in a register here."""
    return struct.pack("=I", value).hex()


def a_rule(*matches: NftMatch, to: Verdict = RETURN, chain: str = "istio-output") -> NftRule:
    """Make a rule."""
    return NftRule(chain, matches, to, "tcp")


def a_table(*rules: NftRule, name: str = NAT) -> tuple[Message, ...]:
    """Return the messages that make a table with one chain."""
    return messages([NftTable(name, ("istio-output",), rules)])


def state_of(batch: tuple[Message, ...]) -> dict[str, State]:
    """Return what a kernel holds that has carried out a batch."""
    return read((message.kind, message.body) for message in batch)


def expressions(rule: NftRule) -> list[str]:
    """Return a rule's expressions in words."""
    described = describe(a_table(rule)).partition("new rule")[2].splitlines()[1:]
    return [line.removeprefix("  [ ").removesuffix(" ]") for line in described]


# -- described ---------------------------------------------------------------------------------


def test_a_batch_is_described_message_by_message() -> None:
    """What goes, what comes, rules by their expressions, elements where they are looked up."""
    nat = NftTable(
        NAT,
        ("output", "istio-output"),
        (
            a_rule(OfFamily(Family.V6), chain="output"),
            a_rule(tcp(), WEB, to=jump("ISTIO_OUTPUT"), chain="output"),
            a_rule(out_interface("lo"), destination("127.0.0.0/8")),
        ),
    )
    mangle = NftTable(MANGLE, ("prerouting",), (a_rule(to=DROP, chain="prerouting"),))
    batch = transaction(messages((nat, mangle)), present=(RAW,), comment="istio-cni 0123")
    assert (
        describe(batch)
        == """\
delete table inet istio-proxy-raw
new table inet istio-proxy-nat comment "istio-cni 0123"
new chain inet istio-proxy-nat output type nat hook output priority -100 policy accept
new chain inet istio-proxy-nat istio-output
new rule inet istio-proxy-nat output
  [ meta load nfproto => reg 1 ]
  [ cmp eq reg 1 0x0a ]
  [ counter ]
  [ immediate reg 0 return ]
new set inet istio-proxy-nat __set%d
new elements inet istio-proxy-nat __set%d
new rule inet istio-proxy-nat output
  [ meta load l4proto => reg 1 ]
  [ cmp eq reg 1 0x06 ]
  [ payload load 2b @ transport header + 2 => reg 1 ]
  [ lookup reg 1 not in { 0x0050, 0x01bb } ]
  [ counter ]
  [ immediate reg 0 jump istio-output ]
new rule inet istio-proxy-nat istio-output
  [ meta load oifname => reg 1 ]
  [ cmp eq reg 1 0x6c6f0000000000000000000000000000 ]
  [ meta load nfproto => reg 1 ]
  [ cmp eq reg 1 0x02 ]
  [ payload load 1b @ network header + 16 => reg 1 ]
  [ cmp eq reg 1 0x7f ]
  [ counter ]
  [ immediate reg 0 return ]
new table inet istio-proxy-mangle comment "istio-cni 0123"
new chain inet istio-proxy-mangle prerouting type filter hook prerouting priority -150 policy accept
new rule inet istio-proxy-mangle prerouting
  [ counter ]
  [ immediate reg 0 drop ]
"""
    )
    assert describe(()) == ""


@pytest.mark.parametrize(
    ("match", "lines"),
    [
        (in_interface("tap+"), ["meta load iifname => reg 1", "cmp eq reg 1 0x746170"]),
        (mark(1337), ["meta load mark => reg 1", f"cmp eq reg 1 0x{host32(1337)}"]),
        (
            mark(1338, negate=True),
            ["meta load mark => reg 1", f"cmp neq reg 1 0x{host32(1338)}"],
        ),
        (connection_mark(1337), ["ct load mark => reg 1", f"cmp eq reg 1 0x{host32(1337)}"]),
        (owner_uid("1337"), ["meta load skuid => reg 1", f"cmp eq reg 1 0x{host32(1337)}"]),
        (
            owner_gid("1000-1999"),
            [
                "meta load skgid => reg 1",
                "byteorder reg 1 = hton(reg 1, 4, 4)",
                "cmp gte reg 1 0x000003e8",
                "cmp lte reg 1 0x000007cf",
            ],
        ),
        (
            owner_gid("1000-1999", negate=True),
            [
                "meta load skgid => reg 1",
                "byteorder reg 1 = hton(reg 1, 4, 4)",
                "range neq reg 1 0x000003e8 0x000007cf",
            ],
        ),
        (
            conntrack_state("RELATED", "ESTABLISHED"),
            [
                "ct load state => reg 1",
                f"bitwise reg 1 = ( reg 1 & 0x{host32(6)} ) ^ 0x00000000",
                "cmp neq reg 1 0x00000000",
            ],
        ),
        (
            source("10.96.0.0/12"),
            [
                "meta load nfproto => reg 1",
                "cmp eq reg 1 0x02",
                "payload load 4b @ network header + 12 => reg 1",
                "bitwise reg 1 = ( reg 1 & 0xfff00000 ) ^ 0x00000000",
                "cmp eq reg 1 0x0a600000",
            ],
        ),
        (
            destination("fd00:10::/32", negate=True),
            [
                "meta load nfproto => reg 1",
                "cmp eq reg 1 0x0a",
                "payload load 4b @ network header + 24 => reg 1",
                "cmp neq reg 1 0xfd000010",
            ],
        ),
        (
            destination_ports(PortRange(8000, 8100)),
            [
                "meta load l4proto => reg 1",
                "cmp eq reg 1 0x06",
                "payload load 2b @ transport header + 2 => reg 1",
                "cmp gte reg 1 0x1f40",
                "cmp lte reg 1 0x1fa4",
            ],
        ),
        (
            OneOf(MatchKind.SOURCE, ((1, 1), (3, 9)), Family.V4),
            [
                "meta load nfproto => reg 1",
                "cmp eq reg 1 0x02",
                "payload load 4b @ network header + 12 => reg 1",
                "lookup reg 1 in { 0x00000000 end, 0x00000001, 0x00000002 end, "
                "0x00000003, 0x0000000a end }",
            ],
        ),
    ],
)
def test_matches_in_words(match: NftMatch, lines: list[str]) -> None:
    """As nft's own debugging output has them, with values in the order of their bytes."""
    assert expressions(a_rule(match)) == [*lines, "counter", "immediate reg 0 return"]


@pytest.mark.parametrize(
    ("verdict", "lines"),
    [
        (ACCEPT, ["counter", "immediate reg 0 accept"]),
        (redirect(15001), ["counter", "immediate reg 1 0x3a99", "redir port reg 1 flags 0x2"]),
        (
            tproxy(15006, 1337),
            [
                "immediate reg 1 0x3a9e",
                "tproxy ip port reg 1",
                f"immediate reg 1 0x{host32(1337)}",
                "meta set mark with reg 1",
                "counter",
                "immediate reg 0 accept",
            ],
        ),
        (
            set_mark(1338),
            ["counter", f"immediate reg 1 0x{host32(1338)}", "meta set mark with reg 1"],
        ),
        (SAVE_MARK, ["counter", "meta load mark => reg 1", "ct set mark with reg 1"]),
        (RESTORE_MARK, ["counter", "ct load mark => reg 1", "meta set mark with reg 1"]),
        (
            zone(2),
            [
                "counter",
                f"immediate reg 1 0x{struct.pack('=H', 2).hex()}",
                "ct set zone with reg 1",
            ],
        ),
    ],
)
def test_verdicts_in_words(verdict: Verdict, lines: list[str]) -> None:
    """Counters stand where nft puts them."""
    assert expressions(a_rule(to=verdict)) == lines


# -- what we have no words for -----------------------------------------------------------------


def with_expression(name: str, *parts: bytes) -> list[tuple[int, bytes]]:
    """List a table whose only rule has one expression."""
    rule = string(1, NAT) + string(2, "istio-output")
    body = rule + nested(4, nested(1, string(1, name), nested(2, *parts)))
    *made, _ = [(message.kind, message.body) for message in a_table(a_rule())]
    return [*made, (NEWRULE, body)]


@pytest.mark.parametrize(
    ("name", "parts", "line"),
    [
        ("notrack", (), "notrack"),
        (
            "limit",
            (attribute(1, bytes(7) + b"\5"), be32(3, 9)),
            "limit 1=0000000000000005 3=00000009",
        ),
        ("meta", (be32(1, 1), be32(2, 4)), "meta load #4 => reg 1"),
        ("meta", (be32(1, 1), be32(2, 3), be32(9, 7)), "meta load mark => reg 1 9=00000007"),
        ("ct", (be32(1, 1), be32(2, 3), attribute(3, b"\1")), "ct load mark => reg 1 3=01"),
        ("cmp", (be32(1, 1), be32(2, 9), nested(3, attribute(1, b"\2"))), "cmp #9 reg 1 0x02"),
        (
            "immediate",
            (be32(1, 0), nested(2, nested(2, be32(1, 3)))),
            "immediate reg 0 #3",
        ),
        ("redir", (be32(1, 1), be32(2, 2), be32(3, 2)), "redir port reg 1 to reg 2 flags 0x2"),
        ("tproxy", (be32(1, 0), be32(3, 1), be32(2, 2)), "tproxy #0 port reg 1 2=00000002"),
    ],
)
def test_what_is_unknown_is_shown_by_number(name: str, parts: tuple[bytes, ...], line: str) -> None:
    """Expressions by their names, attributes and values as they are; never equal to ours."""
    present = read(with_expression(name, *parts))
    assert present[NAT].chains["istio-output"].rules == [(line,)]
    assert difference(present, a_table(a_rule())) == (
        f"inet {NAT} istio-output rule 1: [ {line} ] instead of `counter return`"
    )


SHIFTED = (be32(1, 1), be32(2, 1), be32(3, 4), be32(6, 1), nested(7, attribute(1, bytes(4))))


def test_shifts_can_be_read() -> None:
    """A bitwise expression has a mask only if it masks."""
    (chain,) = read(with_expression("bitwise", *SHIFTED))[NAT].chains.values()
    ((line,),) = chain.rules
    assert line.startswith("bitwise ")
    assert "7=" in line


def test_elements_that_stand_for_all_others_can_be_read() -> None:
    """They have no key; a set with one is none of ours."""
    name = string(1, NAT) + string(2, "everybody")
    every = name + nested(3, nested(1, be32(3, 2)))
    lookup = with_expression("lookup", string(1, "everybody"), be32(2, 1))
    present = read([*lookup[:-1], (NEWSET, name), (NEWSETELEM, every), lookup[-1]])
    ((line,),) = present[NAT].chains["istio-output"].rules
    assert line == "lookup reg 1 in set flags 0x0 { * }"


# -- compared ----------------------------------------------------------------------------------


def as_the_kernel_lists(message: Message) -> tuple[int, bytes]:
    """Add to a message what the kernel adds to objects."""
    body = message.body.replace(string(2, "__set%d"), string(2, "__set7"))
    if message.kind == NEWTABLE:
        return NEWTABLE, body + be32(2, 0) + be32(3, 5) + attribute(4, bytes(7) + b"\1")
    if message.kind == NEWSET:
        parts = [(kind, raw) for kind, raw in attributes(body) if kind != 10]
        return NEWSET, b"".join(attribute(kind, raw) for kind, raw in parts)
    if message.kind != NEWRULE:
        return message.kind, body
    table, chain, (_, listed) = attributes(body)
    rules = [_listed(*dict(attributes(raw)).values()) for _, raw in attributes(listed)]
    head = attribute(*table) + attribute(*chain) + attribute(3, bytes(7) + b"\4")
    return NEWRULE, head + attribute(4, b"".join(rules)) + attribute(7, b"\0\2x\0")


def _listed(name: bytes, data: bytes) -> bytes:
    said = dict(attributes(data))
    if name == b"counter\0":
        said = {1: bytes(7) + b"\x54", 2: bytes(7) + b"\1"}
    elif name == b"redir\0":
        said[2] = said[1]
    elif name == b"bitwise\0":
        said[6] = bytes(4)
    elif name == b"lookup\0":
        del said[4]
        said[1] = b"__set7\0"
    inner = b"".join(attribute(kind, raw) for kind, raw in sorted(said.items()))
    return attribute(1, attribute(1, name) + attribute(2, inner))


def test_what_the_kernel_adds_is_no_difference() -> None:
    """Counted packets, handles, names of sets, defaults, somebody's comment on a rule."""
    wanted = a_table(
        a_rule(tcp(), WEB, to=jump("ISTIO_OUTPUT")),
        a_rule(source("10.96.0.0/12")),
        a_rule(tcp(), to=redirect(15001)),
    )
    listed = [as_the_kernel_lists(message) for message in wanted]
    assert listed != [(message.kind, message.body) for message in wanted]
    assert difference(read(listed), wanted) == ""


BASE = (
    *a_table(a_rule(tcp(), destination_port(80)), a_rule(tcp(), WEB)),
    *messages([NftTable(RAW, ("output",), (a_rule(chain="output"),))]),
)


def test_nothing_differs_from_itself() -> None:
    """Nor does nothing from nothing, whatever tables of others are there."""
    assert difference(state_of(BASE), BASE) == ""
    assert difference({}, ()) == ""
    assert difference(state_of((Message(NEWTABLE, 0, string(1, "x"), "x"),)), ()) == ""


def test_tables_are_named_in_their_order() -> None:
    """The first that differs is, though others do, too."""
    assert difference({}, BASE) == f"inet {NAT}: the table is missing"
    assert difference(state_of(BASE), ()) == f"inet {NAT}: the table is unexpected"
    assert difference(state_of(BASE[:-3]), BASE) == f"inet {RAW}: the table is missing"


def test_elements_count_and_their_order_does_not() -> None:
    """The kernel lists them as it likes."""

    def with_set(*ports: int) -> tuple[Message, ...]:
        intervals = tuple((port, port) for port in ports)
        return a_table(a_rule(OneOf(MatchKind.DESTINATION_PORT, intervals)))

    wanted = with_set(80, 443)
    (elements,) = (message for message in wanted if message.kind == NEWSETELEM)
    said = dict(attributes(elements.body))
    items = b"".join(attribute(1, raw) for _, raw in reversed([*attributes(said[3])]))
    body = string(1, NAT) + string(2, "__set%d") + attribute(3, items) + attribute(4, said[4])
    turned = tuple(
        message._replace(body=body) if message is elements else message for message in wanted
    )
    assert turned != wanted
    assert difference(state_of(turned), wanted) == ""
    for ports in ((80, 444), (80,), (80, 81, 443)):
        found = difference(state_of(with_set(*ports)), wanted)
        assert found.startswith(f"inet {NAT} istio-output rule 1: [ meta load l4proto")
        assert found.endswith(" instead of `tcp dport { 80, 443 } counter return`")


def test_a_sleeping_table_is_a_difference() -> None:
    """It holds all the rules and calls none."""
    (table, *others) = BASE
    asleep = table._replace(body=table.body + be32(2, 1))
    assert difference(state_of((asleep, *others)), BASE) == f"inet {NAT}: the table is dormant"


def test_a_hook_is_a_difference() -> None:
    """Also where a chain has none and ought to have none."""
    hook = nested(4, be32(1, 3), be32(2, 0)) + string(7, "filter")
    hooked = tuple(
        message._replace(body=message.body + hook)
        if (message.kind, message.chain) == (NEWCHAIN, "istio-output")
        else message
        for message in BASE
    )
    assert difference(state_of(hooked), BASE) == (
        f"inet {NAT} istio-output: type filter hook output priority 0 policy accept "
        "instead of no hook"
    )
    assert difference(state_of(BASE), hooked) == (
        f"inet {NAT} istio-output: no hook instead of "
        "type filter hook output priority 0 policy accept"
    )
