"""What capture does to real connections, with both variants of iptables and both families."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from namespaces import inside
from netns.programming import ALL_DNS, TPROXY, VARIANTS, config, program
from netns.traffic import (
    APPLICATION,
    DNS,
    FAMILIES,
    INBOUND,
    OUTBOUND,
    OUTSIDE,
    PASSTHROUGH,
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

pytestmark = pytest.mark.netns

APPLICATIONS = (Listener(8080), Listener(22), Listener(15021))
SERVERS = (Listener(80), Listener(15020), Listener(53), Listener(53, udp=True))
variants = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture
def wire(new_netns: Callable[[], str]) -> Iterator[Wire]:
    """Set up a pod with applications and an outside; the proxy is each test's own."""
    with wired(new_netns, APPLICATIONS, SERVERS) as wire:
        yield wire


def places(arrivals: list[Arrival | str]) -> list[tuple[str, int, str] | str]:
    """Leave out of arrivals what differs from run to run."""
    return [one if isinstance(one, str) else one[:3] for one in arrivals]


@variants
def test_application_reaches_the_proxy(wire: Wire, variant: str) -> None:
    """What it sends to the outside ends at the outbound listener, the destination still known."""
    program(wire.pod, config(variant))
    calls = [Call(OUTSIDE[family], 80) for family in FAMILIES]
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        assert places(reach(wire.pod, APPLICATION, *calls)) == [
            ("proxy", OUTBOUND, endpoint(*call[:2])) for call in calls
        ]


@variants
def test_outside_reaches_the_proxy(wire: Wire, variant: str) -> None:
    """What arrives for any port of the pod ends at the inbound listener, ssh included."""
    program(wire.pod, config(variant))
    calls = [Call(POD[family], port) for family in FAMILIES for port in (8080, 22)]
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        assert places(reach(wire.outside, APPLICATION, *calls)) == [
            ("proxy", INBOUND, endpoint(*call[:2])) for call in calls
        ]


@variants
def test_without_proxy_nothing_passes(wire: Wire, variant: str) -> None:
    """A captured pod whose proxy is down is refused, it does not connect directly."""
    program(wire.pod, config(variant))
    out = [Call(OUTSIDE[family], 80) for family in FAMILIES]
    into = [Call(POD[family], 8080) for family in FAMILIES]
    assert reach(wire.pod, APPLICATION, *out) == ["Connection refused"] * 2
    assert reach(wire.outside, APPLICATION, *into) == ["Connection refused"] * 2


@variants
def test_excluded_ports_are_direct(wire: Wire, variant: str) -> None:
    """An excluded port is left alone, out and in, while its neighbours are captured."""
    program(wire.pod, config(variant, INBOUND_PORTS_EXCLUDE="15021,22"))
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        for family in FAMILIES:
            out, into = OUTSIDE[family], POD[family]
            assert places(reach(wire.pod, APPLICATION, Call(out, 15020), Call(out, 80))) == [
                ("outside", 15020, endpoint(out, 15020)),
                ("proxy", OUTBOUND, endpoint(out, 80)),
            ]
            calls = [Call(into, port) for port in (15021, 22, 8080)]
            assert places(reach(wire.outside, APPLICATION, *calls)) == [
                ("pod", 15021, endpoint(into, 15021)),
                ("pod", 22, endpoint(into, 22)),
                ("proxy", INBOUND, endpoint(into, 8080)),
            ]


@variants
def test_included_ports_alone_are_captured(wire: Wire, variant: str) -> None:
    """With no range included, a listed port is all of the outbound traffic that is captured."""
    only = {"OUTBOUND_PORTS_INCLUDE": "80", "OUTBOUND_IPRANGES_INCLUDE": ""}
    program(wire.pod, config(variant, **only, OUTBOUND_PORTS_EXCLUDE=""))
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        for out in OUTSIDE.values():
            assert places(reach(wire.pod, APPLICATION, Call(out, 80), Call(out, 15020))) == [
                ("proxy", OUTBOUND, endpoint(out, 80)),
                ("outside", 15020, endpoint(out, 15020)),
            ]


@variants
def test_proxy_itself_is_direct(wire: Wire, variant: str) -> None:
    """The proxy's own connections leave as they are, TCP and UDP, DNS included."""
    program(wire.pod, config(variant, **ALL_DNS))
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        for out in OUTSIDE.values():
            calls = (Call(out, 80), Call(out, 53), Call(out, 53, udp=True))
            assert places(reach(wire.pod, PROXY, *calls)) == [
                ("outside", 80, endpoint(out, 80)),
                ("outside", 53, endpoint(out, 53)),
                ("outside", 53, ""),
            ]


@variants
def test_dns_reaches_the_proxy_and_its_answer_the_application(wire: Wire, variant: str) -> None:
    """Questions to any server are answered by the proxy, under the address that was asked."""
    program(wire.pod, config(variant, **ALL_DNS))
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        for out in OUTSIDE.values():
            tcp, udp = reach(wire.pod, APPLICATION, Call(out, 53), Call(out, 53, udp=True))
            assert tcp[:3] == ("proxy", DNS, endpoint(out, 53))
            assert isinstance(udp, Arrival)
            assert (udp.at, udp.port, udp.replied_from) == ("proxy", DNS, endpoint(out, 53))


