"""Rules as values: the order in which a kernel meets them, and when two writings are one rule."""

from __future__ import annotations

import pytest

from istio_cni.rules.model import (
    RETURN,
    Family,
    Match,
    PortRange,
    Rule,
    Ruleset,
    Table,
    canonical,
    conntrack_state,
    destination,
    destination_port,
    destination_ports,
    in_interface,
    jump,
    kernel_order,
    mark,
    out_interface,
    owner_gid,
    source,
    tcp,
)

CHAIN = "ISTIO_INBOUND"


def rule(*matches: Match, position: int | None = None, family: Family | None = None) -> Rule:
    """Return a rule of one chain."""
    return Rule(Table.NAT, CHAIN, matches, RETURN, family, position)


def test_a_family_has_the_rules_of_both_and_its_own() -> None:
    """In their order; a family that is not captured has none."""
    both, v4, v6 = rule(tcp()), rule(family=Family.V4), rule(family=Family.V6)
    ruleset = Ruleset((Family.V4, Family.V6), (both, v6, v4))
    assert ruleset.of(Family.V4) == (both, v4)
    assert ruleset.of(Family.V6) == (both, v6)
    assert Ruleset((Family.V4,), (both, v4)).of(Family.V6) == ()


def test_the_kernel_meets_inserted_rules_last_come_first_served() -> None:
    """Each insertion at the head pushes the former ones down; appended rules stay behind."""
    names = [
        *((f"a{number}", 1) for number in range(3)),
        *((f"b{number}", None) for number in range(2)),
        ("c", 2),
    ]
    rules = tuple(rule(in_interface(name), position=position) for name, position in names)
    (chain,) = kernel_order(rules)[Table.NAT].values()
    met = [r.matches[0] for r in chain]
    assert met == [in_interface(name) for name in ("a2", "c", "a1", "a0", "b0", "b1")]
    assert {r.position for r in chain} == {None}


def test_a_chain_that_is_only_jumped_to_is_empty() -> None:
    """It has to exist all the same."""
    order = kernel_order((Rule(Table.NAT, "OUTPUT", (), jump("ISTIO_OUTPUT")),))
    assert order[Table.NAT]["ISTIO_OUTPUT"] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((tcp(), out_interface("lo")), (out_interface("lo"), tcp())),
        ((destination("10.1.2.3/8"),), (destination("10.0.0.0/8"),)),
        ((destination("fd00::1/8"),), (destination("fd00::/8"),)),
        ((source("0.0.0.0/0"), tcp()), (tcp(),)),
        ((destination("::/0"),), ()),
        ((tcp(), destination_ports(PortRange(0, 65535))), (tcp(),)),
        (
            (conntrack_state("RELATED", "ESTABLISHED"),),
            (conntrack_state("ESTABLISHED", "RELATED"),),
        ),
    ],
)
def test_two_writings_of_one_rule_are_equal(
    one: tuple[Match, ...], other: tuple[Match, ...]
) -> None:
    """Tools reorder options, clear host bits and leave out what matches everything."""
    assert canonical(rule(*one)) == canonical(rule(*other))
    assert canonical(rule(*one, position=1, family=Family.V4)) == canonical(rule(*other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((destination("10.0.0.0/8"),), (destination("10.0.0.0/8", negate=True),)),
        ((destination("10.0.0.0/8"),), (source("10.0.0.0/8"),)),
        ((mark(1),), (mark(1, negate=True),)),
        ((destination_port(53, 80),), (destination_port(80, 53),)),
        ((owner_gid("1"), owner_gid("2")), (owner_gid("2"), owner_gid("1"))),
        ((destination("0.0.0.0/0", negate=True),), ()),
        ((in_interface("eth0"),), (out_interface("eth0"),)),
    ],
)
def test_different_rules_are_not_equal(one: tuple[Match, ...], other: tuple[Match, ...]) -> None:
    """What the kernel keeps apart, in sense or in order, is kept apart here."""
    assert canonical(rule(*one)) != canonical(rule(*other))
