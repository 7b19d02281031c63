"""Two pods in the same place, each programmed by a back end, and the same connections in both.

Configurations are drawn by seed and number, so that one alone can be drawn again. A pod stands
between three neighbours: the outside behind eth0, a second network behind net1, and a guest behind
vnet0 whose way to everywhere leads through the pod. Servers run in all of them all the time; only
the rules change. Of each connection counts where it ended, or how it failed.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import struct
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from random import Random
from typing import Any, NamedTuple, TypeAlias

from istio_cni.capture.settings import to_settings
from istio_cni.rules.config import CaptureConfig
from namespaces import enter, inside, ip
from netns.programming import FORK, clean_up, config, program, started
from netns.traffic import (
    APPLICATION,
    DNS,
    FAMILIES,
    INBOUND,
    LOOPBACK,
    OUTBOUND,
    OUTSIDE,
    PASSTHROUGH,
    POD,
    PROXY,
    TRANSPARENT_LISTENERS,
    Arrival,
    Listener,
    endpoint,
    join,
    serving,
)

Settings: TypeAlias = Mapping[str, Any]
Ending: TypeAlias = Arrival | str
Endings: TypeAlias = tuple[Ending, Ending]
Draw: TypeAlias = Callable[[Random], str]

PATIENCE_S, SECOND_PATIENCE_S = 0.3, 2.0
OWN_OUTBOUND, OWN_INBOUND, NOBODY = 16001, 16006, 16106  # other listeners, and none
SECOND = {4: "10.98.0.1", 6: "fd98::1"}
POD_ON_SECOND = {4: "10.98.0.2", 6: "fd98::2"}
GUEST = {4: "10.97.0.1", 6: "fd97::1"}
POD_ON_GUEST = {4: "10.97.0.2", 6: "fd97::2"}
SERVICE = {4: "10.96.0.10", 6: "fd00:96::10"}
PUBLIC = {4: "192.0.2.7", 6: "2001:db8::7"}
STRANGER = {4: "198.51.100.9", 6: "2001:db8:9::9"}  # sends what belongs to no connection
OTHER_LOOPBACK = "127.0.0.5"
GROUP, ANOTHER = 1, 2000


# -- probes ------------------------------------------------------------------------------------

TCP, UDP = "tcp", "udp"
UDP_SECOND = "udp from a port where another has asked before"
STRAY_TCP, STRAY_ICMP = "stray SYN+ACK", "stray echo reply"


class Probe(NamedTuple):
    """One connection, question or stray packet: from where, by whom, to where."""

    origin: str
    uid: int
    gid: int
    host: str
    port: int
    kind: str = TCP
    source: str = ""
    mark: int = 0

    @property
    def family(self) -> int:
        """The IP version."""
        return 6 if ":" in self.host else 4

    def __str__(self) -> str:
        """Tell a person."""
        bound = f" bound to {self.source}" if self.source else ""
        marked = f" with mark {self.mark}" if self.mark else ""
        where = endpoint(self.host, self.port)
        return f"{self.origin} as {self.uid}:{self.gid}{bound}{marked}, {self.kind} to {where}"


PEOPLE = (
    *((0, 0), (APPLICATION, APPLICATION), (PROXY, PROXY), (ANOTHER, ANOTHER)),
    *((APPLICATION, PROXY), (PROXY, APPLICATION), (APPLICATION, ANOTHER), (APPLICATION, GROUP)),
)


def _by_everybody(family: int) -> Iterator[Probe]:
    """Ask for what depends on who in the pod asks."""
    out, own, loopback = OUTSIDE[family], POD[family], LOOPBACK[family]
    for uid, gid in PEOPLE:
        for host, port in (
            *((out, 80), (out, 15020), (out, 53), (SERVICE[family], 443), (SECOND[family], 80)),
            *((own, 8080), (own, 53), (own, 15008), (loopback, 8080)),
        ):
            yield Probe("pod", uid, gid, host, port)
        for host in (out, SECOND[family], loopback):
            yield Probe("pod", uid, gid, host, 53, UDP)


def _by_the_application(family: int) -> Iterator[Probe]:
    who = (APPLICATION, APPLICATION)
    for host, port in (
        *((PUBLIC[family], 8443), (PUBLIC[family], 80), (OUTSIDE[family], 22)),
        *((OUTSIDE[family], 81), (SECOND[family], 53), (GUEST[family], 8080)),
        *((SERVICE[family], 80), (SERVICE[family], 53), (OUTSIDE[family], 8443)),
        *((POD_ON_SECOND[family], 8080), (LOOPBACK[family], 53), (LOOPBACK[family], 9090)),
    ):
        yield Probe("pod", *who, host, port)
    for host, port in (
        *((OUTSIDE[family], 5300), (OUTSIDE[family], 15020)),
        *((POD[family], 53), (LOOPBACK[family], DNS)),
    ):
        yield Probe("pod", *who, host, port, UDP)
    if family == 4:
        for uid in (0, APPLICATION, PROXY):
            for port in (8080, 53):
                yield Probe("pod", uid, uid, OTHER_LOOPBACK, port)
            yield Probe("pod", uid, uid, OTHER_LOOPBACK, 53, UDP)


def _passed_through(family: int) -> Iterator[Probe]:
    for uid in (0, APPLICATION, PROXY):
        for port in (8080, 15008):
            yield Probe("pod", uid, uid, POD[family], port, TCP, PASSTHROUGH[family])


def _asked_twice(family: int) -> Iterator[Probe]:
    """Ask what conntrack's zones keep apart: proxy and application towards the same resolver."""
    for uid in (APPLICATION, PROXY):
        for host in (OUTSIDE[family], SECOND[family]):
            yield Probe("pod", uid, uid, host, 53, UDP_SECOND)


