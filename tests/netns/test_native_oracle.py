"""Our nf_tables messages against nft: what both make of the same rules, expression by expression.

Text goes through a real nft into one namespace, messages through our own socket into another; the
kernel's listings must be the same, set numbers and handles aside. Two layouts of every case: the
reference's, and the one that is programmed. Then what is there is read back, also after somebody
has changed it.
"""

from __future__ import annotations

import ctypes
import re
import socket
import struct
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cases import ALL_DNS, CASES, CNI, DUAL, TPROXY, Case
from istio_cni.edge import netlink
from istio_cni.rules import nfdump, nfnetlink, nftables
from istio_cni.rules.netlink import NEWCHAIN, NEWRULE, NEWSET, NEWSETELEM, NEWTABLE
from istio_cni.rules.nfnetlink import Message
from istio_cni.rules.nftables import TABLES, NftTable, complete, reference, render, render_complete
from istio_cni.rules.sidecar import generate
from namespaces import CLONE_NEWNET, call_inside, ip
from netns.test_cases import ruleset_of

pytestmark = pytest.mark.netns


def joined(*items: object) -> str:
    """Write a list as settings take it."""
    return ",".join(map(str, items))


SEVENTEENS = joined(*(f"10.{n}.0.0/16" for n in range(0, 200, 3)), "10.0.0.0/12", "10.1.2.3/32")
EVEN_GROUPS = joined(*range(5000, 5090, 2))
EVEN_PORTS = joined(*range(100, 160, 2))
ODD_NAMES = ("ct", "mark", "jump", "3com0")
MORE = {
    "more-ranges-than-rules": Case(
        {
            **CNI,
            **DUAL,
            "OUTBOUND_IPRANGES_EXCLUDE": joined(SEVENTEENS, *(f"fd00:{n}::/32" for n in range(40))),
            "OUTBOUND_OWNER_GROUPS_EXCLUDE": joined(*range(5000, 5100, 2)),
        }
    ),
    "ranges-side-by-side-and-at-both-ends": Case(
        {
            **CNI,
            **DUAL,
            "OUTBOUND_IPRANGES_EXCLUDE": joined(
                *(f"10.0.{n}.0/24" for n in range(1, 30)),
                *("0.0.0.0/32", "255.255.255.255/32", "255.0.0.0/8"),
                *(f"fd00:{n:x}::/32" for n in range(0, 80, 2)),
                *("::/128", "ff00::/8"),
            ),
        }
    ),
    "groups-included-by-the-set": Case({**CNI, "OUTBOUND_OWNER_GROUPS_INCLUDE": EVEN_GROUPS}),
    "groups-included-with-ranges": Case(
        {**CNI, "OUTBOUND_OWNER_GROUPS_INCLUDE": joined(EVEN_GROUPS, "1000-1999", 0, 4294967294)}
    ),
    "groups-excluded-with-ranges": Case(
        {**CNI, "OUTBOUND_OWNER_GROUPS_EXCLUDE": joined(EVEN_GROUPS, "1000-1999", 0, 4294967294)}
    ),
    "groups-excluded-by-thousands": Case(
        {**CNI, "OUTBOUND_OWNER_GROUPS_EXCLUDE": joined(*range(10000, 14000, 2))}
    ),
    "ports-by-the-set": Case(
        {
            **CNI,
            **DUAL,
            "INBOUND_PORTS_INCLUDE": joined(EVEN_PORTS, "150-300", 65535, 0),
            "OUTBOUND_PORTS_INCLUDE": EVEN_PORTS,
        }
    ),
    "tproxy-ports-excluded-by-the-set": Case(
        {**TPROXY, **DUAL, "INBOUND_PORTS_EXCLUDE": joined(EVEN_PORTS, "60000-65535")}
    ),
    "interfaces-with-odd-names": Case({**CNI, **DUAL, "EXCLUDE_INTERFACES": joined(*ODD_NAMES)}),
}
"""Cases that no text of the reference is kept for: long lists, both ends, names that are words."""
ALL = {**CASES, **MORE}
REFUSED_BARE = ("veth0@if3", *ODD_NAMES)
"""Names of interfaces that nft takes only in quotes, which the reference does not write."""


