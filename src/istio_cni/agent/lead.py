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

    __slots__ = ("_lead", "_work", "is_wanted", "since", "start")

    def __init__(self, lead: Lead) -> None:
        self.is_wanted = lead.is_wanted
        self.since = math.inf
        self.start = threading.Lock()
        self._lead = lead
        self._work: threading.Lock | None = None  # while this thread works

    def begin(self) -> None:
        """Begin to work for a caller that was taken in."""
        self.since = time.monotonic()
        self._work = self._lead.take_work()

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Let others lead from now on, and work for the time of a block."""
        self.end()
        try:
            yield
        finally:
            self._work = self._lead.take_work()

    def end(self) -> None:
        """Neither work nor lead any more."""
        if self._work is not None:
            self._work.release()
            self._work = None
        self._lead.pass_on(self)


class Lead:
    """The lead among some threads, and the work, which one of them does at a time.

    Of those that wait the last one leads next: what it needs is still in the processor's caches.
    """

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self.is_wanted = is_wanted
        self._guard = threading.Lock()
        self._leader: Turn | None = None
        self._waiting: list[Turn] = []
        self._work = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[Turn]:
        """Wait for the lead, and have it until the block ends or lets go of it."""
        turn = Turn(self)
        with self._guard:
            if self._leader is None:
                self._leader = turn
            else:
                turn.start.acquire()
                self._waiting.append(turn)
        with turn.start:
            try:
                yield turn
            finally:
                turn.end()

    def pass_on(self, turn: Turn) -> None:
        """Let the next thread lead, if this one does."""
        with self._guard:
            if self._leader is turn:
                self._leader = self._waiting.pop() if self._waiting else None
                if self._leader is not None:
                    self._leader.start.release()

    def look(self) -> None:
        """Let the next thread lead if the leader takes too long; to be called now and then."""
        leader = self._leader
        if leader is not None and time.monotonic() - leader.since > PATIENCE_S:
            self.pass_on(leader)

    def take_work(self) -> threading.Lock:
        """Wait for the work; whoever takes too long with it is left to its own."""
        while not (work := self._work).acquire(timeout=PATIENCE_S):
            if self._work is work:
                self._work = threading.Lock()
        return work
