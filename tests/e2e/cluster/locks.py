"""Locks between runs on one machine, and the word to the person who waits for one."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that the kernel takes back however this process ends; wait for it, and say so."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run, which holds {file}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(what: str) -> None:
    """Tell the person at the terminal, or who reads CI's log, what is being waited for."""
    sys.stderr.write(f"\n{what}\n")
    sys.stderr.flush()