def nft_takes(case: Case) -> bool:
    """Tell whether the reference's text of a case can be loaded."""
    config = case.config
    return {*config.excluded_interfaces, *config.reroute_interfaces}.isdisjoint(REFUSED_BARE)


@pytest.fixture(scope="module")
def home() -> Iterator[str]:
    """Path of a namespace that stays empty: what tests do begins here, in fresh ones of its own."""
    name = f"istio-{uuid.uuid4().hex[:8]}"
    ip("netns", "add", name)
    try:
        yield f"/run/netns/{name}"
    finally:
        ip("netns", "del", name)


def leave() -> None:
    """Move on into a fresh namespace; for children only."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0


def nft(*arguments: str, stdin: str = "") -> str:
    """Run nft here; it must not even complain."""
    done = subprocess.run(
        ["nft", *arguments], input=stdin, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def listing() -> str:
    """List all that is here, as expressions and as text, without what no two runs have in common.

    That is the numbers of sets, handles, and the order in which the kernel lists elements.
    """
    text = nft("-s", "--debug=netlink", "list", "ruleset")
    text = re.sub(r"(?:^\telement .*\n)+", _in_order, text, flags=re.M)
    text = re.sub(r"__set\d+", "__set", text)
    return re.sub(r"^(inet \S+ \S+) \d+( \d+)*", r"\1", text, flags=re.M)


def _in_order(elements: re.Match[str]) -> str:
    return "".join(sorted(elements[0].splitlines(keepends=True)))


def by_nft(text: str) -> str:
    """Let nft make the rules of a fresh namespace; list them."""
    leave()
    nft("-f", "-", stdin=text)
    return listing()


def by_us(wanted: Sequence[Message], comment: str = "") -> str:
    """Make the rules of a fresh namespace ourselves; list them."""
    leave()
    commit(wanted, comment)
    return listing()


def commit(wanted: Sequence[Message], comment: str = "") -> None:
    """Make tables where there are none of ours."""
    with netlink.Ruleset() as kernel:
        kernel.commit(nfnetlink.transaction(wanted, comment=comment))


def in_place(table: NftTable) -> NftTable:
    """Put insertions where they end up: messages only append."""
    chains: dict[str, list[nftables.NftRule]] = {}
    for rule in table.rules:
        rules = chains.setdefault(rule.chain, [])
        rules.insert(len(rules) if rule.at is None else rule.at, rule._replace(at=None))
    return table._replace(rules=tuple(rule for rules in chains.values() for rule in rules))


# -- the same tables ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if nft_takes(case)])
def test_reference_over_netlink_is_what_nft_makes_of_its_text(name: str, home: str) -> None:
    """Insertions by index end up where the kernel puts them, too."""
    tables = reference(ruleset_of(ALL[name]))
    wanted = nfnetlink.messages(map(in_place, tables))
    ours, nfts = call_inside(home, lambda: (by_us(wanted), by_nft(render(tables))))
    assert ours == nfts


@pytest.mark.parametrize("name", ALL)
def test_what_is_programmed_is_what_nft_makes_of_the_complete_text(name: str, home: str) -> None:
    """Whatever the names of interfaces, with the fingerprint as each table's comment."""
    tables = complete(ruleset_of(ALL[name]))
    wanted = nfnetlink.messages(tables)
    comment = nfnetlink.fingerprint(wanted)
    text = render_complete(tables, comment)
    ours, nfts = call_inside(home, lambda: (by_us(wanted, comment), by_nft(text)))
    assert ours == nfts
    assert ours.count(f'comment "{comment}"') == len(tables)


def test_complete_texts_pass_nfts_own_check(home: str) -> None:
    """All of them, one after the other; nothing comes of it."""
    text = "".join(
        render_complete(complete(ruleset_of(case)), nfnetlink.COMMENT_PREFIX)
        for case in ALL.values()
    )
    assert call_inside(home, nft, "-c", "-f", "-", stdin=text) == ""
    assert call_inside(home, nft, "list", "ruleset") == ""


