"""Rules as text, and the texts of both iptables variants as rules."""

from __future__ import annotations

import pytest

from cases import CASES
from istio_cni.rules.iptables import (
    SavedRule,
    check_commands,
    parse_rule,
    parse_save,
    render,
    specification,
)
from istio_cni.rules.model import (
    RESTORE_MARK,
    RETURN,
    SAVE_MARK,
    Family,
    Match,
    PortRange,
    Rule,
    Ruleset,
    Table,
    Verdict,
    canonical,
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
    source_port,
    tcp,
    tproxy,
    udp,
    zone,
)
from istio_cni.rules.sidecar import generate
from istio_cni.rules.state import wanted

CHAIN = "ISTIO_OUTPUT"
BOTH = pytest.mark.parametrize("family", Family)


@pytest.mark.parametrize("name", CASES)
@BOTH
def test_what_is_rendered_is_read_back_as_it_was(name: str, family: Family) -> None:
    """Rules, their order in the kernel and empty chains survive the way through text."""
    ruleset = generate(CASES[name].config)
    assert parse_save(render(ruleset, family)) == wanted(ruleset, family)


@pytest.mark.parametrize("name", CASES)
@BOTH
def test_rendering_table_by_table_is_rendering_all(name: str, family: Family) -> None:
    """A part of the tables gives the same blocks, in alphabetical order whatever is asked for."""
    ruleset = generate(CASES[name].config)
    whole = render(ruleset, family)
    parts = [render(ruleset, family, [table]) for table in (Table.MANGLE, Table.NAT, Table.RAW)]
    assert "".join(parts) == whole
    assert render(ruleset, family, reversed(Table)) == whole


@pytest.mark.parametrize("name", CASES)
@BOTH
def test_each_rule_has_one_check(name: str, family: Family) -> None:
    """In the order of the rules, without positions, token by token as in the text."""
    ruleset = generate(CASES[name].config)
    commands = check_commands(ruleset, family)
    lines = [line for line in render(ruleset, family).splitlines() if line[:3] in ("-A ", "-I ")]
    assert sorted(" ".join(command[4:]) for command in commands) == sorted(
        line.split(" ", 2 if line.startswith("-A") else 3)[-1] for line in lines
    )
    for command, rule in zip(commands, ruleset.of(family), strict=True):
        assert command[:4] == ["-t", rule.table.value, "-C", rule.chain]
        assert " ".join(command[4:]) == specification(rule)


def test_no_rules_are_the_empty_text() -> None:
    """The restore program is then not called at all."""
    assert render(Ruleset((Family.V4,), ()), Family.V4) == ""
    assert render(generate(CASES["cni-defaults"].config), Family.V6) == ""


def test_chains_that_are_only_jumped_to_are_made_after_the_others() -> None:
    """Rules come last, each chain once, built-in chains never."""
    rules = (
        Rule(Table.NAT, "OUTPUT", (), jump("ISTIO_B")),
        Rule(Table.NAT, "ISTIO_A", (), jump("ISTIO_B")),
        Rule(Table.NAT, "PREROUTING", (), jump("ISTIO_A"), position=1),
    )
    assert render(Ruleset((Family.V4,), rules), Family.V4).splitlines() == [
        "* nat",
        "-N ISTIO_A",
        "-N ISTIO_B",
        "-A OUTPUT -j ISTIO_B",
        "-A ISTIO_A -j ISTIO_B",
        "-I PREROUTING 1 -j ISTIO_A",
        "COMMIT",
    ]


MATCHES = [
    ("-i eth+", (in_interface("eth+"),)),
    ("-o lo", (out_interface("lo"),)),
    ("-s 127.0.0.6/32", (source("127.0.0.6/32"),)),
    ("! -d ::1/128", (destination("::1/128", negate=True),)),
    ("-p tcp", (tcp(),)),
    ("-p udp --sport 53", (udp(), source_port(53))),
    ("-p tcp --dport 8000:8100", (tcp(), destination_ports(PortRange(8000, 8100)))),
    ("-p tcp ! --dport 53", (tcp(), destination_port(53, negate=True))),
    ("-p tcp -m multiport ! --dports 53,15008", (tcp(), destination_port(53, 15008, negate=True))),
    ("-m owner ! --uid-owner 1000-1999", (owner_uid("1000-1999", negate=True),)),
    ("-m owner --gid-owner java", (owner_gid("java"),)),
    ("-m conntrack --ctstate RELATED,ESTABLISHED", (conntrack_state("RELATED", "ESTABLISHED"),)),
    ("-m mark ! --mark 1338", (mark(1338, negate=True),)),
    ("-m connmark --mark 1337", (connection_mark(1337),)),
]
VERDICTS = [
    ("RETURN", RETURN),
    ("ISTIO_REDIRECT", jump("ISTIO_REDIRECT")),
    ("REDIRECT --to-ports 15001", redirect(15001)),
    ("TPROXY --tproxy-mark 1337/0xffffffff --on-port 15006", tproxy(15006, 1337)),
    ("MARK --set-mark 1338", set_mark(1338)),
    ("CONNMARK --save-mark", SAVE_MARK),
    ("CONNMARK --restore-mark", RESTORE_MARK),
    ("CT --zone 2", zone(2)),
]


def rule_of(*matches: Match, verdict: Verdict = RETURN) -> Rule:
    """Return a rule of the test's chain."""
    return Rule(Table.NAT, CHAIN, matches, verdict)


@pytest.mark.parametrize(("text", "matches"), MATCHES)
def test_how_a_match_is_written(text: str, matches: tuple[Match, ...]) -> None:
    """And read."""
    rule = rule_of(*matches)
    assert specification(rule) == f"{text} -j RETURN"
    assert parse_rule(Table.NAT, CHAIN, f"{text} -j RETURN") == canonical(rule)


