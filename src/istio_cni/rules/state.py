"""What a family's tables hold, how that differs from what is wanted, and the text between.

A table is committed as a whole: `iptables-restore` swaps a legacy table in one system call and an
nft table in one transaction. So the text for a re-run removes our old objects and adds the new ones
inside one table block, and between those blocks, where more than one table changes under traffic,
drop rules in `filter` (the guard) keep packets from slipping through.

Ours is: every chain with our prefix, every jump to one from wherever, and in a table that holds
such a chain the few rules that the generator itself puts into built-in chains. Everything else is
somebody else's and stays.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable
from typing import TypeAlias

from istio_cni import constants
from istio_cni.errors import quoted
from istio_cni.rules.iptables import SavedRule, block, render, specification
from istio_cni.rules.model import (
    BUILT_IN_CHAINS,
    DROP,
    Family,
    Interface,
    MatchKind,
    Rule,
    Ruleset,
    Table,
    VerdictKind,
    is_ours,
    kernel_order,
    tcp,
    udp,
)
from istio_cni.rules.model import canonical as canonical_rule

State: TypeAlias = dict[Table, dict[str, list[SavedRule]]]
"""Table, chain, rules in order; what `parse_save` returns."""

GUARD = tuple(
    Rule(Table.FILTER, chain, (protocol,), DROP)
    for chain in ("INPUT", "FORWARD", "OUTPUT")
    for protocol in (tcp(), udp())
)
"""Drop everything while rules are swapped."""


def ours(state: State) -> State:
    """Return our part of a state: our chains, and of other chains the rules that are ours."""
    found: State = {}
    for table, chains in state.items():
        if table is Table.FILTER:
            mine = _guard_of(chains)
        elif any(is_ours(chain) for chain in chains):
            mine = {name: rules for name, rules in chains.items() if is_ours(name)}
            for name in sorted(chains.keys() - mine.keys()):
                rules = [saved for saved in chains[name] if _is_our_rule(table, name, saved)]
                if rules:
                    mine[name] = rules
        else:
            continue
        if mine:
            found[table] = mine
    return found


def _guard_of(chains: dict[str, list[SavedRule]]) -> dict[str, list[SavedRule]]:
    """Return our drop rules, if the guard stands complete: its six rules come and go together."""
    found: dict[str, list[SavedRule]] = {}
    for rule in GUARD:
        match = next((saved for saved in chains.get(rule.chain, []) if saved.rule == rule), None)
        if match is None:
            return {}
        found.setdefault(rule.chain, []).append(match)
    return found


def _is_our_rule(table: Table, chain: str, saved: SavedRule) -> bool:
    """Tell whether a rule outside our chains jumps to one, or is one that the generator makes."""
    rule = saved.rule
    if rule is None:
        return _jumps_to_ours(saved.text)
    kind = rule.verdict.kind
    if kind is VerdictKind.JUMP:
        return is_ours(rule.verdict.chain)
    if any(match.negate for match in rule.matches if isinstance(match, Interface)):
        return False
    shape = (chain, kind, *(match.kind for match in rule.matches))
    return shape in _SHAPES.get(table, ())


_IN, _OUT, _TO = MatchKind.IN_INTERFACE, MatchKind.OUT_INTERFACE, MatchKind.DESTINATION
_PROTOCOL = MatchKind.PROTOCOL
_LEFT_ALONE = (
    ("PREROUTING", VerdictKind.RETURN, _IN),
    ("OUTPUT", VerdictKind.RETURN, _OUT),
)
_SHAPES: dict[Table, tuple[tuple[object, ...], ...]] = {
    Table.NAT: _LEFT_ALONE,
    Table.MANGLE: (
        *_LEFT_ALONE,
        ("PREROUTING", VerdictKind.SAVE_MARK, _PROTOCOL, MatchKind.MARK),
        ("OUTPUT", VerdictKind.RETURN, _OUT, _PROTOCOL, MatchKind.MARK),
        ("OUTPUT", VerdictKind.SET_MARK, _OUT, _TO, _PROTOCOL, MatchKind.OWNER_UID),
        ("OUTPUT", VerdictKind.SET_MARK, _OUT, _TO, _PROTOCOL, MatchKind.OWNER_GID),
        ("OUTPUT", VerdictKind.RESTORE_MARK, _PROTOCOL, MatchKind.CONNECTION_MARK),
    ),
}
"""Chain, verdict and matches of the rules that the generator puts into built-in chains."""


def _jumps_to_ours(text: str) -> bool:
    if constants.CHAIN_PREFIX not in text:
        return False
    try:
        words = shlex.split(text)  # a comment that speaks of our chains is one word
    except ValueError:
        return False
    return any(
        word in ("-j", "-g") and is_ours(target) for word, target in itertools.pairwise(words)
    )


def wanted(ruleset: Ruleset, family: Family) -> State:
    """Return the state that a rule set makes in empty tables."""
    return {
        table: {
            chain: [SavedRule(specification(rule), canonical_rule(rule)) for rule in rules]
            for chain, rules in chains.items()
        }
        for table, chains in kernel_order(ruleset.of(family)).items()
    }


def differences(present: State, target: State) -> dict[Table, str]:
    """Return the first difference, in words, of each table that is not as the target has it.

    Order counts: rules match first come, first served.
    """
    mine = ours(present)
    found = {}
    for table in Table:
        text = _table_difference(mine.get(table, {}), target.get(table, {}))
        if text:
            found[table] = f"{table.value} {text}"
    return found


def _table_difference(
    present: dict[str, list[SavedRule]], target: dict[str, list[SavedRule]]
) -> str:
    for chain, rules in target.items():
        if chain not in present and is_ours(chain):
            return f"{chain}: the chain is missing"
        here = present.get(chain, [])
        for number, rule in enumerate(rules, 1):
            if number > len(here):
                return f"{chain} rule {number}: missing `{rule.text}`"
            if here[number - 1].rule != rule.rule:
                found = _shown(here[number - 1])
                return f"{chain} rule {number}: {found} instead of `{rule.text}`"
        if len(here) > len(rules):
            return f"{chain} rule {len(rules) + 1}: unexpected {_shown(here[len(rules)])}"
    for chain, here in present.items():
        if chain not in target:
            return f"{chain}: unexpected " + (_shown(here[0]) if here else "chain")
    return ""


def obstacles(state: State) -> list[str]:
    """Name the rules of others that packets meet before ours in a built-in chain.

    They may let traffic past us; a runtime's or another plugin's business, so nobody is stopped.
    """
    found = []
    for table, chains in ours(state).items():
        for chain in BUILT_IN_CHAINS:
            if table is Table.FILTER or chain not in chains:
                continue
            first = chains[chain][0]
            for number, saved in enumerate(state[table][chain], 1):
                if saved is first:
                    break
                found.append(f"{table.value} {chain} rule {number}: {_shown(saved)}")
    return found


def _shown(saved: SavedRule) -> str:
    return f"`{saved.text}`" if saved.text.isprintable() else quoted(saved.text)


def load_text(present: State, ruleset: Ruleset, family: Family, tables: Iterable[Table]) -> str:
    """Return restore text that makes the given tables hold the rule set.

    In tables without objects of ours this is the plain rendering. A guard is put up around the
    blocks when something of ours is replaced in more than one table.
    """
    changed = set(tables) - {Table.FILTER}
    mine = ours(present)
    if not mine:
        return render(ruleset, family, changed)
    blocks = []
    for table in _alphabetical(changed):
        added = render(ruleset, family, {table}).splitlines()[1:-1]
        blocks.append(block(table, [*_removal(mine.get(table, {})), *added]))
    standing = Table.FILTER in mine
    if len(changed) > 1 and not standing:
        blocks.insert(0, block(Table.FILTER, guard_lines()))
    if len(changed) > 1 or standing:
        blocks.append(block(Table.FILTER, guard_removal_lines()))
    return "".join(blocks)


def undo_blocks(present: State) -> list[str]:
    """Return restore documents, one a table, that remove every object of ours.

    The guard, if one was left behind, goes last: only then does traffic flow again.
    """
    return revert_blocks(present, {})


def revert_blocks(present: State, former: State) -> list[str]:
    """Return restore documents, one a table, that bring back a former state of ours.

    One document a table, because what is undone here may be a restore program that stops half way.
    Where former rules come back in more than one table, the guard stands meanwhile; `filter` is
    last.
    """
    now, before = ours(present), ours(former)
    tables = [
        table
        for table in _alphabetical(set(now) | set(before))
        if _texts(now.get(table, {})) != _texts(before.get(table, {}))
    ]
    blocks = [
        block(
            table,
            [
                *_removal(now.get(table, {})),
                *_restoration(former.get(table, {}), before.get(table, {})),
            ],
        )
        for table in sorted(tables, key=lambda table: table is Table.FILTER)
    ]
    if len(tables) > 1 and before and Table.FILTER not in (*now, *before):
        blocks.insert(0, block(Table.FILTER, guard_lines()))
        blocks.append(block(Table.FILTER, guard_removal_lines()))
    return blocks


def _restoration(former: dict[str, list[SavedRule]], mine: dict[str, list[SavedRule]]) -> list[str]:
    """Return the lines that put our chains and rules of a table back as they were saved."""
    chains = [chain for chain in mine if is_ours(chain)]
    lines = [f"-N {chain}" for chain in chains]
    lines += [f"-A {chain} {saved.text}" for chain in chains for saved in mine[chain]]
    for chain in mine:
        if not is_ours(chain):
            for place, saved in enumerate(former[chain], 1):
                if any(saved is rule for rule in mine[chain]):
                    lines.append(f"-I {chain} {place} {saved.text}")
    return lines


def _removal(mine: dict[str, list[SavedRule]]) -> list[str]:
    """Return the lines that remove our objects of one table: jumps first, then chains."""
    lines = [
        f"-D {chain} {saved.text}"
        for chain, rules in mine.items()
        if not is_ours(chain)
        for saved in rules
    ]
    chains = [chain for chain in mine if is_ours(chain)]
    lines += [f"-F {chain}" for chain in chains]
    lines += [f"-X {chain}" for chain in chains]
    return lines


def guard_lines() -> list[str]:
    """Return the lines that put the guard up, in front of everything."""
    return [f"-I {rule.chain} 1 {specification(rule)}" for rule in GUARD]


def guard_removal_lines() -> list[str]:
    """Return the lines that take the guard down."""
    return [f"-D {rule.chain} {specification(rule)}" for rule in GUARD]


def _alphabetical(tables: set[Table]) -> list[Table]:
    return sorted(tables, key=lambda table: table.value)


def _texts(chains: dict[str, list[SavedRule]]) -> dict[str, list[str]]:
    return {chain: [saved.text for saved in rules] for chain, rules in chains.items()}


def too_many_groups(ruleset: Ruleset) -> int:
    """Return the number of owner matches of a rule that iptables-restore would refuse, else 0."""
    owners = (
        sum(match.kind is MatchKind.OWNER_GID for match in rule.matches) for rule in ruleset.rules
    )
    return max(
        (count for count in owners if count > constants.MAX_OWNER_GROUPS_IPTABLES), default=0
    )