def _from_outside(family: int) -> Iterator[Probe]:
    for port in (8080, 9090, 22, 15008, 15020, 15021, 53, 81, 443):
        yield Probe("outside", 0, 0, POD[family], port)
    for port in (53, 5300):
        yield Probe("outside", 0, 0, POD[family], port, UDP)
    for host, port in ((POD_ON_SECOND[family], 8080), (POD_ON_SECOND[family], 15020)):
        yield Probe("second", 0, 0, host, port)
    yield Probe("second", 0, 0, POD[family], 8080)
    yield Probe("second", 0, 0, POD_ON_SECOND[family], 53, UDP)
    yield Probe("outside", 0, 0, POD[family], 8080, STRAY_TCP, STRANGER[family])
    yield Probe("outside", 0, 0, POD[family], 0, STRAY_ICMP, STRANGER[family])


def _by_the_guest(family: int) -> Iterator[Probe]:
    for host, port in (
        *((OUTSIDE[family], 80), (OUTSIDE[family], 15020), (OUTSIDE[family], 53)),
        *((SERVICE[family], 443), (PUBLIC[family], 8443), (SECOND[family], 80)),
        *((POD_ON_GUEST[family], 8080), (POD[family], 8080)),
    ):
        yield Probe("guest", 0, 0, host, port)
    for host in (OUTSIDE[family], SECOND[family], POD_ON_GUEST[family]):
        yield Probe("guest", 0, 0, host, 53, UDP)


_STRETCHES = (
    *(_by_everybody, _by_the_application, _passed_through, _asked_twice),
    *(_from_outside, _by_the_guest),
)
PROBES = tuple(probe for stretch in _STRETCHES for family in FAMILIES for probe in stretch(family))
"""Some 150 of each family."""


def probes_of(settings: Settings) -> tuple[Probe, ...]:
    """Return the probes for a configuration; what a transparent proxy does needs the mark."""
    if settings["INBOUND_INTERCEPTION_MODE"] != "TPROXY":
        return PROBES
    mark = int(settings["INBOUND_TPROXY_MARK"])
    return (*PROBES, *(probe for family in FAMILIES for probe in marked(family, mark)))


def marked(family: int, mark: int) -> Iterator[Probe]:
    """Connect as a transparent proxy does on behalf of a client, and as it never does."""
    client, own = OUTSIDE[family], POD[family]
    for uid in (APPLICATION, PROXY):
        yield Probe("pod", uid, uid, own, 9090, mark=mark)
    yield Probe("pod", APPLICATION, APPLICATION, own, 8080, TCP, client, mark)
    if family == 6:  # of IPv4, answers from loopback to elsewhere are never routed
        for host in (own, LOOPBACK[family]):
            yield Probe("pod", PROXY, PROXY, host, 8080, TCP, client, mark)


# -- configurations ----------------------------------------------------------------------------

PLAIN: Settings = {
    key: value
    for key, value in to_settings(config()).items()
    if key not in ("BACKEND", "FORCE_IPTABLES_BINARY")
}
"""Every setting that both back ends have, as a pod without annotations has it."""

