"""What the nftables back end does to real connections, and where the reference's layout has gaps.

Each gap is shown open first, with the reference's text loaded by `nft`, then closed by us.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from istio_cni.capture import routing
from istio_cni.edge.netlink import Route
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.nftables import reference, render
from istio_cni.rules.sidecar import generate
from namespaces import call_inside, call_inside_as, inside
from netns.programming import ALL_DNS, TPROXY, check, config, program
from netns.traffic import (
    APPLICATION,
    DNS,
    FAMILIES,
    INBOUND,
    LOOPBACK,
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

APPLICATIONS = (Listener(8080), Listener(15020), Listener(15008))
SERVERS = (Listener(80), Listener(53), Listener(53, udp=True))
SERVICE = {4: "10.96.0.10", 6: "fd00:96::10"}  # nobody has it; the default route covers it
V4_ONLY: dict[str, object] = {"ENABLE_INBOUND_IPV6": False}
TO_OUTSIDE = [Call(OUTSIDE[family], 80) for family in FAMILIES]
TO_POD = [Call(POD[family], 8080) for family in FAMILIES]
QUESTIONS = [Call(OUTSIDE[family], 53, udp=True) for family in FAMILIES]
JUMP = "add rule inet istio-proxy-nat istio-output counter jump istio-output-dns\n"

modes = pytest.mark.parametrize("mode", [{}, {**TPROXY, **ALL_DNS}], ids=["REDIRECT", "TPROXY+DNS"])


@pytest.fixture
def wire(new_netns: Callable[[], str]) -> Iterator[Wire]:
    """Set up a pod with applications and an outside; the proxy is each test's own."""
    with wired(new_netns, APPLICATIONS, SERVERS) as wire:
        yield wire


def native(**settings: object) -> CaptureConfig:
    """Return the defaults of a captured pod, for this back end, with some settings changed."""
    return config("", BACKEND="nftables", **settings)


def load_reference(path: str, wanted: CaptureConfig) -> None:
    """Do what the reference does: its text to `nft`, then addresses and routes."""
    load(path, render(reference(generate(wanted))))

    def route_it() -> None:
        target = routing.wanted(wanted)
        with Route() as route:
            routing.apply(route, routing.read(route, target), target)

    call_inside(path, route_it)


def load(path: str, text: str) -> None:
    """Load a text with `nft`."""
    inside(path, ["nft", "-f", "-"], stdin=text)


def tables(path: str) -> list[str]:
    """Name the nf_tables tables of a namespace."""
    return inside(path, ["nft", "list", "tables"]).replace("table ", "").splitlines()


def rules_of(path: str, table: str, chain: str) -> list[Mapping[str, object]]:
    """List the rules of one chain, as `nft` parses them."""
    text = inside(path, ["nft", "-j", "list", "chain", "inet", table, chain])
    return [item["rule"] for item in json.loads(text)["nftables"] if "rule" in item]


def places(arrivals: Sequence[Arrival | str]) -> list[tuple[str, int] | str]:
    """Reduce arrivals to who took them at which port."""
    return [one if isinstance(one, str) else one[:2] for one in arrivals]


def ends(path: str, uid: int, *calls: Call) -> list[tuple[str, int] | str]:
    """Make connections as a user, and say who took each at which port."""
    return places(reach(path, uid, *calls))


