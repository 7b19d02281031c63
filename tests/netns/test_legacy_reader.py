"""Legacy tables read by python-iptables, which knows nothing of our texts and our parser."""

from __future__ import annotations

import subprocess
import warnings

import pytest

from cases import CASES
from istio_cni.rules.iptables import render
from istio_cni.rules.model import (
    Address,
    ConntrackState,
    Family,
    Interface,
    Mark,
    MatchKind,
    Owner,
    Ports,
    Protocol,
    Rule,
    Verdict,
    VerdictKind,
    canonical,
    kernel_order,
)
from istio_cni.rules.sidecar import generate
from namespaces import call_inside

pytestmark = pytest.mark.netns

BASE = {Family.V4: "iptables", Family.V6: "ip6tables"}
NAMES = [
    *("appendix-a", "appendix-b", "everything", "several-ids", "outbound-ranges"),
]
Told = dict[str, object]

_KEYS = {
    MatchKind.IN_INTERFACE: "in-interface",
    MatchKind.OUT_INTERFACE: "out-interface",
    MatchKind.SOURCE: "src",
    MatchKind.DESTINATION: "dst",
    MatchKind.SOURCE_PORT: "sport",
    MatchKind.DESTINATION_PORT: "dport",
    MatchKind.OWNER_UID: "uid-owner",
    MatchKind.OWNER_GID: "gid-owner",
    MatchKind.MARK: "mark",
    MatchKind.CONNECTION_MARK: "connmark",
}


def told(rule: Rule, family: Family) -> Told:
    """Return a rule in the terms of python-iptables."""
    found: Told = {"target": _target(rule.verdict, family)}
    protocol = next((match.name for match in rule.matches if isinstance(match, Protocol)), "")
    for match in rule.matches:
        match match:
            case Interface(kind=kind, name=value) | Address(kind=kind, prefix=value):
                found[_KEYS[kind]] = f"!{value}" if match.negate else value
            case Protocol(name=name):
                found["protocol"] = name
            case Ports(kind=kind, ranges=(only,)):
                text = f"{only.first}:{only.last}" if only.last > only.first else f"{only.first}"
                found[protocol] = {_KEYS[kind]: _negatable(text, match.negate)}
            case Ports(kind=kind, ranges=ranges):
                text = ",".join(str(ports.first) for ports in ranges)
                found["multiport"] = {f"{_KEYS[kind]}s": _negatable(text, match.negate)}
            case Owner(kind=kind, id=value):
                found["owner"] = {_KEYS[kind]: _negatable(value, match.negate)}
            case ConntrackState(states=states):
                found["conntrack"] = {"ctstate": ",".join(sorted(states, reverse=True))}
            case Mark(kind=kind, value=number):
                found[_KEYS[kind]] = {"mark": _negatable(hex(number), match.negate)}
    return found


def _negatable(text: str, negate: bool) -> object:
    return ["!", text] if negate else text


def _target(verdict: Verdict, family: Family) -> object:
    """Return a verdict in the terms of python-iptables."""
    whole = f"{verdict.value:#x}/0xffffffff"
    masks = {"nfmask": "0xffffffff", "ctmask": "0xffffffff"}
    match verdict.kind:
        case VerdictKind.JUMP:
            return verdict.chain
        case VerdictKind.REDIRECT:
            return {"REDIRECT": {"to-ports": str(verdict.port)}}
        case VerdictKind.TPROXY:
            on_ip = "::" if family is Family.V6 else "0.0.0.0"
            return {"TPROXY": {"on-port": str(verdict.port), "on-ip": on_ip, "tproxy-mark": whole}}
        case VerdictKind.SET_MARK:
            return {"MARK": {"set-xmark": whole}}
        case VerdictKind.SAVE_MARK:
            return {"CONNMARK": {"save-mark": "", **masks}}
        case VerdictKind.RESTORE_MARK:
            return {"CONNMARK": {"restore-mark": "", **masks}}
        case VerdictKind.ZONE:
            return {"CT": {"zone": str(verdict.value)}}
        case plain:
            return plain.value.upper()


def load_and_read(family: Family, text: str) -> dict[str, dict[str, list[Told]]]:
    """Load a text with iptables-legacy, and read it back with python-iptables.

    In a child of its own for each family: the library remembers targets across both.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        from iptc import easy

    program = f"{BASE[family]}-legacy-restore"
    subprocess.run([program, "--noflush"], input=text, text=True, check=True)
    found = {}
    for table in ("mangle", "nat", "raw"):
        chains = easy.dump_table(table, ipv6=family is Family.V6)
        filled = {
            name: [_without_counters(rule) for rule in rules]
            for name, rules in chains.items()
            if rules
        }
        if filled:
            found[table] = filled
    return found


def _without_counters(rule: Told) -> Told:
    return {key: value for key, value in rule.items() if key != "counters"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", Family)
def test_an_independent_reader_finds_the_rules_wanted(
    name: str, family: Family, netns: str
) -> None:
    """Table, chain, order, matches and verdicts."""
    ruleset = generate(CASES[name].config)
    assert call_inside(netns, load_and_read, family, render(ruleset, family)) == {
        table.value: {
            chain: [told(canonical(rule), family) for rule in rules]
            for chain, rules in chains.items()
        }
        for table, chains in kernel_order(ruleset.of(family)).items()
    }