def test_complete_text_replaces_all_that_was_there(home: str) -> None:
    """Tables that are not wanted any more go, as they do over netlink."""
    before, after = (
        render_complete(complete(ruleset_of(CASES[name])), "istio-cni x")
        for name in ("everything", "cni-defaults")
    )

    def replace() -> tuple[str, str, str]:
        alone = by_nft(after)
        first = by_nft(before)
        nft("-f", "-", stdin=after)
        return alone, first, listing()

    alone, first, second = call_inside(home, replace)
    assert "istio-proxy-mangle" in first
    assert second == alone


@pytest.mark.parametrize("name", REFUSED_BARE)
def test_nft_refuses_some_names_without_quotes(name: str, home: str) -> None:
    """Which is why the reference's text of some cases cannot be loaded; quoted they are names."""
    text = "add table inet t\nadd chain inet t c\nadd rule inet t c iifname {} counter return\n"
    call_inside(home, nft, "-c", "-f", "-", stdin=text.format(f'"{name}"'))
    with pytest.raises(AssertionError, match="Error: "):
        call_inside(home, nft, "-c", "-f", "-", stdin=text.format(name))


# -- the same bytes ----------------------------------------------------------------------------

BY_PYROUTE2 = (
    "appendix-a",
    "everything",
    "groups-excluded",
    "ranges-side-by-side-and-at-both-ends",
)


@pytest.mark.parametrize("name", BY_PYROUTE2)
def test_pyroute2_writes_the_same_messages(name: str) -> None:
    """Taken apart into its names and put together again, each is byte for byte what it was.

    It knows every attribute, and sets no flag on nested ones; elements of sets it counts.
    """
    wanted = nfnetlink.messages(complete(ruleset_of(ALL[name])))
    batch = nfnetlink.transaction(wanted, comment=nfnetlink.fingerprint(wanted))
    assert {message.kind for message in batch} >= {NEWTABLE, NEWCHAIN, NEWRULE, NEWSET, NEWSETELEM}
    for message in batch:
        ours, theirs = through_pyroute2(message)
        assert len(ours) == len(theirs), message.about
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            counted = message.kind == NEWSETELEM and at % 4 in (2, 3) and one in (0, 1, 0x80)
            assert one == other or (at % 4 == 3 and one == other | 0x80) or counted, message.about


def through_pyroute2(message: Message) -> tuple[bytes, bytes]:
    """Return a message as we write it, and as pyroute2 does."""
    from pyroute2.netlink.nfnetlink import nftsocket

    kinds = {
        NEWTABLE: nftsocket.nft_table_msg,
        NEWCHAIN: nftsocket.nft_chain_msg,
        NEWRULE: nftsocket.nft_rule_msg,
        NEWSET: nftsocket.nft_set_msg,
        NEWSETELEM: nftsocket.nft_set_elem_list_msg,
    }
    kind, flags = 10 << 8 | message.kind, 1 | message.flags
    head = struct.pack("=IHHIIBBH", 20 + len(message.body), kind, flags, 7, 0, 1, 0, 0)
    read = kinds[message.kind](head + message.body)
    read.decode()
    written = kinds[message.kind]()
    written["nfgen_family"] = 1
    written["header"] = {"type": kind, "flags": flags, "sequence_number": 7, "pid": 0}
    written["attrs"] = [(slot.name, _plain(slot.nla, slot.value)) for slot in read["attrs"]]
    written.encode()
    return head + message.body, bytes(written.data)


def _plain(attribute: Any, value: Any) -> Any:
    """Return the value that pyroute2 encodes to an attribute which it has decoded."""
    if isinstance(value, list):
        return [
            item if isinstance(item, tuple) else _plain(item, item.getvalue()) for item in value
        ]
    if isinstance(value, dict):
        return {"attrs": [(slot.name, _plain(slot.nla, slot.value)) for slot in value["attrs"]]}
    if isinstance(value, str) and hasattr(attribute, "ops"):
        return attribute["value"]  # the number that it gave a name to
    return value


# -- read back ---------------------------------------------------------------------------------


