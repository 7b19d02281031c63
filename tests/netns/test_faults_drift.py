"""CHECK names the first thing that is not as it was programmed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from istio_cni.errors import ProgrammingFailed
from istio_cni.rules.iptables import render
from istio_cni.rules.model import Family
from istio_cni.rules.sidecar import generate
from namespaces import inside
from netns.programming import (
    ALL_DNS,
    TPROXY,
    VARIANTS,
    check,
    clean_up,
    config,
    program,
    restore,
    state,
    wrap,
)

pytestmark = pytest.mark.netns

variants = pytest.mark.parametrize("variant", VARIANTS)
OWNER = "-m owner --uid-owner 1337 -j RETURN"


def nat(*words: str) -> Callable[[str, str], None]:
    """Return a change to nat with the variant's own program."""

    def change(path: str, variant: str) -> None:
        inside(path, [f"iptables-{variant}", "-t", "nat", *" ".join(words).split()])

    return change


def ip(*words: str) -> Callable[[str, str], None]:
    """Return a change to addresses, routes or policy rules."""

    def change(path: str, variant: str) -> None:
        inside(path, ["ip", *" ".join(words).split()])

    return change


def in_order(*changes: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """Return several changes as one."""

    def change(path: str, variant: str) -> None:
        for one in changes:
            one(path, variant)

    return change


def in_the_other_variant(path: str, variant: str) -> None:
    """Load the same rules a second time, where they capture as well."""
    other = VARIANTS[1 - VARIANTS.index(variant)]
    restore(path, f"iptables-{other}", render(generate(config(variant, **TPROXY)), Family.V4))


CHANGES = {
    "deleted rule": (
        nat("-D ISTIO_OUTPUT", OWNER),
        "iptables ({}) nat ISTIO_OUTPUT rule 6: `! -d 127.0.0.1/32 -o lo -p tcp ",
    ),
    "inserted rule": (
        nat("-I ISTIO_OUTPUT 1 -p tcp --dport 5432 -j RETURN"),
        "iptables ({}) nat ISTIO_OUTPUT rule 1: `-p tcp -m tcp --dport 5432 -j RETURN` instead of",
    ),
    "appended rule": (
        nat("-A ISTIO_REDIRECT -p tcp -j RETURN"),
        "iptables ({}) nat ISTIO_REDIRECT rule 2: unexpected `-p tcp -j RETURN`",
    ),
    "changed order": (
        in_order(nat("-D ISTIO_OUTPUT", OWNER), nat("-I ISTIO_OUTPUT 1", OWNER)),
        "iptables ({}) nat ISTIO_OUTPUT rule 1: `-m owner --uid-owner 1337 -j RETURN` instead of",
    ),
    "missing jump": (
        nat("-D OUTPUT -j ISTIO_OUTPUT"),
        "iptables ({}) nat OUTPUT rule 1: missing `-j ISTIO_OUTPUT`",
    ),
    "missing chain": (
        in_order(nat("-F ISTIO_IN_REDIRECT"), nat("-F ISTIO_OUTPUT"), nat("-X ISTIO_IN_REDIRECT")),
        "iptables ({}) nat ISTIO_IN_REDIRECT: the chain is missing",
    ),
    "unexpected chain": (
        nat("-N ISTIO_EXTRA"),
        "iptables ({}) nat ISTIO_EXTRA: unexpected chain",
    ),
    "missing policy rule": (
        ip("-6 rule del priority 31337"),
        "policy rule (IPv6, priority 31337, mark 1337, table 133) is missing",
    ),
    "missing route": (
        ip("route flush table 133"),
        "local route (IPv4, table 133) is missing",
    ),
    "missing ::6": (ip("addr del ::6/128 dev lo"), "::6 on lo is missing"),
    "lo down": (ip("link set lo down"), "lo is down"),
    "other variant": (in_the_other_variant, "iptables ({other}) mangle "),
}


@variants
@pytest.mark.parametrize("change", CHANGES)
def test_first_difference_is_named(netns: str, variant: str, change: str) -> None:
    """One line: where, which rule, what is there and what should be; a run mends it."""
    wanted = config(variant, **TPROXY)
    variants_ = program(netns, wanted).variants
    assert check(netns, wanted, variants_) == ""
    whole = state(netns)
    alter, expected = CHANGES[change]
    alter(netns, variant)
    other = VARIANTS[1 - VARIANTS.index(variant)]
    found = check(netns, wanted, variants_)
    assert found.startswith(expected.format(variant, other=other))
    assert "\n" not in found
    program(netns, wanted)
    assert check(netns, wanted, variants_) == ""
    assert state(netns) == whole


@variants
def test_foreign_rules_are_no_difference(netns: str, variant: str) -> None:
    """What others put beside ours since is their business."""
    wanted = config(variant, **TPROXY, **ALL_DNS)
    variants_ = program(netns, wanted).variants
    for words in ("-t nat -I OUTPUT 1 -p udp -j RETURN", "-t filter -A INPUT -p tcp -j DROP"):
        inside(netns, [f"iptables-{variant}", *words.split()])
    assert check(netns, wanted, variants_) == ""


def test_nothing_there_is_a_difference(netns: str) -> None:
    """Whether or not it is known which variant was used."""
    wanted = config("nft", ENABLE_INBOUND_IPV6=False)
    assert check(netns, wanted, {}) == "iptables holds no rules of ours"
    variants_ = program(netns, wanted).variants
    clean_up(netns)
    assert check(netns, wanted, variants_) == (
        "iptables (nft) nat ISTIO_INBOUND: the chain is missing"
    )


@variants
def test_leftovers_of_a_family_that_is_not_captured_are_named(netns: str, variant: str) -> None:
    """IPv6 rules of a former configuration capture what this one leaves alone."""
    program(netns, config(variant))
    wanted = config(variant, ENABLE_INBOUND_IPV6=False)
    found = check(netns, wanted, {"iptables": variant})
    assert found.startswith(f"ip6tables ({variant}) nat ISTIO_INBOUND: unexpected `-p tcp ")
    program(netns, wanted)
    assert check(netns, wanted, {"iptables": variant}) == ""


@pytest.mark.parametrize("script", ["exit 1", "not executable"])
def test_rules_that_cannot_be_read_are_no_difference(
    netns: str, tmp_path: Path, script: str
) -> None:
    """Trouble with the program says nothing about the rules, and is not taken for a change."""
    wanted = config("legacy")
    variants_ = program(netns, wanted).variants
    wrap(tmp_path, "iptables-legacy-save", script)
    wrap(tmp_path, "iptables-legacy-restore", "exit 1")
    if script != "exit 1":
        (tmp_path / "iptables-legacy-save").chmod(0o644)
    with pytest.raises(ProgrammingFailed, match="the rules cannot be read: iptables-legacy-save"):
        check(netns, wanted, variants_, only=tmp_path)


@variants
def test_check_changes_nothing(netns: str, variant: str) -> None:
    """It only reads, and quickly: a runtime may ask for it at any time."""
    wanted = config(variant, **TPROXY, **ALL_DNS)
    variants_ = program(netns, wanted).variants
    before = state(netns)
    started = time.monotonic()
    for _ in range(3):
        assert check(netns, wanted, variants_) == ""
    assert time.monotonic() - started < 2
    assert state(netns) == before
