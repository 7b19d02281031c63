"""Our nf_tables tables: what is there, read message by message, and batches that change it.

A batch is carried out whole or not at all, both address families and all tables. The socket belongs
to the namespace in which it was opened, so it must be opened inside and may be used anywhere.

Source: include/uapi/linux/netfilter/nf_tables.h, net/netfilter/nfnetlink.c
"""

from __future__ import annotations

import errno
import os
import time
from _thread import start_new_thread
from contextlib import suppress

from istio_cni.constants import NFT_FAMILY
from istio_cni.edge.netlink.messages import DUMP, DUMP_PAUSE_S, DUMP_TRIES, Refused
from istio_cni.edge.netlink.tables import (
    MODULES,
    Nftables,
    framed_batch,
    message,
)
from istio_cni.errors import ProgrammingFailed, TryAgainLater
from istio_cni.rules.netlink import (
    DELTABLE,
    GETCHAIN,
    GETRULE,
    GETSET,
    GETSETELEM,
    GETTABLE,
    NEWCHAIN,
    NEWRULE,
    NEWSET,
    NEWSETELEM,
    NEWTABLE,
    attributes,
    string,
    text,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from istio_cni.rules.nfnetlink import Batch

_BODY = 4  # where attributes begin, after nfgenmsg
# Something changed meanwhile, or nobody can tell: replies were lost, a signal came.
_UNSETTLED = (errno.ERESTART, errno.EINTR, errno.EAGAIN, errno.ENOBUFS)


class Unsettled(ProgrammingFailed):
    """Whether a batch was carried out, or why not, shows only when the tables are read again."""


class Ruleset(Nftables):
    """The tables of the namespace of the thread that makes this; a context manager."""

    _has_deleted = False

    def close(self) -> None:
        """Close the socket; after deletions on a thread of its own, which waits for the kernel.

        That takes a grace period, 7 to 20 ms, in which whoever programmed has better things to do.
        """
        if self._has_deleted:
            with suppress(RuntimeError):  # no more threads, the interpreter ends
                start_new_thread(super().close, ())
                return
        super().close()

    def dump(self, tables: Collection[str]) -> list[tuple[int, bytes]]:
        """Return these `inet` tables as the messages that would make them: operation, attributes.

        Tables, chains, sets and their elements, rules, in this order. These are several lists: if
        anything changes meanwhile, all are read again, `DUMP_TRIES` times in all.
        """
        for _ in range(DUMP_TRIES):
            before = self.generation()
            found = self._dump_once(tables)
            if self.generation() == before:
                return found
            time.sleep(DUMP_PAUSE_S)
        raise TryAgainLater(f"nf_tables changed each of {DUMP_TRIES} times it was read")

    def _dump_once(self, tables: Collection[str]) -> list[tuple[int, bytes]]:
        found = self._all(NEWTABLE, GETTABLE, tables) + self._all(NEWCHAIN, GETCHAIN, tables)
        for table in tables:
            name = string(1, table)
            sets = self._all(NEWSET, GETSET, (table,), name)
            found += sets
            for _, body in sets:
                one = name + string(2, text(dict(attributes(body))[2]))
                found += self._all(NEWSETELEM, GETSETELEM, (table,), one)
        for table in tables:
            found += self._all(NEWRULE, GETRULE, (table,), string(1, table))
        return found

    def _all(
        self, makes: int, asks: int, tables: Collection[str], about: bytes = b""
    ) -> list[tuple[int, bytes]]:
        """List objects of some tables; none if there is nothing of the kind."""
        request = message(asks, DUMP, NFT_FAMILY, about)
        try:
            replies = self.ask("reading our nf_tables tables", *request)
        except Refused as refused:
            if refused.errno != errno.ENOENT:
                raise
            return []
        bodies = (reply[_BODY:] for reply in replies)
        return [(makes, body) for body in bodies if text(dict(attributes(body))[1]) in tables]

    def commit(self, batch: Batch, generation: int = 0) -> None:
        """Carry out all messages or none; with a `generation`, none if anything changed since.

        Raises Unsettled if the tables must be looked at again first, else ProgrammingFailed with
        the message that the kernel refused and why.
        """
        self._has_deleted |= batch.deletes
        try:
            self.batch("programming nf_tables", framed_batch(batch.packed, len(batch), generation))
        except Refused as refused:
            raise _explained(refused, batch) from refused


def _explained(refused: Refused, batch: Batch) -> ProgrammingFailed:
    place = -1 if refused.place is None else refused.place - 1
    known = 0 <= place < len(batch)
    gone = known and batch[place].kind == DELTABLE and refused.errno == errno.ENOENT
    made = known and batch[place].kind == NEWTABLE and refused.errno == errno.EEXIST
    if gone or made or refused.errno in _UNSETTLED:
        return Unsettled(f"nf_tables has changed meanwhile: {refused.msg}")
    missing = refused.errno in (errno.ENOENT, errno.EOPNOTSUPP)
    hint = f"; the kernel needs the modules {MODULES}" if missing else ""
    if not known:
        return ProgrammingFailed(f"{refused.msg}{hint}")
    # the kernel counts what it finds out in the end as an error of the first message
    where = "the rules as a whole, or " if place == 0 else ""
    why = os.strerror(refused.errno)
    if batch[place].kind == DELTABLE and refused.errno == errno.EPERM:
        hint = "; a running process may own the table"
    return ProgrammingFailed(f"nf_tables refuses {where}{batch[place].about}: {why}{hint}")
