"""What tables hold against what is wanted, and the texts that lead from one to the other."""

from __future__ import annotations

from itertools import combinations

import pytest

from cases import CASES, CNI
from fake_restore import RestoreFailed, restore
from istio_cni.capture.settings import read_settings
from istio_cni.rules.iptables import parse_save, render
from istio_cni.rules.model import Family, Ruleset, Table
from istio_cni.rules.sidecar import generate
from istio_cni.rules.state import (
    State,
    differences,
    guard_lines,
    load_text,
    ours,
    revert_blocks,
    too_many_groups,
    undo_blocks,
    wanted,
)

BOTH = pytest.mark.parametrize("family", Family)
PLAIN, WIDE, FULL = "cni-defaults-dual-stack", "wider-loopback", "everything"
PAIRS = list(combinations([PLAIN, WIDE, FULL, "dns-all"], 2))
FOREIGN = """\
* filter
-N KUBE-FIREWALL
-A INPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
* mangle
-A PREROUTING -m comment --comment "of a VPN" -j MARK --set-xmark 0x1/0x1
-A POSTROUTING -p tcp -j RETURN
COMMIT
* nat
-N DOCKER
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT -d 10.0.0.53/32 -p udp -j REDIRECT --to-ports 5353
-A POSTROUTING -o eth9 -j RETURN
COMMIT
"""


def rules(name: str) -> Ruleset:
    """Return the rules of a case."""
    return generate(CASES[name].config)


def loaded(name: str, family: Family = Family.V4, state: State | None = None) -> State:
    """Return a state with a case's rules loaded into it."""
    return restore(state or {}, render(rules(name), family))


def replaced(present: State, name: str, family: Family = Family.V4) -> State:
    """Return the state after everything that differs from a case has been replaced."""
    ruleset = rules(name)
    changed = differences(present, wanted(ruleset, family))
    return restore(present, load_text(present, ruleset, family, changed))


def undone(present: State) -> State:
    """Return the state after our objects have been removed."""
    for text in undo_blocks(present):
        present = restore(present, text)
    return present


def shown(state: State) -> dict[tuple[Table, str], list[str]]:
    """Return the texts of a state's rules, to compare what is left of others'."""
    return {
        (table, chain): [saved.text for saved in saved_rules]
        for table, chains in state.items()
        for chain, saved_rules in chains.items()
    }


def without_rule(state: State, table: Table, chain: str, index: int) -> State:
    """Return a state that lacks one rule."""
    chains = dict(state[table])
    chains[chain] = [rule for at, rule in enumerate(chains[chain]) if at != index]
    return {**state, table: chains}


@pytest.mark.parametrize("name", CASES)
@BOTH
def test_a_case_loads_into_empty_tables(name: str, family: Family) -> None:
    """And is then what was wanted: nothing differs, in any table."""
    state = loaded(name, family)
    assert state == wanted(rules(name), family)
    assert differences(state, wanted(rules(name), family)) == {}
    assert ours(state) == state


@pytest.mark.parametrize("name", CASES)
def test_loading_a_case_twice_is_refused(name: str) -> None:
    """Chains are made, never flushed by accident."""
    with pytest.raises(RestoreFailed, match="already exists"):
        loaded(name, state=loaded(name))


@pytest.mark.parametrize("name", CASES)
@BOTH
def test_undo_leaves_nothing(name: str, family: Family) -> None:
    """Whatever the configuration was: it is not asked for."""
    assert undone(loaded(name, family)) == {}


@pytest.mark.parametrize("name", CASES)
def test_undo_leaves_what_others_made(name: str) -> None:
    """Their rules stay, in their order, also between ours."""
    foreign = parse_save(FOREIGN)
    assert shown(undone(loaded(name, state=foreign))) == shown(foreign)


@pytest.mark.parametrize(("former", "name"), PAIRS)
def test_one_case_replaces_another(former: str, name: str) -> None:
    """In both directions; only tables that differ are touched, and what others made stays."""
    foreign = parse_save(FOREIGN)
    for old, new in ((former, name), (name, former)):
        state = replaced(loaded(old, state=foreign), new)
        assert ours(state) == ours(loaded(new))
        assert shown(undone(state)) == shown(foreign)


