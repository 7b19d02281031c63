"""Which back end is chosen where nothing has to be asked, and what counts as ours."""

from __future__ import annotations

import pytest

from istio_cni.capture.backend import (
    ENTRIES_KEPT,
    IPTABLES,
    NFTABLES,
    Choice,
    choose,
    may_hold_iptables,
    ours_native,
)
from istio_cni.capture.iptables import fresh_texts
from istio_cni.capture.native import compile_rules
from istio_cni.edge import netlink
from istio_cni.edge.netfilter import Netfilter
from istio_cni.edge.netlink import Listed
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import PortRange


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("variant", ["", "nft", "legacy"])
@pytest.mark.parametrize("name", [IPTABLES, NFTABLES])
def test_a_back_end_asked_for_by_name_is_taken(name: str, variant: str, foreign: bool) -> None:
    """Whatever else is asked for, wherever it is; no other one is tried after it."""
    config = CaptureConfig(backend=name, iptables_variant=variant)
    net = Netfilter(deadline=0, search_path="/nowhere")
    assert choose(net, config, foreign=foreign) == Choice(
        name, "asked for by name", variant=variant
    )


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_variant_asked_for_by_name_means_iptables(variant: str, foreign: bool) -> None:
    """Also where it is not there: then its absence is the error."""
    net = Netfilter(deadline=0, search_path="/nowhere")
    assert choose(net, CaptureConfig(iptables_variant=variant), foreign=foreign) == Choice(
        IPTABLES, f"the variant {variant} is asked for by name", variant=variant
    )


@pytest.mark.parametrize(
    ("node_backend", "choice"),
    [
        ("nftables", Choice(NFTABLES, "no iptables works on this node")),
        (
            "iptables-legacy",
            Choice(IPTABLES, "iptables-legacy works on this node", sure=False, variant="legacy"),
        ),
    ],
)
def test_what_works_on_the_node_need_not_be_looked_for(
    monkeypatch: pytest.MonkeyPatch, node_backend: str, choice: Choice
) -> None:
    """Once somebody has tried; it may still turn out not to work for one pod."""
    monkeypatch.setattr(netlink, "nft_tables", lambda: ())
    net = Netfilter(deadline=0, search_path="/nowhere")
    assert choose(net, CaptureConfig(), node_backend) == choice


def test_our_tables_are_told_by_family_and_name() -> None:
    """With what their comments say, in the order in which they are listed."""
    tables = (
        Listed("inet", "istio-proxy-raw", "istio-cni 2"),
        Listed("ip", "istio-proxy-nat", "istio-cni 1"),
        Listed("inet", "istio-proxy", ""),
        Listed("inet", "filter", ""),
        Listed("inet", "istio-proxy-nat", ""),
    )
    found = ours_native(tables)
    assert [*found.items()] == [("istio-proxy-raw", "istio-cni 2"), ("istio-proxy-nat", "")]
    assert ours_native(()) == {}


@pytest.mark.parametrize("family", ["ip", "ip6"])
@pytest.mark.parametrize("name", ["nat", "mangle", "raw", "filter"])
def test_tables_of_iptables_may_hold_rules_of_ours(family: str, name: str) -> None:
    """Those that iptables-nft makes, among others, whoever made them."""
    assert may_hold_iptables((Listed("inet", "x", ""), Listed(family, name, "")))


def test_what_is_made_of_a_configuration_is_kept() -> None:
    """Most pods of a node have the same."""
    assert compile_rules(CaptureConfig()) is compile_rules(CaptureConfig())
    texts = [fresh_texts(CaptureConfig(drop_invalid=True)) for _ in range(2)]
    assert texts[0] is texts[1]


def test_what_is_long_is_made_anew() -> None:
    """Pods with long lists, each with others, must not fill the memory of who serves them."""
    for length, is_kept in ((ENTRIES_KEPT - 10, True), (ENTRIES_KEPT + 1, False)):
        ports = tuple(PortRange(port, port) for port in range(1, length + 1))
        config = CaptureConfig(outbound_ports_excluded=ports)
        for make in (compile_rules, fresh_texts):
            assert (make(config) is make(config)) is is_kept
            assert make(config) == make(config)