_V4 = (
    *("10.0.0.0/8", "10.96.0.0/12", "10.96.0.10/32", "10.99.0.7/24", "10.98.0.0/31"),
    *("0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1", "192.0.2.1/25", "192.0.2.7/29", "10.99.0.2/32"),
    *("127.0.0.0/8", "127.0.0.1/32", "10.97.0.0/16", "10.99.0.0/23"),
)
_V6 = (
    *("fd00::/8", "fd99::/64", "fd99::7/64", "fd99::1/128", "fd00:96::/108", "fd98::/63"),
    *("::/0", "8000::/1", "2001:db8::/32", "2001:db8::7/125", "fd99::2/128", "fd97::/16"),
    *("::1/128", "::ffff:127.0.0.0/104", "fd98::1/127"),
)
_INBOUND = (
    *("8080", "9090", "22", "15008", "15020", "15021", "53", "81"),
    *("8000-8100", "9000:9100", "0-1023", "15000-65535", "65535", "0"),
)
_OUTBOUND = (
    *("80", "443", "22", "53", "15020", "8443", "8080", "81"),
    *("400-500", "8000-9000", "0-79", "15000-65535", "53-80"),
)
_IDS = (
    *("1337", "0", "1000", "2000", "1"),
    *("1000-1999", "1337-2000", "0-999", "1001-1336", "2000-4294967294"),
)
CROWDED, CROWD = 0.15, (15, 30)  # a back end may treat long lists in a way of its own
_RESOLVERS = {4: (OUTSIDE[4], SECOND[4], SERVICE[4], LOOPBACK[4], "10.96.0.11")}
_RESOLVERS |= {6: (OUTSIDE[6], SECOND[6], SERVICE[6], LOOPBACK[6], "fd00:96::11")}


class Configuration(NamedTuple):
    """What both back ends are to program; `fresh` says that the pods are cleaned up before."""

    seed: int
    number: int
    settings: Settings
    variant: str = "nft"
    fresh: bool = True

    @property
    def iptables(self) -> CaptureConfig:
        """The configuration for the back end that iptables' programs are."""
        return config(self.variant, BACKEND="iptables", **self.settings)

    @property
    def nftables(self) -> CaptureConfig:
        """The same for the native one."""
        return config(BACKEND="nftables", **self.settings)


def draw(seed: int, number: int) -> Configuration:
    """Draw a configuration, the same for the same seed and number."""
    dice = Random(f"{seed}/{number}")  # noqa: S311 - it is to be repeatable
    settings = {
        **_draw_inbound(dice),
        **_draw_outbound(dice),
        **_draw_senders(dice),
        **_draw_interfaces(dice),
        **_draw_dns(dice),
        "ENABLE_INBOUND_IPV6": dice.random() < 0.8,
        "DUAL_STACK": dice.random() < 0.5,
        "DROP_INVALID": dice.random() < 0.25,
    }
    variant = dice.choices(("nft", "legacy"), (3, 1))[0]
    return Configuration(seed, number, settings, variant, fresh=number % 2 == 0)


def _some(dice: Random, pool: Sequence[str], at_most: int = 3, other: Draw | None = None) -> str:
    """Take a few items, in any order, as people write lists; now and then among many others."""
    items = dice.sample(pool, dice.randint(1, at_most))
    if other and dice.random() < CROWDED:
        items += [other(dice) for _ in range(dice.randint(*CROWD))]
        dice.shuffle(items)
    return dice.choice((",", ", ")).join(items)


def _a_port(dice: Random) -> str:
    first = dice.randint(0, 65535)
    return dice.choice((str(first), f"{first}-{min(first + dice.randint(0, 20), 65535)}"))


def _a_prefix(dice: Random) -> str:
    if dice.random() < 0.5:
        return f"{dice.randint(1, 255)}.{dice.randint(0, 255)}.99.255/{dice.randint(9, 32)}"
    return f"{dice.randint(1, 0xFFFF):x}:{dice.randint(0, 0xFFFF):x}::ff/{dice.randint(9, 128)}"


def _an_id(dice: Random) -> str:
    first = dice.randint(3, 4294967290)
    return dice.choice((str(first), f"{first}-{first + 4}"))


def _now_and_then(dice: Random, share: float, value: str, usual: str) -> str:
    return value if dice.random() < share else usual


def _draw_inbound(dice: Random) -> dict[str, object]:
    listed, excluded = _some(dice, _INBOUND, 4, _a_port), _some(dice, _INBOUND, 4, _a_port)
    ports = (str(INBOUND), str(OWN_INBOUND), str(NOBODY))
    return {
        "INBOUND_INTERCEPTION_MODE": dice.choice(("REDIRECT", "TPROXY")),
        "INBOUND_PORTS_INCLUDE": dice.choices(("*", listed, ""), (5, 4, 1))[0],
        "INBOUND_PORTS_EXCLUDE": dice.choice(("15020,15021,15090", excluded, excluded, "")),
        "INBOUND_CAPTURE_PORT": dice.choices(ports, (16, 2, 2))[0],
        "INBOUND_TUNNEL_PORT": _now_and_then(dice, 0.1, "9090", "15008"),
        "INBOUND_TPROXY_MARK": _now_and_then(dice, 0.1, "4294967295", "1337"),
        "INBOUND_TPROXY_ROUTE_TABLE": _now_and_then(dice, 0.1, "1000", "133"),
    }