def difference(wanted: Sequence[Message]) -> str:
    """Name the first thing in which the present namespace differs from what is wanted."""
    with netlink.Ruleset() as kernel:
        return nfdump.difference(nfdump.read(kernel.dump(tuple(TABLES.values()))), wanted)


@pytest.mark.parametrize("name", ALL)
def test_what_was_committed_is_read_back(name: str, home: str) -> None:
    """No case's rules differ from themselves, and each case's differ from those of another."""
    wanted = nfnetlink.messages(complete(ruleset_of(ALL[name])))

    def read() -> tuple[str, str]:
        leave()
        commit(wanted)
        return difference(wanted), difference(BASE)

    same, other = call_inside(home, read)
    assert same == ""
    assert other != ""


BASE = nfnetlink.messages(
    complete(generate(Case({**CNI, **ALL_DNS, "INBOUND_PORTS_INCLUDE": "8080,9090"}).config))
)
"""Rules that tests change: without IPv6, so that each base chain begins with a guard."""
NAT = "inet istio-proxy-nat"
PORTS = f"{NAT} istio-inbound"
TCP = "[ meta load l4proto => reg 1 ] [ cmp eq reg 1 0x06 ]"
DPORT = "[ payload load 2b @ transport header + 2 => reg 1 ]"
TO_8080 = "`meta l4proto tcp tcp dport 8080 counter jump istio-in-redirect`"
TO_9090 = "`meta l4proto tcp tcp dport 9090 counter jump istio-in-redirect`"
TO_PROXY = "[ counter ] [ immediate reg 0 jump istio-in-redirect ]"
PROXYS_OWN = (
    "oifname lo meta l4proto tcp ip daddr != 127.0.0.1/32 tcp dport != { 53, 15008 } "
    "skuid 1337 counter jump istio-in-redirect"
)
DRAWN_ANEW = (
    f"flush chain {NAT} prerouting\ndelete chain {NAT} prerouting\n"
    f"add chain {NAT} prerouting {{ type nat hook prerouting priority %s ; }}\n"
    f"add rule {NAT} prerouting meta nfproto ipv6 counter return\n"
    f"add rule {NAT} prerouting meta l4proto tcp counter jump istio-inbound\n"
)
TAMPERED = {
    "nothing": ("", ""),
    "a rule deleted": (
        f"delete rule {PORTS} #2",
        f"{PORTS} rule 2: {TCP} {DPORT} [ cmp eq reg 1 0x2382 ] {TO_PROXY} instead of {TO_8080}",
    ),
    "the last rule deleted": (f"delete rule {PORTS} #3", f"{PORTS} rule 3: missing {TO_9090}"),
    "all rules deleted": (
        f"flush chain {PORTS}",
        f"{PORTS} rule 1: missing `meta l4proto tcp tcp dport 15008 counter return`",
    ),
    "a rule inserted": (
        f"insert rule {PORTS} counter accept",
        f"{PORTS} rule 1: [ counter ] [ immediate reg 0 accept ] instead of "
        "`meta l4proto tcp tcp dport 15008 counter return`",
    ),
    "a rule added": (
        f"add rule {PORTS} tcp dport 80 drop",
        f"{PORTS} rule 4: unexpected {TCP} {DPORT} [ cmp eq reg 1 0x0050 ] "
        "[ immediate reg 0 drop ]",
    ),
    "two rules swapped": (
        f"delete rule {PORTS} #2\nadd rule {PORTS} tcp dport 8080 counter jump istio-in-redirect",
        f"{PORTS} rule 2: {TCP} {DPORT} [ cmp eq reg 1 0x2382 ] {TO_PROXY} instead of {TO_8080}",
    ),
    "another port": (
        f"replace rule {PORTS} #2 tcp dport 8081 counter jump istio-in-redirect",
        f"{PORTS} rule 2: {TCP} {DPORT} [ cmp eq reg 1 0x1f91 ] {TO_PROXY} instead of {TO_8080}",
    ),
    "another verdict": (
        f"replace rule {PORTS} #2 tcp dport 8080 counter goto istio-in-redirect",
        f"{PORTS} rule 2: {TCP} {DPORT} [ cmp eq reg 1 0x1f90 ] [ counter ] "
        f"[ immediate reg 0 goto istio-in-redirect ] instead of {TO_8080}",
    ),
    "another set": (
        f"replace rule {NAT} istio-output #4 {PROXYS_OWN.replace('53,', '54,')}",
        f"{NAT} istio-output rule 4: [ meta load oifname => reg 1 ] "
        f"[ cmp eq reg 1 0x6c6f{'00' * 14} ] {TCP} "
        "[ meta load nfproto => reg 1 ] [ cmp eq reg 1 0x02 ] "
        "[ payload load 4b @ network header + 16 => reg 1 ] [ cmp neq reg 1 0x7f000001 ] "
        f"{DPORT} [ lookup reg 1 not in {{ 0x0036, 0x3aa0 }} ] "
        f"[ meta load skuid => reg 1 ] [ cmp eq reg 1 0x{struct.pack('=I', 1337).hex()} ] "
        f"{TO_PROXY} instead of `{PROXYS_OWN}`",
    ),
    "another priority": (
        DRAWN_ANEW % -99,
        f"{NAT} prerouting: type nat hook prerouting priority -99 policy accept instead of "
        "type nat hook prerouting priority -100 policy accept",
    ),
    "the same chain anew": (DRAWN_ANEW % -100, ""),
    "another policy": (
        f"add chain {NAT} prerouting {{ policy drop ; }}",
        f"{NAT} prerouting: type nat hook prerouting priority -100 policy drop instead of "
        "type nat hook prerouting priority -100 policy accept",
    ),
    "a chain without its hook": (
        DRAWN_ANEW.replace("{ type nat hook prerouting priority %s ; }", ""),
        f"{NAT} prerouting: no hook instead of "
        "type nat hook prerouting priority -100 policy accept",
    ),
    "a chain added": (f"add chain {NAT} extra", f"{NAT} extra: unexpected chain"),
    "a chain gone": (
        f"delete rule {NAT} prerouting #2\ndelete chain {NAT} istio-inbound",
        f"{NAT} prerouting rule 2: missing `meta l4proto tcp counter jump istio-inbound`",
    ),
    "a table asleep": (f"add table {NAT} {{ flags dormant ; }}", f"{NAT}: the table is dormant"),
    "a table gone": (
        "delete table inet istio-proxy-raw",
        "inet istio-proxy-raw: the table is missing",
    ),
    "a table of ours more": (
        "add table inet istio-proxy-mangle",
        "inet istio-proxy-mangle: the table is unexpected",
    ),
    "tables of others": (
        "add table inet x\nadd table ip istio-proxy-nat\nadd table ip6 istio-proxy-raw\n"
        "add chain ip istio-proxy-nat prerouting\n"
        "add rule ip istio-proxy-nat prerouting counter accept",
        "",
    ),
}
"""What somebody does, as nft takes it, `#2` for the second rule of a chain; what is said of it."""


