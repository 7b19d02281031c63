"""What the generator does where a text alone does not say why."""

from __future__ import annotations

import pytest

from cases import CASES
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.iptables import render, specification
from istio_cni.rules.model import (
    BUILT_IN_CHAINS,
    Family,
    Table,
    VerdictKind,
    is_ours,
    kernel_order,
)
from istio_cni.rules.sidecar import generate


def kernel(name: str, table: Table, chain: str, family: Family = Family.V4) -> list[str]:
    """Return the rules of a case's chain as the kernel meets them."""
    order = kernel_order(generate(CASES[name].config).of(family))
    return [specification(rule) for rule in order[table][chain]]


@pytest.mark.parametrize("name", CASES)
def test_every_rule_belongs_to_a_captured_family(name: str) -> None:
    """A renderer that puts both families into one table need not look at the configuration."""
    ruleset = generate(CASES[name].config)
    assert {rule.family for rule in ruleset.rules} <= {None, *ruleset.families}


@pytest.mark.parametrize("name", CASES)
def test_every_jump_leads_to_a_chain_with_rules(name: str) -> None:
    """In each family: a jump to a chain that nobody fills would be left behind by other tools."""
    ruleset = generate(CASES[name].config)
    for family in ruleset.families:
        rules = ruleset.of(family)
        filled = {(rule.table, rule.chain) for rule in rules}
        jumps = {(r.table, r.verdict.chain) for r in rules if r.verdict.kind is VerdictKind.JUMP}
        assert jumps <= filled


@pytest.mark.parametrize("name", CASES)
def test_all_chains_are_ours_or_built_in(name: str) -> None:
    """And nothing is ever put into the filter table."""
    for rule in generate(CASES[name].config).rules:
        assert rule.chain in BUILT_IN_CHAINS or is_ours(rule.chain)
        assert rule.table is not Table.FILTER


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_rules_fits_one_table_for_both_families(name: str) -> None:
    """Merged into one list, each family's rules keep the order that they have by themselves."""
    ruleset = generate(CASES[name].config)
    merged = kernel_order(ruleset.rules)
    for family in ruleset.families:
        alone = kernel_order(ruleset.of(family))
        for table, chains in alone.items():
            for chain, rules in chains.items():
                here = [rule for rule in merged[table][chain] if rule.family in (None, family)]
                if chain != "ISTIO_INBOUND" or table is not Table.MANGLE:
                    assert here == rules
                else:  # the pass-through rules of both families share one place; all are returns
                    assert here[3:] == rules[3:]
                    assert set(here[:3]) == set(rules[:3])


def test_rerouted_interfaces_stand_in_reverse() -> None:
    """Each insertion goes to the head: latest range, last interface first; what is left returns."""
    assert kernel("appendix-c", Table.NAT, "PREROUTING") == [
        "-i tap1 -d 10.0.0.0/8 -j ISTIO_REDIRECT",
        "-i tap0 -d 10.0.0.0/8 -j ISTIO_REDIRECT",
        "-i tap1 -j RETURN",
        "-i tap0 -j RETURN",
        "-p tcp -j ISTIO_INBOUND",
    ]
    assert kernel("appendix-d", Table.NAT, "PREROUTING") == [
        "-i eth2 -j ISTIO_REDIRECT",
        "-i eth1 -j ISTIO_REDIRECT",
        "-i eth2 -j RETURN",
        "-i eth1 -j RETURN",
    ]


def test_tproxy_marks_are_looked_at_before_ports() -> None:
    """What the proxy has sent or has in hand already is not diverted again."""
    assert kernel("appendix-b", Table.MANGLE, "ISTIO_INBOUND") == [
        "-p tcp -m mark --mark 1337 -j RETURN",
        "-p tcp -s 127.0.0.6/32 -i lo -j RETURN",
        "-p tcp -i lo -m mark ! --mark 1338 -j RETURN",
        "-p tcp --dport 8080 -m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT",
        "-p tcp --dport 8080 -j ISTIO_TPROXY",
    ]


def test_owner_groups_come_before_dns_and_ranges() -> None:
    """Traffic of strangers is left alone altogether, their DNS included."""
    rules = kernel("no-group", Table.NAT, "ISTIO_OUTPUT")
    at = rules.index("-j RETURN")
    assert "-j ISTIO_OUTPUT_DNS" in rules[at:]
    assert "-j ISTIO_REDIRECT" in rules[at:]


@pytest.mark.parametrize(
    "prefix", ["127.0.0.0/8", "127.3.0.0/16", "::1/128", "::ffff:127.0.0.1/128"]
)
@pytest.mark.parametrize("dns", [False, True])
def test_a_loopback_range_captures_the_applications_own_calls(prefix: str, dns: bool) -> None:
    """Both families lose the rule that leaves them alone, whichever family the range is of."""
    config = CaptureConfig(
        ipv6=True, outbound_ranges=("10.0.0.0/8",), redirect_dns=dns, capture_all_dns=dns
    )
    for family in Family:
        assert "! --uid-owner" in render(generate(config), family)
        wider = config._replace(outbound_ranges=("10.0.0.0/8", prefix))
        assert "! --uid-owner" not in render(generate(wider), family)
        assert "! --gid-owner" not in render(generate(wider), family)


def test_everything_is_no_loopback_range() -> None:
    """Neither the star nor a range of length 0 asks for the application's calls to itself."""
    for ranges in ("*", ("0.0.0.0/0",)):
        text = render(generate(CaptureConfig(outbound_ranges=ranges)), Family.V4)
        assert "-o lo -m owner ! --uid-owner 1337 -j RETURN" in text


def test_only_user_ids_spare_port_53() -> None:
    """With DNS captured, the proxy's user may ask a resolver on `lo`, its group may not."""
    text = render(generate(CASES["dns-all"].config), Family.V4)
    assert "--dports 53,15008 -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT" in text
    assert "! --dport 15008 -m owner --gid-owner 1337 -j ISTIO_IN_REDIRECT" in text


@pytest.mark.parametrize("name", CASES)
def test_a_rule_set_is_a_function_of_its_configuration(name: str) -> None:
    """Two runs agree: rules are rendered once and compared with what was rendered long ago."""
    assert generate(CASES[name].config) == generate(CASES[name].config)