@pytest.mark.parametrize("table", [Table.MANGLE, Table.NAT, Table.RAW])
def test_a_table_that_is_as_wanted_is_not_touched(table: Table) -> None:
    """Its counters run on, its connections do not notice."""
    others = [block for block in (Table.MANGLE, Table.NAT, Table.RAW) if block is not table]
    present = restore({}, render(rules(FULL), Family.V4, [table]))
    changed = differences(present, wanted(rules(FULL), Family.V4))
    assert set(changed) == set(others)
    text = load_text(present, rules(FULL), Family.V4, changed)
    assert f"* {table.value}\n" not in text
    assert ours(restore(present, text)) == wanted(rules(FULL), Family.V4)


def test_first_rules_are_loaded_as_they_are_rendered() -> None:
    """No guard, no removal: the text of a first run is the reference's."""
    ruleset, foreign = rules(FULL), parse_save(FOREIGN)
    for present in ({}, foreign):
        changed = differences(present, wanted(ruleset, Family.V4))
        assert load_text(present, ruleset, Family.V4, changed) == render(ruleset, Family.V4)


def test_nothing_to_change_is_no_text() -> None:
    """The restore program is then not called."""
    present = loaded(FULL)
    assert load_text(present, rules(FULL), Family.V4, {}) == ""
    assert revert_blocks(present, present) == []
    assert undo_blocks(parse_save(FOREIGN)) == []


def test_one_table_is_replaced_without_a_guard() -> None:
    """It is committed as a whole, so no packet meets half of it."""
    present = loaded(PLAIN)
    changed = differences(present, wanted(rules(WIDE), Family.V4))
    text = load_text(present, rules(WIDE), Family.V4, changed)
    assert text.count("* nat\n") == 1
    assert "* filter" not in text


def test_several_tables_are_replaced_behind_a_guard() -> None:
    """Everything is dropped first and let through last; in between no packet slips past."""
    present = loaded(PLAIN)
    changed = differences(present, wanted(rules(FULL), Family.V4))
    lines = load_text(present, rules(FULL), Family.V4, changed).splitlines()
    up = ["* filter", *guard_lines(), "COMMIT"]
    assert lines[: len(up)] == up
    assert lines[-len(up) :] == [line.replace("-I", "-D").replace(" 1 ", " ") for line in up]
    assert [line for line in lines if line.startswith("* ")] == [
        *("* filter", "* mangle", "* nat", "* raw", "* filter"),
    ]


GUARDS = [
    "-I INPUT 1 -p tcp -j DROP",
    "-I INPUT 1 -p udp -j DROP",
    "-I FORWARD 1 -p tcp -j DROP",
    "-I FORWARD 1 -p udp -j DROP",
    "-I OUTPUT 1 -p tcp -j DROP",
    "-I OUTPUT 1 -p udp -j DROP",
]


def test_the_guard_drops_all_transport() -> None:
    """TCP and UDP, in, out and through."""
    assert guard_lines() == GUARDS


def guarded(state: State) -> State:
    """Return a state with the guard put up."""
    return restore(state, "\n".join(("* filter", *GUARDS, "COMMIT", "")))


def test_a_guard_that_was_left_behind_is_taken_down() -> None:
    """By the next run as by a clean-up, each time after everything else."""
    wall = guarded(loaded(PLAIN))
    target = wanted(rules(PLAIN), Family.V4)
    assert list(differences(wall, target)) == [Table.FILTER]
    assert replaced(wall, PLAIN) == loaded(PLAIN)
    assert ours(replaced(wall, FULL)) == ours(loaded(FULL))
    assert undo_blocks(wall)[-1].startswith("* filter\n")
    assert undone(wall) == {}


def test_drop_rules_of_others_are_no_guard() -> None:
    """Unless all six stand, they are somebody's firewall."""
    for left_out in range(len(GUARDS)):
        some = [line for at, line in enumerate(GUARDS) if at != left_out]
        state = restore({}, "\n".join(("* filter", *some, "COMMIT", "")))
        assert ours(state) == {}
        assert undo_blocks(state) == []


def test_an_interrupted_load_is_completed() -> None:
    """Tables are committed one by one; the missing ones are added."""
    target = wanted(rules(FULL), Family.V4)
    for done in ([Table.MANGLE], [Table.MANGLE, Table.NAT]):
        half = restore({}, render(rules(FULL), Family.V4, done))
        assert replaced(half, FULL) == target


