"""Rules as nf_tables netlink messages: what nft would compile their text to, without nft.

Each rule becomes a list of expressions over one register, as the kernel evaluates them. Matches on
an address or a port read a header, so the family or the protocol is compared first, immediately
before, where nft puts it too: the kernel's listing of these messages and of the text is the same.
Integers of attributes are in network order, compared values in the order in which the kernel loads
them.

Source: include/uapi/linux/netfilter/nf_tables.h; nft --debug=netlink.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache, cached_property
from hashlib import sha256
from ipaddress import IPv6Network, ip_network
from typing import NamedTuple

from istio_cni.constants import NFT_FAMILY
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
    VerdictKind,
)
from istio_cni.rules.netlink import (
    DELTABLE,
    HEADERS,
    NEWCHAIN,
    NEWRULE,
    NEWSET,
    NEWSETELEM,
    NEWTABLE,
    NF_TABLES,
    attribute,
    frames,
    nested,
    pack_comment,
    string,
)
from istio_cni.rules.nftables import (
    HOOKS,
    NftMatch,
    NftRule,
    NftTable,
    OfFamily,
    OneOf,
    chain_name,
    interval,
    rule_text,
)

CREATE, EXCL, APPEND = 0x400, 0x200, 0x800
ELEMENTS_PER_MESSAGE = 1000  # an attribute takes 64 KB
COMMENT_PREFIX = "istio-cni "


class Message(NamedTuple):
    """One nf_tables message: operation, flags, attributes, and what it is about."""

    kind: int
    flags: int
    body: bytes
    table: str
    chain: str = ""
    number: int = 0
    rule: NftRule | None = None

    @property
    def about(self) -> str:
        """Name the object that the message makes, for errors."""
        if self.rule is None:
            return f"table {self.table}" + (f" chain {self.chain}" if self.chain else "")
        text = rule_text(self.table, self.rule)
        part = "" if self.kind == NEWRULE else " (its set)"
        return f"{self.table} {self.chain} rule {self.number}{part}: `{text}`"


class Batch(tuple[Message, ...]):
    """Messages that are carried out together, or none of them."""

    @cached_property
    def packed(self) -> bytes:
        """All of them as they are sent, each numbered by its place, from 1 on."""
        operation, header = NF_TABLES << 8, HEADERS[NFT_FAMILY]
        return frames((operation | one.kind, one.flags, header + one.body) for one in self)

    @property
    def deletes(self) -> bool:
        """Whether a table goes, which the kernel takes its time for afterwards."""
        return any(one.kind == DELTABLE for one in self)


def messages(tables: Iterable[NftTable]) -> tuple[Message, ...]:
    """Return the messages that make these tables in a namespace that has none of ours."""
    return tuple(message for table in tables for message in _table(table))


def fingerprint(wanted: Iterable[Message]) -> str:
    """Return what the comment of each table says of the whole: equal for equal rule sets only."""
    digest = sha256()
    for message in wanted:
        digest.update(struct.pack("!HHI", message.kind, message.flags, len(message.body)))
        digest.update(message.body)
    return COMMENT_PREFIX + digest.hexdigest()[:32]


def transaction(
    wanted: Iterable[Message], *, present: Collection[str] = (), comment: str = ""
) -> Batch:
    """Return the batch that puts the wanted messages in the place of what is there.

    `present` names the tables of ours that are there: they go first. A table that is there although
    it is not named makes the batch fail (EEXIST), one that is not although it is named, too
    (ENOENT): then what is present has changed meanwhile.
    """
    batch = [Message(DELTABLE, 0, string(1, name), name) for name in present]
    for message in wanted:
        if message.kind == NEWTABLE and comment:
            message = message._replace(body=message.body + pack_comment(6, comment))
        batch.append(message)
    return Batch(batch)


class Wanted(NamedTuple):
    """Our tables, the messages that make them, the fingerprint that they carry as a comment.

    `fresh` is the batch for a namespace that has none of ours.
    """

    tables: tuple[NftTable, ...]
    messages: tuple[Message, ...]
    comment: str
    fresh: Batch

    @property
    def names(self) -> dict[str, str]:
        """The tables by name, each with its comment."""
        return dict.fromkeys((table.name for table in self.tables), self.comment)

    def replacing(self, present: Collection[str]) -> Batch:
        """Return the batch for a namespace that has these tables of ours."""
        if not present:
            return self.fresh
        return transaction(self.messages, present=present, comment=self.comment)


NOTHING = Wanted((), (), "", Batch())


def compiled(tables: tuple[NftTable, ...]) -> Wanted:
    """Compile tables, with all that follows from them alone."""
    made = messages(tables)
    comment = fingerprint(made)
    return Wanted(tables, made, comment, transaction(made, comment=comment))


def _table(table: NftTable) -> Iterator[Message]:
    name = string(1, table.name)
    yield Message(NEWTABLE, CREATE | EXCL, name, table.name)
    for chain in table.chains:
        yield Message(NEWCHAIN, CREATE, name + _chain(table.name, chain), table.name, chain)
    sets = 0
    places: dict[str, int] = {}
    for rule in table.rules:
        places[rule.chain] = number = places.get(rule.chain, 0) + 1
        about = table.name, rule.chain, number, rule
        for match in rule.matches:
            if isinstance(match, OneOf) and len(match.intervals) > 1:
                sets += 1
                for kind, body in _set(name, sets, match):
                    yield Message(kind, CREATE, body, *about)
        body = name + string(2, rule.chain) + nested(4, *_expressions(rule, sets))
        yield Message(NEWRULE, CREATE | APPEND, body, *about)


def _chain(table: str, chain: str) -> bytes:
    hook = HOOKS.get((table, chain))
    if hook is None:
        return string(3, chain)
    number = {"prerouting": 0, "input": 1, "forward": 2, "output": 3}[hook.name]
    place = nested(4, _be32(1, number), _be32(2, hook.priority))
    return string(3, chain) + place + _be32(5, 1) + string(7, hook.type)


# -- sets --------------------------------------------------------------------------------------

_ANONYMOUS, _CONSTANT, _INTERVAL = 1, 2, 4
_INTERVAL_END = 1
_SET_NAME = "__set%d"  # the kernel puts a number in
_HOST_ORDER = struct.pack("=BBI", 0, 4, 1)  # to nft's listings, of keys that it cannot tell by type
_OPEN_INTERVAL = struct.pack("=BBI", 1, 4, 1)  # likewise, of an interval up to the highest value
_KEYS = {  # nft's type number and the bytes of a key, for its listings
    MatchKind.SOURCE_PORT: (13, 2),
    MatchKind.DESTINATION_PORT: (13, 2),
    MatchKind.OWNER_UID: (24, 4),
    MatchKind.OWNER_GID: (25, 4),
}
_ADDRESS_KEYS = {Family.V4: (7, 4), Family.V6: (8, 16)}


def _set(table: bytes, number: int, match: OneOf) -> Iterator[tuple[int, bytes]]:
    """Make an anonymous set; its number is how the rule after it finds it."""
    kind, length = _ADDRESS_KEYS[match.family] if match.family else _KEYS[match.kind]
    elements = list(_elements(match, length))
    flags = _ANONYMOUS | _CONSTANT | (_INTERVAL if _has_ranges(match) else 0)
    name = table + string(2, _SET_NAME)
    described = _be32(3, flags) + _be32(4, kind) + _be32(5, length)
    size = nested(9, _be32(1, len(elements)))
    order = attribute(13, _HOST_ORDER) if _in_host_order(match) else b""
    yield NEWSET, name + described + _be32(10, number) + size + order
    for at in range(0, len(elements), ELEMENTS_PER_MESSAGE):
        some = nested(3, *elements[at : at + ELEMENTS_PER_MESSAGE])
        yield NEWSETELEM, name + some + _be32(4, number)


def _in_host_order(match: OneOf) -> bool:
    """Tell how ids are compared: as loaded, unless one must tell which of two is greater."""
    return _is_owner(match.kind) and not _has_ranges(match)


def _has_ranges(match: OneOf) -> bool:
    return any(low != high for low, high in match.intervals)


def _elements(match: OneOf, length: int) -> Iterator[bytes]:
    """Pack a set's elements; of intervals, the first value of each and the first one after it."""
    order = sys.byteorder if _in_host_order(match) else "big"
    values = sorted(set(match.intervals))
    if not _has_ranges(match):
        yield from (_element(low.to_bytes(length, order)) for low, _ in values)
        return
    after, is_open = 0, False
    for low, high in values:
        if after < low or after == 0 < low:
            yield _element(after.to_bytes(length, order), _INTERVAL_END)
        after = high + 1
        is_open = after == 1 << 8 * length
        yield _element(low.to_bytes(length, order), said=_OPEN_INTERVAL if is_open else b"")
    if not is_open:
        yield _element(after.to_bytes(length, order), _INTERVAL_END)