def _draw_outbound(dice: Random) -> dict[str, object]:
    pool = _V4 + _V6
    listed, left = _some(dice, pool, 6, _a_prefix), _some(dice, pool, 2, _a_prefix)
    ports, other = (_some(dice, _OUTBOUND, 3, _a_port) for _ in range(2))
    loopback = ("127.0.0.1/32", "127.0.0.0/8", "127.0.0.5/30", "127.0.0.1/31")
    return {
        "OUTBOUND_IPRANGES_INCLUDE": dice.choices(("*", listed, ""), (8, 7, 1))[0],
        "OUTBOUND_IPRANGES_EXCLUDE": _now_and_then(dice, 0.4, left, ""),
        "OUTBOUND_PORTS_INCLUDE": _now_and_then(dice, 0.3, ports, ""),
        "OUTBOUND_PORTS_EXCLUDE": dice.choices(("15020", other, ""), (2, 1, 1))[0],
        "HOST_IPV4_LOOPBACK_CIDR": dice.choices(loopback, (6, 1, 1, 1))[0],
        "PROXY_PORT": _now_and_then(dice, 0.1, str(OWN_OUTBOUND), str(OUTBOUND)),
    }


def _draw_senders(dice: Random) -> dict[str, object]:
    groups, excluded = _some(dice, _IDS, 3, _an_id), _some(dice, _IDS, 2, _an_id)
    return {
        "PROXY_UID": _now_and_then(dice, 0.25, _some(dice, _IDS, 2), "1337"),
        "PROXY_GID": _now_and_then(dice, 0.25, _some(dice, _IDS, 2), "1337"),
        "OUTBOUND_OWNER_GROUPS_INCLUDE": dice.choices(("*", groups, ""), (16, 4, 1))[0],
        "OUTBOUND_OWNER_GROUPS_EXCLUDE": _now_and_then(dice, 0.2, excluded, ""),
    }


def _draw_interfaces(dice: Random) -> dict[str, object]:
    left = ("", "net1", "net+", "vnet0", "eth0", "lo", "net1,vnet0", "eth1, eth+")
    rerouted = ("", "vnet0", "vnet+", "tap0,vnet0", "net1", "vnet0,net1")
    return {
        "EXCLUDE_INTERFACES": dice.choices(left, (14, 3, 1, 2, 1, 1, 1, 1))[0],
        "KUBE_VIRT_INTERFACES": dice.choices(rerouted, (8, 4, 2, 1, 2, 1))[0],
    }


def _draw_dns(dice: Random) -> dict[str, object]:
    servers = {family: dice.sample(_RESOLVERS[family], dice.randint(1, 3)) for family in FAMILIES}
    kinds = {"off": 6, "all": 6, "v4": 2, "v6": 2, "both": 3, "no server": 1, "not asked for": 1}
    kind = dice.choices(tuple(kinds), tuple(kinds.values()))[0]
    return {
        "REDIRECT_DNS": kind not in ("off", "not asked for"),
        "CAPTURE_ALL_DNS": kind in ("all", "not asked for"),
        "DNS_SERVERS_V4": servers[4] if kind in ("v4", "both", "not asked for") else [],
        "DNS_SERVERS_V6": servers[6] if kind in ("v6", "both") else [],
    }


# -- what is meant to differ -------------------------------------------------------------------


class Known(NamedTuple):
    """A difference that the reference has, too: where it shows, and how."""

    topic: str
    reason: str
    shows: Callable[[Settings, Probe], bool]
    iptables: Ending
    nftables: Ending


def _stray_icmp_dropped(settings: Settings, probe: Probe) -> bool:
    """Tell whether iptables drops an unasked echo reply from the outside."""
    if probe.kind != STRAY_ICMP or not settings["DROP_INVALID"]:
        return False
    left = settings["EXCLUDE_INTERFACES"].replace("+", "0").replace(" ", "").split(",")
    spared = settings["INBOUND_INTERCEPTION_MODE"] == "TPROXY" and "eth0" in left
    captured = probe.family == 4 or settings["ENABLE_INBOUND_IPV6"]
    return captured and not spared