@pytest.mark.parametrize(
    ("table", "chain"),
    [(table, chain) for table, chains in loaded(FULL).items() for chain in chains],
)
def test_each_missing_rule_is_noticed_and_put_back(table: Table, chain: str) -> None:
    """In our chains and in built-in ones, wherever it stood."""
    target = wanted(rules(FULL), Family.V4)
    for index in range(len(target[table][chain])):
        state = without_rule(loaded(FULL), table, chain, index)
        assert list(differences(state, target)) == [table]
        assert replaced(state, FULL) == target


def test_differences_are_told_by_table_chain_and_rule() -> None:
    """The first one of each table, as a person would look for it."""
    target = wanted(rules(PLAIN), Family.V4)
    state = loaded(PLAIN)
    lone = without_rule(state, Table.NAT, "PREROUTING", 0)
    assert differences(lone, target) == {
        Table.NAT: "nat PREROUTING rule 1: missing `-p tcp -j ISTIO_INBOUND`"
    }
    more = restore(state, "* nat\n-A ISTIO_REDIRECT -j RETURN\nCOMMIT\n")
    assert differences(more, target) == {
        Table.NAT: "nat ISTIO_REDIRECT rule 2: unexpected `-j RETURN`"
    }
    swapped = restore(
        state, "* nat\n-D ISTIO_INBOUND -p tcp --dport 15020 -j RETURN\n"
        "-A ISTIO_INBOUND -p tcp --dport 15020 -j RETURN\nCOMMIT\n",
    )  # fmt: skip
    assert differences(swapped, target) == {
        Table.NAT: "nat ISTIO_INBOUND rule 2: `-p tcp --dport 15021 -j RETURN` "
        "instead of `-p tcp --dport 15020 -j RETURN`"
    }
    chain = restore(state, "* nat\n-N ISTIO_OLD\nCOMMIT\n* raw\n-N ISTIO_OLD\nCOMMIT\n")
    assert differences(chain, target) == {
        Table.NAT: "nat ISTIO_OLD: unexpected chain",
        Table.RAW: "raw ISTIO_OLD: unexpected chain",
    }
    assert differences({}, target) == {Table.NAT: "nat ISTIO_INBOUND: the chain is missing"}


def test_an_empty_chain_that_is_wanted_must_exist() -> None:
    """Chains count, not only rules."""
    target = wanted(rules(PLAIN), Family.V4)
    target[Table.NAT]["ISTIO_EMPTY"] = []
    assert differences(loaded(PLAIN), target) == {
        Table.NAT: "nat ISTIO_EMPTY: the chain is missing"
    }


def test_rules_of_others_between_ours_do_not_count() -> None:
    """Only the order of our own rules does."""
    foreign = "-p udp -j DNAT --to-destination 10.0.0.1"
    text = f"* nat\n-I PREROUTING 1 {foreign}\n-A OUTPUT {foreign}\nCOMMIT\n"
    state = restore(loaded(PLAIN), text)
    assert differences(state, wanted(rules(PLAIN), Family.V4)) == {}


@pytest.mark.parametrize(
    "rule",
    [
        "POSTROUTING -o eth9 -j RETURN",
        "PREROUTING ! -i eth9 -j RETURN",
        "PREROUTING -i eth9 -p tcp -j RETURN",
        "PREROUTING -i eth9 -j ACCEPT",
        "OUTPUT -d 10.0.0.0/8 -j RETURN",
        "OUTPUT -p tcp -j REDIRECT --to-ports 8080",
        "OUTPUT -m comment --comment ISTIO_OUTPUT -j RETURN",
        "OUTPUT -j OUR_OUTPUT",
    ],
)
@pytest.mark.parametrize("table", ["mangle", "nat", "raw"])
def test_what_the_generator_would_not_make_is_not_ours(rule: str, table: str) -> None:
    """Even in tables that hold chains of ours."""
    text = f"* {table}\n-N OUR_OUTPUT\n-A {rule}\nCOMMIT\n"
    state = restore(loaded(FULL), text)
    assert ours(state) == loaded(FULL)
    assert shown(undone(state)) == shown(parse_save(text))