def _element(raw: bytes, flags: int = 0, said: bytes = b"") -> bytes:
    flagged = _be32(3, flags) if flags else b""
    return nested(1, _value(1, raw), flagged, attribute(6, said) if said else b"")


# -- rules -------------------------------------------------------------------------------------

_META_MARK, _META_IIFNAME, _META_OIFNAME = 3, 6, 7
_META_SKUID, _META_SKGID, _META_NFPROTO, _META_L4PROTO = 10, 11, 15, 16
_CT_STATE, _CT_MARK, _CT_ZONE = 0, 3, 17
_EQ, _NEQ, _LTE, _GTE = 0, 1, 3, 5
_NETWORK, _TRANSPORT = 1, 2
_IFNAMSIZ = 16
_NFPROTO = {Family.V4: 2, Family.V6: 10}
_L4PROTO = {"tcp": 6, "udp": 17}
_STATES = {"INVALID": 1, "ESTABLISHED": 2, "RELATED": 4, "NEW": 8}
_META = {
    MatchKind.IN_INTERFACE: _META_IIFNAME,
    MatchKind.OUT_INTERFACE: _META_OIFNAME,
    MatchKind.OWNER_UID: _META_SKUID,
    MatchKind.OWNER_GID: _META_SKGID,
}
_PORT_OFFSET = {MatchKind.SOURCE_PORT: 0, MatchKind.DESTINATION_PORT: 2}
_ADDRESS_OFFSET = {
    (MatchKind.SOURCE, Family.V4): 12,
    (MatchKind.DESTINATION, Family.V4): 16,
    (MatchKind.SOURCE, Family.V6): 8,
    (MatchKind.DESTINATION, Family.V6): 24,
}
_DROP, _ACCEPT, _JUMP, _RETURN = 0, 1, -3, -5


