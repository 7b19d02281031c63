"""From one back end to another: in the end one captures, and on the way there is always one."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from istio_cni.capture import apply
from istio_cni.errors import ProgrammingFailed
from istio_cni.rules.config import CaptureConfig
from namespaces import enter, inside
from netns.plugin import Node
from netns.programming import (
    ALL_DNS,
    FIRST_TABLE_ONLY,
    TPROXY,
    VARIANTS,
    check,
    clean_up,
    config,
    holders,
    program,
    restore,
    started,
    state,
    wrap,
)
from netns.test_faults_killed import without_empty_tables
from netns.test_faults_restore import no_gap
from netns.traffic import (
    APPLICATION,
    OUTSIDE,
    TRANSPARENT_LISTENERS,
    Listener,
    Wire,
    count_direct,
    direct_arrivals,
    serving,
    wired,
)

pytestmark = pytest.mark.netns

NATIVE = "nftables"
WHOLE = {**TPROXY, **ALL_DNS}
FOREIGN = """\
*nat
:MESH - [0:0]
-A POSTROUTING -p tcp --dport 4000 -j MESH
-A MESH -p tcp -j ACCEPT
COMMIT
*filter
-A INPUT -p tcp --dport 4002 -j DROP
COMMIT
"""
EVERY_SWITCH = ("nft", NATIVE, "legacy", NATIVE, "nft", "legacy", "nft")
"""Back ends in an order that has each of the six switches once."""

variants = pytest.mark.parametrize("variant", VARIANTS)
modes = pytest.mark.parametrize("mode", [ALL_DNS, WHOLE], ids=["REDIRECT", "TPROXY"])


@pytest.fixture
def wire(new_netns: Callable[[], str]) -> Iterator[Wire]:
    """Set up a captured pod's surroundings: application, proxy, servers outside."""
    with (
        wired(new_netns, (Listener(8080),), (Listener(80), Listener(53, udp=True))) as wire,
        serving(wire.pod, "proxy", TRANSPARENT_LISTENERS),
    ):
        yield wire


def by(backend: str, **settings: object) -> CaptureConfig:
    """Return the defaults of a captured pod for a back end, named by variant if it is iptables."""
    if backend == NATIVE:
        return config("", BACKEND=NATIVE, **settings)
    return config(backend, BACKEND="iptables", **settings)


def native_tables(path: str) -> list[str]:
    """Name our own tables in a namespace."""
    listed = inside(path, ["nft", "list", "tables", "inet"]).split()
    return [word for word in listed if word.startswith("istio-proxy-")]


def captures(path: str) -> set[str]:
    """Say which back ends hold rules of ours in a namespace; more than one is one too many."""
    return {*holders(path).values(), *([NATIVE] if native_tables(path) else [])}


def whole_state(path: str) -> str:
    """Return all that any back end may change in a namespace."""
    own = [
        inside(path, ["nft", "-s", "list", "table", "inet", table])
        for table in sorted(native_tables(path))
    ]
    return "".join([state(path), *own])


def put_foreign(path: str, variant: str) -> None:
    """Load rules of somebody else, of both families, through one variant; none if it is ""."""
    for base in ("iptables", "ip6tables") if variant else ():
        restore(path, f"{base}-{variant}", FOREIGN)


# -- one after the other -----------------------------------------------------------------------


@pytest.mark.parametrize("foreign", ["", *VARIANTS], ids=["fresh", *VARIANTS])
def test_each_takes_over_from_each(netns: str, foreign: str) -> None:
    """What one back end has made is replaced as a whole, CHECK agrees, foreign rules stay."""
    put_foreign(netns, foreign)
    before, tables = state(netns), inside(netns, ["nft", "list", "tables"])
    clean: dict[str, str] = {}
    former: tuple[CaptureConfig, dict[str, str]] | None = None
    for backend in EVERY_SWITCH[:5] if foreign else EVERY_SWITCH:
        wanted = by(backend, **WHOLE)
        outcome = program(netns, wanted)
        assert outcome.warnings == []
        assert captures(netns) == {backend}
        assert check(netns, wanted, outcome.variants) == ""
        assert former is None or check(netns, *former) != ""
        if backend in clean:
            assert whole_state(netns) == clean[backend]
            assert program(netns, wanted).changed == []
        else:
            clean[backend] = whole_state(netns)
        former = wanted, outcome.variants
    clean_up(netns)
    assert captures(netns) == set()
    assert (state(netns), inside(netns, ["nft", "list", "tables"])) == (before, tables)


