"""Rules as iptables text, and `iptables-save` output read back into rules.

The text is the reference's, token for token: people compare it, tools grep it. What a tool prints
back is formatted differently (marks in hex, options reordered, modules named), so state is never
compared as text but parsed into the same values that were rendered.

Source: istio tools/istio-iptables, pkg/builder; iptables-extensions(8).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from istio_cni.rules.config import canonical_address
from istio_cni.rules.model import (
    ACCEPT,
    BUILT_IN_CHAINS,
    DROP,
    RESTORE_MARK,
    RETURN,
    SAVE_MARK,
    Address,
    ConntrackState,
    Family,
    Interface,
    Mark,
    Match,
    MatchKind,
    Owner,
    PortRange,
    Ports,
    Protocol,
    Rule,
    Ruleset,
    Table,
    Verdict,
    VerdictKind,
    canonical,
    is_ours,
    jump,
    redirect,
    set_mark,
    tproxy,
    zone,
)

WHOLE_MARK = 0xFFFFFFFF


# -- rules to text -----------------------------------------------------------------------------


def render(ruleset: Ruleset, family: Family, tables: Iterable[Table] = Table) -> str:
    """Return the standard input of `iptables-restore --noflush` that adds a family's rules.

    Tables stand in alphabetical order; chains are made with `-N`, so that loading over existing
    ones fails instead of flushing them. No rules: the empty text.
    """
    rules = ruleset.of(family)
    wanted = set(tables)
    blocks = []
    for table in sorted(Table, key=lambda table: table.value):
        here = [rule for rule in rules if rule.table is table]
        if here and table in wanted:
            blocks.append(block(table, table_lines(here)))
    return "".join(blocks)


def block(table: Table, lines: Iterable[str]) -> str:
    """Return one table's part of a restore document."""
    return "\n".join((f"* {table.value}", *lines, "COMMIT", ""))


def table_lines(rules: list[Rule]) -> list[str]:
    """Return the lines that add rules to one table: its new chains first, each at first sight."""
    chains = [rule.chain for rule in rules]
    chains += [rule.verdict.chain for rule in rules if rule.verdict.kind is VerdictKind.JUMP]
    new = dict.fromkeys(chain for chain in chains if chain not in BUILT_IN_CHAINS)
    return [*(f"-N {chain}" for chain in new), *(_addition(rule) for rule in rules)]


def _addition(rule: Rule) -> str:
    where = f"-A {rule.chain}" if rule.position is None else f"-I {rule.chain} {rule.position}"
    return f"{where} {specification(rule)}"


def specification(rule: Rule) -> str:
    """Return matches and verdict as iptables options."""
    return " ".join(_tokens(rule))


def check_commands(ruleset: Ruleset, family: Family) -> list[list[str]]:
    """Return the arguments of one `iptables -C` per rule, in order of the rules."""
    rules = ruleset.of(family)
    return [["-t", rule.table.value, "-C", rule.chain, *_tokens(rule)] for rule in rules]


def _tokens(rule: Rule) -> Iterator[str]:
    for match in rule.matches:
        yield from _match_tokens(match)
    yield "-j"
    yield from _verdict_tokens(rule)


def _match_tokens(match: Match) -> Iterator[str]:
    bang = ("!",) if match.negate else ()
    option = _OPTIONS[match.kind]
    match match:
        case Interface(name=value) | Protocol(name=value) | Address(prefix=value):
            yield from (*bang, option, value)
        case Ports(ranges=(only,)):
            yield from (*bang, option, _port_text(only))
        case Ports(ranges=ranges):
            yield from ("-m", "multiport", *bang, f"{option}s", ",".join(map(_port_text, ranges)))
        case Owner(id=value):
            yield from ("-m", "owner", *bang, option, value)
        case ConntrackState(states=states):
            yield from ("-m", "conntrack", *bang, option, ",".join(states))
        case Mark(kind=kind, value=number):
            module = "mark" if kind is MatchKind.MARK else "connmark"
            yield from ("-m", module, *bang, option, str(number))


_OPTIONS = {
    MatchKind.IN_INTERFACE: "-i",
    MatchKind.OUT_INTERFACE: "-o",
    MatchKind.SOURCE: "-s",
    MatchKind.DESTINATION: "-d",
    MatchKind.PROTOCOL: "-p",
    MatchKind.SOURCE_PORT: "--sport",
    MatchKind.DESTINATION_PORT: "--dport",
    MatchKind.OWNER_UID: "--uid-owner",
    MatchKind.OWNER_GID: "--gid-owner",
    MatchKind.CONNTRACK_STATE: "--ctstate",
    MatchKind.MARK: "--mark",
    MatchKind.CONNECTION_MARK: "--mark",
}


