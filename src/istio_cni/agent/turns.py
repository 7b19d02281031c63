"""One call at a time in the interpreter, which runs one thread at a time anyway.

A call makes some two hundred system calls, and each of them lets go of the interpreter. With many
calls at once threads spend more time on getting it back than on their work: taking turns, a hundred
ADDs are done in little more than half of the time. Who waits for something else, for the API server
or a program, lets go of its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 0.1  # then a call goes on beside: whoever has the turn waits for some lock


class Turns:
    """Turns of all calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def next(self) -> Turn:
        """Make the turn of a call."""
        return Turn(self._lock)


class Turn:
    """The turn of one call, taken in a `with` block; of one thread."""

    __slots__ = ("_has", "_lock")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._has = False

    def __enter__(self) -> None:
        self._has = self._lock.acquire(timeout=PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        if self._has:
            self._has = False
            self._lock.release()

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Let others have it for the time of a block."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