@pytest.mark.parametrize(
    ("one", "other"), [("nft", NATIVE), ("legacy", NATIVE), (NATIVE, "nft"), (NATIVE, "legacy")]
)
def test_refused_unless_it_may_replace(netns: str, one: str, other: str) -> None:
    """Without leave to replace, nothing is touched and the error says how to get it."""
    program(netns, by(one, **WHOLE))
    before = whole_state(netns)
    with pytest.raises(ProgrammingFailed, match=r"other rules of ours .* --reconcile$"):
        program(netns, by(other, **WHOLE), existing=apply.REFUSE)
    assert whole_state(netns) == before


def test_refusal_names_the_first_difference(netns: str) -> None:
    """Of another configuration, and the back end where that is another one."""
    program(netns, by(NATIVE))
    with pytest.raises(ProgrammingFailed, match=r"istio-inbound rule 2: .* instead of"):
        program(netns, by(NATIVE, INBOUND_PORTS_EXCLUDE="80"), existing=apply.REFUSE)
    with pytest.raises(ProgrammingFailed, match="the back end nftables has made inet istio-proxy"):
        program(netns, by("nft"), existing=apply.REFUSE)


@pytest.mark.parametrize("backend", [*VARIANTS, NATIVE])
def test_nothing_asked_for_by_name_keeps_what_is_there(netns: str, backend: str) -> None:
    """A second run that leaves the back end open finds all in place."""
    program(netns, by(backend, **WHOLE))
    outcome = program(netns, config("", **WHOLE))
    assert outcome.changed == []
    assert outcome.backend == (NATIVE if backend == NATIVE else "iptables")
    assert captures(netns) == {backend}


@variants
def test_capture_by_both_is_mended(netns: str, variant: str) -> None:
    """As after a switch that was stopped half way: whichever comes next stays alone."""
    for last in (NATIVE, variant):
        program(netns, by(variant, **WHOLE))
        text = inside(netns, [f"iptables-{variant}-save"])
        clean_up(netns)
        program(netns, by(NATIVE, **WHOLE))
        restore(netns, f"iptables-{variant}", text)
        assert captures(netns) == {NATIVE, variant}
        assert check(netns, by(NATIVE, **WHOLE), {}) != ""
        program(netns, by(last, **WHOLE))
        assert captures(netns) == {last}
        program(netns, by(NATIVE, **WHOLE))
        clean_up(netns)
        assert captures(netns) == set()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_cannot_be_read_is_told(netns: str, tmp_path: Path, variant: str) -> None:
    """Somebody with programs of their own was here, and the node has none: ours go, the rest stays.

    An ADD warns of it; a clean-up does not claim to have removed it.
    """
    program(netns, by(variant))
    outcome = program(netns, by(NATIVE), only=tmp_path)
    assert any("iptables has tables here that cannot be read" in text for text in outcome.warnings)
    assert check(netns, by(NATIVE), {}) != ""
    with pytest.raises(ProgrammingFailed, match="cannot be read and stay"):
        clean_up(netns, only=tmp_path)
    assert native_tables(netns) == []
    clean_up(netns)
    assert captures(netns) == set()


@pytest.mark.parametrize("order", [("iptables", NATIVE), (NATIVE, "iptables")], ids=" to ".join)
def test_plugin_follows_the_configuration(
    node: Node, pod_netns: str, order: tuple[str, str]
) -> None:
    """ADD by one back end, CHECK, ADD and CHECK by the other, DEL: nothing is left of either."""
    before = state(pod_netns)
    node.add_pod()
    for backend in order:
        settings = node.config(backend=backend)
        assert node.call("ADD", pod_netns, config=settings).status == 0
        assert len(captures(pod_netns)) == 1
        assert (captures(pod_netns) == {NATIVE}) == (backend == NATIVE)
        for reader in order:
            assert node.call("CHECK", pod_netns, config=node.config(backend=reader)).silent
    assert node.call("DEL", pod_netns, config=node.config(backend=order[0])).silent
    assert captures(pod_netns) == set()
    assert state(pod_netns) == before


# -- under traffic -----------------------------------------------------------------------------


