"""Settings drawn at random, the same ones for the same seed and number.

Dice of its own for each number mean that one configuration can be looked at without drawing those
before it. The pools hold what the probes meet, at its edges and just beside them; long lists of
other values are mixed in now and then. The order in which the dice are thrown is part of what a
seed means: a new setting is best drawn last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeAlias

from istio_cni.capture.settings import to_settings
from istio_cni.rules.config import CaptureConfig
from netns.programming import config
from netns.traffic import FAMILIES, INBOUND, LOOPBACK, OUTBOUND, OUTSIDE

from .places import NOBODY, OWN_INBOUND, OWN_OUTBOUND, SECOND, SERVICE, Settings

Draw: TypeAlias = Callable[[Random], str]

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
