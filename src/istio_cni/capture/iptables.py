"""The iptables back end: both families loaded, compared, and proved, through iptables' programs."""

from __future__ import annotations

from collections.abc import Mapping

from istio_cni import constants
from istio_cni.capture import routing
from istio_cni.capture.backend import IPTABLES, Choice, Report, once_each, ours_native
from istio_cni.capture.session import REFUSE, REWRITE, Log, other_rules
from istio_cni.capture.tools import BASE, Held, Tables, kept, survey
from istio_cni.capture.transaction import running
from istio_cni.edge import netlink
from istio_cni.edge.netfilter import Netfilter
from istio_cni.errors import InvalidParameter, ProgrammingFailed
from istio_cni.rules import state as tables_of
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import Family, Ruleset, Table
from istio_cni.rules.sidecar import generate
from istio_cni.rules.state import State, differences, ours


def program(
    net: Netfilter, config: CaptureConfig, log: Log, choice: Choice, existing: str
) -> Report:
    """Load both families, then remove other variants' rules, and our nf_tables tables at last."""
    ruleset = prepare(config)
    with running(net, log) as run:
        forced, rewrite = choice.variant, existing == REWRITE
        if existing == REFUSE:
            _refuse_other_configuration(run.held, forced, ruleset)
            run.refuse_native()
        used = run.load_together(fresh_texts(config), forced) or {
            family: run.load(family, forced, ruleset, rewrite=rewrite) for family in config.families
        }
        run.remove_ours(keep=set(used.items()))
        run.route(routing.wanted(config))
        run.sweep()
        if Family.V6 not in used:
            run.warn_of_broken(Family.V6)
        run.confirm()
        run.remove_native()  # last: until then what was before can be brought back
        variants = {BASE[family]: used[family] for family in used}
        return Report(variants, run.changed, IPTABLES, choice.reason)


@once_each
def prepare(config: CaptureConfig) -> Ruleset:
    """Return the rule set of a configuration that iptables can take, or refuse it."""
    ruleset = generate(config)
    groups = tables_of.too_many_groups(ruleset)
    if groups:
        raise InvalidParameter(
            f"{groups} included owner groups: iptables takes at most "
            f"{constants.MAX_OWNER_GROUPS_IPTABLES} in one rule; the back end nftables has no limit"
        )
    return ruleset


@once_each
def fresh_texts(config: CaptureConfig) -> Mapping[Family, str]:
    """Return what is loaded for each family where nothing is there."""
    ruleset = prepare(config)
    return {
        family: tables_of.load_text({}, ruleset, family, tables_of.wanted(ruleset, family))
        for family in config.families
    }


def difference(net: Netfilter, config: CaptureConfig, variants: dict[str, str]) -> str:
    """Return the first thing in which iptables' tables differ from what is wanted, or ""."""
    ruleset, tables = prepare(config), netlink.nft_tables()
    for name in ours_native(tables):
        return f"{constants.NFT_FAMILY} {name}: the table is unexpected"
    for family in Family:
        target = tables_of.wanted(ruleset, family)
        found = _family_difference(net, family, tables, target, variants.get(BASE[family], ""))
        if found:
            return found
    return ""


def leftover(net: Netfilter, tables: Tables) -> str:
    """Return the first thing of ours in any variant's tables, where there should be nothing."""
    found = (_family_difference(net, family, tables, {}, "") for family in Family)
    return next(filter(None, found), "")


def _family_difference(
    net: Netfilter, family: Family, tables: Tables, target: State, chosen: str
) -> str:
    if target and not chosen:
        return f"{BASE[family]} holds no rules of ours"
    held, unread = survey(net, family, tables)
    for variant in dict.fromkeys((chosen, *held) if target else held):
        if variant in unread:
            raise ProgrammingFailed(f"the rules cannot be read: {unread[variant].msg}")
        present = held[variant].state if variant in held else {}
        for text in differences(present, target if variant == chosen else {}).values():
            return f"{BASE[family]} ({variant}) {text}"
    return ""


def holders(net: Netfilter, tables: Tables) -> dict[str, str]:
    """Return the variant that holds rules of ours per family's program, where one does."""
    return {
        BASE[family]: variant
        for family in Family
        for variant, held in survey(net, family, tables).held.items()
        if ours(held.state)
    }


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
                raise other_rules(f"{BASE[family]} {text}")