# -- who ends where ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_connection_ends_where_the_table_says(wire: Wire, family: int) -> None:
    """The table is that of the reference: inbound, outbound, the proxy's own, loopback."""
    program(wire.pod, native())
    pod, out, service = POD[family], OUTSIDE[family], SERVICE[family]
    passthrough = Call(pod, 8080, source=PASSTHROUGH[family])
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        arrivals = [
            *reach(wire.outside, APPLICATION, *(Call(pod, port) for port in (8080, 15020, 15008))),
            *reach(wire.pod, APPLICATION, Call(out, 80), Call(service, 80), Call(pod, 8080)),
            *reach(wire.pod, APPLICATION, Call(LOOPBACK[family], 8080)),
            *reach(wire.pod, PROXY, Call(out, 80), Call(pod, 8080), passthrough),
        ]
    assert [one if isinstance(one, str) else one[:3] for one in arrivals] == [
        ("proxy", INBOUND, endpoint(pod, 8080)),
        ("pod", 15020, endpoint(pod, 15020)),
        ("pod", 15008, endpoint(pod, 15008)),
        ("proxy", OUTBOUND, endpoint(out, 80)),
        ("proxy", OUTBOUND, endpoint(service, 80)),
        ("pod", 8080, endpoint(pod, 8080)),
        ("pod", 8080, endpoint(LOOPBACK[family], 8080)),
        ("outside", 80, endpoint(out, 80)),
        ("proxy", INBOUND, endpoint(pod, 8080)),
        ("pod", 8080, endpoint(pod, 8080)),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_tproxy_shows_the_proxy_who_calls_whom(wire: Wire, family: int) -> None:
    """A transparent listener has both addresses; the rest is as with REDIRECT."""
    program(wire.pod, native(**TPROXY))
    passthrough = Call(POD[family], 8080, source=PASSTHROUGH[family])
    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS):
        (arrival,) = reach(wire.outside, APPLICATION, Call(POD[family], 8080))
        assert isinstance(arrival, Arrival)
        assert arrival[:3] == ("proxy", INBOUND, endpoint(POD[family], 8080))
        assert arrival.client.startswith(endpoint(OUTSIDE[family], 0)[:-1])
        assert ends(wire.pod, APPLICATION, Call(OUTSIDE[family], 80)) == [("proxy", OUTBOUND)]
        own = reach(
            wire.pod, PROXY, Call(OUTSIDE[family], 80), Call(POD[family], 8080), passthrough
        )
        assert places(own) == [("outside", 80), ("proxy", INBOUND), ("pod", 8080)]


def test_no_proxy_no_connection(wire: Wire) -> None:
    """A captured pod whose proxy is down is refused, it does not connect directly."""
    program(wire.pod, native())
    refused = ["Connection refused"] * 2
    assert ends(wire.pod, APPLICATION, *TO_OUTSIDE) == refused
    assert ends(wire.outside, APPLICATION, *TO_POD) == refused


# -- DNS ---------------------------------------------------------------------------------------


def ask_from(path: str, uid: int, family: int, port: int) -> str:
    """Ask the outside's DNS server from a port of the pod's address; return who answers."""

    def ask() -> str:
        af = {4: socket.AF_INET, 6: socket.AF_INET6}[family]
        with socket.socket(af, socket.SOCK_DGRAM) as client:
            client.settimeout(2)
            client.bind((POD[family], port))
            client.sendto(b"?", (OUTSIDE[family], 53))
            try:
                return str(json.loads(client.recv(512))[0])
            except TimeoutError:
                return "timeout"

    return call_inside_as(uid, path, ask)


def zones(path: str, port: int) -> set[str]:
    """Return the conntrack zones that hold connections from a port."""
    listed = inside(path, ["cat", "/proc/net/nf_conntrack"]).splitlines()
    words = [line.split() for line in listed if f"sport={port} dport=53 " in line]
    return {word for line in words for word in line if word.startswith("zone")}


@pytest.mark.parametrize("family", FAMILIES)
def test_dns_of_proxy_and_application_are_apart(wire: Wire, family: int) -> None:
    """Both may ask the same server from the same port at the same time; without zones they mix."""
    program(wire.pod, native(**ALL_DNS))
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        assert ask_from(wire.pod, APPLICATION, family, 4000) == "proxy"
        assert zones(wire.pod, 4000) == {"zone=2"}
        assert ask_from(wire.pod, PROXY, family, 4000) == "outside"
        assert zones(wire.pod, 4000) == {"zone=1", "zone=2"}
        assert ask_from(wire.pod, PROXY, family, 4001) == "outside"
        assert zones(wire.pod, 4001) == {"zone=1"}
        inside(wire.pod, ["nft", "delete", "table", "inet", "istio-proxy-raw"])
        assert ask_from(wire.pod, APPLICATION, family, 4002) == "proxy"
        assert ask_from(wire.pod, PROXY, family, 4002) != "outside"


