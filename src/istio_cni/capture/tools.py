"""Which iptables to use in a namespace: what each variant holds there, and in which order to try.

The variant that already holds our rules is kept, whatever else works: two variants with our rules
would capture twice. What a variant holds is asked only where the kernel says that it has tables
here at all. Whether one works shows when it loads the rules: asking before, and taking the question
back, would cost every pod two grace periods of the kernel.

Source of the order: istio tools/istio-iptables, pkg/dependencies (DetectIptablesVersion).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from istio_cni.edge import netlink
from istio_cni.edge.netfilter import PROBE, CommandFailed, Netfilter, Tool
from istio_cni.errors import NoUsableBackend, TryAgainLater
from istio_cni.rules.iptables import parse_save
from istio_cni.rules.model import Family, Table
from istio_cni.rules.state import State, ours

Tables = tuple[netlink.Listed, ...]
VARIANTS = ("legacy", "nft")
BASE = {Family.V4: "iptables", Family.V6: "ip6tables"}
NFT_FAMILY = {Family.V4: "ip", Family.V6: "ip6"}
LOAD_TRIES, RETRY_PAUSE_S = 5, 0.05
_TABLES = frozenset(table.value for table in Table)


class Held(NamedTuple):
    """A variant's programs, and what its tables hold."""

    tool: Tool
    state: State


class Survey(NamedTuple):
    """What each variant holds for a family, of those that have tables here.

    `unread` says why the tables of a variant could not be read.
    """

    held: dict[str, Held]
    unread: dict[str, CommandFailed]


def survey(net: Netfilter, family: Family, tables: Tables) -> Survey:
    """Read what each variant holds in the present namespace, where nf_tables has these tables."""
    found = Survey({}, {})
    for variant in VARIANTS:
        if has_tables(variant, family, tables):
            _read(net, family, variant, found)
    return found


def _read(net: Netfilter, family: Family, variant: str, found: Survey) -> None:
    reasons: list[CommandFailed] = []
    for name in (f"{BASE[family]}-{variant}", BASE[family]):
        try:
            tool = net.find(name, family.value)
            if tool.variant == variant:
                found.held[variant] = Held(tool, parse_save(net.save(tool)))
                return
        except CommandFailed as error:
            reasons.append(error)
    found.unread[variant] = min(reasons, key=lambda error: error.missing)


def load(net: Netfilter, tool: Tool, document: str, again: Callable[[], str] | None = None) -> None:
    """Load restore text, and while that may help, what `again` makes of what is there by then.

    Without `again` the same text is loaded again, which must be of one table. A lock that was
    waited for as long as the program was told to is not asked for again.
    """
    for attempt in range(LOAD_TRIES):
        started = time.monotonic()
        try:
            return net.load(tool, document)
        except CommandFailed as error:
            waited = error.lock_held and time.monotonic() - started >= net.lock_wait_s
            if waited or not error.transient or attempt == LOAD_TRIES - 1:
                raise
        time.sleep(RETRY_PAUSE_S * 2**attempt)
        document = again() if again else document
        if not document:
            return None
    return None


def has_tables(variant: str, family: Family, tables: Tables) -> bool:
    """Tell whether a variant has tables for a family in the present namespace; see `survey`."""
    if variant == "legacy":
        return not _TABLES.isdisjoint(netlink.legacy_tables(family.value))
    return any(table.family == NFT_FAMILY[family] and table.name in _TABLES for table in tables)


def kept(held: dict[str, Held], forced: str) -> str:
    """Return the variant whose rules stay: the forced one, else the first with any, or ""."""
    with_ours = [variant for variant in VARIANTS if variant in held and ours(held[variant].state)]
    return forced if forced in with_ours else (*with_ours, "")[0]


def candidates(family: Family, forced: str, held: dict[str, Held]) -> list[str]:
    """Return the names of the programs to try, best first.

    The variant with our rules; iptables-legacy where it holds any rules; then nft, the plain name,
    legacy.
    """
    base = BASE[family]
    if forced:
        return [f"{base}-{forced}", base]
    names = [held[variant].tool.name for variant in (kept(held, ""),) if variant]
    if "legacy" in held and held["legacy"].state:
        names.append(held["legacy"].tool.name)
    return list(dict.fromkeys((*names, f"{base}-nft", base, f"{base}-legacy")))


def find(net: Netfilter, name: str, family: Family, forced: str, held: dict[str, Held]) -> Held:
    """Return a candidate's programs and what its tables hold; CommandFailed if it is no use."""
    tool = net.find(name, family.value)
    if forced and tool.variant != forced:
        raise CommandFailed(name, None, f"this is the {tool.variant} variant, {forced} is wanted")
    known = held.get(tool.variant)
    return known if known is not None and ours(known.state) else Held(tool, _state(known))


def _state(known: Held | None) -> State:
    return known.state if known is not None else {}


def works(net: Netfilter, tool: Tool) -> CommandFailed | None:
    """Ask whether a variant works here at all; why not, if it does not.

    A grace period dear, so this is asked only after it has failed to load rules.
    """
    try:
        load(net, tool, PROBE)
    except CommandFailed as error:
        return error
    return None


def none_works(family: Family, forced: str, refused: dict[str, CommandFailed]) -> NoUsableBackend:
    """Say that no candidate works, with each one's reason."""
    reasons = tuple((name, error.msg) for name, error in refused.items())
    hint = f"IPv{family.value} needs the kernel modules "
    hint += Netfilter.modules(forced or "nft", family.value)
    if all(error.missing for error in refused.values()):
        hint = "install iptables where this runs"
    shown = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    return NoUsableBackend(f"no usable {BASE[family]} ({shown}); {hint}", reasons)


def lock_held(error: CommandFailed) -> TryAgainLater:
    """Say that the lock is the trouble, not the kernel."""
    return TryAgainLater(
        f"the xtables lock is held by another process and was not released in time ({error.msg})"
    )
