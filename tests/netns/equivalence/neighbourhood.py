"""The networks around a pod: wires, addresses and routes, and the kernel's settings in each.

The same connection has to end the same way each time, so nothing may depend on how much went
before: refusals are not rate-limited, and conntrack forgets ended connections before their ports
come again. The pod has one table beside the product's, which changes no packet's way; it makes
visible in which conntrack zone an answer was looked up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from namespaces import inside, ip
from netns.traffic import FAMILIES, POD, join

from .places import GUEST, POD_ON_GUEST, POD_ON_SECOND, PUBLIC, SECOND, SERVICE, STRANGER

_HELD = (SERVICE, PUBLIC, STRANGER)  # further addresses of the outside
_SYSCTLS = (
    "net.ipv4.ip_forward=1",
    "net.ipv6.conf.all.forwarding=1",
    "net.ipv4.icmp_ratelimit=0",  # a refusal that is not sent reads as a timeout
    "net.ipv6.icmp.ratelimit=0",
)

_SHORT = (
    *("tcp_timeout_time_wait", "tcp_timeout_syn_sent", "tcp_timeout_close_wait"),
    *("udp_timeout", "udp_timeout_stream"),
)
"""What conntrack remembers of ended connections, in seconds: less than until ports come again."""

_WITNESS = """
    table inet witness {
        chain input {
            type filter hook input priority 0
            iifname != "lo" udp sport 53 ct state new ip dscp set cs1
            iifname != "lo" udp sport 53 ct state new ip6 dscp set cs1
        }
    }
"""
"""Answers to what conntrack has not seen asked, by their zone, get a mark that the client reads."""


def settle(places: Mapping[str, str]) -> None:
    """Join the namespaces of a pod and its neighbours, given by name, and prepare each."""
    pod = places["pod"]
    join(pod, places["outside"])
    _lay(pod, places["second"], "net1", POD_ON_SECOND, SECOND)
    _lay(pod, places["guest"], "vnet0", POD_ON_GUEST, GUEST)
    held = [f"addr add {each[family]} dev lo" for each in _HELD for family in FAMILIES]
    back = [f"route add default via {POD[family]}" for family in FAMILIES]
    _ip_inside(places["outside"], *held, *back)
    for path in places.values():
        inside(path, ["sysctl", "-qw", *_SYSCTLS])
    inside(pod, ["nft", "-f", "-"], stdin=_WITNESS)
    inside(pod, ["sysctl", "-qw", *(f"net.netfilter.nf_conntrack_{name}=15" for name in _SHORT)])


def _lay(pod: str, other: str, link: str, own: Mapping[int, str], far: Mapping[int, str]) -> None:
    """Lay a further wire from a pod, which is the way to everywhere for who is at its other end."""
    names = os.path.basename(pod), os.path.basename(other)
    ip("link", "add", link, "netns", names[0], "type", "veth", "peer", "pod0", "netns", names[1])
    for path, device, held in ((pod, link, own), (other, "pod0", far)):
        v4, v6 = f"addr add {held[4]}/24 dev {device}", f"addr add {held[6]}/64 dev {device} nodad"
        _ip_inside(path, f"link set {device} up", v4, v6)
    _ip_inside(other, *(f"route add default via {own[family]}" for family in FAMILIES))


def _ip_inside(path: str, *lines: str) -> None:
    inside(path, ["ip", "-batch", "-"], stdin="\n".join(lines))