def test_dns_is_answered_from_the_address_that_was_asked(wire: Wire) -> None:
    """Over TCP and UDP the proxy answers; the application cannot tell."""
    program(wire.pod, native(**ALL_DNS))
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        for out in OUTSIDE.values():
            over_tcp, over_udp = reach(
                wire.pod, APPLICATION, Call(out, 53), Call(out, 53, udp=True)
            )
            assert over_tcp[:3] == ("proxy", DNS, endpoint(out, 53))
            assert isinstance(over_udp, Arrival)
            assert (over_udp[:2], over_udp.replied_from) == (("proxy", DNS), endpoint(out, 53))


def test_only_the_named_dns_servers_are_captured(wire: Wire) -> None:
    """Questions to others leave."""
    servers = {"REDIRECT_DNS": True, "DNS_SERVERS_V4": [OUTSIDE[4]], "DNS_SERVERS_V6": ["fd99::9"]}
    program(wire.pod, native(**servers))
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        assert ends(wire.pod, APPLICATION, *QUESTIONS) == [("proxy", DNS), ("outside", 53)]


def test_dns_servers_of_a_family_that_is_not_captured(wire: Wire) -> None:
    """They are left alone, IPv4 is captured; the reference jumps to a chain that it never makes."""
    servers = {"REDIRECT_DNS": True, "DNS_SERVERS_V6": [OUTSIDE[6]]}
    wanted = native(**servers, **V4_ONLY)
    with pytest.raises(AssertionError, match="No such file or directory"):
        load(wire.pod, render(reference(generate(wanted))) + JUMP)
    program(wire.pod, wanted)
    assert check(wire.pod, wanted, {}) == ""
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        assert ends(wire.pod, APPLICATION, *QUESTIONS) == [("outside", 53)] * 2
        assert ends(wire.pod, APPLICATION, *TO_OUTSIDE) == [("proxy", OUTBOUND), ("outside", 80)]
        assert ends(wire.outside, APPLICATION, *TO_POD) == [("proxy", INBOUND), ("pod", 8080)]


# -- gaps of the reference ---------------------------------------------------------------------


def test_tproxy_without_listener_is_closed(wire: Wire) -> None:
    """Once the proxy has stopped, no connection reaches the application directly."""
    wanted = native(**TPROXY)
    calls = [call._replace(timeout_s=0.4) for call in TO_POD]
    load_reference(wire.pod, wanted)
    assert ends(wire.outside, APPLICATION, *calls) == [("pod", 8080)] * 2
    program(wire.pod, wanted)
    assert ends(wire.outside, APPLICATION, *calls) == ["timeout"] * 2
    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS):
        assert ends(wire.outside, APPLICATION, *TO_POD) == [("proxy", INBOUND)] * 2
        assert ends(wire.outside, APPLICATION, Call(POD[4], 15020)) == [("pod", 15020)]
    assert ends(wire.outside, APPLICATION, *calls) == ["timeout"] * 2