def _port_text(ports: PortRange) -> str:
    return str(ports.first) if ports.first == ports.last else f"{ports.first}:{ports.last}"


def _verdict_tokens(rule: Rule) -> tuple[str, ...]:
    verdict = rule.verdict
    match verdict.kind:
        case VerdictKind.ACCEPT | VerdictKind.DROP | VerdictKind.RETURN:
            return (verdict.kind.value.upper(),)
        case VerdictKind.JUMP:
            return (verdict.chain,)
        case VerdictKind.REDIRECT:
            udp = any(isinstance(match, Protocol) and match.name == "udp" for match in rule.matches)
            # the reference spells the option in two ways, and its users' tools match on both
            return ("REDIRECT", "--to-port" if udp else "--to-ports", str(verdict.port))
        case VerdictKind.TPROXY:
            mark = f"{verdict.value}/{WHOLE_MARK:#x}"
            return ("TPROXY", "--tproxy-mark", mark, "--on-port", str(verdict.port))
        case VerdictKind.SET_MARK:
            return ("MARK", "--set-mark", str(verdict.value))
        case VerdictKind.SAVE_MARK:
            return ("CONNMARK", "--save-mark")
        case VerdictKind.RESTORE_MARK:
            return ("CONNMARK", "--restore-mark")
        case VerdictKind.ZONE:
            return ("CT", "--zone", str(verdict.value))


# -- text to rules -----------------------------------------------------------------------------


class SavedRule(NamedTuple):
    """A rule as a tool printed it, and as a canonical value; None where it cannot be ours."""

    text: str
    rule: Rule | None


def parse_save(text: str) -> dict[Table, dict[str, list[SavedRule]]]:
    """Read `iptables-save` output, or restore text of ours: table, chain, rules in order.

    Built-in chains appear only when they hold a rule; other tables and comments are ignored.
    """
    tables: dict[Table, dict[str, list[SavedRule]]] = {}
    known = {table.value: table for table in Table}
    table: Table | None = None
    for line in _lines(text):
        if line.startswith("*"):
            table = known.get(line[1:].strip())
        elif table is None:
            continue
        elif line.startswith((":", "-N ")):
            chain = line.removeprefix("-N ").removeprefix(":").split(" ")[0]
            if chain not in BUILT_IN_CHAINS:
                tables.setdefault(table, {}).setdefault(chain, [])
        elif line.startswith(("-A ", "-I ")):
            chain, position, spec = _placed(line)
            rules = tables.setdefault(table, {}).setdefault(chain, [])
            saved = SavedRule(spec, parse_rule(table, chain, spec))
            rules.insert(len(rules) if position is None else position - 1, saved)
    return tables


def _lines(text: str) -> Iterator[str]:
    """Split saved text where its rules end: a comment may hold line ends of every kind.

    Tools print a comment in double quotes, quotes and backslashes in it escaped.
    """
    whole = ""
    for part in text.split("\n"):
        whole += part
        if '"' in whole and _inside_quotes(whole):
            whole += "\n"
            continue
        yield whole.strip(" ")
        whole = ""
    yield whole


def _inside_quotes(text: str) -> bool:
    return text.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 1


def _placed(line: str) -> tuple[str, int | None, str]:
    """Split `-A CHAIN spec` or `-I CHAIN position spec`."""
    _, chain, *rest = line.split(" ", 2)
    spec = rest[0] if rest else ""
    if line.startswith("-A "):
        return chain, None, spec
    position, _, spec = spec.partition(" ")
    return chain, int(position), spec


def parse_rule(table: Table, chain: str, spec: str) -> Rule | None:
    """Read one rule's options into a canonical rule; None if the model has no word for it."""
    try:
        matches, verdict = _parse_tokens(shlex.split(spec))
        return canonical(Rule(table, chain, matches, verdict))
    except (KeyError, ValueError, IndexError):
        return None


def _parse_tokens(tokens: list[str]) -> tuple[tuple[Match, ...], Verdict]:
    """Read options up to the verdict; KeyError, ValueError or IndexError if one is foreign."""
    matches: list[Match] = []
    module, negate, at = "", False, 0
    while at < len(tokens):
        word = tokens[at]
        if word == "-j":
            if negate:
                raise ValueError(word)
            return tuple(matches), _parse_verdict(tokens[at + 1 :])
        if word == "!":
            negate, at = True, at + 1
            continue
        value = tokens[at + 1]
        if word == "-m":
            module = _MODULES[value]
        else:
            matches.append(_parse_match(module, word, value, negate=negate))
            negate = False
        at += 2
    raise ValueError("no verdict")


_MODULES = {
    name: name for name in ("tcp", "udp", "owner", "conntrack", "mark", "connmark", "multiport")
}


def _parse_match(module: str, option: str, value: str, *, negate: bool) -> Match:
    if option == "--mark":
        return _parse_mark(module, value, negate=negate)
    return _PARSERS[option](value, negate)


