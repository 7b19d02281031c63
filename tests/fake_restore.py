"""`iptables-restore --noflush` without a kernel: a state in, a restore text, the next state out.

It refuses what the real one refuses: a chain that exists already, one that is not there or is still
used, a rule that is not found, a place behind the end. Tables are committed one by one.
"""

from __future__ import annotations

from itertools import pairwise

from istio_cni.rules.iptables import SavedRule, parse_rule
from istio_cni.rules.model import BUILT_IN_CHAINS, Table, VerdictKind
from istio_cni.rules.state import State

Chains = dict[str, list[SavedRule]]


class RestoreFailed(Exception):
    """A line was refused; `state` holds the tables committed before it."""

    def __init__(self, line: str, why: str, state: State) -> None:
        super().__init__(f"{line!r}: {why}")
        self.state = state


def restore(state: State, text: str) -> State:
    """Return the state after loading a text."""
    committed = {table: dict(chains) for table, chains in state.items()}
    table, chains = None, None
    for line in text.splitlines():
        if line.startswith("* "):
            table = Table(line[2:])
            chains = {name: list(rules) for name, rules in committed.get(table, {}).items()}
        elif table is None or chains is None:
            raise RestoreFailed(line, "outside a table", committed)
        elif line == "COMMIT":
            committed[table] = chains
            table, chains = None, None
        else:
            why = _obey(table, chains, line)
            if why:
                raise RestoreFailed(line, why, _without_empty(committed))
    if table is not None:
        raise RestoreFailed(text, "no COMMIT", _without_empty(committed))
    return _without_empty(committed)


def _without_empty(state: State) -> State:
    """Leave out what no tool prints: built-in chains without rules, tables without chains."""
    shown: State = {}
    for table, chains in state.items():
        kept = {name: r for name, r in chains.items() if r or name not in BUILT_IN_CHAINS}
        if kept:
            shown[table] = kept
    return shown


def _obey(table: Table, chains: Chains, line: str) -> str:
    """Do what a line says; return why not."""
    command, _, rest = line.partition(" ")
    name, _, spec = rest.partition(" ")
    if command == "-N":
        if name in chains:
            return "chain already exists"
        chains[name] = []
        return ""
    if name not in chains and name not in BUILT_IN_CHAINS:
        return "no such chain"
    rules = chains.setdefault(name, [])
    if command == "-F":
        rules.clear()
    elif command == "-X":
        return _delete_chain(chains, name)
    elif command == "-A":
        return _add(table, chains, name, spec, len(rules))
    elif command == "-I":
        place, _, spec = spec.partition(" ")
        return _add(table, chains, name, spec, int(place) - 1)
    elif command == "-D":
        wanted = parse_rule(table, name, spec)
        for index, saved in enumerate(rules):
            if saved.text == spec or (wanted is not None and saved.rule == wanted):
                del rules[index]
                return ""
        return "no such rule"
    else:
        return "unknown command"
    return ""


def _add(table: Table, chains: Chains, name: str, spec: str, index: int) -> str:
    rule = parse_rule(table, name, spec)
    if index > len(chains[name]):
        return "index too big"
    if rule and rule.verdict.kind is VerdictKind.JUMP and rule.verdict.chain not in chains:
        return "no such target"
    chains[name].insert(index, SavedRule(spec, rule))
    return ""


def _delete_chain(chains: Chains, name: str) -> str:
    if chains[name]:
        return "chain is not empty"
    texts = [saved.text.split() for rules in chains.values() for saved in rules]
    if any(pair in (("-j", name), ("-g", name)) for words in texts for pair in pairwise(words)):
        return "chain is in use"
    del chains[name]
    return ""
