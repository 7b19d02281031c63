"""What netlink messages are made of: header, attributes, and the operations of nf_tables.

An attribute is a length, a number and a payload, padded to four bytes; a payload may be attributes
again. Packed and unpacked here, no kernel needed.

Source: include/uapi/linux/netlink.h, netfilter/nf_tables.h
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

NEWTABLE, GETTABLE, DELTABLE = 0, 1, 2
NEWCHAIN, GETCHAIN, DELCHAIN = 3, 4, 5
NEWRULE, GETRULE = 6, 7
NEWSET, GETSET = 9, 10
NEWSETELEM, GETSETELEM = 12, 13
GETGEN = 16

NF_TABLES = 10  # the subsystem of netfilter's netlink
FAMILIES = {"inet": 1, "ip": 2, "arp": 3, "netdev": 5, "bridge": 7, "ip6": 10}
HEADERS = {"": bytes(4)} | {name: bytes((number, 0, 0, 0)) for name, number in FAMILIES.items()}
"""What attributes follow in its messages, by family: that, version, resource; "" for all."""

HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
REQUEST = 0x1

NESTED = 0x8000
_KIND_BITS = 0x3FFF  # of an attribute's number; the others say "nested" and "network order"
_HEAD = struct.Struct("=HH")
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


def frame(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """Pack one message, a request to the kernel."""
    return HEADER.pack(HEADER.size + len(body), kind, flags | REQUEST, sequence, 0) + body


def frames(messages: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Pack the messages of a batch, type, flags and body each, numbered by place from 1 on."""
    return b"".join(
        frame(kind, flags, at, body) for at, (kind, flags, body) in enumerate(messages, 1)
    )


def attribute(kind: int, payload: bytes) -> bytes:
    """Pack one attribute, padded to four bytes."""
    size = 4 + len(payload)
    return _HEAD.pack(size, kind) + payload + _PADDING[size & 3]


def nested(kind: int, *parts: bytes) -> bytes:
    """Pack an attribute of attributes."""
    return attribute(kind | NESTED, b"".join(parts))


def string(kind: int, value: str) -> bytes:
    """Pack a NUL-terminated string; bytes that were no UTF-8 when read go back as they were."""
    return attribute(kind, value.encode(errors="surrogateescape") + b"\0")


def attributes(data: bytes, at: int = 0) -> list[tuple[int, bytes]]:
    """Unpack the attributes from offset `at` on: number and payload."""
    found, last = [], len(data) - _HEAD.size
    while at <= last:
        size, kind = _HEAD.unpack_from(data, at)
        found.append((kind & _KIND_BITS, data[at + _HEAD.size : at + size]))
        at += padded(size) or _HEAD.size
    return found


def padded(size: int) -> int:
    """Round a length up to the next multiple of four."""
    return (size + 3) & ~3


def text(raw: bytes) -> str:
    """Decode a NUL-terminated string; bytes that are not UTF-8 survive the way back."""
    return raw.partition(b"\0")[0].decode(errors="surrogateescape")


_USER_DATA_COMMENT = 0


def pack_comment(kind: int, comment: str) -> bytes:
    """Pack the user data by which nf_tables objects carry a comment, at most 254 bytes."""
    raw = comment.encode() + b"\0"
    return attribute(kind, bytes((_USER_DATA_COMMENT, len(raw))) + raw)


def comment(user_data: bytes) -> str:
    """Return the comment among an object's user data, "" if there is none."""
    at = 0
    while at + 2 <= len(user_data):
        kind, size = user_data[at : at + 2]
        if kind == _USER_DATA_COMMENT:
            return text(user_data[at + 2 : at + 2 + size])
        at += 2 + size
    return ""
