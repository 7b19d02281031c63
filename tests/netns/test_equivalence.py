"""Both back ends send every connection to the same place, whatever the configuration.

EQUIVALENCE_CONFIGURATIONS says how many configurations are drawn, EQUIVALENCE_SEED which ones;
EQUIVALENCE_ONLY is the number of the one to look at.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import pytest

from cases import CASES
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import Table
from istio_cni.rules.sidecar import generate
from netns.equivalence.comparison import Difference, Run, kind_of, unexpected
from netns.equivalence.configurations import PLAIN, Configuration, draw
from netns.equivalence.known import ALIKE, KNOWN
from netns.equivalence.places import NOBODY, OTHER_LOOPBACK, SECOND, STRANGER
from netns.equivalence.pods import Pod, two_pods
from netns.equivalence.probes import PROBES, STRAY_ICMP, STRAY_TCP, UDP, Probe, marked
from netns.equivalence.report import beside_defaults, report, shrink
from netns.programming import ALL_DNS, TPROXY, config, program
from netns.traffic import APPLICATION, OUTSIDE, POD, PROXY

pytestmark = pytest.mark.netns

USUAL_NUMBER, USUAL_SEED = 12, 1
NUMBER = int(os.environ.get("EQUIVALENCE_CONFIGURATIONS") or USUAL_NUMBER)
SEED = int(os.environ.get("EQUIVALENCE_SEED") or USUAL_SEED)
ONLY = os.environ.get("EQUIVALENCE_ONLY", "")
LONG, OFTEN, MOST_SHOWN = 30, 25, 8

LEAST = {"proxy, outbound": 5, "proxy, inbound": 5, "proxy, DNS": 2, "guest": 0.2}
LEAST |= {"pod": 20, "outside": 20, "second": 5, "Connection refused": 1, "reset": 0.5}
"""How many probes must end in each kind of place, a configuration, for a run to prove anything."""


@pytest.fixture
def pods(new_netns: Callable[[], str]) -> Iterator[tuple[Pod, Pod]]:
    """Set up two pods in equal neighbourhoods."""
    with two_pods(new_netns) as both:
        yield both


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[Run, int], None]:
    """Tell how far a long run has come: on a terminal in one line, elsewhere now and then."""
    begin = time.monotonic()

    def tell(run: Run, differing: int) -> None:
        if NUMBER >= LONG and not ONLY:
            with capsys.disabled():
                _tell(run, differing, time.monotonic() - begin)

    return tell


def _tell(run: Run, differing: int, seconds: float) -> None:
    done, last = run.configurations, run.configurations == NUMBER
    line = f"{done} of {NUMBER} configurations, {differing} differ, {seconds / done:.2f} s each"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{line}\033[K")
    elif done % OFTEN == 0 or last:
        sys.stderr.write(f"{line}\n")
    if last:
        ended = (f"{kind} {count}" for kind, count in run.places.most_common())
        sys.stderr.write(f"\nprobes ended: {', '.join(ended)}\n")
    sys.stderr.flush()


# -- the comparison ----------------------------------------------------------------------------


def test_every_connection_ends_at_the_same_place(
    pods: tuple[Pod, Pod], told: Callable[[Run, int], None]
) -> None:
    """What iptables and nftables make of the same settings cannot be told apart by connections."""
    run, differences = Run(pods), []
    for number in [int(ONLY)] if ONLY else range(NUMBER):
        configuration = draw(SEED, number)
        if ONLY and not configuration.fresh:
            run.program(draw(SEED, number - 1))
        difference = run.examine(configuration)
        if difference:
            differences.append(difference)
        told(run, len(differences))
    if differences:
        pytest.fail(all_of(pods, differences), pytrace=False)
    if NUMBER >= 10 and not ONLY:
        assert_meaningful(run)


def all_of(pods: tuple[Pod, Pod], differences: list[Difference]) -> str:
    """Report differences, the first one also with the fewest settings that show it."""
    fewest = beside_defaults(shrink(pods, differences[0]).settings)
    return "\n".join(
        (
            f"the back ends disagree under {len(differences)} configurations",
            *map(report, differences[:MOST_SHOWN]),
            f"of the first, these settings beside the defaults are enough: {fewest}",
        )
    )


def assert_meaningful(run: Run) -> None:
    """Hold a run to having seen enough of each kind, and most probes end now here, now there."""
    places = run.places
    few = {kind: places[kind] for kind in LEAST if places[kind] < LEAST[kind] * run.configurations}
    assert not few, f"too few of {few} in {dict(places)}"
    moved = sum(len(run.ended[probe]) > 1 for probe in PROBES)
    assert moved > len(PROBES) / 2, f"only {moved} of {len(PROBES)} probes ended differently"


# -- what is listed ----------------------------------------------------------------------------


def plain(**changed: object) -> Configuration:
    """Return the settings of a pod without annotations, some of them changed."""
    return Configuration(SEED, 0, {**PLAIN, **changed})


def test_known_differences_are_just_these(pods: tuple[Pod, Pod]) -> None:
    """A difference of the reference shows where the list says, and nowhere else."""
    run = Run(pods)
    assert run.examine(plain(DROP_INVALID=True)) is None
    assert run.known == {"Invalid drop": 2}
    assert run.examine(plain(DROP_INVALID=True, ENABLE_INBOUND_IPV6=False)) is None
    assert run.known == {"Invalid drop": 3}
    spared = {**TPROXY, "EXCLUDE_INTERFACES": "eth0"}
    assert run.examine(plain(DROP_INVALID=True, **spared)) is None
    assert run.known == {"Invalid drop": 3}


def test_every_listed_difference_has_its_reason() -> None:
    """Nothing is on the list without a word why."""
    assert {each.topic for each in KNOWN}.isdisjoint(ALIKE)
    assert all(each.reason for each in KNOWN)
    assert all(ALIKE.values())


# -- the harness sees --------------------------------------------------------------------------


class Crooked(Configuration):
    """A configuration that the second back end gets wrong."""

    @property
    def nftables(self) -> CaptureConfig:
        """Leave a port out."""
        return config("nft", **{**self.settings, "OUTBOUND_PORTS_EXCLUDE": "80"})


def test_a_difference_is_reported_with_all_that_repeats_it(pods: tuple[Pod, Pod]) -> None:
    """The report names probe, both ends, settings and command; few settings are left of many."""
    many = {"OUTBOUND_IPRANGES_INCLUDE": "10.0.0.0/8", "EXCLUDE_INTERFACES": "net1"}
    difference = Run(pods).examine(Crooked(*plain(**many)))
    assert difference is not None
    probe = Probe("pod", APPLICATION, APPLICATION, OUTSIDE[4], 80)
    ends = [kind_of(ending) for ending in difference.endings[probe]]
    assert ends == ["proxy, outbound", "outside"]
    text = report(difference, most=len(PROBES))
    for part in (
        *(f"seed {SEED}, number 0", str(probe), "iptables: proxy, outbound", "nftables: outside"),
        *('"EXCLUDE_INTERFACES": "net1"', f"EQUIVALENCE_SEED={SEED} EQUIVALENCE_ONLY=0 pytest"),
    ):
        assert part in text
    assert beside_defaults(shrink(pods, difference).settings) == {}


def test_a_known_difference_that_is_absent_is_reported(pods: tuple[Pod, Pod]) -> None:
    """Where both back ends drop what one should let through, the list is wrong, and that fails."""
    run, both_drop = Run(pods), Crooked(*plain(DROP_INVALID=True, OUTBOUND_PORTS_EXCLUDE="80"))
    assert run.program(both_drop) == ("", "")
    endings = run.call([probe for probe in PROBES if probe.kind == STRAY_ICMP])
    assert unexpected(both_drop.settings, endings) == endings
    assert set(endings.values()) == {("timeout", "timeout")}


class Change(NamedTuple):
    """A setting, two values of it, and a connection that they send to different places."""

    one: object
    other: object
    probe: Probe
    ends: tuple[str, str]
    beside: Mapping[str, object] = {}


OUT, OUT_V6 = (Probe("pod", APPLICATION, APPLICATION, OUTSIDE[family], 80) for family in (4, 6))
ASKED, ASKED_V6 = (probe._replace(port=53, kind=UDP) for probe in (OUT, OUT_V6))
INTO, OTHER, TUNNEL = (Probe("outside", 0, 0, POD[4], port) for port in (8080, 9090, 15008))
LOOPED = Probe("pod", PROXY, PROXY, OTHER_LOOPBACK, 8080)
MARKED = next(probe for probe in marked(4, 1337) if probe.source)
FROM_SECOND = Probe("second", 0, 0, "10.98.0.2", 8080)
FROM_GUEST = Probe("guest", 0, 0, OUTSIDE[4], 80)
STRAY = INTO._replace(kind=STRAY_TCP, source=STRANGER[4])
LEFT, TAKEN = ("proxy, outbound", "outside"), ("outside", "proxy, outbound")
LEFT_INBOUND, DNS_TAKEN = ("proxy, inbound", "pod"), ("outside", "proxy, DNS")
SERVERS = {"REDIRECT_DNS": True, "DNS_SERVERS_V4": [SECOND[4]]}

CHANGES = {
    "INBOUND_INTERCEPTION_MODE": Change("REDIRECT", "TPROXY", TUNNEL, LEFT_INBOUND[::-1]),
    "INBOUND_PORTS_INCLUDE": Change("*", "9090", INTO, LEFT_INBOUND),
    "INBOUND_PORTS_EXCLUDE": Change("", "8000-8100", INTO, LEFT_INBOUND),
    "INBOUND_CAPTURE_PORT": Change(
        "15006", str(NOBODY), INTO, ("proxy, inbound", "Connection refused")
    ),
    "INBOUND_TUNNEL_PORT": Change("15008", "9090", OTHER, LEFT_INBOUND),
    "OUTBOUND_IPRANGES_INCLUDE": Change("*", "10.96.0.0/16,fd00::/8", OUT, LEFT),
    "OUTBOUND_IPRANGES_EXCLUDE": Change("", "10.99.0.7/24", OUT, LEFT),
    "OUTBOUND_PORTS_INCLUDE": Change("", "80", OUT, TAKEN, {"OUTBOUND_IPRANGES_INCLUDE": ""}),
    "OUTBOUND_PORTS_EXCLUDE": Change("", "0-80", OUT, LEFT),
    "HOST_IPV4_LOOPBACK_CIDR": Change("127.0.0.1/32", "127.0.0.7/8", LOOPED, LEFT_INBOUND),
    "PROXY_PORT": Change("15001", str(NOBODY), OUT, ("proxy, outbound", "Connection refused")),
    "PROXY_UID": Change("1337", "1000-1999", OUT, LEFT),
    "PROXY_GID": Change("1337", "2000,1000", OUT, LEFT),
    "OUTBOUND_OWNER_GROUPS_INCLUDE": Change("*", "1337,2000-2999", OUT, LEFT),
    "OUTBOUND_OWNER_GROUPS_EXCLUDE": Change("", "1000", OUT, LEFT),
    "EXCLUDE_INTERFACES": Change("", "net+", FROM_SECOND, LEFT_INBOUND),
    "KUBE_VIRT_INTERFACES": Change("", "vnet0", FROM_GUEST, ("proxy, inbound", "proxy, outbound")),
    "REDIRECT_DNS": Change(False, True, ASKED, DNS_TAKEN, ALL_DNS),
    "CAPTURE_ALL_DNS": Change(False, True, ASKED, DNS_TAKEN, SERVERS),
    "DNS_SERVERS_V4": Change([], [OUTSIDE[4]], ASKED, DNS_TAKEN, SERVERS),
    "DNS_SERVERS_V6": Change([], [OUTSIDE[6]], ASKED_V6, DNS_TAKEN, SERVERS),
    "ENABLE_INBOUND_IPV6": Change(True, False, OUT_V6, LEFT),
    "INBOUND_TPROXY_MARK": Change("1337", "7", MARKED, ("pod", "timeout"), TPROXY),
    "DROP_INVALID": Change(False, True, STRAY, ("reset", "timeout")),
}
NO_EFFECT = {
    "DUAL_STACK",  # ENABLE_INBOUND_IPV6 says already what it would decide
    "INBOUND_TPROXY_ROUTE_TABLE",  # any number will do
}


def test_every_setting_shows(pods: tuple[Pod, Pod]) -> None:
    """Pods that differ in one setting are told apart: the comparison is blind in none of them."""
    run, seen = Run(pods), {}
    for key, change in CHANGES.items():
        one, other = ({**change.beside, key: value} for value in (change.one, change.other))
        wanted = config("nft", BACKEND="iptables", **one), config(BACKEND="nftables", **other)
        failures = run.both(program, *((each,) for each in wanted))
        assert failures == ("", ""), key
        endings = run.call((change.probe,))
        assert unexpected(plain().settings, endings) == endings, key
        seen[key] = tuple(map(kind_of, endings[change.probe]))
    assert seen == {key: change.ends for key, change in CHANGES.items()}


def test_what_the_reference_leaves_open_is_closed(pods: tuple[Pod, Pod]) -> None:
    """Without a listener for TPROXY nothing passes; IPv6 that is not captured is left alone."""
    run = Run(pods)
    assert run.examine(plain(**TPROXY, INBOUND_CAPTURE_PORT=str(NOBODY))) is None
    assert run.ended[INTO] == {"timeout": 1}
    assert run.ended[OUT_V6] == {"proxy, outbound": 1}
    assert run.examine(plain(ENABLE_INBOUND_IPV6=False)) is None
    assert run.ended[OUT_V6] == {"proxy, outbound": 1, "outside": 1}


# -- what is drawn -----------------------------------------------------------------------------


def test_a_configuration_can_be_drawn_again() -> None:
    """Seed and number are all that it depends on."""
    assert draw(7, 300) == draw(7, 300)
    assert draw(7, 300).settings != draw(8, 300).settings != draw(8, 301).settings


def test_every_setting_is_drawn_and_proved_to_show() -> None:
    """No setting that moves packets stays the same, and each has its row above."""
    drawn = [draw(SEED, number) for number in range(100)]
    for key in drawn[0].settings:
        assert len({str(each.settings[key]) for each in drawn}) > 1, key
    assert set(drawn[0].settings) == set(PLAIN) == {*CHANGES, *NO_EFFECT}
    assert {each.variant for each in drawn} == {"nft", "legacy"}


def test_every_chain_is_drawn() -> None:
    """Even the usual run leaves out no chain that some configuration has."""
    drawn = [draw(USUAL_SEED, number).iptables for number in range(USUAL_NUMBER)]
    assert _chains(drawn) == _chains(case.config for case in CASES.values())


def _chains(configs: Iterable[CaptureConfig]) -> set[tuple[Table, str]]:
    return {(rule.table, rule.chain) for each in configs for rule in generate(each).rules}