def _expressions(rule: NftRule, set_number: int) -> Iterator[bytes]:
    """Compile a rule's matches and what it does; protocol and family are compared once."""
    known_protocol = False
    for match in rule.matches:
        if isinstance(match, Protocol):
            known_protocol = True
        elif _needs_protocol(match) and not known_protocol:
            known_protocol = True
            yield from _protocol(rule.protocol)
        yield from _match(match, set_number)
    yield from _statement(rule)


def _needs_protocol(match: NftMatch) -> bool:
    """Tell whether a match reads a transport header."""
    return isinstance(match, Ports | OneOf) and match.kind in _PORT_OFFSET


def _is_owner(kind: MatchKind) -> bool:
    return kind in (MatchKind.OWNER_UID, MatchKind.OWNER_GID)


@cache
def _protocol(name: str) -> tuple[bytes, ...]:
    return _load_meta(_META_L4PROTO), _compare(bytes((_L4PROTO[name],)))


@cache
def _family(family: Family) -> tuple[bytes, ...]:
    return _load_meta(_META_NFPROTO), _compare(bytes((_NFPROTO[family],)))


def _match(match: NftMatch, set_number: int) -> tuple[bytes, ...]:
    match match:
        case Protocol(name=name):
            return _protocol(name)
        case OfFamily(family=family):
            return _family(family)
        case Interface(kind=kind, name=name, negate=negate):
            return _load_meta(_META[kind]), _compare(_interface(name), negate)
        case Address():
            return _address(match)
        case Ports(kind=kind, negate=negate):
            low, high = (port.to_bytes(2, "big") for port in interval(match))
            load = _payload(_TRANSPORT, _PORT_OFFSET[kind], 2)
            return load, *_within(low, high, negate=negate)
        case Owner(kind=kind, negate=negate):
            return _load_meta(_META[kind]), *_owner(match, negate=negate)
        case ConntrackState(states=states, negate=negate):
            mask = _host32(sum(_STATES[state] for state in states))
            return _load_ct(_CT_STATE), _masked(mask), _compare(bytes(4), not negate)
        case Mark(kind=kind, value=value, negate=negate):
            of_packet = kind is MatchKind.MARK
            load = _load_meta(_META_MARK) if of_packet else _load_ct(_CT_MARK)
            return load, _compare(_host32(value), negate)
        case OneOf():
            return _look_up(match, set_number)