@variants
def test_only_the_named_dns_servers_are_captured(wire: Wire, variant: str) -> None:
    """With servers given, questions to others leave; UDP is otherwise not captured at all."""
    servers = {"REDIRECT_DNS": True, "DNS_SERVERS_V4": [OUTSIDE[4]], "DNS_SERVERS_V6": ["fd99::9"]}
    program(wire.pod, config(variant, **servers))
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        calls = [Call(OUTSIDE[family], 53, udp=True) for family in FAMILIES]
        named, other = reach(wire.pod, APPLICATION, *calls)
    assert named[:2] == ("proxy", DNS)
    assert other[:2] == ("outside", 53)


@variants
def test_proxy_calling_its_own_pod_is_inbound(wire: Wire, variant: str) -> None:
    """A service that resolves to the pod itself gets its inbound policies applied."""
    program(wire.pod, config(variant))
    calls = [Call(POD[family], 8080) for family in FAMILIES]
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        assert places(reach(wire.pod, PROXY, *calls)) == [
            ("proxy", INBOUND, endpoint(*call[:2])) for call in calls
        ]


@variants
@pytest.mark.parametrize("mode", [{}, TPROXY], ids=["REDIRECT", "TPROXY"])
def test_passthrough_address_is_direct(wire: Wire, variant: str, mode: dict[str, object]) -> None:
    """What the proxy sends from 127.0.0.6 or ::6 reaches the application and does not loop."""
    program(wire.pod, config(variant, **mode))
    calls = [Call(POD[family], 8080, source=PASSTHROUGH[family]) for family in FAMILIES]
    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS if mode else PROXY_LISTENERS):
        assert places(reach(wire.pod, PROXY, *calls)) == [
            ("pod", 8080, endpoint(*call[:2])) for call in calls
        ]


@variants
def test_application_calling_its_own_pod_is_direct(wire: Wire, variant: str) -> None:
    """Applications of one pod talk to each other without the proxy, by any address of the pod."""
    program(wire.pod, config(variant))
    calls = [Call(host, 8080) for host in (*POD.values(), "127.0.0.1", "::1")]
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        assert places(reach(wire.pod, APPLICATION, *calls)) == [
            ("pod", 8080, endpoint(*call[:2])) for call in calls
        ]


@variants
def test_tproxy_keeps_both_addresses(wire: Wire, variant: str) -> None:
    """A transparent listener sees who calls whom; outbound traffic is redirected as ever."""
    program(wire.pod, config(variant, **TPROXY))
    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS):
        for family in FAMILIES:
            (arrival,) = reach(wire.outside, APPLICATION, Call(POD[family], 8080))
            assert isinstance(arrival, Arrival)
            assert arrival[:3] == ("proxy", INBOUND, endpoint(POD[family], 8080))
            assert arrival.client.startswith(endpoint(OUTSIDE[family], 0)[:-1])
            assert places(reach(wire.pod, APPLICATION, Call(OUTSIDE[family], 80))) == [
                ("proxy", OUTBOUND, endpoint(OUTSIDE[family], 80))
            ]


@variants
def test_tproxy_without_listener_is_closed(wire: Wire, variant: str) -> None:
    """Once the proxy has stopped, connections fail; none reaches the application directly."""
    program(wire.pod, config(variant, **TPROXY))
    calls = [Call(POD[family], 8080, timeout_s=0.4) for family in FAMILIES]
    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS):
        assert [one[:2] for one in reach(wire.outside, APPLICATION, *calls)] == [
            ("proxy", INBOUND)
        ] * 2
    assert reach(wire.outside, APPLICATION, *calls) == ["timeout"] * 2


@variants
def test_tproxy_works_where_lo_was_down(wire: Wire, variant: str) -> None:
    """The routes of diverted traffic need `lo`, so it is brought up first."""
    inside(wire.pod, ["ip", "link", "set", "lo", "down"])
    program(wire.pod, config(variant, **TPROXY))
    calls = [Call(POD[family], 8080) for family in FAMILIES]
    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS):
        assert [one[:2] for one in reach(wire.outside, APPLICATION, *calls)] == [
            ("proxy", INBOUND)
        ] * 2


@variants
def test_pod_with_ipv4_only_is_captured_in_ipv4_only(
    new_netns: Callable[[], str], variant: str
) -> None:
    """Nothing of IPv6 is programmed, not even an address on `lo`."""
    with (
        wired(new_netns, APPLICATIONS, SERVERS, families=(4,)) as wire,
        serving(wire.pod, "proxy", PROXY_LISTENERS),
    ):
        outcome = program(wire.pod, config(variant, ENABLE_INBOUND_IPV6=False))
        assert outcome.variants == {"iptables": variant}
        assert " ::6/" not in inside(wire.pod, ["ip", "-6", "address"])
        (arrival,) = reach(wire.pod, APPLICATION, Call(OUTSIDE[4], 80))
        assert arrival[:2] == ("proxy", OUTBOUND)
