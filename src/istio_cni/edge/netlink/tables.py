"""Which tables of nf_tables and iptables-legacy exist, and the removal of idle ones.

iptables-nft makes a table and its base chains for whatever it is asked about, even by a mere probe,
and never removes them; what is left would pass for a rule set of somebody. Only the kernel can tell
safely whether such a table is empty at the moment of its deletion, so it is asked to refuse
otherwise. Integers are in network order here.

Source: include/uapi/linux/netfilter/nfnetlink.h, nf_tables.h
"""

from __future__ import annotations

import errno
import os
import struct
from collections import namedtuple

from istio_cni.edge.netlink.messages import DUMP, Netlink, Refused
from istio_cni.errors import IOFailure, ProgrammingFailed
from istio_cni.rules.netlink import (
    DELCHAIN,
    DELTABLE,
    FAMILIES,
    GETCHAIN,
    GETGEN,
    GETTABLE,
    HEADERS,
    NF_TABLES,
    attribute,
    attributes,
    comment,
    frame,
    frames,
    string,
    text,
)

IPTABLES_TABLES = tuple(
    (family, table) for family in ("ip", "ip6") for table in ("nat", "mangle", "raw", "filter")
)

MODULES = "nf_tables, nft_chain_nat, nft_ct, nft_redir, nft_tproxy"
_NETLINK_NETFILTER = 12
BATCH_BEGIN, BATCH_END = 0x10, 0x11
_NONREC = 0x100  # delete it only if nothing is in it
_GENERATION = 1
_TABLE_NAME, _TABLE_USE, _TABLE_USERDATA = 1, 3, 6
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY, _CHAIN_USE = 1, 3, 4, 5, 6
_ACCEPT = 1
FAMILY_NAMES = {number: name for name, number in FAMILIES.items()}
_UNSUPPORTED = (errno.EINVAL, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP)
# In use by now, changed meanwhile, already gone, owned by a running process.
_LEFT_ALONE = (errno.EBUSY, errno.ERESTART, errno.ENOENT, errno.EPERM)


class Listed(namedtuple("Listed", ("family", "name", "comment"))):
    """A table: its family (`ip`, `inet`, …), name and comment, "" for none."""

    __slots__ = ()
    family: str
    name: str
    comment: str


class NoNftables(ProgrammingFailed):
    """The kernel has no nf_tables: an error only for whoever wants to program it."""

    def __init__(self) -> None:
        super().__init__(f"the kernel has no nf_tables; it needs the modules {MODULES}")


class Nftables(Netlink):
    """nf_tables in the namespace of the thread that makes this; a context manager."""

    def __init__(self, timeout_s: float = 2.0) -> None:
        try:
            super().__init__(_NETLINK_NETFILTER, timeout_s)
        except Refused as refused:
            if refused.errno not in _UNSUPPORTED:
                raise
            raise NoNftables() from refused

    def generation(self) -> int:
        """Read the number that each change in this namespace increases."""
        try:
            reply = self.ask("reading the nf_tables generation", *message(GETGEN, 0))[0]
        except Refused as refused:
            if refused.errno not in _UNSUPPORTED:
                raise
            raise NoNftables() from refused
        return _value(_said(reply)[_GENERATION])

    def tables(self) -> tuple[Listed, ...]:
        """List all tables."""
        try:
            replies = self.ask("listing the nf_tables tables", *message(GETTABLE, DUMP))
        except Refused:
            self.generation()  # tells a kernel without nf_tables from other trouble
            raise
        found = []
        for reply in replies:
            said = _said(reply)
            family = FAMILY_NAMES.get(reply[0], str(reply[0]))
            about = comment(said.get(_TABLE_USERDATA, b""))
            found.append(Listed(family, text(said[_TABLE_NAME]), about))
        return tuple(found)

    def idle_chains(self, family: str, table: str) -> tuple[str, ...] | None:
        """Name the chains of a table that does nothing; None if it does something, or is absent.

        The kernel counts: the uses of a table are its chains, sets, maps, objects and flowtables,
        those of a chain its rules and the jumps to it.
        """
        doing = f"reading the nf_tables table {family} {table}"
        name = string(_TABLE_NAME, table)
        try:
            reply = self.ask(doing, *message(GETTABLE, 0, family, name))[0]
        except Refused as refused:
            if refused.errno != errno.ENOENT:
                raise
            return None
        listed = [_said(one) for one in self.ask(doing, *message(GETCHAIN, DUMP, family))]
        chains = [chain for chain in listed if text(chain[_CHAIN_TABLE]) == table]
        if _value(_said(reply)[_TABLE_USE]) != len(chains) or not all(map(_is_idle, chains)):
            return None
        return tuple(text(chain[_CHAIN_NAME]) for chain in chains)

    def delete_idle(
        self, family: str, table: str, chains: tuple[str, ...], generation: int = 0
    ) -> bool:
        """Delete these chains and their table, all or none; False if they are in use by now.

        With a `generation`, also False if anything has changed since; a chain's policy, for
        instance, is no use that the kernel counts.
        """
        names = (string(_CHAIN_TABLE, table) + string(_CHAIN_NAME, chain) for chain in chains)
        batch = [message(DELCHAIN, _NONREC, family, each) for each in names]
        batch.append(message(DELTABLE, _NONREC, family, string(_TABLE_NAME, table)))
        doing = f"deleting the empty nf_tables table {family} {table}"
        try:
            self.batch(doing, framed_batch(frames(batch), len(batch), generation))
        except Refused as refused:
            if refused.errno not in _LEFT_ALONE:
                raise
            return False
        return True


