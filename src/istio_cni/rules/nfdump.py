"""nf_tables netlink messages read back: in words for people, and compared.

What the kernel lists are the messages that would make the same objects, so one reader serves what
is sent and what is there. It writes each expression as a line; two rules are equal if their lines
are. What the kernel adds by itself is left out: counters' values, the names it gives to anonymous
sets, defaults it fills in. What this module has no word for is shown by number, and so never equal
to anything of ours.

Source: include/uapi/linux/netfilter/nf_tables.h; libnftnl's snprintf functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from istio_cni.rules.netlink import (
    DELTABLE,
    NEWCHAIN,
    NEWRULE,
    NEWSET,
    NEWSETELEM,
    NEWTABLE,
    attributes,
    comment,
    text,
)
from istio_cni.rules.nfnetlink import Message
from istio_cni.rules.nftables import FAMILY, TABLES, rule_text

Attributes: TypeAlias = dict[int, bytes]
Sets: TypeAlias = "dict[tuple[str, str | int], Set]"
"""Sets by table, and by the number or the name under which rules know them."""


class Set(NamedTuple):
    """A set: its flags, and its elements in words."""

    flags: int
    elements: list[str]


class Chain(NamedTuple):
    """A chain: where it is hooked in ("" if nowhere), and its rules, each a tuple of lines."""

    hook: str
    rules: list[tuple[str, ...]]


class State(NamedTuple):
    """A table: its comment, whether it sleeps (is not called), its chains by name."""

    comment: str
    dormant: bool
    chains: dict[str, Chain]


def read(messages: Iterable[tuple[int, bytes]]) -> dict[str, State]:
    """Read operation and attributes of each message into tables by name.

    Objects come before what refers to them: tables, chains, sets, elements, rules.
    """
    tables: dict[str, State] = {}
    sets: Sets = {}
    for kind, body in messages:
        said = dict(attributes(body))
        if kind == NEWTABLE:
            dormant = bool(_number(said.get(2, b"")) & 1)
            tables[text(said[1])] = State(comment(said.get(6, b"")), dormant, {})
        elif kind == NEWCHAIN:
            chains = tables[text(said[1])].chains
            chains[text(said[3])] = Chain(_hook(said), [])
        elif kind in (NEWSET, NEWSETELEM):
            _add_elements(sets, kind, said)
        elif kind == NEWRULE:
            table, chain = text(said[1]), text(said[2])
            lines = tuple(_expression(raw, table, sets) for _, raw in attributes(said[4]))
            tables[table].chains[chain].rules.append(lines)
    return tables


def difference(present: dict[str, State], wanted: Iterable[Message]) -> str:
    """Name the first thing in which our tables differ from what is wanted; "" if there is none.

    Order counts: rules match first come, first served.
    """
    batch = tuple(wanted)
    target = read((message.kind, message.body) for message in batch)
    texts = _texts(batch)
    for name in TABLES.values():
        found = _table_difference(name, present.get(name), target.get(name), texts)
        if found:
            return f"{FAMILY} {name}{found}"
    return ""


def _table_difference(
    table: str, present: State | None, target: State | None, texts: dict[tuple[str, str, int], str]
) -> str:
    if present is None or target is None:
        if present is target:
            return ""
        return ": the table is unexpected" if present else ": the table is missing"
    if present.dormant:
        return ": the table is dormant"
    for name, chain in target.chains.items():
        here = present.chains.get(name)
        if here is None:
            return f" {name}: the chain is missing"
        if here.hook != chain.hook:
            return f" {name}: {here.hook or 'no hook'} instead of {chain.hook or 'no hook'}"
        wanted = [texts[table, name, number] for number in range(1, len(chain.rules) + 1)]
        found = _rule_difference(here.rules, chain.rules, wanted)
        if found:
            return f" {name} {found}"
    for name in present.chains:
        if name not in target.chains:
            return f" {name}: unexpected chain"
    return ""


def _rule_difference(
    here: list[tuple[str, ...]], rules: list[tuple[str, ...]], texts: list[str]
) -> str:
    for number, (rule, wanted) in enumerate(zip(rules, texts, strict=True), 1):
        if number > len(here):
            return f"rule {number}: missing `{wanted}`"
        if here[number - 1] != rule:
            return f"rule {number}: {_shown(here[number - 1])} instead of `{wanted}`"
    if len(here) > len(rules):
        return f"rule {len(rules) + 1}: unexpected {_shown(here[len(rules)])}"
    return ""


def _texts(batch: Iterable[Message]) -> dict[tuple[str, str, int], str]:
    return {
        (message.table, message.chain, message.number): rule_text(message.table, message.rule)
        for message in batch
        if message.rule is not None
    }


def _shown(rule: tuple[str, ...]) -> str:
    return "[ " + " ] [ ".join(rule) + " ]"


def describe(batch: Iterable[Message]) -> str:
    """Write a batch for people: each message with what it makes, rules by their expressions."""
    lines: list[str] = []
    sets: Sets = {}
    for message in batch:
        said = dict(attributes(message.body))
        where = f"{FAMILY} {message.table}"
        if message.kind == DELTABLE:
            lines.append(f"delete table {where}")
        elif message.kind == NEWTABLE:
            said_of = comment(said.get(6, b""))
            lines.append(f"new table {where}" + (f' comment "{said_of}"' if said_of else ""))
        elif message.kind == NEWCHAIN:
            lines.append(f"new chain {where} {text(said[3])} {_hook(said)}".rstrip())
        elif message.kind in (NEWSET, NEWSETELEM):
            _add_elements(sets, message.kind, said)
            word = "new set" if message.kind == NEWSET else "new elements"
            lines.append(f"{word} {where} {text(said[2])}")
        else:
            lines.append(f"new rule {where} {message.chain}")
            rules = attributes(said[4])
            lines += (f"  [ {_expression(raw, message.table, sets)} ]" for _, raw in rules)
    return "".join(f"{line}\n" for line in lines)


# -- objects -----------------------------------------------------------------------------------

_HOOKS = {0: "prerouting", 1: "input", 2: "forward", 3: "output", 4: "postrouting"}
_POLICIES = {0: "drop", 1: "accept"}


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "big")


def _hook(said: Attributes) -> str:
    if 4 not in said:
        return ""
    place = dict(attributes(said[4]))
    priority = int.from_bytes(place[2], "big", signed=True)
    policy = _POLICIES.get(_number(said.get(5, b"\1")), "unknown")
    name = _HOOKS.get(_number(place[1]), "unknown")
    return f"type {text(said.get(7, b''))} hook {name} priority {priority} policy {policy}"


def _add_elements(sets: Sets, kind: int, said: Attributes) -> None:
    """Note a set, or elements of one, under its name and, if it has one, its number."""
    table, name = text(said[1]), text(said[2])
    number = said.get(10 if kind == NEWSET else 4)
    key: tuple[str, str | int] = (table, name if "%" not in name else _number(number or b""))
    if kind == NEWSET:
        sets[key] = Set(_number(said.get(3, b"")), [])
    elif key in sets:
        elements = sets[key].elements
        listed = (raw for _, raw in attributes(said.get(3, b"")))
        elements += (_element(dict(attributes(raw))) for raw in listed)
        elements.sort()


def _element(said: Attributes) -> str:
    """Write an element: its key, whether it ends an interval, and whatever else there is."""
    key = f"0x{_data(said.pop(1))}" if 1 in said else "*"
    end = " end" if _number(said.pop(3, b"")) & 1 else ""
    return f"{key}{end}{_rest(said)}"


def _rest(said: Attributes) -> str:
    return "".join(f" {number}={value.hex()}" for number, value in sorted(said.items()))


def _data(raw: bytes) -> str:
    return dict(attributes(raw)).get(1, b"").hex()


# -- expressions -------------------------------------------------------------------------------

_ANONYMOUS_CONSTANT, _INTERVAL = 3, 4  # flags of the sets that rules bring along
_META = {
    3: "mark",
    6: "iifname",
    7: "oifname",
    10: "skuid",
    11: "skgid",
    15: "nfproto",
    16: "l4proto",
}
_CT = {0: "state", 3: "mark", 17: "zone"}
_BASES = {1: "network", 2: "transport"}
_OPERATORS = {0: "eq", 1: "neq", 2: "lt", 3: "lte", 4: "gt", 5: "gte"}
_CODES = {0: "drop", 1: "accept", -3: "jump", -4: "goto", -5: "return"}
_FAMILIES = {2: "ip", 10: "ip6"}


def _expression(raw: bytes, table: str, sets: Sets) -> str:
    """Write one expression as a line; whatever is not in the line follows by number."""
    outer = dict(attributes(raw))
    name, said = text(outer[1]), dict(attributes(outer.get(2, b"")))
    if name == "lookup":
        words = _look_up(said, table, sets)
    else:
        words = _WRITERS[name](said) if name in _WRITERS else name
    return words + _rest(said)


def _take(said: Attributes, kind: int) -> int:
    return _number(said.pop(kind, b""))


def _word(words: dict[int, str], number: int) -> str:
    return words.get(number, f"#{number}")


def _meta(said: Attributes) -> str:
    key = _word(_META, _take(said, 2))
    if 3 in said:
        return f"meta set {key} with reg {_take(said, 3)}"
    return f"meta load {key} => reg {_take(said, 1)}"


def _ct(said: Attributes) -> str:
    key = _word(_CT, _take(said, 2))
    if 4 in said:
        return f"ct set {key} with reg {_take(said, 4)}"
    return f"ct load {key} => reg {_take(said, 1)}"


def _payload(said: Attributes) -> str:
    base, offset, size = _word(_BASES, _take(said, 2)), _take(said, 3), _take(said, 4)
    return f"payload load {size}b @ {base} header + {offset} => reg {_take(said, 1)}"


def _bitwise(said: Attributes) -> str:
    if _number(said.get(6, b"")) == 0:  # the kernel names the default operation
        said.pop(6, None)
    source, target = _take(said, 1), _take(said, 2)
    if not {4, 5} <= said.keys():  # not one of ours: a shift, or between two registers
        return f"bitwise reg {target} = reg {source}"
    size, mask, xor = said.pop(3, b""), _data(said.pop(4)), _data(said.pop(5))
    if 2 * _number(size) != len(mask):
        said[3] = size
    return f"bitwise reg {target} = ( reg {source} & 0x{mask} ) ^ 0x{xor}"


def _byteorder(said: Attributes) -> str:
    source, target = _take(said, 1), _take(said, 2)
    call = {0: "ntoh", 1: "hton"}.get(_take(said, 3), "?")
    return f"byteorder reg {target} = {call}(reg {source}, {_take(said, 4)}, {_take(said, 5)})"


def _compare(said: Attributes) -> str:
    register, operator = _take(said, 1), _word(_OPERATORS, _take(said, 2))
    return f"cmp {operator} reg {register} 0x{_data(said.pop(3))}"


def _range(said: Attributes) -> str:
    register, operator = _take(said, 1), _word(_OPERATORS, _take(said, 2))
    low, high = _data(said.pop(3)), _data(said.pop(4))
    return f"range {operator} reg {register} 0x{low} 0x{high}"


def _look_up(said: Attributes, table: str, sets: Sets) -> str:
    name, number = text(said.pop(1)), said.pop(4, b"")
    register, inverted = _take(said, 2), _take(said, 5)
    found = sets.get((table, name if "%" not in name else _number(number)), Set(0, []))
    word = "not in" if inverted & 1 else "in"
    odd = "" if found.flags & ~_INTERVAL == _ANONYMOUS_CONSTANT else f" set flags {found.flags:#x}"
    return f"lookup reg {register} {word}{odd} {{ {', '.join(found.elements)} }}"


def _immediate(said: Attributes) -> str:
    register, data = _take(said, 1), dict(attributes(said.pop(2)))
    if 2 not in data:
        return f"immediate reg {register} 0x{data.get(1, b'').hex()}"
    verdict = dict(attributes(data[2]))
    code = _word(_CODES, int.from_bytes(verdict[1], "big", signed=True))
    return f"immediate reg {register} {code} {text(verdict.get(2, b''))}".rstrip()


def _counter(said: Attributes) -> str:
    said.clear()
    return "counter"


def _redirect(said: Attributes) -> str:
    low, high, flags = _take(said, 1), _take(said, 2), _take(said, 3)
    registers = f"reg {low}" if high in (0, low) else f"reg {low} to reg {high}"
    return f"redir port {registers} flags {flags:#x}"


def _tproxy(said: Attributes) -> str:
    return f"tproxy {_word(_FAMILIES, _take(said, 1))} port reg {_take(said, 3)}"


_WRITERS = {
    "meta": _meta,
    "ct": _ct,
    "payload": _payload,
    "bitwise": _bitwise,
    "byteorder": _byteorder,
    "cmp": _compare,
    "range": _range,
    "immediate": _immediate,
    "counter": _counter,
    "redir": _redirect,
    "tproxy": _tproxy,
}