@pytest.mark.parametrize(("text", "verdict"), VERDICTS)
def test_how_a_verdict_is_written(text: str, verdict: Verdict) -> None:
    """And read."""
    assert specification(rule_of(verdict=verdict)) == f"-j {text}"
    assert parse_rule(Table.NAT, CHAIN, f"-j {text}") == rule_of(verdict=verdict)


def test_redirecting_udp_is_spelt_differently() -> None:
    """The reference writes `--to-port` there, and its users' tools look for that."""
    assert specification(rule_of(udp(), verdict=redirect(15053))).endswith("--to-port 15053")


SAVED = [
    ("-p tcp -m tcp --dport 80 -j RETURN", "-p tcp --dport 80 -j RETURN"),
    ("-p 6 -j RETURN", "-p tcp -j RETURN"),
    ("-d 127.0.0.1 -j RETURN", "-d 127.0.0.1/32 -j RETURN"),
    ("-d ::1 -j RETURN", "-d ::1/128 -j RETURN"),
    ("! -d 127.0.0.1/32 -o lo -p tcp -j RETURN", "-o lo ! -d 127.0.0.1/32 -p tcp -j RETURN"),
    ("-p tcp -j REDIRECT --to-ports 15053", "-p tcp -j REDIRECT --to-port 15053"),
    ("-m mark --mark 0x539 -j RETURN", "-m mark --mark 1337 -j RETURN"),
    ("-m mark --mark 0x539/0xffffffff -j RETURN", "-m mark --mark 1337 -j RETURN"),
    ("-m connmark ! --mark 0x539 -j RETURN", "-m connmark ! --mark 1337 -j RETURN"),
    ("-j MARK --set-xmark 0x53a/0xffffffff", "-j MARK --set-mark 1338"),
    ("-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff", "-j CONNMARK --save-mark"),
    (
        "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
        "-j CONNMARK --restore-mark",
    ),
    (
        "-j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff",
        "-j TPROXY --tproxy-mark 1337/0xffffffff --on-port 15006",
    ),
    (
        "-j TPROXY --on-port 15006 --on-ip :: --tproxy-mark 0x539/0xffffffff",
        "-j TPROXY --tproxy-mark 1337/0xffffffff --on-port 15006",
    ),
    (
        "-p tcp -m tcp -m conntrack --ctstate ESTABLISHED,RELATED -j ISTIO_DIVERT",
        "-p tcp -m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT",
    ),
    ("-p tcp -m tcp -j RETURN", "-p tcp --dport 0:65535 -j RETURN"),
    ("-d ::ffff:10.0.0.0/104 -j RETURN", "-d ::ffff:a00:0/104 -j RETURN"),
]


@pytest.mark.parametrize(("saved", "ours"), SAVED)
def test_what_the_tools_print_is_what_we_wrote(saved: str, ours: str) -> None:
    """Reordered options, named modules, hexadecimal marks and implied masks are the same rule."""
    rule = parse_rule(Table.MANGLE, CHAIN, ours)
    assert rule is not None
    assert parse_rule(Table.MANGLE, CHAIN, saved) == rule


@pytest.mark.parametrize(
    "text",
    [
        "-m comment --comment istio -j RETURN",
        '-m comment --comment "two words" -j RETURN',
        "-p icmp -j RETURN",
        "-p tcp -g ISTIO_OUTPUT",
        "-j KUBE-SERVICES",
        "-j LOG --log-prefix x",
        "-j MARK --set-xmark 0x4000/0x4000",
        "-m mark --mark 0x4000/0x4000 -j RETURN",
        "-j CONNMARK --save-mark --nfmask 0xff --ctmask 0xff",
        "-j TPROXY --on-port 15006 --on-ip 10.0.0.1 --tproxy-mark 0x539/0xffffffff",
        "-p tcp -j REDIRECT --to-ports 15001-15010",
        "-p tcp -j REDIRECT --to-ports 15001 --random",
        "-j CT --zone 1 --notrack",
        "-j CT --notrack",
        "-j RETURN extra",
        "-p tcp",
        "-p tcp ! -j RETURN",
        "-p tcp --dport http -j RETURN",
        "-d example.com -j RETURN",
        "-p",
        "",
        "-p tcp 'unclosed",
    ],
)
def test_what_cannot_be_ours_is_no_rule(text: str) -> None:
    """It is kept as a text, and never taken for a rule of the model."""
    assert parse_rule(Table.NAT, CHAIN, text) is None


def test_a_saved_table_with_everything_in_it() -> None:
    """Comments, policies, counters of chains and unknown tables do not matter."""
    text = """\
# Generated by iptables-save v1.8.9 (nf_tables)
*security
:INPUT ACCEPT [0:0]
-A INPUT -j DROP
COMMIT
*nat
:PREROUTING ACCEPT [12:720]
:OUTPUT ACCEPT [0:0]
:ISTIO_OUTPUT - [3:180]
:KUBE-X - [0:0]
-A OUTPUT -j ISTIO_OUTPUT
-A KUBE-X -m comment --comment "a b" -j MASQUERADE
COMMIT
# Completed
"""
    assert parse_save(text) == {
        Table.NAT: {
            "ISTIO_OUTPUT": [],
            "KUBE-X": [SavedRule('-m comment --comment "a b" -j MASQUERADE', None)],
            "OUTPUT": [
                SavedRule("-j ISTIO_OUTPUT", Rule(Table.NAT, "OUTPUT", (), jump("ISTIO_OUTPUT")))
            ],
        }
    }


@pytest.mark.parametrize("text", ["", "*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n", "no table\n-A X\n"])
def test_empty_tables_hold_nothing(text: str) -> None:
    """A table that was merely looked at is not there."""
    assert parse_save(text) == {}