def _parse_mark(module: str, value: str, *, negate: bool) -> Mark:
    number, _, mask = value.partition("/")
    if mask and int(mask, 0) != WHOLE_MARK:
        raise ValueError(value)
    kind = {"mark": MatchKind.MARK, "connmark": MatchKind.CONNECTION_MARK}[module]
    return Mark(kind, int(number, 0), negate)


def _parse_protocol(value: str, negate: bool) -> Protocol:
    name = {"6": "tcp", "17": "udp", "tcp": "tcp", "udp": "udp"}[value]
    return Protocol(MatchKind.PROTOCOL, name, negate)


def _address_parser(kind: MatchKind) -> Callable[[str, bool], Match]:
    def parse(value: str, negate: bool) -> Match:
        address, _, length = value.partition("/")
        full = "128" if ":" in address else "32"
        return Address(kind, f"{canonical_address(address)}/{length or full}", negate)

    return parse


def _port_parser(kind: MatchKind) -> Callable[[str, bool], Match]:
    def parse(value: str, negate: bool) -> Match:
        ranges = []
        for part in value.split(","):
            first, colon, last = part.partition(":")
            ranges.append(PortRange(int(first), int(last) if colon else int(first)))
        return Ports(kind, tuple(ranges), negate)

    return parse


_PARSERS: dict[str, Callable[[str, bool], Match]] = {
    "-i": lambda value, negate: Interface(MatchKind.IN_INTERFACE, value, negate),
    "-o": lambda value, negate: Interface(MatchKind.OUT_INTERFACE, value, negate),
    "-s": _address_parser(MatchKind.SOURCE),
    "-d": _address_parser(MatchKind.DESTINATION),
    "-p": _parse_protocol,
    "--sport": _port_parser(MatchKind.SOURCE_PORT),
    "--dport": _port_parser(MatchKind.DESTINATION_PORT),
    "--dports": _port_parser(MatchKind.DESTINATION_PORT),
    "--uid-owner": lambda value, negate: Owner(MatchKind.OWNER_UID, value, negate),
    "--gid-owner": lambda value, negate: Owner(MatchKind.OWNER_GID, value, negate),
    "--ctstate": lambda value, negate: ConntrackState(
        MatchKind.CONNTRACK_STATE, tuple(value.split(",")), negate
    ),
}


def _parse_verdict(tokens: list[str]) -> Verdict:
    target, options = tokens[0], dict(zip(tokens[1::2], tokens[2::2], strict=False))
    plain = {"ACCEPT": ACCEPT, "DROP": DROP, "RETURN": RETURN}
    if target in plain and len(tokens) == 1:
        return plain[target]
    if is_ours(target) and len(tokens) == 1:
        return jump(target)
    return _TARGETS[target](options, tokens[1:])


def _parse_redirect(options: dict[str, str], tokens: list[str]) -> Verdict:
    port = options.get("--to-ports") or options["--to-port"]
    if len(tokens) != 2:
        raise ValueError(tokens)
    return redirect(int(port))


def _parse_tproxy(options: dict[str, str], tokens: list[str]) -> Verdict:
    if options.get("--on-ip", "::") not in ("0.0.0.0", "::"):
        raise ValueError(tokens)
    return tproxy(int(options["--on-port"]), _whole(options["--tproxy-mark"]))


def _parse_mark_target(options: dict[str, str], tokens: list[str]) -> Verdict:
    if len(tokens) != 2:
        raise ValueError(tokens)
    return set_mark(_whole(options.get("--set-mark") or options["--set-xmark"]))


def _whole(text: str) -> int:
    """Read a mark that is set as a whole: no mask, or a full one."""
    value, _, mask = text.partition("/")
    if mask and int(mask, 0) != WHOLE_MARK:
        raise ValueError(text)
    return int(value, 0)


def _parse_connmark(options: dict[str, str], tokens: list[str]) -> Verdict:
    masks = dict(zip(tokens[1::2], tokens[2::2], strict=True))
    if any(int(mask, 0) != WHOLE_MARK for mask in masks.values()):
        raise ValueError(tokens)
    return {"--save-mark": SAVE_MARK, "--restore-mark": RESTORE_MARK}[tokens[0]]


def _parse_zone(options: dict[str, str], tokens: list[str]) -> Verdict:
    if len(tokens) != 2:
        raise ValueError(tokens)
    return zone(int(options["--zone"], 0))


_TARGETS: dict[str, Callable[[dict[str, str], list[str]], Verdict]] = {
    "REDIRECT": _parse_redirect,
    "TPROXY": _parse_tproxy,
    "MARK": _parse_mark_target,
    "CONNMARK": _parse_connmark,
    "CT": _parse_zone,
}