def _interface(name: str) -> bytes:
    """Pad a name to what the kernel compares; a trailing `+` leaves the rest of it open."""
    if name.endswith("+"):
        return name[:-1].encode()
    return name.encode().ljust(_IFNAMSIZ, b"\0")


def _address(match: Address) -> tuple[bytes, ...]:
    """Compare the leading bytes of an address, or with a prefix inside a byte, its bits."""
    network = ip_network(match.prefix, strict=False)
    family = Family.V6 if isinstance(network, IPv6Network) else Family.V4
    offset = _ADDRESS_OFFSET[match.kind, family]
    wanted = network.network_address.packed
    size, odd_bits = divmod(network.prefixlen, 8)
    if odd_bits or not size:
        read = _payload(_NETWORK, offset, len(wanted)), _masked(network.netmask.packed)
        return *_family(family), *read, _compare(wanted, match.negate)
    read_part = _payload(_NETWORK, offset, size)
    return *_family(family), read_part, _compare(wanted[:size], match.negate)


def _owner(match: Owner, *, negate: bool) -> tuple[bytes, ...]:
    """Compare an id in host order; ranges compare byte by byte, so in network order."""
    low, high = interval(match)
    if low == high:
        return (_compare(_host32(low), negate),)
    return _to_network_order(), *_within(low.to_bytes(4, "big"), high.to_bytes(4, "big"), negate)


def _within(low: bytes, high: bytes, negate: bool) -> tuple[bytes, ...]:
    if low == high:
        return (_compare(low, negate),)
    if negate:
        bounds = _be32(2, _NEQ) + _value(3, low) + _value(4, high)
        return (_expression("range", _be32(1, 1), bounds),)
    return _compare(low, operator=_GTE), _compare(high, operator=_LTE)


def _look_up(match: OneOf, set_number: int) -> tuple[bytes, ...]:
    inverted = _be32(5, 1) if match.negate else b""
    name = string(1, _SET_NAME)
    look_up = _expression("lookup", name, _be32(2, 1), _be32(4, set_number), inverted)
    if match.family:
        size = _ADDRESS_KEYS[match.family][1]
        load = _payload(_NETWORK, _ADDRESS_OFFSET[match.kind, match.family], size)
        if len(match.intervals) == 1:  # nft makes no set of one
            low, high = (end.to_bytes(size, "big") for end in match.intervals[0])
            return *_family(match.family), load, *_within(low, high, match.negate)
        return *_family(match.family), load, look_up
    if match.kind in _PORT_OFFSET:
        return _payload(_TRANSPORT, _PORT_OFFSET[match.kind], 2), look_up
    reorder = () if _in_host_order(match) else (_to_network_order(),)
    return _load_meta(_META[match.kind]), *reorder, look_up