KNOWN = (
    Known(
        "Invalid drop",
        "nftables.md §6: any protocol with iptables, TCP only with nftables",
        _stray_icmp_dropped,
        iptables="timeout",
        nftables="delivered",
    ),
)
ALIKE = {
    "IPv6 disabled": "§8.1 2: left alone by both",
    "TPROXY, no listener on the inbound port": "§8.1 1: dropped by both",
    "Negated owner match, packet without a user socket": (
        "§6: such packets are ICMP and RST; the rules with that match are in nat, which takes the "
        "first packet of a connection alone, and lead to redirects of TCP and of UDP to port 53"
    ),
    "Owner groups": "§6: a limit on what is accepted; the configurations drawn stay below both",
    "DNS jump": "§6: a jump to a chain without a rule for that family; no packet takes another way",
    "Objects, atomicity, idempotence, insert positions, counters, lock, iptables-save": (
        "§6: not where a packet goes"
    ),
    'Ports "53 and tunnel"': "§6: two ways to write the same",
}
"""The other rows of nftables.md §6: what was mended, or why no probe can tell."""


def known(settings: Settings, probe: Probe) -> Known | None:
    """Return the difference that a probe must meet; None if both must end alike."""
    return next((each for each in KNOWN if each.shows(settings, probe)), None)


# -- two pods ----------------------------------------------------------------------------------

_SERVERS = {
    "pod": (
        *map(Listener, (8080, 9090, 22, 15008, 15020, 15021, 53)),
        *(Listener(53, udp=True), Listener(5300, udp=True)),
    ),
    "outside": (
        *map(Listener, (80, 443, 8443, 22, 15020, 53)),
        *(Listener(port, udp=True) for port in (53, 5300, 15020)),
    ),
    "second": (Listener(80), Listener(53), Listener(53, udp=True)),
    "guest": (Listener(8080),),
}
_PROXY = (
    *TRANSPARENT_LISTENERS,
    Listener(OWN_OUTBOUND, PROXY),
    Listener(OWN_INBOUND, PROXY, transparent=True),
)


class Failed(Exception):
    """Something went wrong in a pod; the text says what."""


class Pod:
    """A pod among its neighbours, and the process that acts there."""

    def __init__(self, places: Mapping[str, str], worker: Connection) -> None:
        self.path = places["pod"]
        self._places = places
        self._worker = worker

    def ask(self, what: Callable[..., Any], *args: object) -> None:
        """Have something done; the answer is waited for later."""
        self._worker.send((what, args))

    def ask_calls(self, probes: Sequence[Probe], first_port: int, patience_s: float) -> None:
        """Have connections made, each from a port of its own."""
        self.ask(make_calls, self._places, probes, first_port, patience_s)

    def answer(self) -> Any:
        """Wait for what was asked for; raises Failed."""
        result, failure = self._worker.recv()
        if failure:
            raise Failed(failure)
        return result


@contextmanager
def two_pods(new_netns: Callable[[], str]) -> Iterator[tuple[Pod, Pod]]:
    """Set up two pods, each with a neighbourhood of its own, servers running everywhere."""
    with ExitStack() as stack:
        yield (
            stack.enter_context(_pod(new_netns)),
            stack.enter_context(_pod(new_netns)),
        )


@contextmanager
def _pod(new_netns: Callable[[], str]) -> Iterator[Pod]:
    places = {name: new_netns() for name in _SERVERS}
    _settle(places)
    ours, theirs = FORK.Pipe()
    with ExitStack() as stack:
        for at, listeners in _SERVERS.items():
            stack.enter_context(serving(places[at], at, listeners))
        stack.enter_context(serving(places["pod"], "proxy", _PROXY))
        stack.enter_context(started(_work, theirs))
        theirs.close()
        stack.callback(ours.close)
        yield Pod(places, ours)


