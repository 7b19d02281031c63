"""How a child process gets inside a namespace, and what it sees of the node there.

The mount namespace (the sandbox) exists because the plugin runs in the pod's network namespace but
with the node's files: `-m owner` makes iptables ask the node's name service, which may reach for
the network through a half-built pod, and old iptables-legacy takes the node-wide lock.

Source: istio cni/pkg/iptables (sandbox), tools/istio-iptables/pkg/dependencies;
mount_namespaces(7), user_namespaces(7), pid_namespaces(7), capabilities(7).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import contextmanager
from functools import cache

from istio_cni.edge.netns.namespace import CLONE_NEWNET, foreign_owner
from istio_cni.errors import InvalidNetns, Stranded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Log = Callable[[str, str], None]

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
PR_SET_PDEATHSIG = 1
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2
CAPABILITY_VERSION = 0x20080522
CAP_DAC_READ_SEARCH, CAP_NET_ADMIN, CAP_NET_RAW = 2, 12, 13

CLOSING_S = 2.0  # as long as anything is waited for at the end of a task
NAME_SERVICE = "/etc/nsswitch.conf"
XTABLES_LOCK = "/run/xtables.lock"


def fork_apart() -> int:
    """Fork; where allowed, the child is the first of a process namespace, which ends with it.

    Only what this thread forks goes there, and it comes back before anything else is forked.
    """
    try:
        own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.fork()
    try:
        try:
            _call("setns", own, CLONE_NEWPID)  # whether there will be a way back
            _call("unshare", CLONE_NEWPID)
        except OSError:
            return os.fork()
        child = -1
        try:
            child = os.fork()
        finally:
            if child != 0:
                _call("setns", own, CLONE_NEWPID)
        return child
    finally:
        os.close(own)


def enter_sandbox(log: Log) -> bool:
    """Get a mount namespace in which no name service is configured; a refusal costs one warning."""
    try:
        _call("unshare", CLONE_NEWNS)
        _mount("", "/", MS_REC | MS_SLAVE)  # what the node unmounts goes here, too
        if os.path.exists(NAME_SERVICE):
            _mount("/dev/null", NAME_SERVICE, MS_BIND)
    except OSError as error:
        log(
            "warn",
            f"no mount sandbox ({error.strerror}): iptables sees the node's files as they are",
        )
        return False
    return True


def enter_mounts(mounts: int) -> None:
    """Enter a mount namespace for good: the node's files are seen instead of a container's."""
    try:
        _call("setns", mounts, CLONE_NEWNS)
    except OSError as error:
        raise InvalidNetns(f"cannot see the node's files: {error.strerror}") from error


def shadow_lock(path: str, log: Log) -> bool:
    """Bind a file over the xtables lock, in a sandbox only; tell whether that worked."""
    try:
        _mount(path, XTABLES_LOCK, MS_BIND)
    except OSError as error:
        log("warn", f"cannot shadow {XTABLES_LOCK}: {error.strerror}; the node's lock is used")
        return False
    return True


def enter(netns: int) -> None:
    """Enter a network namespace for good, its owning user namespace first if not ours."""
    owner = foreign_owner(netns)
    try:
        if owner is not None:
            _wait_for_one_thread()
            _call("setns", owner, CLONE_NEWUSER)
        _call("setns", netns, CLONE_NEWNET)
        if owner is not None:
            _pass_capabilities_on()
    except OSError as error:
        raise InvalidNetns(f"cannot enter the network namespace: {error.strerror}") from error
    finally:
        if owner is not None:
            os.close(owner)


def _wait_for_one_thread() -> None:
    """Wait for threads that still close a socket of an earlier task: 7 to 20 ms, or not at all.

    A process changes its user namespace only while it has one thread.
    """
    limit = time.monotonic() + CLOSING_S
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < limit:
        time.sleep(0.001)


def leave() -> None:
    """Go to a fresh network namespace for good. Raises InvalidNetns."""
    try:
        _call("unshare", CLONE_NEWNET)
    except OSError as error:
        raise InvalidNetns(f"cannot make a network namespace: {error.strerror}") from error


@contextmanager
def visiting(netns: int, home: int | None = None) -> Iterator[None]:
    """Have the calling thread in a network namespace, and back home after the block.

    `home` is a descriptor of where it is now; without it, one is opened. For what opens sockets and
    starts no program. A thread that cannot get home must end: it would work for the next pod in the
    wrong namespace.
    """
    back = open_home() if home is None else home
    try:
        try:
            _set_netns(netns)
        except OSError as error:
            raise InvalidNetns(f"cannot enter the network namespace: {error.strerror}") from error
        try:
            yield
        finally:
            try:
                _set_netns(back)
            except OSError as error:
                raise Stranded(f"cannot leave the network namespace: {error.strerror}") from error
    finally:
        if home is None:
            os.close(back)


def open_home() -> int:
    """Open the calling thread's network namespace; the caller closes it. Raises InvalidNetns."""
    try:
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidNetns(f"no way back from another namespace: {error.strerror}") from error


def _set_netns(netns: int) -> None:
    if sys.version_info >= (3, 12):
        os.setns(netns, CLONE_NEWNET)
    else:
        _call("setns", netns, CLONE_NEWNET)


def _pass_capabilities_on() -> None:
    """Let the programs started from here program netfilter, although they run as the node's root.

    That is no root in the user namespace, so capabilities would end with the first program. And
    /proc/net/ip_tables_names belongs to its root, or to the node's, where ids were mapped after the
    network namespace was made; the node's with the right to read reads both.
    """
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; lower, then upper halves
    _call("capget", header, sets)
    sets[2], sets[5] = sets[1], sets[4]
    _call("capset", header, sets)
    for capability in (CAP_DAC_READ_SEARCH, CAP_NET_ADMIN, CAP_NET_RAW):
        _call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def die_with_parent() -> None:
    """Ask to be killed when the parent ends; entering a user namespace clears this."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc(), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mount(source: str, target: str, flags: int) -> None:
    _call("mount", source.encode(), target.encode(), None, ctypes.c_ulong(flags), None)
