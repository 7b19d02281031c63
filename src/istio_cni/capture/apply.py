"""Put a configuration's rules, addresses and routes into the present namespace, or take them out.

Each call is one transaction over both families and both back ends, and looks first: what is right
already is not touched. What only one back end needs is loaded with it.
"""

from __future__ import annotations

from istio_cni.capture import routing
from istio_cni.capture.backend import (
    IPTABLES,
    NFTABLES,
    Choice,
    Report,
    by_name,
    choose,
    ours_native,
)
from istio_cni.capture.session import REFUSE, REPLACE, REWRITE, ROLLBACK_S, Log, changing
from istio_cni.edge import netlink
from istio_cni.edge.netfilter import CommandFailed, Netfilter
from istio_cni.errors import NoUsableBackend, ProgrammingFailed
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import Family

__all__ = [
    "IPTABLES",
    "NFTABLES",
    "REFUSE",
    "REPLACE",
    "REWRITE",
    "ROLLBACK_S",
    "Choice",
    "Report",
    "by_name",
    "check",
    "choose",
    "clean_up",
    "holders",
    "program",
    "refuse_impossible",
    "working_variant",
]


def program(
    net: Netfilter, config: CaptureConfig, log: Log, choice: Choice, *, existing: str = REPLACE
) -> Report:
    """Make the present namespace hold what a configuration wants, or leave it as it was and raise.

    `existing` says what to do with rules of ours that differ: REFUSE them by name, REPLACE what
    differs, or REWRITE everything. Whatever another back end has made goes, while one of the two
    captures at any moment. A choice that is not sure gives way where no iptables works.
    """
    reason = choice.reason
    if choice.name == IPTABLES:
        from istio_cni.capture import iptables  # the iptables back end only

        try:
            return iptables.program(net, config, log, choice, existing)
        except NoUsableBackend as error:
            if choice.sure:
                raise
            reason = error.msg
    from istio_cni.capture import native  # the nftables back end only

    return native.program(net, config, log, reason, existing)


def clean_up(net: Netfilter, log: Log) -> Report:
    """Remove every object of ours from the present namespace, whatever made it."""
    with changing(net, log) as session:
        session.refuse_unread()
        session.remove_programs_rules()
        session.route(routing.NONE)
        session.remove_native()
    if session.missing:
        reasons = "; ".join(reason.msg for reason in session.missing)
        raise ProgrammingFailed(
            f"removed {', '.join(session.changed) or 'nothing'}, but iptables has tables here and "
            f"rules of ours in them cannot be read and stay ({reasons}); repeat where iptables is"
        )
    return Report({}, session.changed)


def check(net: Netfilter, config: CaptureConfig, backend: str, variants: dict[str, str]) -> str:
    """Return the first thing in which the namespace differs from what is wanted, or "".

    `backend` and `variants` (of iptables, per family's program) are what `program` reported. Raises
    ProgrammingFailed when a variant's tables cannot be read: that says nothing about the rules.
    """
    if backend == NFTABLES:
        from istio_cni.capture import native  # the nftables back end only

        found = native.difference(net, config)
    else:
        from istio_cni.capture import iptables  # the iptables back end only

        found = iptables.difference(net, config, variants)
    if found:
        return found
    wanted = routing.wanted(config)
    with netlink.Route() as route:
        return routing.difference(routing.read(route, wanted), wanted)


def holders(net: Netfilter) -> tuple[str, dict[str, str]]:
    """Return which back end holds rules of ours here, and in which variant per family's program."""
    tables = netlink.nft_tables()
    if ours_native(tables):
        return NFTABLES, {}
    from istio_cni.capture import iptables  # a CHECK without a record

    return IPTABLES, iptables.holders(net, tables)


def working_variant(net: Netfilter) -> str:
    """Return the variant of iptables that works in the present namespace, "" if none does.

    It is tried as for a pod without any rules.
    """
    from istio_cni.capture import tools  # once in the life of a node agent

    for name in tools.candidates(Family.V4, "", {}):
        try:
            tool = net.find(name, Family.V4.value)
        except CommandFailed:
            continue
        if tools.works(net, tool) is None:
            return tool.variant
    return ""


def refuse_impossible(config: CaptureConfig) -> None:
    """Raise InvalidParameter if the back end that would be used cannot take a configuration."""
    by_iptables = config.backend == IPTABLES or Netfilter(deadline=0).any_program()
    if config.backend != NFTABLES and by_iptables:
        from istio_cni.capture import iptables  # the iptables back end only

        iptables.prepare(config)
