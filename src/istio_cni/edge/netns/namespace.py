"""What a network namespace is: opened by path, told from others, locked while it is programmed.

Source: namespaces(7), ioctl_nsfs(2), unix(7).
"""

from __future__ import annotations

import errno
import os
import socket
import time

from istio_cni.errors import InvalidNetns, ProgrammingFailed, TryAgainLater, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CLONE_NEWNET = 0x40000000
NS_GET_USERNS = 0xB701
NS_GET_NSTYPE = 0xB703
APPLY_LOCK = b"\0istio-cni/apply"


def open_netns(path: str, pinned: int | OSError | None = None) -> int:
    """Open a network namespace by path and return its descriptor; the caller closes it.

    `pinned` is a descriptor of what the path led to when the call began, or why it led nowhere;
    then that is meant, whatever it leads to now. Raises InvalidNetns when it cannot be opened or is
    something else.
    """
    try:
        if isinstance(pinned, OSError):
            raise pinned
        if pinned is not None:
            netns = os.dup(pinned)
        else:  # it might be a pipe
            netns = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidNetns(
            f"cannot open network namespace {quoted(path)}: {error.strerror}"
        ) from error
    if not is_netns(netns):
        os.close(netns)
        raise InvalidNetns(f"{quoted(path)} is not a network namespace")
    return netns


def identity(netns: int) -> tuple[int, int]:
    """Return device and inode of a namespace: equal for two descriptors of the same one."""
    status = os.fstat(netns)
    return status.st_dev, status.st_ino


def here() -> tuple[int, int] | None:
    """Return the same of the namespace in which the calling thread is, None without /proc."""
    return _identity_of("/proc/thread-self/ns/net")


def is_netns(descriptor: int) -> bool:
    """Tell whether a descriptor is of a network namespace, and not of something else."""
    return _ioctl(descriptor, NS_GET_NSTYPE) == CLONE_NEWNET


def _identity_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def foreign_owner(netns: int) -> int | None:
    """Return a descriptor of the user namespace that owns a namespace, None if it is our own."""
    owner = _ioctl(netns, NS_GET_USERNS)
    if owner < 0:
        return None  # a kernel without the call, or an owner above us: no pod of ours
    if identity(owner) == _identity_of("/proc/self/ns/user"):
        os.close(owner)
        return None
    return owner


def is_foreign(netns: int) -> bool:
    """Tell whether a user namespace that is not ours owns a namespace."""
    owner = foreign_owner(netns)
    if owner is not None:
        os.close(owner)
    return owner is not None


def is_here_foreign() -> bool:
    """Tell the same of the namespace in which the calling thread is."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return is_foreign(here)
    finally:
        os.close(here)


def _ioctl(descriptor: int, request: int) -> int:
    from fcntl import ioctl  # captured pods only

    try:
        return ioctl(descriptor, request)
    except OSError:
        return -1


def hold_apply_lock(deadline: float, confirm: Callable[[], None] | None = None) -> socket.socket:
    """Wait until no other process programs this namespace; held while the socket lives.

    `confirm` is called now and then, and raises once nobody wants it any more.

    An abstract Unix address belongs to one network namespace and vanishes with its holder, so
    agent, plugin, init container and a person at a shell exclude each other without any file.
    """
    try:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError as error:
        raise ProgrammingFailed(f"cannot lock the network namespace: {error.strerror}") from error
    try:
        while not _bound(lock):
            if time.monotonic() >= deadline:
                raise TryAgainLater(
                    "another process is programming this network namespace and does not finish"
                )
            if confirm is not None:
                confirm()
            time.sleep(0.02)
    except BaseException:
        lock.close()
        raise
    return lock


def _bound(lock: socket.socket) -> bool:
    try:
        lock.bind(APPLY_LOCK)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ProgrammingFailed(
                f"cannot lock the network namespace: {error.strerror}"
            ) from error
        return False
    return True