def tampered(commands: str) -> str:
    """Commit the base's rules, let somebody change them, return the difference."""
    leave()
    commit(BASE)
    nft("-f", "-", stdin=re.sub(r"(inet \S+ \S+) #(\d+)", _with_handle, commands))
    return difference(BASE)


def _with_handle(found: re.Match[str]) -> str:
    rules = re.findall(r"# handle (\d+)$", nft("-a", "list", "chain", *found[1].split()), re.M)
    return f"{found[1]} handle {rules[int(found[2])]}"  # the first handle is the chain's own


@pytest.mark.parametrize("what", TAMPERED)
def test_what_somebody_changed_is_named(what: str, home: str) -> None:
    """The first difference, by table, chain and rule; what is not ours is no difference."""
    commands, said = TAMPERED[what]
    assert call_inside(home, tampered, commands) == said


FOREIGN = (
    "meta mark set meta mark << 1",
    "ip daddr vmap { 10.0.0.1 : drop, 10.0.0.2 : accept }",
    "ip daddr vmap { 10.0.0.1 : drop, * : accept }",
    "ip daddr . tcp dport { 10.0.0.1 . 80 } drop",
    "ip daddr . tcp dport { 10.0.0.0/8 . 80-90 } drop",
    "meta mark set numgen random mod 4 map { 0 : 1, 1-2 : 2, 3 : 3 }",
    "ip daddr @nobody drop",
    "ip daddr @everybody drop",
    "update @seen { ip saddr limit rate 1/second } drop",
    'log prefix "x" group 1',
    "limit rate 1/second drop",
    "quota over 1 mbytes drop",
    "tcp flags syn / syn,ack drop",
    "tcp option maxseg size set 1400",
    "ip6 dscp set cs1",
    "ct state new reject",
    "tcp dport 80 dnat ip to 10.0.0.1:80-90",
    "redirect",
    "fib daddr type local accept",
    "notrack",
    "meta iif 1 accept",
    "ip daddr 10.0.0.0-10.0.0.9 accept",
    "ip daddr != 10.0.0.0-10.0.0.9 accept",
    "counter name hits accept",
    'counter accept comment "mine"',
    "jump { counter accept ; }",
    "continue",
)
SETS = {
    "@nobody": "set {0} nobody {{ type ipv4_addr ; }}",
    "@everybody": "set {0} everybody {{ type ipv4_addr ; flags interval ; elements = {{ * }} ; }}",
    "@seen": "set {0} seen {{ type ipv4_addr ; size 9 ; flags dynamic, timeout ; timeout 9s ; }}",
    "name hits": "counter {0} hits",
}
"""What a rule that says so needs."""