def _statement(rule: NftRule) -> tuple[bytes, ...]:
    verdict = rule.verdict
    match verdict.kind:
        case VerdictKind.REDIRECT:
            port = verdict.port.to_bytes(2, "big")
            redirect = _expression("redir", _be32(1, 1), _be32(3, 2))
            return _COUNTER, _immediate(port), redirect
        case VerdictKind.TPROXY:
            family = _be32(1, _NFPROTO[rule.family or Family.V4])
            hand_over = _expression("tproxy", family, _be32(3, 1))
            port, mark = verdict.port.to_bytes(2, "big"), _host32(verdict.value)
            set_mark = _immediate(mark), _set_meta(_META_MARK)
            return _immediate(port), hand_over, *set_mark, _COUNTER, _verdict(_ACCEPT)
        case VerdictKind.SET_MARK:
            return _COUNTER, _immediate(_host32(verdict.value)), _set_meta(_META_MARK)
        case VerdictKind.SAVE_MARK:
            return _COUNTER, _load_meta(_META_MARK), _set_ct(_CT_MARK)
        case VerdictKind.RESTORE_MARK:
            return _COUNTER, _load_ct(_CT_MARK), _set_meta(_META_MARK)
        case VerdictKind.ZONE:
            return _COUNTER, _immediate(struct.pack("=H", verdict.value)), _set_ct(_CT_ZONE)
        case VerdictKind.ACCEPT:
            return _COUNTER, _verdict(_ACCEPT)
        case VerdictKind.DROP:
            return _COUNTER, _verdict(_DROP)
        case VerdictKind.RETURN:
            return _COUNTER, _verdict(_RETURN)
        case VerdictKind.JUMP:
            return _COUNTER, _verdict(_JUMP, chain_name(verdict.chain))


# -- expressions -------------------------------------------------------------------------------


_BE32_HEADS = [struct.pack("=HH", 8, kind) for kind in range(16)]


def _be32(kind: int, value: int) -> bytes:
    return _BE32_HEADS[kind] + (value & 0xFFFFFFFF).to_bytes(4, "big")


def _host32(value: int) -> bytes:
    return struct.pack("=I", value)


def _value(kind: int, raw: bytes) -> bytes:
    return nested(kind, attribute(1, raw))


def _expression(name: str, *parts: bytes) -> bytes:
    return nested(1, string(1, name), nested(2, *parts))


@cache
def _load_meta(key: int) -> bytes:
    return _expression("meta", _be32(2, key), _be32(1, 1))


@cache
def _set_meta(key: int) -> bytes:
    return _expression("meta", _be32(2, key), _be32(3, 1))


@cache
def _load_ct(key: int) -> bytes:
    return _expression("ct", _be32(2, key), _be32(1, 1))


@cache
def _set_ct(key: int) -> bytes:
    return _expression("ct", _be32(2, key), _be32(4, 1))


@cache
def _payload(base: int, offset: int, size: int) -> bytes:
    return _expression("payload", _be32(1, 1), _be32(2, base), _be32(3, offset), _be32(4, size))


def _compare(raw: bytes, negate: bool = False, *, operator: int | None = None) -> bytes:
    chosen = (_NEQ if negate else _EQ) if operator is None else operator
    return _expression("cmp", _be32(1, 1), _be32(2, chosen), _value(3, raw))


def _masked(mask: bytes) -> bytes:
    of, to = _be32(1, 1), _be32(2, 1)
    zeros = _value(5, bytes(len(mask)))
    return _expression("bitwise", of, to, _be32(3, len(mask)), _value(4, mask), zeros)


def _to_network_order() -> bytes:
    size = _be32(4, 4) + _be32(5, 4)
    return _expression("byteorder", _be32(1, 1), _be32(2, 1), _be32(3, 1), size)


def _immediate(raw: bytes) -> bytes:
    return _expression("immediate", _be32(1, 1), _value(2, raw))


@cache
def _verdict(code: int, chain: str = "") -> bytes:
    inner = _be32(1, code) + (string(2, chain) if chain else b"")
    return _expression("immediate", _be32(1, 0), nested(2, nested(2, inner)))


_COUNTER = _expression("counter", attribute(1, bytes(8)), attribute(2, bytes(8)))
