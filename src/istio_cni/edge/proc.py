"""What /proc says about this process: cheap questions that need no foreign call."""

from __future__ import annotations

import errno
import os

OWN_NETNS = "/proc/self/ns/net"
THREAD_NETNS = "/proc/thread-self/ns/net"
OWN_MOUNTS = "/proc/self/ns/mnt"
HOST_NETNS = "/proc/1/ns/net"


def namespace(path: str | int) -> tuple[int, int] | None:
    """Return what tells a namespace from others, None if the path leads nowhere or is closed."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def pin(path: str) -> int | OSError:
    """Open what a path leads to now, or say why nothing is; the caller closes it.

    Paths below /proc/<pid> lead elsewhere once a process id is used again. What is held open stays
    what it is, and its inode number is not used again meanwhile.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return error
    except ValueError:  # no path at all: it has a NUL
        return OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def release(pinned: int | OSError) -> None:
    """Close what `pin` has opened."""
    if isinstance(pinned, int):
        os.close(pinned)
