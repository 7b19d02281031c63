"""Which thread takes the next caller in, and which one works: one of each, where that can be.

The interpreter runs one thread at a time anyway, and lets go of itself at each system call, of
which a call makes more than a hundred. With many calls at once most of the time would go into
handing it over. So one thread leads, works for its caller, and takes the next one; before it waits
for somebody else, a program or the API server, it lets another thread lead and work.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 0.1  # with a thread at work: it may wait for a lock, and has told nobody


class Turn:
    """The time in which a thread leads; `is_wanted` tells whether callers wait meanwhile."""

    def __init__(self, lead: Lead) -> None:
        self.is_wanted = lead.is_wanted
        self._all = lead
        self._work: threading.Lock | None = None  # while this thread works
        self._lead = threading.Lock()
        self._leads = self._lead.acquire()
        self._since = math.inf

    def begin(self) -> None:
        """Begin to work for a caller that was taken in."""
        self._since = time.monotonic()
        self._work = self._all.take_work()

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Let others lead from now on, and work for the time of a block."""
        self.end()
        try:
            yield
        finally:
            self._work = self._all.take_work()

    def end(self) -> None:
        """Neither work nor lead any more."""
        if self._work is not None:
            self._work.release()
            self._work = None
        if self._leads:
            self._leads = False
            self._lead.release()

    def wait_for_end(self) -> None:
        """Wait until another thread may lead, or this one takes too long with its caller."""
        while not self._lead.acquire(timeout=PATIENCE_S):
            if time.monotonic() - self._since > PATIENCE_S:
                return


class Lead:
    """The lead among some threads, and the work, which one of them does at a time."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self.is_wanted = is_wanted
        self._next = threading.Lock()
        self._work = threading.Lock()
        self._turn = Turn(self)
        self._turn.end()

    @contextmanager
    def taken(self) -> Iterator[Turn]:
        """Wait for the lead, and have it until the block ends or lets go of it."""
        with self._next:  # one thread waits for the leader, the others for that one
            self._turn.wait_for_end()
            self._turn = turn = Turn(self)
        try:
            yield turn
        finally:
            turn.end()

    def take_work(self) -> threading.Lock:
        """Wait for the work; whoever takes too long with it is left to its own."""
        while not (work := self._work).acquire(timeout=PATIENCE_S):
            if self._work is work:
                self._work = threading.Lock()
        return work
