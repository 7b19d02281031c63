"""Rules that send a sidecar pod's traffic through its proxy: a configuration in, a rule set out.

Order is everything: the first rule that matches decides, and tests hold every line against the
reference's own expected results. Each function below is one stretch of that order; `generate`
strings them together.

Source: istio tools/istio-iptables, pkg/capture/run.go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from istio_cni import constants
from istio_cni.rules.config import CaptureConfig, family_of, is_loopback
from istio_cni.rules.model import (
    ACCEPT,
    DROP,
    RESTORE_MARK,
    RETURN,
    SAVE_MARK,
    Address,
    Family,
    Match,
    Owner,
    Rule,
    Ruleset,
    Table,
    Verdict,
    connection_mark,
    conntrack_state,
    destination,
    destination_port,
    destination_ports,
    in_interface,
    jump,
    mark,
    out_interface,
    owner_gid,
    owner_uid,
    redirect,
    set_mark,
    source,
    source_port,
    tcp,
    tproxy,
    udp,
    zone,
)

INBOUND = "ISTIO_INBOUND"
OUTPUT = "ISTIO_OUTPUT"
OUTPUT_DNS = "ISTIO_OUTPUT_DNS"
REDIRECT = "ISTIO_REDIRECT"
IN_REDIRECT = "ISTIO_IN_REDIRECT"
DIVERT = "ISTIO_DIVERT"
TPROXY = "ISTIO_TPROXY"
DROP_CHAIN = "ISTIO_DROP"

Rules = Iterable[Rule]


def generate(config: CaptureConfig) -> Ruleset:
    """Return the rule set of a pod, in the reference's order of emission."""
    families = config.families
    rules = (
        *_excluded_interfaces(config),
        *_rerouted_interfaces_left(config),
        *_invalid_dropped(config),
        *_redirect_chains(config),
        *_inbound(config),
        *_outbound_exceptions(config),
        *_proxy_traffic(config),
        *_owner_groups(config),
        *_dns(config),
        *_outbound_ranges(config),
        *_tproxy_marks(config),
    )
    captured = tuple(rule for rule in rules if rule.family is None or rule.family in families)
    return Ruleset(families, captured)


def _rule(
    table: Table,
    chain: str,
    *matches: Match,
    to: Verdict,
    family: Family | None = None,
    position: int | None = None,
) -> Rule:
    return Rule(table, chain, matches, to, family, position)


def _nat(chain: str, *matches: Match, to: Verdict, family: Family | None = None) -> Rule:
    return Rule(Table.NAT, chain, matches, to, family)


def _output(*matches: Match, to: Verdict, family: Family | None = None) -> Rule:
    return Rule(Table.NAT, OUTPUT, matches, to, family)


def _loopback(config: CaptureConfig, family: Family) -> str:
    return config.loopback_v4 if family is Family.V4 else constants.LOOPBACK_V6


def _not_loopback(config: CaptureConfig, family: Family) -> Address:
    return destination(_loopback(config, family), negate=True)


def _passthrough(family: Family) -> Address:
    """Match the address that the proxy's inbound pass-through cluster binds; it must not loop."""
    v4 = family is Family.V4
    return source(constants.PASSTHROUGH_V4 if v4 else constants.PASSTHROUGH_V6)


def _excluded_interfaces(config: CaptureConfig) -> Rules:
    for table in (Table.NAT, Table.MANGLE) if config.tproxy else (Table.NAT,):
        for name in config.excluded_interfaces:
            yield _rule(table, "PREROUTING", in_interface(name), to=RETURN)
            yield _rule(table, "OUTPUT", out_interface(name), to=RETURN)


def _rerouted_interfaces_left(config: CaptureConfig) -> Rules:
    """Leave alone what comes from a virtual machine's interface and is not redirected further down.

    The redirects are inserted before these at the end, hence the positions.
    """
    for name in config.reroute_interfaces:
        yield _rule(Table.NAT, "PREROUTING", in_interface(name), to=RETURN, position=1)


def _invalid_dropped(config: CaptureConfig) -> Rules:
    if config.drop_invalid:
        invalid = conntrack_state("INVALID")
        yield _rule(Table.MANGLE, "PREROUTING", invalid, to=jump(DROP_CHAIN))
        yield _rule(Table.MANGLE, DROP_CHAIN, to=DROP)


def _redirect_chains(config: CaptureConfig) -> Rules:
    yield _nat(INBOUND, tcp(), destination_port(config.tunnel_port), to=RETURN)
    yield _nat(REDIRECT, tcp(), to=redirect(config.outbound_port))
    yield _nat(IN_REDIRECT, tcp(), to=redirect(config.inbound_port))