@variants
@modes
def test_switch_under_traffic_has_no_gap(wire: Wire, variant: str, mode: dict[str, object]) -> None:
    """There and back while connections are made, also into the other mode."""
    other = WHOLE if mode == ALL_DNS else ALL_DNS
    program(wire.pod, by(variant, **mode))
    with no_gap(wire):
        for backend, settings in (
            (NATIVE, mode),
            (variant, mode),
            (NATIVE, other),
            (variant, mode),
        ):
            program(wire.pod, by(backend, **settings))
    assert captures(wire.pod) == {variant}


def test_another_configuration_under_traffic_has_no_gap(wire: Wire) -> None:
    """Our own tables are swapped in one go: modes, other ports left out, all written anew."""
    program(wire.pod, by(NATIVE, **ALL_DNS))
    with no_gap(wire):
        for number in range(8):
            left_out = {"OUTBOUND_PORTS_EXCLUDE": f"{15020 + number}"}
            for mode in (WHOLE, ALL_DNS):
                program(wire.pod, by(NATIVE, **{**mode, **left_out}))
            program(wire.pod, by(NATIVE, **ALL_DNS), existing=apply.REWRITE)
    assert captures(wire.pod) == {NATIVE}


GUARDED = "inet istio-proxy-guard: a run was killed, and no connection can begin"


def put_slow(path: str) -> None:
    """Load a nat chain of somebody else that takes a packet long, anew.

    Of one priority the chain that was made last is met first: with ours replaced, this one stands
    between the new one and the old one. Each of its chains is gone through twice by the one before,
    as deep as the kernel allows.
    """
    chains = ["chain c14 { counter; counter; }"]
    chains += [f"chain c{n} {{ jump c{n + 1}; jump c{n + 1}; }}" for n in reversed(range(14))]
    chains.append("chain c { type nat hook output priority -100; jump c0; }")
    text = "\n".join(("table ip slow", "delete table ip slow", "table ip slow {", *chains, "}"))
    inside(path, ["nft", "-f", "-"], stdin=text)


def flood(path: str) -> None:
    """Begin connections to the outside as fast as can be, and wait for none."""
    enter(path)
    os.setresgid(APPLICATION, APPLICATION, APPLICATION)
    os.setresuid(APPLICATION, APPLICATION, APPLICATION)
    while True:
        with socket.socket() as client:
            client.setblocking(False)
            client.connect_ex((OUTSIDE[4], 80))


def test_packets_on_their_way_do_not_slip_through(wire: Wire) -> None:
    """One that meets a new chain too early and an old one too late is dropped, not let through."""
    program(wire.pod, by(NATIVE))
    count_direct(wire.outside, (80,))
    inside(wire.pod, ["sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_timeout_syn_sent=1"])
    with started(flood, wire.pod), started(flood, wire.pod):
        for _ in range(30):
            put_slow(wire.pod)
            program(wire.pod, by(NATIVE), existing=apply.REWRITE)
    assert direct_arrivals(wire.outside) == 0
    assert native_tables(wire.pod) == ["istio-proxy-nat"]


def test_guard_of_a_killed_run_is_found_and_goes(netns: str) -> None:
    """CHECK names it; a run that has nothing else to do takes it away, and so does a clean-up."""
    guard = "add table inet istio-proxy-guard\n"
    for end in (lambda: program(netns, by(NATIVE)), lambda: clean_up(netns)):
        program(netns, by(NATIVE))
        inside(netns, ["nft", "-f", "-"], stdin=guard)
        assert check(netns, by(NATIVE), {}) == GUARDED
        end()
        assert "guard" not in inside(netns, ["nft", "list", "tables"])


# -- switches that fail ------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("failing", ["iptables", "ip6tables"])
def test_removal_that_fails_brings_the_former_state_back(
    wire: Wire, tmp_path: Path, variant: str, failing: str
) -> None:
    """The first table of iptables is gone already; our own go again, and nothing got past."""
    program(wire.pod, by(variant, **ALL_DNS))
    before = whole_state(wire.pod)
    wrap(tmp_path, f"{failing}-{variant}-restore", f"{FIRST_TABLE_ONLY} sleep 0.03; exit 1")
    with no_gap(wire):
        for mode in (ALL_DNS, WHOLE):
            with pytest.raises(ProgrammingFailed, match=f"{failing}-{variant}-restore failed"):
                program(wire.pod, by(NATIVE, **mode), wrappers=tmp_path)
            assert native_tables(wire.pod) == []
            assert whole_state(wire.pod) == before