@pytest.mark.parametrize("rule", FOREIGN)
def test_rules_of_any_kind_can_be_read(rule: str, home: str) -> None:
    """Whatever somebody puts into our chains is shown as a difference."""
    needs = (f"add {what.format(NAT)}\n" for word, what in SETS.items() if word in rule)
    try:
        said = call_inside(
            home, tampered, f"{''.join(needs)}insert rule {NAT} istio-output {rule}\n"
        )
    except AssertionError as error:
        if re.search("not supported|No such file|Could not process", str(error)):
            pytest.skip(f"needs a kernel that takes `{rule}`")
        raise
    assert said.startswith(f"{NAT} istio-output rule 1: [ ")
    assert said.endswith(" ] instead of `tcp dport 15020 counter return`")


def test_elements_that_expire_are_a_difference(home: str) -> None:
    """They are the same as ours only for a while."""
    elements = "53 timeout 1h, 15008 timeout 1h"
    commands = (
        f"add set {NAT} brief {{ type inet_service ; flags timeout ; "
        f"elements = {{ {elements} }} ; }}\n"
        f"replace rule {NAT} istio-output #4 {PROXYS_OWN.replace('{ 53, 15008 }', '@brief')}\n"
    )
    said = call_inside(home, tampered, commands)
    assert said.startswith(f"{NAT} istio-output rule 4: ")
    assert said.endswith(f" instead of `{PROXYS_OWN}`")


@pytest.mark.parametrize("before", [2, 3])
def test_tables_made_while_they_are_read_are_read_whole(before: int, home: str) -> None:
    """Somebody's ADD between two of the lists that a CHECK asks for."""

    def read() -> str:
        leave()
        ask, asked = netlink.Ruleset.ask, 0

        def then_ask(kernel: netlink.Ruleset, *request: Any) -> list[bytes]:
            nonlocal asked
            asked += 1
            if asked == before:
                commit(BASE)
            return ask(kernel, *request)

        setattr(netlink.Ruleset, "ask", then_ask)  # noqa: B010 - a method, in this child only
        return difference(BASE)

    assert call_inside(home, read) == ""


def test_counted_packets_are_no_difference(home: str) -> None:
    """Nor does anything else that the kernel keeps count of."""

    def send() -> tuple[str, str]:
        leave()
        commit(BASE)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", ("127.0.0.1", 9))
        return nft("list", "ruleset"), difference(BASE)

    rules, said = call_inside(home, send)
    assert "counter packets 1 bytes 28" in rules
    assert said == ""
