"""What the back ends are meant to do differently, because the reference does.

An entry says how each back end's connection ends, not that it may end anyhow: a difference that is
gone is reported as one that is new. What of the reference's list no probe can tell apart, or is no
difference any more, is listed with the reason, so that no row is left out by oversight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .places import Ending, Settings
from .probes import STRAY_ICMP, Probe


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
