"""A machine in miniature: the node, the world outside, the namespaces of pods.

The demo moves itself into a new network namespace and so becomes the node: whatever it starts, the
CNI plugins above all, makes its links and routes there, and the machine's own network cannot be
touched by mistake. Namespaces have no names here. The kernel frees one, with every link in it, when
the last process and the last descriptor of it are gone, so that not even a killed demo leaves any.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import NamedTuple

from .process import DemoFailed, set_namespace, signals_held, succeed, unshare_namespace

IPV6_SWITCHES = (
    "/proc/sys/net/ipv6/conf/all/disable_ipv6",
    "/proc/sys/net/ipv6/conf/default/disable_ipv6",
)
ACCEPT_DAD = "/proc/sys/net/ipv6/conf/default/accept_dad"  # looking for duplicate addresses

# documentation addresses (RFC 5737, RFC 3849), by family
NODE = {4: "192.0.2.1", 6: "2001:db8:2::1"}
OUTSIDE = {4: "192.0.2.10", 6: "2001:db8:2::10"}
EXCLUDED = {4: "198.51.100.10", 6: "2001:db8:51::10"}  # in the ranges that pods/web.yaml leaves out
LENGTH = {4: 24, 6: 64}


class Netns(NamedTuple):
    """A network namespace, held by a descriptor."""

    descriptor: int

    @property
    def path(self) -> str:
        """A path for other processes, as CNI_NETNS wants one; runtimes make a file in /run/netns.

        It works as long as the demo runs.
        """
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"


def families() -> tuple[int, ...]:
    """Return the IP versions that this machine knows."""
    return (4, 6) if all(_reads_zero(path) for path in IPV6_SWITCHES) else (4,)


def _reads_zero(path: str) -> bool:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip() == "0"
    except OSError:
        return False


def become_node() -> None:
    """Move this process, and what it will start, into a network namespace of its own."""
    try:
        unshare_namespace()
    except OSError as error:
        raise DemoFailed(
            f"{error.strerror}; inside a container, this needs a privileged one"
        ) from error
    # nobody else is here, and looking takes a second of the first connection
    with suppress(OSError), open(ACCEPT_DAD, "w", encoding="ascii") as file:
        file.write("0")
    succeed(["ip", "link", "set", "lo", "up"])


def new_netns(undo: ExitStack) -> Netns:
    """Make a network namespace with `lo` up, as runtimes do for a pod."""
    with signals_held():
        node = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            unshare_namespace()
            netns = Netns(os.open("/proc/self/ns/net", os.O_RDONLY))
            set_namespace(node)
        finally:
            os.close(node)
    undo.callback(os.close, netns.descriptor)
    succeed(["ip", "link", "set", "lo", "up"], netns=netns.descriptor)
    return netns


def attach_outside(undo: ExitStack, families: tuple[int, ...]) -> Netns:
    """Make the world outside: a neighbour of the node, which routes everything of its pods."""
    outside = new_netns(undo)
    near = [f"link add uplink type veth peer name eth0 netns {outside.path}", "link set uplink up"]
    far = ["link set eth0 up"]
    for family in families:
        length = LENGTH[family]
        near.append(f"addr add {NODE[family]}/{length} dev uplink {_nodad(family)}")
        far.append(f"addr add {OUTSIDE[family]}/{length} dev eth0 {_nodad(family)}")
        far.append(f"addr add {EXCLUDED[family]} dev lo {_nodad(family)}")
        near.append(f"route add {EXCLUDED[family]} via {OUTSIDE[family]}")
        far.append(f"route add default via {NODE[family]}")
    for lines, netns in ((near, None), (far, outside.descriptor)):
        succeed(["ip", "-batch", "-"], stdin="\n".join(lines), netns=netns)
    return outside


def _nodad(family: int) -> str:
    return "nodad" if family == 6 else ""
