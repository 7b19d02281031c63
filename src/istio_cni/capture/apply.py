"""Put a configuration's rules, addresses and routes into the present namespace, or take them out.

Each call is one transaction over both families, and looks first: what is right already is not
touched.
"""

from __future__ import annotations

from typing import NamedTuple

from istio_cni import constants
from istio_cni.capture import routing
from istio_cni.capture.tools import BASE, Held, kept, survey
from istio_cni.capture.transaction import ROLLBACK_S, Log, Run
from istio_cni.edge import netlink
from istio_cni.edge.netfilter import Netfilter
from istio_cni.errors import InvalidParameter, ProgrammingFailed
from istio_cni.rules import state as tables_of
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import Family, Ruleset, Table
from istio_cni.rules.sidecar import generate
from istio_cni.rules.state import differences, ours

__all__ = [
    "REFUSE",
    "REPLACE",
    "REWRITE",
    "ROLLBACK_S",
    "Report",
    "check",
    "clean_up",
    "holders",
    "prepare",
    "program",
]

REFUSE, REPLACE, REWRITE = "refuse", "replace", "rewrite"


class Report(NamedTuple):
    """What a run did: the variant per family, and the parts it changed (none: all was in place)."""

    variants: dict[str, str]
    changed: list[str]


def program(net: Netfilter, config: CaptureConfig, log: Log, *, existing: str = REPLACE) -> Report:
    """Make the present namespace hold what a configuration wants, or leave it as it was and raise.

    `existing` says what to do with rules of ours that differ: REFUSE them by name, REPLACE what
    differs, or REWRITE everything. Tables that an interrupted run has not reached are filled in
    either way.
    """
    ruleset = prepare(config)
    with Run(net, log) as run:
        forced, rewrite = config.iptables_variant, existing == REWRITE
        if existing == REFUSE:
            _refuse_other_configuration(run.held, forced, ruleset)
        used = {
            family: run.load(family, forced, ruleset, rewrite=rewrite) for family in config.families
        }
        run.remove_ours(keep=set(used.items()))
        run.route(routing.wanted(config))
        run.sweep()
        if Family.V6 not in used:
            run.warn_of_broken(Family.V6)
        return Report({BASE[family]: used[family] for family in used}, run.changed)


def clean_up(net: Netfilter, log: Log) -> Report:
    """Remove every object of ours from the present namespace, whatever made it."""
    with Run(net, log) as run:
        run.refuse_unread()
        run.remove_ours(keep=set())
        run.route(routing.NONE)
        run.sweep()
        return Report({}, run.changed)


def check(net: Netfilter, config: CaptureConfig, variants: dict[str, str]) -> str:
    """Return the first thing in which the namespace differs from what is wanted, or "".

    `variants` names the iptables variant per family's program, as `program` reported it. Raises
    ProgrammingFailed when a variant's tables cannot be read: that says nothing about the rules.
    """
    ruleset = prepare(config)
    for family in Family:
        text = _family_difference(net, family, ruleset, variants.get(BASE[family], ""))
        if text:
            return f"{BASE[family]} {text}"
    target_routing = routing.wanted(config)
    with netlink.Route() as route:
        return routing.difference(routing.read(route, target_routing), target_routing)


def _family_difference(net: Netfilter, family: Family, ruleset: Ruleset, chosen: str) -> str:
    target = tables_of.wanted(ruleset, family)
    if target and not chosen:
        return "holds no rules of ours"
    held, unread = survey(net, family)
    for variant in dict.fromkeys((chosen, *held) if target else held):
        if variant in unread:
            raise ProgrammingFailed(f"the rules cannot be read: {unread[variant].msg}")
        present = held[variant].state if variant in held else {}
        for text in differences(present, target if variant == chosen else {}).values():
            return f"({variant}) {text}"
    return ""


def holders(net: Netfilter) -> dict[str, str]:
    """Return the variant that holds rules of ours per family's program, where one does."""
    return {
        BASE[family]: variant
        for family in Family
        for variant, held in survey(net, family).held.items()
        if ours(held.state)
    }


def prepare(config: CaptureConfig) -> Ruleset:
    """Return the rule set of a configuration that the back end can take, or refuse it."""
    if config.backend == "nftables":
        raise InvalidParameter("the back end nftables is not part of this version; use iptables")
    ruleset = generate(config)
    groups = tables_of.too_many_groups(ruleset)
    if groups:
        raise InvalidParameter(
            f"{groups} included owner groups: iptables takes at most "
            f"{constants.MAX_OWNER_GROUPS_IPTABLES} in one rule; the back end nftables has no limit"
        )
    return ruleset


def _refuse_other_configuration(
    held: dict[Family, dict[str, Held]], forced: str, ruleset: Ruleset
) -> None:
    """Refuse to touch rules of ours that another configuration made; an interrupted run is none.

    Rules of a family that is not to be captured any more are another configuration's, too.
    """
    for family, variants in held.items():
        variant = kept(variants, forced)
        present = variants[variant].state if variant else {}
        mine = ours(present)
        for table, text in differences(present, tables_of.wanted(ruleset, family)).items():
            if table in mine and table is not Table.FILTER:
                raise ProgrammingFailed(
                    f"other rules of ours are in place: {BASE[family]} {text}; "
                    "replace them with --reconcile"
                )
