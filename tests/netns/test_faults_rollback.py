"""When the former state cannot be brought back either: traffic stops, and the error says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from istio_cni.errors import ProgrammingFailed
from namespaces import inside
from netns.programming import (
    ALL_DNS,
    FIRST_TABLE_ONLY,
    TPROXY,
    VARIANTS,
    clean_up,
    config,
    program,
    rules,
    state,
    wrap,
)
from netns.traffic import (
    APPLICATION,
    FAMILIES,
    OUTSIDE,
    POD,
    TRANSPARENT_LISTENERS,
    Call,
    Listener,
    Wire,
    count_direct,
    direct_arrivals,
    reach,
    serving,
    wired,
)

pytestmark = pytest.mark.netns

variants = pytest.mark.parametrize("variant", VARIANTS)
STAND = "drop rules are in place and all traffic stops until it is programmed again"
FOR_EVER = f"[ -e $HERE/failed ] && exit 1; {FIRST_TABLE_ONLY} : > $HERE/failed; exit 1"
ALL_BUT_DROP_RULES = (
    f"[ -e $HERE/failed ] || {{ {FIRST_TABLE_ONLY} : > $HERE/failed; exit 1; }}; text=$(cat); "
    'case $text in *ISTIO*) exit 1;; esac; echo "$text" | $REAL "$@"'
)


@pytest.fixture
def wire(new_netns: Callable[[], str]) -> Iterator[Wire]:
    """Set up a pod whose proxy and application run, and an outside with a server."""
    with (
        wired(new_netns, (Listener(8080),), (Listener(80), Listener(53, udp=True))) as wire,
        serving(wire.pod, "proxy", TRANSPARENT_LISTENERS),
    ):
        count_direct(wire.outside, (80, 53))
        yield wire


def wrap_restore(directory: Path, variant: str, script: str) -> Path:
    """Wrap the restore program of one variant."""
    wrap(directory, f"iptables-{variant}-restore", script)
    return directory


def message_of(wire: Wire, directory: Path, *settings: dict[str, object], variant: str) -> str:
    """Program a pod so that it fails; return what the error says."""
    wanted = config(variant, **{key: value for more in settings for key, value in more.items()})
    with pytest.raises(ProgrammingFailed) as failure:
        program(wire.pod, wanted, wrappers=directory)
    assert "\n" not in failure.value.msg
    return failure.value.msg


def is_shut(wire: Wire) -> bool:
    """Tell whether nothing gets through in IPv4, in either direction, TCP or UDP."""
    quick = 0.15
    out = (Call(OUTSIDE[4], 80, timeout_s=quick), Call(OUTSIDE[4], 53, udp=True, timeout_s=quick))
    sent = reach(wire.pod, APPLICATION, *out)
    arrived = reach(wire.outside, APPLICATION, Call(POD[4], 8080, timeout_s=quick))
    failures = {"timeout", "Operation not permitted"}
    return failures.issuperset([*sent, *arrived]) and direct_arrivals(wire.outside) == 0


@variants
@pytest.mark.parametrize("back", [False, True], ids=["to TPROXY", "to REDIRECT"])
def test_rerun_stays_shut(wire: Wire, tmp_path: Path, variant: str, back: bool) -> None:
    """Both rule sets are in pieces; the drop rules in front of them stay until the next run."""
    old, new = (TPROXY, {}) if back else ({}, TPROXY)
    program(wire.pod, config(variant, **old, **ALL_DNS))
    wrappers = wrap_restore(tmp_path, variant, FOR_EVER)
    message = message_of(wire, wrappers, new, ALL_DNS, variant=variant)
    assert message.startswith(f"iptables-{variant}-restore failed (exit status 1)")
    assert "; the former state could not be restored (" in message
    assert message.endswith(STAND)
    assert is_shut(wire)
    program(wire.pod, config(variant, **new, **ALL_DNS))
    calls = [Call(OUTSIDE[family], 80) for family in FAMILIES]
    assert [one[:2] for one in reach(wire.pod, APPLICATION, *calls)] == [("proxy", 15001)] * 2
    assert "DROP" not in rules(wire.pod)


@variants
def test_first_run_is_shut_if_it_can_be(wire: Wire, tmp_path: Path, variant: str) -> None:
    """Half a rule set is left, so the drop rules are put in front of it."""
    wrappers = wrap_restore(tmp_path, variant, ALL_BUT_DROP_RULES)
    message = message_of(wire, wrappers, TPROXY, ALL_DNS, variant=variant)
    assert message.endswith(STAND)
    assert is_shut(wire)


@variants
def test_message_admits_what_could_not_be_shut(netns: str, tmp_path: Path, variant: str) -> None:
    """If nothing can be loaded any more, nobody is told that traffic stops."""
    wrappers = wrap_restore(tmp_path, variant, FOR_EVER)
    message = message_of(Wire(netns, ""), wrappers, TPROXY, ALL_DNS, variant=variant)
    assert "; the former state could not be restored (" in message
    assert "; drop rules could not be put in place either (" in message
    assert STAND not in message


@variants
def test_next_run_mends(
    netns: str, new_netns: Callable[[], str], tmp_path: Path, variant: str
) -> None:
    """A later run in working order leaves what a first one would have."""
    wanted = config(variant, **TPROXY, **ALL_DNS)
    wrappers = wrap_restore(tmp_path, variant, ALL_BUT_DROP_RULES)
    with pytest.raises(ProgrammingFailed):
        program(netns, wanted, wrappers=wrappers)
    program(netns, wanted)
    other = new_netns()
    program(other, wanted)
    assert state(netns) == state(other)


@variants
def test_clean_up_opens_again(netns: str, tmp_path: Path, variant: str) -> None:
    """The drop rules are ours, so a clean-up takes them away with the rest."""
    before = state(netns)
    wrappers = wrap_restore(tmp_path, variant, ALL_BUT_DROP_RULES)
    with pytest.raises(ProgrammingFailed):
        program(netns, config(variant, **TPROXY, **ALL_DNS), wrappers=wrappers)
    assert rules(netns).count("-j DROP") == 6
    clean_up(netns)
    assert state(netns) == before


def test_roll_back_that_hangs_leaves_time_to_shut(wire: Wire, tmp_path: Path) -> None:
    """Of the time for the roll-back a part is kept for the drop rules."""
    hang = ALL_BUT_DROP_RULES.replace("*ISTIO*) exit 1", "*ISTIO*) sleep 60")
    wrappers = wrap_restore(tmp_path, "nft", hang)
    wanted = config("nft", **TPROXY, **ALL_DNS)
    with pytest.raises(ProgrammingFailed) as failure:
        program(wire.pod, wanted, wrappers=wrappers, seconds=2, rollback_s=1)
    assert "iptables-nft-restore did not end within" in failure.value.msg
    assert failure.value.msg.endswith(STAND)
    assert is_shut(wire)


@pytest.mark.parametrize("lo", ["up", "down"])
def test_route_that_cannot_be_added_leaves_nothing(netns: str, lo: str) -> None:
    """Rules come first and go again when another default route is in the way; so does `lo`."""
    inside(netns, ["ip", "route", "add", "unreachable", "default", "table", "133"])
    inside(netns, ["ip", "link", "set", "lo", lo])
    before = state(netns)
    with pytest.raises(ProgrammingFailed, match="adding the IPv4 route local default dev lo table"):
        program(netns, config("nft", **TPROXY))
    assert state(netns) == before
    assert ("state DOWN" in inside(netns, ["ip", "link", "show", "lo"])) == (lo == "down")
