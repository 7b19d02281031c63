"""What capture needs beside rules: an address and, for TPROXY, policy rules and local routes.

`::6` on `lo` is the IPv6 twin of 127.0.0.6, which the proxy's pass-through cluster binds
(127.0.0.0/8 is all local, of IPv6 only ::1 is). Diverted packets carry a mark; a policy rule sends
them to a table whose only route delivers them locally. The rule has a priority of its own, so that
adding it twice is one rule.

Source: istio tools/istio-iptables, pkg/capture (ConfigureRoutes).
"""

from __future__ import annotations

from typing import NamedTuple

from istio_cni import constants
from istio_cni.edge.netlink import (
    WHOLE_MARK,
    LocalRoute,
    PolicyRule,
    Route,
)
from istio_cni.rules.config import CaptureConfig

PASSTHROUGH, _, _LENGTH = constants.PASSTHROUGH_V6.partition("/")


class Routing(NamedTuple):
    """Our part of a namespace's addresses and routes."""

    loopback_up: bool
    passthrough: bool
    rules: frozenset[PolicyRule]
    routes: frozenset[LocalRoute]


NONE = Routing(loopback_up=False, passthrough=False, rules=frozenset(), routes=frozenset())


def wanted(config: CaptureConfig) -> Routing:
    """Return what a configuration needs."""
    families = [family.value for family in config.families] if config.routes_inbound else []
    rules = [
        PolicyRule(
            family,
            constants.TPROXY_RULE_PRIORITY,
            config.tproxy_mark,
            WHOLE_MARK,
            config.tproxy_table,
        )
        for family in families
    ]
    return Routing(
        loopback_up=config.ipv6 or config.routes_inbound,
        passthrough=config.ipv6,
        rules=frozenset(rules),
        routes=frozenset(LocalRoute(family, config.tproxy_table) for family in families),
    )


def read(route: Route, target: Routing = NONE) -> Routing:
    """Return what is there of ours, whatever made it, and of the target.

    Ours is a policy rule that says nothing but a whole mark and a table, with our priority, or with
    the default mark and table, as the reference adds it without a priority; and the local routes of
    the tables that such rules and the target name.
    """
    wanted_marks = {(rule.mark, rule.table) for rule in target.rules}
    wanted_marks.add((constants.TPROXY_MARK, constants.TPROXY_TABLE))
    rules = [
        rule
        for rule in route.marked_rules()
        if not rule.rest
        and (
            rule.priority == constants.TPROXY_RULE_PRIORITY
            or (rule.mark, rule.table) in wanted_marks
        )
    ]
    tables = {rule.table for rule in rules} | {there.table for there in target.routes}
    tables.add(constants.TPROXY_TABLE)
    return Routing(
        route.loopback_is_up(),
        route.has_loopback_address(PASSTHROUGH, int(_LENGTH)),
        frozenset(rules),
        frozenset(route.local_routes(tables=tables)),
    )


def apply(route: Route, present: Routing, target: Routing) -> bool:
    """Turn what is there into what is wanted; tell whether anything changed.

    `lo` is brought up where it is needed, and never taken down here.
    """
    if target.loopback_up and not present.loopback_up:
        route.set_loopback(True)
    if target.passthrough and not present.passthrough:
        route.add_loopback_address(6, PASSTHROUGH, int(_LENGTH))
    for rule in sorted(target.rules - present.rules):
        route.add_policy_rule(rule)
    for there in sorted(target.routes - present.routes):
        route.add_local_route(there)
    for rule in sorted(present.rules - target.rules):
        route.delete_policy_rule(rule)
    for there in sorted(present.routes - target.routes):
        route.delete_local_route(there)
    if present.passthrough and not target.passthrough:
        route.delete_loopback_address(6, PASSTHROUGH, int(_LENGTH))
    return bool(difference(present, target))


def revert(route: Route, former: Routing) -> None:
    """Bring everything back to a former state, `lo` included."""
    present = read(route, former)
    apply(route, present, former)
    if present.loopback_up and not former.loopback_up:
        route.set_loopback(False)


def difference(present: Routing, target: Routing) -> str:
    """Name the first thing in which the two differ; "" if there is none."""
    if target.loopback_up and not present.loopback_up:
        return "lo is down"
    if target.passthrough != present.passthrough:
        return f"{PASSTHROUGH} on lo is {'missing' if target.passthrough else 'unexpected'}"
    return _set_difference("policy rule", present.rules, target.rules) or _set_difference(
        "local route", present.routes, target.routes
    )


def _set_difference(
    kind: str,
    present: frozenset[PolicyRule | LocalRoute],
    target: frozenset[PolicyRule | LocalRoute],
) -> str:
    for items, what in ((target - present, "missing"), (present - target, "unexpected")):
        if items:
            return f"{kind} {min(map(_shown, items))} is {what}"
    return ""


def _shown(item: PolicyRule | LocalRoute) -> str:
    if isinstance(item, PolicyRule):
        return f"(IPv{item.family}, priority {item.priority}, mark {item.mark}, table {item.table})"
    return f"(IPv{item.family}, table {item.table})"
