"""What others have put into a pod's namespace stays: rules, chains, tables, routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from istio_cni.errors import ProgrammingFailed
from namespaces import inside
from netns.programming import (
    ALL_DNS,
    FIRST_TABLE_ONLY,
    TPROXY,
    VARIANTS,
    clean_up,
    config,
    program,
    restore,
    rules,
    state,
    wrap,
)

pytestmark = pytest.mark.netns

variants = pytest.mark.parametrize("variant", VARIANTS)
PROGRAMS = ("iptables", "ip6tables")
BEFORE = """\
*nat
:FOREIGN - [0:0]
-A PREROUTING -p tcp --dport 4000 -j FOREIGN
-A OUTPUT -p tcp --dport 4000 -j RETURN
-A OUTPUT -o eth7 -p udp -j RETURN
-A FOREIGN -p tcp -j REDIRECT --to-ports 4001
COMMIT
*mangle
-A PREROUTING -p tcp --dport 4000 -j MARK --set-mark 7
-A OUTPUT -p tcp -m mark --mark 7 -j CONNMARK --save-mark
COMMIT
*filter
-A INPUT -p tcp -j DROP
-A INPUT -i eth7 -j RETURN
-A OUTPUT -p udp -j DROP
-A FORWARD -p tcp -j DROP
COMMIT
*raw
-A PREROUTING -i eth7 -j RETURN
COMMIT
"""
"""Among others: some of our drop rules, but not all, and a RETURN where we make none."""
AFTER = """\
*nat
-I OUTPUT 1 -p tcp --dport 5000 -j RETURN
-A OUTPUT -p tcp --dport 5001 -j RETURN
-I PREROUTING 2 -p tcp --dport 5002 -j RETURN
COMMIT
*mangle
-A PREROUTING -p tcp --dport 5003 -j MARK --set-mark 8
COMMIT
"""
LATER = ("--dport 5000 ", "--dport 5001 ", "--dport 5002 ", "--dport 5003 ")


def put_rules(path: str, variant: str, text: str) -> None:
    """Load foreign rules in both families."""
    for program_ in PROGRAMS:
        restore(path, f"{program_}-{variant}", text)


def put_others(path: str) -> None:
    """Add what is not iptables: native tables, policy rules, routes, addresses."""
    native = (
        "add table ip mesh",
        "add chain ip mesh output { type nat hook output priority -50; }",
        "add rule ip mesh output tcp dport 1 accept",
        "add table inet filter",
        "add chain inet filter input { type filter hook input priority 0; policy accept; }",
        "add table ip6 ISTIO_OUTPUT",
        "add set ip6 ISTIO_OUTPUT peers { type ipv6_addr; }",
    )
    inside(path, ["nft", "-f", "-"], stdin="\n".join(native))
    lines = (
        "rule add priority 31337 fwmark 1337 from 192.0.2.0/24 lookup 133",
        "rule add priority 31337 fwmark 0x539/0xfff lookup 133",
        "rule add priority 31336 fwmark 7 lookup 7",
        "rule add priority 900 fwmark 1337 lookup 900",
        "route add local default dev lo table 900",
        "route add unreachable 192.0.2.0/24 table 133",
        "addr add ::7/128 dev lo",
        "addr add 127.0.0.9/32 dev lo",
    )
    inside(path, ["ip", "-batch", "-"], stdin="\n".join(lines))


def all_state(path: str) -> str:
    """Return also what `state` leaves out: native tables and all routes."""
    parts = [
        inside(path, ["ip", family, "route", "show", "table", "all"]) for family in ("-4", "-6")
    ]
    tables = inside(path, ["nft", "list", "tables"])
    native = [inside(path, ["nft", "list", "table", *name.split()]) for name in NATIVE]
    return "".join([state(path), *parts, "".join(sorted(tables.splitlines(True))), *native])


NATIVE = ("ip mesh", "inet filter", "ip6 ISTIO_OUTPUT")


@variants
@pytest.mark.parametrize("mode", [{}, TPROXY], ids=["REDIRECT", "TPROXY"])
def test_clean_up_leaves_foreign_things(netns: str, variant: str, mode: dict[str, object]) -> None:
    """After capture and clean-up the namespace is as it was, to the order of rules."""
    put_rules(netns, variant, BEFORE)
    put_others(netns)
    before = all_state(netns)
    program(netns, config(variant, **mode, **ALL_DNS))
    assert "ISTIO_INBOUND" in rules(netns)
    program(netns, config(variant, **mode))
    clean_up(netns)
    assert all_state(netns) == before
    assert clean_up(netns).changed == []


@variants
def test_rules_added_around_ours_keep_their_order(netns: str, variant: str) -> None:
    """Others may have put theirs before, between and behind ours since; all of them stay."""
    program(netns, config(variant, **TPROXY))
    put_rules(netns, variant, BEFORE + AFTER)
    foreign = [line for line in rules(netns).splitlines() if any(port in line for port in LATER)]
    assert len(foreign) == 8
    for wanted in (config(variant, **ALL_DNS), config(variant, **TPROXY)):
        program(netns, wanted)
        assert [line for line in rules(netns).splitlines() if line in foreign] == foreign
    clean_up(netns)
    assert [line for line in rules(netns).splitlines() if line in foreign] == foreign
    assert "ISTIO" not in rules(netns)


@variants
def test_failed_run_puts_ours_back_between_theirs(netns: str, tmp_path: Path, variant: str) -> None:
    """A roll-back knows the place of each of our rules among the others."""
    put_rules(netns, variant, BEFORE)
    program(netns, config(variant, **ALL_DNS))
    put_rules(netns, variant, AFTER)
    before = state(netns)
    wrap(tmp_path, f"iptables-{variant}-restore", f"{FIRST_TABLE_ONLY} exit 1")
    wrap(tmp_path, f"ip6tables-{variant}-restore", f"{FIRST_TABLE_ONLY} exit 1")
    with pytest.raises(ProgrammingFailed):
        program(netns, config(variant, **TPROXY), wrappers=tmp_path)
    assert state(netns) == before


@variants
def test_clean_up_of_a_namespace_without_ours_touches_nothing(netns: str, variant: str) -> None:
    """There is nothing to remove, so nothing is loaded."""
    put_rules(netns, variant, BEFORE)
    put_others(netns)
    before = all_state(netns)
    assert clean_up(netns).changed == []
    assert all_state(netns) == before


def test_foreign_empty_tables_stay(netns: str) -> None:
    """A table that somebody's `iptables -L` has made is not ours to delete."""
    for program_ in PROGRAMS:
        inside(netns, [f"{program_}-nft", "-t", "filter", "-S"])
        restore(
            netns,
            f"{program_}-nft",
            "*filter\n-A INPUT -p 99 -j DROP\n-D INPUT -p 99 -j DROP\nCOMMIT\n",
        )
    before = state(netns)
    assert "*filter" in before
    program(netns, config("nft", **ALL_DNS))
    program(netns, config("nft", **TPROXY))
    clean_up(netns)
    assert state(netns) == before