def _inbound(config: CaptureConfig) -> Rules:
    """Rules that send what arrives to the proxy: through nat, or through mangle with TPROXY."""
    if config.inbound_ports == ():
        return
    table = Table.MANGLE if config.tproxy else Table.NAT
    if config.tproxy:
        yield from _divert_chains(config)
    yield _rule(table, "PREROUTING", tcp(), to=jump(INBOUND))
    if isinstance(config.inbound_ports, str):
        for ports in config.inbound_ports_excluded:
            yield _rule(table, INBOUND, tcp(), destination_ports(ports), to=RETURN)
        yield from _captured_inbound(config)
    else:
        for ports in config.inbound_ports:
            yield from _captured_inbound(config, destination_ports(ports))


def _divert_chains(config: CaptureConfig) -> Rules:
    yield _rule(Table.MANGLE, DIVERT, to=set_mark(config.tproxy_mark))
    yield _rule(Table.MANGLE, DIVERT, to=ACCEPT)
    proxy = tproxy(config.inbound_port, config.tproxy_mark)
    for family in config.families:
        far = _not_loopback(config, family)
        yield _rule(Table.MANGLE, TPROXY, far, tcp(), to=proxy, family=family)


def _captured_inbound(config: CaptureConfig, *ports: Match) -> Rules:
    if config.tproxy:
        known = conntrack_state("RELATED", "ESTABLISHED")
        yield _rule(Table.MANGLE, INBOUND, tcp(), *ports, known, to=jump(DIVERT))
        yield _rule(Table.MANGLE, INBOUND, tcp(), *ports, to=jump(TPROXY))
    else:
        yield _nat(INBOUND, tcp(), *ports, to=jump(IN_REDIRECT))


def _outbound_exceptions(config: CaptureConfig) -> Rules:
    yield _nat("OUTPUT", to=jump(OUTPUT))
    for ports in config.outbound_ports_excluded:
        yield _output(tcp(), destination_ports(ports), to=RETURN)
        yield _output(udp(), destination_ports(ports), to=RETURN)
    for family in config.families:
        yield _output(out_interface("lo"), _passthrough(family), to=RETURN, family=family)


def _proxy_traffic(config: CaptureConfig) -> Rules:
    """Rules for what the proxy itself sends.

    The proxy calling the pod's own address through `lo` goes to its inbound side; an application
    talking to itself over `lo` does not, unless a loopback range was asked for; everything else of
    the proxy leaves directly, whatever the protocol.
    """
    ranges = config.outbound_ranges
    loop = not isinstance(ranges, str) and any(is_loopback(prefix) for prefix in ranges)
    uid_exempt = (constants.DNS_PORT, config.tunnel_port) if config.dns else (config.tunnel_port,)
    for uid in config.proxy_uids:
        yield from _one_proxy(config, owner_uid, uid, uid_exempt, loop=loop)
    for gid in config.proxy_gids:
        yield from _one_proxy(config, owner_gid, gid, (config.tunnel_port,), loop=loop)


def _one_proxy(
    config: CaptureConfig,
    owner: Callable[..., Owner],
    identity: str,
    exempt: tuple[int, ...],
    *,
    loop: bool,
) -> Rules:
    lo = out_interface("lo")
    for family in config.families:
        far, others = _not_loopback(config, family), destination_port(*exempt, negate=True)
        its_own = (lo, far, tcp(), others, owner(identity))
        yield _output(*its_own, to=jump(IN_REDIRECT), family=family)
    if not loop:
        not_dns = (tcp(), destination_port(constants.DNS_PORT, negate=True)) if config.dns else ()
        yield _output(lo, *not_dns, owner(identity, negate=True), to=RETURN)
    yield _output(owner(identity), to=RETURN)


def _owner_groups(config: CaptureConfig) -> Rules:
    """Leave out excluded groups; with a list of included ones, everybody who is in none of them."""
    if isinstance(config.owner_groups, str):
        for group in config.owner_groups_excluded:
            yield _output(owner_gid(group), to=RETURN)
    else:
        strangers = (owner_gid(group, negate=True) for group in config.owner_groups)
        yield _output(*strangers, to=RETURN)


def _dns(config: CaptureConfig) -> Rules:
    """Send the application's DNS to the proxy, and keep the two halves apart in conntrack.

    Proxy and application use the same address and port pairs towards the resolver; zone 1 holds
    proxy to resolver, zone 2 application to proxy.
    """
    if not config.dns:
        return
    yield _rule(Table.RAW, "OUTPUT", to=jump(OUTPUT_DNS))
    for family in _dns_families(config):
        yield _output(to=jump(OUTPUT_DNS), family=family)
    for protocol in (tcp(), udp()):
        for server, family in _dns_servers(config):
            queries: tuple[Match, ...] = (
                protocol,
                destination_port(constants.DNS_PORT),
                *map(destination, server),
            )
            yield _nat(
                OUTPUT_DNS, *queries, to=redirect(constants.DNS_LISTENER_PORT), family=family
            )
    yield from _dns_zones(config)