@modes
def test_ipv6_that_is_not_captured_is_left_alone(wire: Wire, mode: dict[str, object]) -> None:
    """IPv6 goes where it would without us, from and to everybody, while IPv4 is captured."""
    wanted = native(**mode, **V4_ONLY)

    def v6() -> list[tuple[str, int] | str]:
        pod, out = POD[6], OUTSIDE[6]
        here = [Call(out, 80), Call(out, 53), Call(out, 53, udp=True), Call(pod, 8080)]
        return [
            *ends(wire.pod, APPLICATION, *here, Call("::1", 8080)),
            *ends(wire.pod, PROXY, *here),
            *ends(wire.outside, APPLICATION, Call(pod, 8080), Call(pod, 15020)),
        ]

    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS):
        alone = v6()
        assert {one[0] for one in alone} == {"pod", "outside"}
        load_reference(wire.pod, wanted)
        assert ends(wire.pod, APPLICATION, TO_OUTSIDE[1]) == [("proxy", OUTBOUND)]
        if mode:
            assert ends(wire.pod, APPLICATION, QUESTIONS[1]) == [("proxy", DNS)]
        else:
            assert ends(wire.outside, APPLICATION, TO_POD[1]) == [("proxy", INBOUND)]
        program(wire.pod, wanted)
        assert v6() == alone
        assert ends(wire.pod, APPLICATION, TO_OUTSIDE[0]) == [("proxy", OUTBOUND)]
        assert ends(wire.outside, APPLICATION, TO_POD[0]) == [("proxy", INBOUND)]
    assert " ::6/" not in inside(wire.pod, ["ip", "-6", "address"])


def test_tables_that_are_not_needed_any_more_go(wire: Wire) -> None:
    """From TPROXY and DNS to less: what the reference leaves in mangle still captures."""
    former, latter = native(**TPROXY, **ALL_DNS), native(INBOUND_PORTS_EXCLUDE="8080")
    whole = ["inet istio-proxy-nat", "inet istio-proxy-mangle", "inet istio-proxy-raw"]
    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS):
        load_reference(wire.pod, former)
        load_reference(wire.pod, latter)
        assert tables(wire.pod) == whole
        program(wire.pod, former)
        assert tables(wire.pod) == whole
        load(wire.pod, render(reference(generate(latter))))
        assert ends(wire.outside, APPLICATION, *TO_POD) == [("proxy", INBOUND)] * 2
        program(wire.pod, latter)
        assert tables(wire.pod) == whole[:1]
        assert ends(wire.outside, APPLICATION, *TO_POD) == [("pod", 8080)] * 2
        others = [call._replace(port=8081) for call in TO_POD]
        assert ends(wire.outside, APPLICATION, *others) == [("proxy", INBOUND)] * 2
        assert ends(wire.pod, APPLICATION, *TO_OUTSIDE) == [("proxy", OUTBOUND)] * 2
        assert ends(wire.pod, APPLICATION, *QUESTIONS) == [("outside", 53)] * 2