@pytest.mark.parametrize(
    "rule",
    [
        "OUTPUT -p tcp -m comment --comment mine -j ISTIO_OUTPUT",
        "OUTPUT -p tcp -g ISTIO_OUTPUT",
        "THEIRS -p tcp -j ISTIO_OUTPUT",
        "PREROUTING -i eth9 -j RETURN",
        "OUTPUT -o eth9 -j RETURN",
    ],
)
def test_what_leads_to_our_chains_is_ours(rule: str) -> None:
    """A chain that is jumped to cannot be deleted, from wherever the jump comes."""
    text = f"* nat\n-N THEIRS\n-A THEIRS -j RETURN\n-A {rule}\nCOMMIT\n"
    state = restore(loaded(PLAIN), text)
    assert list(differences(state, wanted(rules(PLAIN), Family.V4))) == [Table.NAT]
    assert shown(undone(state)) == {(Table.NAT, "THEIRS"): ["-j RETURN"]}
    assert ours(replaced(state, PLAIN)) == loaded(PLAIN)
    reverted = undone(state)
    for block in revert_blocks(reverted, state):
        reverted = restore(reverted, block)
    assert shown(reverted) == shown(state)


@pytest.mark.parametrize(("name", "former"), PAIRS)
def test_the_former_state_comes_back(name: str, former: str) -> None:
    """From what a failed run has left: all of the new rules, some of them, or none."""
    foreign = parse_save(FOREIGN)
    before = loaded(former, state=foreign)
    after = replaced(before, name)
    for present in (after, undone(before), {**after, Table.NAT: before[Table.NAT]}, foreign):
        state = present
        for text in revert_blocks(present, before):
            state = restore(state, text)
        assert shown(state) == shown(before)


def test_rules_come_back_to_their_places_among_others() -> None:
    """A firewall's rule that stood in front of ours stands in front of it again."""
    text = """\
* nat
-I PREROUTING 1 -p udp -j DNAT --to-destination 10.0.0.1
-A PREROUTING -p icmp -j DNAT --to-destination 10.0.0.2
-I OUTPUT 1 -p udp -j DNAT --to-destination 10.0.0.3
-A OUTPUT -p icmp -j DNAT --to-destination 10.0.0.4
COMMIT
"""
    before = restore(loaded("rerouted-interfaces"), text)
    state = undone(before)
    for block in revert_blocks(state, before):
        state = restore(state, block)
    assert shown(state) == shown(before)


def test_several_tables_come_back_behind_a_guard() -> None:
    """One document a table, as each may fail by itself; nothing slips through meanwhile."""
    blocks = revert_blocks(loaded(PLAIN), loaded(FULL))
    assert blocks[0].splitlines()[1:-1] == GUARDS
    assert [block.split("\n")[0] for block in blocks] == [
        *("* filter", "* mangle", "* nat", "* raw", "* filter"),
    ]
    assert all(block.count("COMMIT") == 1 for block in blocks)


def test_undoing_needs_no_guard() -> None:
    """Where nothing is to be captured afterwards, nothing can slip past."""
    assert [block.split("\n")[0] for block in undo_blocks(loaded(FULL))] == [
        *("* mangle", "* nat", "* raw"),
    ]


def test_undo_removes_jumps_before_chains() -> None:
    """All chains are emptied before the first is deleted, as they refer to each other."""
    (block,) = undo_blocks(loaded("appendix-d"))
    kinds = [line[:2] for line in block.splitlines()]
    assert kinds == ["* ", *["-D"] * 5, *["-F"] * 4, *["-X"] * 4, "CO"]


@pytest.mark.parametrize(("included", "refused"), [(0, 0), (1, 0), (49, 0), (50, 50), (64, 64)])
def test_one_rule_takes_49_groups(included: int, refused: int) -> None:
    """More arguments than that iptables-restore does not take; excluded groups have a rule each."""
    groups = ",".join(map(str, range(included)))
    many = ",".join(map(str, range(100)))
    included_ones = read_settings({**CNI, "OUTBOUND_OWNER_GROUPS_INCLUDE": groups})
    assert too_many_groups(generate(included_ones)) == refused
    excluded_ones = read_settings({**CNI, "OUTBOUND_OWNER_GROUPS_EXCLUDE": many})
    assert too_many_groups(generate(excluded_ones)) == 0
