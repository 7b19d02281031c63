"""Which back end programs a namespace: iptables, or nf_tables directly.

`auto` takes iptables where the node has it, since people and tools look at `iptables-save`. Two
things overrule that: rules of ours that nf_tables holds here already, and a namespace that belongs
to another user namespace, where iptables' owner matches can only be loaded from within. Every
choice has its reason, for logs and explanations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import NamedTuple, TypeVar

from istio_cni.constants import NFT_FAMILY, NFT_GUARD, NFT_TABLES
from istio_cni.edge import netlink
from istio_cni.edge.netfilter import Netfilter
from istio_cni.rules.config import CaptureConfig

AUTO, IPTABLES, NFTABLES = "auto", "iptables", "nftables"
DISTINCT = 128  # configurations whose rules are kept; compiled, each takes some 50 kB
ENTRIES_KEPT = 100  # of a configuration's lists: whoever writes annotations must not fill memory
_IPTABLES = frozenset(netlink.IPTABLES_TABLES)


Made = TypeVar("Made")


def once_each(make: Callable[[CaptureConfig], Made]) -> Callable[[CaptureConfig], Made]:
    """Keep what is made of a configuration, unless it is long; most pods of a node have the same.

    `cache_clear` forgets all of it.
    """
    kept = lru_cache(maxsize=DISTINCT)(make)

    @wraps(make)
    def made(config: CaptureConfig) -> Made:
        return kept(config) if config.entries <= ENTRIES_KEPT else make(config)

    made.cache_clear = kept.cache_clear  # type: ignore[attr-defined] # as functools has it
    return made


class Choice(NamedTuple):
    """A back end, and why it was taken; unless `sure`, another one may be tried after it.

    `variant` is the one of iptables to take, "" for whichever works.
    """

    name: str
    reason: str
    sure: bool = True
    variant: str = ""


class Report(NamedTuple):
    """What a run did: the back end and why, what it changed (none: all was in place).

    `variants` names the variant of iptables per family's program; empty for nftables.
    """

    variants: dict[str, str]
    changed: list[str]
    backend: str = ""
    reason: str = ""


def by_name(config: CaptureConfig) -> Choice | None:
    """Return the back end that a configuration names, None if it leaves that open."""
    variant = config.iptables_variant
    if config.backend != AUTO:
        return Choice(config.backend, "asked for by name", variant=variant)
    if variant:
        reason = f"the variant {variant} is asked for by name"
        return Choice(IPTABLES, reason, variant=variant)
    return None


def choose(
    net: Netfilter, config: CaptureConfig, node_backend: str = "", *, foreign: bool = False
) -> Choice:
    """Choose for the present namespace; `foreign` if another user namespace owns it.

    `node_backend` is what was found to work on this node: nftables, or `iptables-` and a variant;
    "" if nobody has tried.
    """
    named = by_name(config)
    if named is not None:
        return named
    if ours_native(netlink.nft_tables()):
        return Choice(NFTABLES, "rules of ours are in nf_tables here already")
    if foreign:
        return Choice(NFTABLES, "the network namespace belongs to another user namespace")
    if node_backend == NFTABLES:
        return Choice(NFTABLES, "no iptables works on this node")
    if node_backend:
        variant = node_backend.removeprefix(f"{IPTABLES}-")
        return Choice(IPTABLES, f"{node_backend} works on this node", sure=False, variant=variant)
    found = net.any_program()
    if not found:
        return Choice(NFTABLES, f"no iptables-restore in {net.search_path}")
    return Choice(IPTABLES, f"{found} is there", sure=False)


def ours_native(tables: tuple[netlink.Listed, ...]) -> dict[str, str]:
    """Return our own tables among those listed, with their comments."""
    return {
        table.name: table.comment
        for table in tables
        if table.family == NFT_FAMILY and table.name in NFT_TABLES
    }


def guard_stands(tables: tuple[netlink.Listed, ...]) -> bool:
    """Tell whether the drop rules stand that our own back end puts up while it replaces tables."""
    return any((table.family, table.name) == (NFT_FAMILY, NFT_GUARD) for table in tables)


def may_hold_iptables(tables: tuple[netlink.Listed, ...]) -> bool:
    """Tell whether a variant of iptables has tables here that may hold rules of ours."""
    if any((table.family, table.name) in _IPTABLES for table in tables):
        return True
    return any(netlink.legacy_tables(family) for family in (4, 6))
