"""What /proc says about this process: cheap questions that need no foreign call."""

from __future__ import annotations

import os

OWN_NETNS = "/proc/self/ns/net"
HOST_NETNS = "/proc/1/ns/net"


def namespace(path: str | int) -> tuple[int, int] | None:
    """Return what tells a namespace from others, None if the path leads nowhere or is closed."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def pin(path: str) -> int | None:
    """Open what a path leads to now, None if that is nothing; the caller closes it.

    Paths below /proc/<pid> lead elsewhere once a process id is used again. What is held open stays
    what it is, and its inode number is not used again meanwhile.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None


def release(descriptor: int) -> None:
    """Close what `pin` has opened."""
    os.close(descriptor)