def _work(orders: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test's; it ends this process
    while True:
        try:
            what, args = orders.recv()
        except EOFError:
            return
        try:
            orders.send((what(*args), ""))
        except Exception:
            orders.send((None, traceback.format_exc()))


def _settle(places: Mapping[str, str]) -> None:
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


# -- calls -------------------------------------------------------------------------------------

_AF = {4: socket.AF_INET, 6: socket.AF_INET6}
_TRANSPARENT = {4: (socket.SOL_IP, 19), 6: (socket.IPPROTO_IPV6, 75)}
_TOLD = {4: (socket.SOL_IP, 13), 6: (socket.IPPROTO_IPV6, 66)}  # the mark of `_WITNESS`
_RECVERR = {4: (socket.SOL_IP, 11), 6: (socket.IPPROTO_IPV6, 25)}
_ICMP = {4: (socket.IPPROTO_ICMP, 0), 6: (socket.IPPROTO_ICMPV6, 129)}  # type of an echo reply
_IPV6_CHECKSUM = 7
_HEADER = {4: 20, 6: 0}  # what a raw socket gives of the IP header
_SYN_ACK, _RST = 0x12, 0x04


class _Traveller:
    """Opens sockets in any namespace as any user: owner matches look at who opened a socket."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._at = ""

    def __enter__(self) -> _Traveller:
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        enter(f"/proc/self/fd/{self._home}")
        os.close(self._home)

    def open(
        self, at: str, family: int, kind: int, protocol: int = 0, *, owner: tuple[int, int] = (0, 0)
    ) -> socket.socket:
        """Open a socket that does not block."""
        if at != self._at:
            enter(self._places[at])
            self._at = at
        os.setegid(owner[1])
        os.seteuid(owner[0])
        try:
            return socket.socket(_AF[family], kind | socket.SOCK_NONBLOCK, protocol)
        finally:
            os.seteuid(0)
            os.setegid(0)


class _Attempt(NamedTuple):
    """A call under way: the socket that its end is read from, and what was read."""

    probe: Probe
    port: int
    socket: socket.socket
    lines: list[bytes]


def make_calls(
    places: Mapping[str, str], probes: Sequence[Probe], first_port: int, patience_s: float
) -> list[Ending]:
    """Make all calls at once; those that are open when nothing happens any more are timeouts."""
    endings: list[Ending] = ["timeout"] * len(probes)
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        with _Traveller(places) as traveller:
            for index, probe in enumerate(probes):
                try:
                    attempt = _start(traveller, opened, probe, first_port + index)
                except OSError as error:
                    endings[index] = os.strerror(error.errno or 0)
                else:
                    selector.register(attempt.socket, selectors.EVENT_READ, (index, attempt))
        while selector.get_map() and (ready := selector.select(patience_s)):
            for key, _ in ready:
                index, attempt = key.data
                ending = _read(attempt)
                if ending:
                    endings[index] = ending
                    selector.unregister(attempt.socket)
    return endings


def _start(traveller: _Traveller, opened: ExitStack, probe: Probe, port: int) -> _Attempt:
    starts = {
        **{TCP: _connect, UDP: _question, UDP_SECOND: _second_question},
        **{STRAY_TCP: _stray_tcp, STRAY_ICMP: _stray_icmp},
    }
    return _Attempt(probe, port, starts[probe.kind](traveller, opened, probe, port), [])


def _connect(traveller: _Traveller, opened: ExitStack, probe: Probe, port: int) -> socket.socket:
    owner = (probe.uid, probe.gid)
    client = traveller.open(probe.origin, probe.family, socket.SOCK_STREAM, owner=owner)
    opened.enter_context(client)
    if probe.mark:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack("=I", probe.mark))
        client.setsockopt(*_TRANSPARENT[probe.family], 1)
    client.bind((probe.source, port))
    with suppress(BlockingIOError):
        client.connect((probe.host, probe.port))
    return client


def _question(traveller: _Traveller, opened: ExitStack, probe: Probe, port: int) -> socket.socket:
    owner = (probe.uid, probe.gid)
    client = traveller.open(probe.origin, probe.family, socket.SOCK_DGRAM, owner=owner)
    opened.enter_context(client)
    for option in (_RECVERR, _TOLD):
        client.setsockopt(*option[probe.family], 1)
    client.bind((probe.source, port))
    client.sendto(b"?", (probe.host, probe.port))
    return client


def _second_question(
    traveller: _Traveller, opened: ExitStack, probe: Probe, port: int
) -> socket.socket:
    """Ask once the other of proxy and application has asked the same from the same port."""
    other = APPLICATION if probe.uid == PROXY else PROXY
    with ExitStack() as first:
        asker = _question(traveller, first, probe._replace(uid=other, gid=other), port)
        select.select([asker], [], [], PATIENCE_S)
    return _question(traveller, opened, probe, port)


def _stray_tcp(traveller: _Traveller, opened: ExitStack, probe: Probe, port: int) -> socket.socket:
    """Send a SYN+ACK that nobody asked for; the pod's kernel refuses it, or does not see it."""
    stray = traveller.open(probe.origin, probe.family, socket.SOCK_RAW, socket.IPPROTO_TCP)
    opened.enter_context(stray)
    stray.bind((probe.source, 0))
    stray.connect((probe.host, 0))
    segment = struct.pack("!HHIIBBHHH", port, probe.port, 1, 1, 5 << 4, _SYN_ACK, 1024, 0, 0)
    if probe.family == 6:
        stray.setsockopt(socket.IPPROTO_IPV6, _IPV6_CHECKSUM, 16)
    else:
        ends = socket.inet_aton(probe.source) + socket.inet_aton(probe.host)
        pseudo = ends + struct.pack("!HH", socket.IPPROTO_TCP, len(segment))
        segment = segment[:16] + _checksum(pseudo + segment) + segment[18:]
    stray.send(segment)
    return stray


def _stray_icmp(traveller: _Traveller, opened: ExitStack, probe: Probe, port: int) -> socket.socket:
    """Send an echo reply that nobody asked for, and listen in the pod whether it comes through."""
    protocol, kind = _ICMP[probe.family]
    listener = traveller.open("pod", probe.family, socket.SOCK_RAW, protocol)
    opened.enter_context(listener)
    listener.bind((probe.host, 0))
    listener.connect((probe.source, 0))
    with traveller.open(probe.origin, probe.family, socket.SOCK_RAW, protocol) as stray:
        stray.bind((probe.source, 0))
        reply = struct.pack("!BBHHH", kind, 0, 0, port, 1)
        if probe.family == 4:
            reply = reply[:2] + _checksum(reply) + reply[4:]
        stray.sendto(reply, (probe.host, 0))
    return listener


def _checksum(data: bytes) -> bytes:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


def _read(attempt: _Attempt) -> Ending:
    """Return where a call has ended; "" if it has not."""
    try:
        if attempt.probe.kind == TCP:
            return _read_line(attempt)
        data, told, _, sender = attempt.socket.recvmsg(512, 64)
    except BlockingIOError:
        return ""
    except OSError as error:
        return os.strerror(error.errno or 0)
    if attempt.probe.kind in (UDP, UDP_SECOND):
        unasked = " (unasked)" if told and told[0][2][0] else ""
        replied_from = endpoint(*sender[:2]) + unasked
        return _arrival(data)._replace(replied_from=replied_from)
    return _read_packet(attempt, data[_HEADER[attempt.probe.family] :])


def _read_line(attempt: _Attempt) -> Ending:
    piece = attempt.socket.recv(512)
    if piece:
        attempt.lines.append(piece)
        return ""
    line = b"".join(attempt.lines)
    return _arrival(line) if line else "no answer"


def _arrival(line: bytes) -> Arrival:
    """Read an answer; NAT may change the client's port where it is taken, that is no difference."""
    arrival = Arrival(*json.loads(line))
    return arrival._replace(client=arrival.client.rpartition(":")[0])


def _read_packet(attempt: _Attempt, packet: bytes) -> Ending:
    if attempt.probe.kind == STRAY_TCP:
        mine = struct.unpack_from("!HH", packet)[1] == attempt.port and packet[13] & _RST
        return "reset" if mine else ""
    mine = struct.unpack_from("!BBHH", packet)[::3] == (
        _ICMP[attempt.probe.family][1],
        attempt.port,
    )
    return "delivered" if mine else ""


# -- comparison --------------------------------------------------------------------------------

FIRST_PORT, PORTS = 20000, 40000  # of clients, one after the other


class Difference(NamedTuple):
    """A configuration under which the pods disagree: about which probes, or about programming."""

    configuration: Configuration
    endings: dict[Probe, Endings]
    failures: tuple[str, str] = ("", "")


class Run:
    """Configurations put into both pods, one after the other, and what came of it."""

    def __init__(self, pods: tuple[Pod, Pod]) -> None:
        self.pods = pods
        self.configurations = 0
        self.ended: defaultdict[Probe, Counter[str]] = defaultdict(Counter)
        self.known: Counter[str] = Counter()
        self.settled_later = 0
        self._port = 0

    @property
    def places(self) -> Counter[str]:
        """How many probes ended in which kind of place, all in all."""
        return sum(self.ended.values(), Counter())

    def both(self, what: Callable[..., Any], *args: Sequence[object]) -> tuple[str, str]:
        """Do something in both pods at once; return what failed."""
        for pod, own in zip(self.pods, args or ((), ()), strict=True):
            pod.ask(what, pod.path, *own)
        failures = ["", ""]
        for index, pod in enumerate(self.pods):
            try:
                pod.answer()
            except Failed as failure:
                failures[index] = str(failure)
        return failures[0], failures[1]

    def call(self, probes: Sequence[Probe], patience_s: float = PATIENCE_S) -> dict[Probe, Endings]:
        """Make the same connections in both pods; where each ended."""
        if self._port + len(probes) > PORTS:
            self._port = 0
        for pod in self.pods:
            pod.ask_calls(probes, FIRST_PORT + self._port, patience_s)
        self._port += len(probes)
        return dict(
            zip(probes, zip(*(pod.answer() for pod in self.pods), strict=True), strict=True)
        )

    def program(self, configuration: Configuration) -> tuple[str, str]:
        """Program a configuration, a back end a pod; return what failed."""
        failures = self.both(clean_up) if configuration.fresh else ("", "")
        if any(failures):
            return failures
        return self.both(program, (configuration.iptables,), (configuration.nftables,))

    def examine(self, configuration: Configuration) -> Difference | None:
        """Compare what the back ends make of a configuration; what differs is looked at twice."""
        self.configurations += 1
        failures = self.program(configuration)
        if any(failures):
            return Difference(configuration, {}, failures)
        endings = self.call(probes_of(configuration.settings))
        suspects = unexpected(configuration.settings, endings)
        if suspects:
            endings |= self.call(tuple(suspects), SECOND_PATIENCE_S)
        differing = unexpected(configuration.settings, endings)
        self.settled_later += len(suspects) - len(differing)
        self._count(configuration.settings, endings)
        return Difference(configuration, differing) if differing else None

    def _count(self, settings: Settings, endings: Mapping[Probe, Endings]) -> None:
        for probe, (ending, _) in endings.items():
            self.ended[probe][kind_of(ending)] += 1
            expected = known(settings, probe)
            if expected:
                self.known[expected.topic] += 1


def unexpected(settings: Settings, endings: Mapping[Probe, Endings]) -> dict[Probe, Endings]:
    """Return what did not end alike, or not as different as is known."""
    found = {}
    for probe, ended in endings.items():
        expected = known(settings, probe)
        alike = ended[0] == ended[1]
        if ended != (expected.iptables, expected.nftables) if expected else not alike:
            found[probe] = ended
    return found


def kind_of(ending: Ending) -> str:
    """Sum up where a probe ended: who took it, and on which side of the proxy."""
    if isinstance(ending, str):
        return ending
    ports = {OUTBOUND: "outbound", OWN_OUTBOUND: "outbound", DNS: "DNS"}
    return f"proxy, {ports.get(ending.port, 'inbound')}" if ending.at == "proxy" else ending.at


# -- reports -----------------------------------------------------------------------------------

BACK_ENDS = ("iptables", "nftables")
MOST_SHOWN = 12


def shrink(pods: tuple[Pod, Pod], difference: Difference) -> Configuration:
    """Take back settings to their defaults for as long as the pods disagree all the same."""
    run, found = Run(pods), difference.configuration
    probes = tuple(difference.endings)[:MOST_SHOWN]
    for key, default in PLAIN.items():
        fewer = found._replace(settings={**found.settings, key: default}, fresh=True)
        if fewer.settings == found.settings:
            continue
        failed = any(run.program(fewer))
        if failed if not probes else not failed and unexpected(fewer.settings, run.call(probes)):
            found = fewer
    return found


def beside_defaults(settings: Settings) -> dict[str, object]:
    """Return the settings that are not what a pod has anyway."""
    return {key: value for key, value in settings.items() if value != PLAIN[key]}


def report(difference: Difference, most: int = MOST_SHOWN) -> str:
    """Tell a person where the pods disagree, and how to see it again."""
    configuration = difference.configuration
    lines = [f"seed {configuration.seed}, number {configuration.number}:"]
    for back_end, failure in zip(BACK_ENDS, difference.failures, strict=True):
        if failure:
            lines.append(f"  {back_end} cannot program it: {failure.strip().splitlines()[-1]}")
    for probe, endings in [*difference.endings.items()][:most]:
        lines.append(f"  {probe}")
        lines += (
            f"    {name}: {_shown(end)}" for name, end in zip(BACK_ENDS, endings, strict=True)
        )
    if len(difference.endings) > most:
        lines.append(f"  and {len(difference.endings) - most} probes more")
    lines += (
        f"  iptables variant: {configuration.variant}",
        f"  settings for istio-iptables --config: {json.dumps(dict(configuration.settings))}",
        f"  once more: EQUIVALENCE_SEED={configuration.seed} "
        f"EQUIVALENCE_ONLY={configuration.number} "
        "pytest tests/netns/test_equivalence.py -k same_place",
    )
    return "\n".join(lines)


def _shown(ending: Ending) -> str:
    if isinstance(ending, str):
        return ending
    told = ", ".join(f"{name} {value}" for name, value in ending._asdict().items() if value)
    return f"{kind_of(ending)}: {told}"