@variants
def test_removal_that_fails_for_good_leaves_ours(wire: Wire, tmp_path: Path, variant: str) -> None:
    """If nothing can be put back, what the switch has made goes on capturing; the error says so."""
    program(wire.pod, by(variant, **WHOLE))
    script = f"if [ -e $HERE/failed ]; then exit 1; fi; : > $HERE/failed; {FIRST_TABLE_ONLY} exit 1"
    wrap(tmp_path, f"iptables-{variant}-restore", script)
    with no_gap(wire):
        with pytest.raises(ProgrammingFailed, match="the former state could not be restored"):
            program(wire.pod, by(NATIVE, **WHOLE), wrappers=tmp_path)
        assert NATIVE in captures(wire.pod)
        program(wire.pod, by(NATIVE, **WHOLE))
        assert captures(wire.pod) == {NATIVE}


@variants
@pytest.mark.parametrize("failing", ["iptables", "ip6tables"])
def test_load_that_fails_keeps_ours(wire: Wire, tmp_path: Path, variant: str, failing: str) -> None:
    """On the way to iptables: its half is taken back, our tables have not been touched."""
    program(wire.pod, by(NATIVE, **WHOLE))
    before, handles = whole_state(wire.pod), inside(wire.pod, ["nft", "-sa", "list", "tables"])
    wrap(tmp_path, f"{failing}-{variant}-restore", f"{FIRST_TABLE_ONLY} sleep 0.03; exit 1")
    with no_gap(wire):
        with pytest.raises(ProgrammingFailed, match=f"{failing}-{variant}-restore failed"):
            program(wire.pod, by(variant, **WHOLE), wrappers=tmp_path)
        assert whole_state(wire.pod) == before
    assert inside(wire.pod, ["nft", "-sa", "list", "tables"]) == handles


# -- runs that are killed ----------------------------------------------------------------------


def kill_at_random(
    path: str, wanted: CaptureConfig, moments: random.Random, longest: float
) -> None:
    """Start a run and kill it some time later."""
    with started(program, path, wanted):
        time.sleep(moments.uniform(0.003, longest))


@pytest.mark.parametrize("former", ["", *VARIANTS, NATIVE], ids=["fresh", *VARIANTS, NATIVE])
def test_killed_at_any_moment_and_run_again(
    netns: str, new_netns: Callable[[], str], former: str
) -> None:
    """Whatever was there, the next run ends as an undisturbed one does."""
    wanted = by(NATIVE, **ALL_DNS)
    clean = new_netns()
    program(clean, wanted)
    undisturbed = without_empty_tables(whole_state(clean))
    moments = random.Random(former)  # noqa: S311 - the same moments each time
    for _ in range(3 if former in VARIANTS else 6):
        if former:
            program(netns, by(former, **WHOLE))
        kill_at_random(netns, wanted, moments, 0.1 if former in VARIANTS else 0.04)
        program(netns, wanted)
        assert check(netns, wanted, {}) == ""
        assert without_empty_tables(whole_state(netns)) == undisturbed
        clean_up(netns)


@variants
def test_killed_switches_have_no_gap(wire: Wire, variant: str) -> None:
    """Whether they lead here or there, a connection is captured by one of the two, or none is."""
    program(wire.pod, by(variant, **ALL_DNS))
    moments = random.Random(variant)  # noqa: S311 - the same moments each time
    with no_gap(wire):
        for backend in (NATIVE, variant) * 3:
            kill_at_random(wire.pod, by(backend, **ALL_DNS), moments, 0.15)
            program(wire.pod, by(backend, **ALL_DNS))
    assert captures(wire.pod) == {variant}


def test_killed_runs_never_leave_half_a_table(netns: str) -> None:
    """Straight after the kill there are the old tables or the new ones, whole."""
    one, other = by(NATIVE, **ALL_DNS), by(NATIVE, **WHOLE)
    program(netns, one)
    moments = random.Random(1)  # noqa: S311 - the same moments each time
    for _ in range(10):
        with started(program, netns, other):
            time.sleep(moments.uniform(0.003, 0.04))
        found = [difference_of_rules(netns, wanted) for wanted in (one, other)]
        assert any(text in ("", GUARDED) for text in found), found
        program(netns, one)


def difference_of_rules(path: str, wanted: CaptureConfig) -> str:
    """Return how our tables differ from a configuration's; addresses and routes do not count."""
    found = check(path, wanted, {})
    return found if "istio-proxy" in found else ""