@pytest.mark.parametrize("number", [64, 500])
@pytest.mark.parametrize("with_range", [False, True], ids=["single", "with a range"])
def test_any_number_of_owner_groups(wire: Wire, number: int, with_range: bool) -> None:
    """Members are captured and others are not; the reference's one rule takes 63 groups."""
    groups = [str(3000 + 2 * n) for n in range(number)]
    first, middle, last = 3000, 3000 + 2 * (number // 2), 3000 + 2 * (number - 1)
    members, others = {first, middle, last}, {first - 1, first + 1, last + 1, APPLICATION}
    if with_range:
        groups[10:20] = ["7000-7100"]
        members |= {7000, 7050, 7100}
        others |= {6999, 7101, 3020, 3038}
    program(wire.pod, native(OUTBOUND_OWNER_GROUPS_INCLUDE=",".join(groups)))
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        for family in FAMILIES:
            call = Call(OUTSIDE[family], 80)
            assert {ends(wire.pod, gid, call)[0] for gid in members} == {("proxy", OUTBOUND)}
            assert {ends(wire.pod, gid, call)[0] for gid in others} == {("outside", 80)}


def test_the_reference_s_rule_takes_no_64_groups(netns: str) -> None:
    """Its text for 63 groups loads; one match more and the kernel refuses all of it."""
    groups = [str(3000 + 2 * n) for n in range(63)]
    wanted = native(OUTBOUND_OWNER_GROUPS_INCLUDE=",".join(groups))
    text = render(reference(generate(wanted)))
    load(netns, text)
    last = f"skgid != {groups[-1]}"
    with pytest.raises(AssertionError, match="Invalid argument"):
        load(netns, text.replace(last, f"{last} skgid != 9"))


def test_long_lists_of_prefixes(wire: Wire) -> None:
    """Overlapping, adjacent and repeated ones, of both families, are one rule a family."""
    v4 = [f"10.{n}.{n % 3}.0/{23 + n % 3}" for n in range(1, 81)]
    v6 = [f"fd50:{n:x}::/{32 + n % 2}" for n in range(1, 81)]
    v4 += ["10.50.0.0/16", "10.50.7.0/24", "10.50.7.9/32", "255.255.255.255/32", "10.51.0.0/16"]
    v6 += ["fd50:4000::/18", "fd50:4001::/32", "fd50:4001::7/128", "ffff::/16"]
    v4 += [f"10.52.{n}.0/25" for n in range(31)]
    excluded = {4: ["10.50.0.0", "10.50.255.255", "10.51.255.255", "10.52.30.127", "10.1.1.1"]}
    excluded[6] = ["fd50:4000::", "fd50:7fff:ffff::1", "fd50:4001::7", "fd50:1::1"]
    captured = {4: ["10.49.255.1", "10.53.200.1", "10.52.30.128", "10.200.0.1", OUTSIDE[4]]}
    captured[6] = ["fd50:8000::", "fd50:3fff:ffff::1", "fd51::1", OUTSIDE[6]]
    wanted = native(OUTBOUND_IPRANGES_EXCLUDE=",".join(v4 + v6))
    assert len(v4 + v6) == 200
    for family in FAMILIES:
        lines = [f"addr replace {host} dev lo" for host in excluded[family] + captured[family][:-1]]
        inside(wire.outside, ["ip", "-batch", "-"], stdin="\n".join(lines))

    def probe() -> None:
        for family in FAMILIES:
            out = [Call(host, 80) for host in excluded[family]]
            assert ends(wire.pod, APPLICATION, *out) == [("outside", 80)] * len(out)
            out = [Call(host, 80) for host in captured[family]]
            assert ends(wire.pod, APPLICATION, *out) == [("proxy", OUTBOUND)] * len(out)

    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        load_reference(wire.pod, wanted)
        one_each = len(rules_of(wire.pod, "istio-proxy-nat", "istio-output"))
        probe()
        program(wire.pod, wanted)
        assert len(rules_of(wire.pod, "istio-proxy-nat", "istio-output")) <= one_each - 198
        probe()
    assert check(wire.pod, wanted, {}) == ""


def test_long_lists_of_ports(wire: Wire) -> None:
    """Excluded ports and ranges, in and out, and the neighbours that are not excluded."""
    ports = [str(port) for port in range(20001, 20080, 2)]
    listed = ",".join([*ports, "8080", "8081-8090", "8085-8095", "80"])
    program(wire.pod, native(INBOUND_PORTS_EXCLUDE=listed, OUTBOUND_PORTS_EXCLUDE=listed))
    with (
        serving(wire.pod, "proxy", PROXY_LISTENERS),
        serving(wire.outside, "outside", [Listener(20079), Listener(8095)]),
    ):
        for family in FAMILIES:
            pod, out = POD[family], OUTSIDE[family]
            into = [Call(pod, port) for port in (8080, 8096, 20002)]
            taken = [("pod", 8080), ("proxy", INBOUND), ("proxy", INBOUND)]
            assert ends(wire.outside, APPLICATION, *into) == taken
            calls = [Call(out, port) for port in (80, 8095, 20079, 8096, 20078)]
            assert ends(wire.pod, APPLICATION, *calls) == [
                *(("outside", port) for port in (80, 8095, 20079)),
                *[("proxy", OUTBOUND)] * 2,
            ]
