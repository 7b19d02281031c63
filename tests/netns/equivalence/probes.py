"""The connections that are made under every configuration: about 150 of each IP version.

Each is there because some rule could treat it in a way of its own: by who sends it (the groups of
senders are those that owner matches tell apart), by address, port and interface, by mark, or by
what conntrack remembers. The list does not depend on the configuration, so that what one leaves
alone is looked at as closely as what it captures; a transparent proxy's mark is the one exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from netns.traffic import (
    APPLICATION,
    DNS,
    FAMILIES,
    LOOPBACK,
    OUTSIDE,
    PASSTHROUGH,
    POD,
    PROXY,
    endpoint,
)

from .places import (
    ANOTHER,
    GROUP,
    GUEST,
    OTHER_LOOPBACK,
    POD_ON_GUEST,
    POD_ON_SECOND,
    PUBLIC,
    SECOND,
    SERVICE,
    STRANGER,
    Settings,
)

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
