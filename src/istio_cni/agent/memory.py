"""How the agent's processes use memory: what one call has touched is to serve the next one."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_M_ARENA_MAX = -8  # malloc.h
_CYCLES_AFTER = 20_000  # new objects; an ADD makes some thousands, and most are gone again


def share_one_arena() -> None:
    """Have all threads that are started later allocate from one place, where that is glibc's.

    One of them works at a time, so they need no places of their own; and there is less of it all.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def look_seldom() -> None:
    """Look for cycles seldom, and not among what is there by now: an ADD leaves few behind."""
    gc.freeze()
    gc.set_threshold(_CYCLES_AFTER)