def _dns_families(config: CaptureConfig) -> tuple[Family | None, ...]:
    """Families that have a server: None stands for both."""
    if config.capture_all_dns or (config.dns_servers_v4 and config.dns_servers_v6):
        return (None,)
    return (Family.V4,) if config.dns_servers_v4 else (Family.V6,)


def _dns_servers(config: CaptureConfig) -> Iterable[tuple[tuple[str, ...], Family | None]]:
    """Servers as prefixes with their family; one empty pair when every server is meant."""
    if config.capture_all_dns:
        return [((), None)]
    v4 = [((f"{server}/32",), Family.V4) for server in config.dns_servers_v4]
    v6 = [((f"{server}/128",), Family.V6) for server in config.dns_servers_v6]
    return [*v4, *v6]


def _dns_zones(config: CaptureConfig) -> Rules:
    query, answer = destination_port(constants.DNS_PORT), source_port(constants.DNS_LISTENER_PORT)
    upstream, application = zone(constants.ZONE_UPSTREAM), zone(constants.ZONE_APPLICATION)
    owners = (*map(owner_uid, config.proxy_uids), *map(owner_gid, config.proxy_gids))
    for owner in owners:
        yield _rule(Table.RAW, OUTPUT_DNS, udp(), query, owner, to=upstream)
        yield _rule(Table.RAW, OUTPUT_DNS, udp(), answer, owner, to=application)
    for family in _dns_families(config):
        yield _rule(Table.RAW, "PREROUTING", to=jump(INBOUND), family=family)
    for server, family in _dns_servers(config):
        to_server: tuple[Match, ...] = (udp(), query, *map(destination, server))
        from_server: tuple[Match, ...] = (
            udp(),
            source_port(constants.DNS_PORT),
            *map(source, server),
        )
        yield _rule(Table.RAW, OUTPUT_DNS, *to_server, to=application, family=family)
        yield _rule(Table.RAW, INBOUND, *from_server, to=upstream, family=family)


def _outbound_ranges(config: CaptureConfig) -> Rules:
    """Rules for where an application's connections go, after all exceptions by who sends them."""
    for family in config.families:
        yield _output(destination(_loopback(config, family)), to=RETURN, family=family)
    for prefix, family in _by_family(config.outbound_ranges_excluded):
        yield _output(destination(prefix), to=RETURN, family=family)
    for ports in config.outbound_ports:
        yield _output(tcp(), destination_ports(ports), to=jump(REDIRECT))
    if isinstance(config.outbound_ranges, str):
        yield _output(to=jump(REDIRECT))
        yield from _rerouted(config)
        return
    for prefix, family in _by_family(config.outbound_ranges):
        yield from _rerouted(config, destination(prefix), family=family)
        yield _output(destination(prefix), to=jump(REDIRECT), family=family)


def _rerouted(config: CaptureConfig, *where: Match, family: Family | None = None) -> Rules:
    for name in config.reroute_interfaces:
        matches = (in_interface(name), *where)
        yield Rule(Table.NAT, "PREROUTING", matches, jump(REDIRECT), family, position=1)


def _by_family(prefixes: tuple[str, ...]) -> list[tuple[str, Family]]:
    """Pair prefixes with their family, IPv4 first, each family in the given order."""
    pairs = [(prefix, family_of(prefix)) for prefix in prefixes]
    return sorted(pairs, key=lambda pair: pair[1].value)


def _tproxy_marks(config: CaptureConfig) -> Rules:
    """Keep the mark of diverted connections, and tell the proxy's own traffic on `lo` from it."""
    if not config.tproxy:
        return
    lo, ours = out_interface("lo"), mark(config.tproxy_mark)
    mangle = Table.MANGLE
    yield _rule(mangle, "PREROUTING", tcp(), ours, to=SAVE_MARK)
    yield _rule(mangle, "OUTPUT", tcp(), lo, ours, to=RETURN)
    owners = (*map(owner_uid, config.proxy_uids), *map(owner_gid, config.proxy_gids))
    for owner in owners:
        for family in config.families:
            own = (_not_loopback(config, family), tcp(), lo, owner)
            yield _rule(mangle, "OUTPUT", *own, to=set_mark(constants.OUTBOUND_MARK), family=family)
    diverted = connection_mark(config.tproxy_mark)
    yield _rule(mangle, "OUTPUT", tcp(), diverted, to=RESTORE_MARK)
    yield _rule(mangle, INBOUND, tcp(), ours, to=RETURN, position=1)
    arriving = in_interface("lo")
    for family in config.families:
        looped = (tcp(), _passthrough(family), arriving)
        yield _rule(mangle, INBOUND, *looped, to=RETURN, family=family, position=2)
    strangers = mark(constants.OUTBOUND_MARK, negate=True)
    yield _rule(mangle, INBOUND, tcp(), arriving, strangers, to=RETURN, position=3)
