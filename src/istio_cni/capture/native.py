"""The nftables back end: a configuration as the one batch that programs it, and the proof of it."""

from __future__ import annotations

from istio_cni.capture import routing
from istio_cni.capture.backend import NFTABLES, Report, guard_stands, may_hold_iptables, once_each
from istio_cni.capture.detect import resolve_owners
from istio_cni.capture.session import REFUSE, REWRITE, Log, changing, rules_difference
from istio_cni.constants import NFT_FAMILY, NFT_GUARD
from istio_cni.edge import netlink
from istio_cni.edge.netfilter import Netfilter
from istio_cni.rules import nfnetlink
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.nfnetlink import Wanted
from istio_cni.rules.nftables import complete
from istio_cni.rules.sidecar import generate


@once_each
def compile_rules(config: CaptureConfig) -> Wanted:
    """Turn a configuration into what the kernel is to hold. Raises InvalidParameter.

    Names of owners, which pods cannot have, mean what they did when this process first asked.
    """
    return nfnetlink.compiled(complete(generate(resolve_owners(config))))


def program(net: Netfilter, config: CaptureConfig, log: Log, reason: str, existing: str) -> Report:
    """Commit our tables, and remove what iptables holds where nothing is uncaptured by it.

    That is before the commit if our tables were there already, else after it.
    """
    wanted = compile_rules(config)
    with changing(net, log) as session:
        if existing == REFUSE:
            session.refuse_programs_rules()
            session.refuse_other(wanted)
        captured = bool(session.native)
        if captured:
            session.remove_programs_rules()
        session.route(routing.wanted(config))
        session.commit(wanted, rewrite=existing == REWRITE)
        if not captured:
            session.remove_programs_rules()
        for unread in session.missing:  # somebody with programs of their own may have been here
            log("warn", f"iptables has tables here that cannot be read, and stay: {unread.msg}")
        session.confirm()
        return Report({}, session.changed, NFTABLES, reason)


def difference(net: Netfilter, config: CaptureConfig) -> str:
    """Return the first thing in which our tables differ from what is wanted, or "".

    That iptables holds rules of ours, too, is a difference.
    """
    wanted = compile_rules(config)
    with netlink.Ruleset() as kernel:
        found = rules_difference(kernel, wanted.messages)
        tables = kernel.tables()
    if not found and guard_stands(tables):
        found = f"{NFT_FAMILY} {NFT_GUARD}: a run was killed, and no connection can begin"
    if found or not may_hold_iptables(tables):
        return found
    from istio_cni.capture import iptables  # where iptables has tables

    return iptables.leftover(net, tables)