def nft_tables() -> tuple[Listed, ...]:
    """List the nf_tables tables of the calling thread's namespace."""
    try:
        with Nftables() as nftables:
            return nftables.tables()
    except NoNftables:
        return ()


def sweep_empty_tables(
    candidates: tuple[tuple[str, str], ...] = IPTABLES_TABLES,
) -> tuple[tuple[str, str], ...]:
    """Delete the candidates, family and name each, that do nothing; return what was deleted.

    What holds a rule, a set, a chain without hook or a policy other than accept, or comes to hold
    it meanwhile, stays. A deletion makes this take a grace period longer, 7 to 20 ms.
    """
    deleted = []
    try:
        with Nftables() as nftables:
            for family, table in candidates:
                generation = nftables.generation()
                chains = nftables.idle_chains(family, table)
                if chains is not None and nftables.delete_idle(family, table, chains, generation):
                    deleted.append((family, table))
    except NoNftables:
        return ()
    return tuple(deleted)


def legacy_tables(family: int) -> tuple[str, ...]:
    """Name the tables that iptables-legacy has instantiated in the calling thread's namespace."""
    name = {4: "ip_tables_names", 6: "ip6_tables_names"}[family]
    path = f"/proc/thread-self/net/{name}"
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # the kernel has no legacy tables, or none was ever asked for
        return ()
    except OSError as error:
        raise IOFailure(f"opening {path}: {error.strerror}") from error
    try:
        return tuple(os.read(file, 4096).decode().split())
    finally:
        os.close(file)


def message(
    kind: int, flags: int, family: str = "", attributes: bytes = b""
) -> tuple[int, int, bytes]:
    """Make a message of nf_tables, as `ask` takes it; no family means all."""
    return NF_TABLES << 8 | kind, flags, HEADERS[family] + attributes


def framed_batch(packed: bytes, count: int, generation: int = 0) -> bytes:
    """Make one batch of so many packed messages; it is refused if a `generation` has passed."""
    about = struct.pack("!BBH", 0, 0, NF_TABLES)
    since = attribute(_GENERATION, struct.pack("!I", generation)) if generation else b""
    begin = frame(BATCH_BEGIN, 0, 0, about + since)
    return begin + packed + frame(BATCH_END, 0, count + 1, about)


def _said(reply: bytes) -> dict[int, bytes]:
    return dict(attributes(reply, 4))


def _value(raw: bytes) -> int:
    return int.from_bytes(raw, "big")


def _is_idle(chain: dict[int, bytes]) -> bool:
    accepts = _CHAIN_HOOK in chain and _value(chain[_CHAIN_POLICY]) == _ACCEPT
    return accepts and _value(chain[_CHAIN_USE]) == 0
