"""The bundled plugin in an empty root: no libc, no loader, no shell, no iptables.

The pods' connections are made from outside, where there are programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from namespaces import inside
from netns.bare_root import DUAL_STACK, BareNode, bare
from netns.plugin import JSON, Answer
from netns.traffic import (
    APPLICATION,
    DNS,
    FAMILIES,
    INBOUND,
    OUTBOUND,
    OUTSIDE,
    POD,
    PROXY,
    PROXY_LISTENERS,
    TRANSPARENT_LISTENERS,
    Arrival,
    Call,
    Listener,
    Wire,
    endpoint,
    reach,
    serving,
    wired,
)

__all__ = ["bare"]  # a fixture
pytestmark = pytest.mark.netns


@pytest.fixture
def wire(new_netns: Callable[[], str]) -> Iterator[Wire]:
    """Set up a pod with an application and an outside; the proxy is each test's own."""
    servers = [Listener(80), Listener(53, udp=True)]
    with wired(new_netns, [Listener(8080), Listener(15021)], servers) as wire:
        yield wire


def places(arrivals: list[Arrival | str]) -> list[tuple[str, int, str] | str]:
    """Leave out of arrivals what differs from run to run."""
    return [one if isinstance(one, str) else one[:3] for one in arrivals]


def ruleset(netns: str) -> str:
    """List the rules of a namespace, of all that use nf_tables."""
    return inside(netns, ["nft", "list", "ruleset"])


def decision(answer: Answer) -> JSON:
    """Return the line of the log that says what the plugin did."""
    (line,) = [line for line in answer.log if line["level"] == "info"]
    return line


OUT = [Call(OUTSIDE[family], 80) for family in FAMILIES]
IN = [Call(POD[family], 8080) for family in FAMILIES]


def ends(at: str, calls: list[Call], port: int = 0) -> list[tuple[str, int, str]]:
    """Return where calls end that reach one server, by default under the port they asked for."""
    return [(at, port or call.port, endpoint(*call[:2])) for call in calls]


# -- without a pod's namespace -------------------------------------------------------------------


def test_version_is_answered(bare: BareNode) -> None:
    """It is what a runtime asks first."""
    answer = bare.call("VERSION")
    assert (answer.status, answer.stderr) == (0, "")
    assert "1.1.0" in answer.json["supportedVersions"]  # type: ignore[operator] # a list


def test_a_pod_outside_the_mesh_passes(bare: BareNode, pod_netns: str) -> None:
    """Nothing is programmed, and nothing is missed."""
    bare.node.add_pod(sidecar=False)
    answer = bare.call("ADD", pod_netns)
    assert (answer.status, answer.logged("", "warn")) == (0, False)
    assert ruleset(pod_netns) == ""
    assert bare.call("DEL", pod_netns).silent


# -- a captured pod ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("auto", "no iptables"), (None, "no iptables"), ("nftables", "")],
    ids=["auto", "default", "nftables"],
)
def test_the_bundled_plugin_captures_a_pod(
    bare: BareNode, wire: Wire, backend: str | None, reason: str
) -> None:
    """Out to 15001, in to 15006, the proxy past both; CHECK proves it, DEL undoes it."""
    added = bare.call("ADD", wire.pod, backend=backend)
    assert (added.status, added.logged("", "warn")) == (0, False)
    line = decision(added)
    assert line["backend"] == "nftables"
    assert reason in str(line["reason"])
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        assert places(reach(wire.pod, APPLICATION, *OUT)) == ends("proxy", OUT, OUTBOUND)
        assert places(reach(wire.outside, APPLICATION, *IN)) == ends("proxy", IN, INBOUND)
        assert places(reach(wire.pod, PROXY, *OUT)) == ends("outside", OUT)
        health = [Call(POD[family], 15021) for family in FAMILIES]
        assert places(reach(wire.outside, APPLICATION, *health)) == ends("pod", health)
    assert bare.call("CHECK", wire.pod, backend=backend).silent
    assert bare.call("DEL", wire.pod, backend=backend).silent
    assert (ruleset(wire.pod), bare.node.records) == ("", [])
    assert places(reach(wire.pod, APPLICATION, *OUT)) == ends("outside", OUT)
    assert places(reach(wire.outside, APPLICATION, *IN)) == ends("pod", IN)


def test_tproxy_and_dns_need_no_program_either(bare: BareNode, wire: Wire) -> None:
    """Routes and policy rules are made as the rules are, and go as they do."""
    bare.node.add_pod(
        annotations={"sidecar.istio.io/interceptionMode": "TPROXY"},
        env=[DUAL_STACK, {"name": "ISTIO_META_DNS_CAPTURE", "value": "true"}],
    )
    assert bare.call("ADD", wire.pod).status == 0
    questions = [Call(OUTSIDE[family], 53, udp=True) for family in FAMILIES]
    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS):
        arrived = reach(wire.outside, APPLICATION, *IN)
        assert places(arrived) == ends("proxy", IN, INBOUND)
        assert places(reach(wire.pod, APPLICATION, *OUT)) == ends("proxy", OUT, OUTBOUND)
        asked = places(reach(wire.pod, APPLICATION, *questions))
        assert [one[:2] for one in asked] == [("proxy", DNS)] * 2
    assert bare.call("CHECK", wire.pod).silent
    assert bare.call("DEL", wire.pod).silent
    assert ruleset(wire.pod) == ""
    for family in ("-4", "-6"):
        assert "133" not in inside(wire.pod, ["ip", family, "rule"])


def test_a_second_add_changes_nothing(bare: BareNode, pod_netns: str) -> None:
    """What is there is read back without any program, and found to be right."""
    assert bare.call("ADD", pod_netns).status == 0
    before = inside(pod_netns, ["nft", "-s", "-a", "list", "ruleset"])  # with handles
    assert bare.call("ADD", pod_netns).status == 0
    assert inside(pod_netns, ["nft", "-s", "-a", "list", "ruleset"]) == before != ""


def test_check_names_what_is_gone(bare: BareNode, pod_netns: str) -> None:
    """Code 107, and an ADD puts it right."""
    assert bare.call("ADD", pod_netns).status == 0
    inside(pod_netns, ["nft", "flush", "chain", "inet", "istio-proxy-nat", "istio-output"])
    answer = bare.call("CHECK", pod_netns)
    assert (answer.status, answer.code) == (1, 107)
    assert "istio-output" in answer.msg
    assert bare.call("ADD", pod_netns).status == 0
    assert bare.call("CHECK", pod_netns).silent


def test_iptables_is_refused_by_name_where_it_is_not(bare: BareNode, pod_netns: str) -> None:
    """Who wants it gets it, or an error that says what to install; nothing is half done."""
    answer = bare.call("ADD", pod_netns, backend="iptables")
    assert answer.status == 1
    assert "no usable iptables" in answer.msg
    assert (ruleset(pod_netns), bare.node.records) == ("", [])
