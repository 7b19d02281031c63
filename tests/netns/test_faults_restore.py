"""Restore programs that stop half way: what was there before is there again, and never a gap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from istio_cni.capture import apply
from istio_cni.errors import ProgrammingFailed
from namespaces import inside
from netns.programming import (
    ALL_DNS,
    FIRST_TABLE_ONLY,
    TPROXY,
    VARIANTS,
    clean_up,
    config,
    holders,
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
    hammering,
    reach,
    serving,
    wired,
)

pytestmark = pytest.mark.netns

variants = pytest.mark.parametrize("variant", VARIANTS)
LOCK = "Another app is currently holding the xtables lock. Perhaps you want to use the -w option?"
ONCE = 'if [ -e $HERE/failed ]; then exec $REAL "$@"; fi; : > $HERE/failed;'


def wrap_restore(directory: Path, script: str, programs: tuple[str, ...] = ("iptables",)) -> Path:
    """Wrap the restore programs of both variants."""
    for base in programs:
        for variant in VARIANTS:
            wrap(directory, f"{base}-{variant}-restore", script)
    return directory


@pytest.fixture
def wire(new_netns: Callable[[], str]) -> Iterator[Wire]:
    """Set up a captured pod's surroundings: application, proxy, servers outside."""
    with (
        wired(new_netns, (Listener(8080),), (Listener(80), Listener(53, udp=True))) as wire,
        serving(wire.pod, "proxy", TRANSPARENT_LISTENERS),
    ):
        yield wire


@contextmanager
def no_gap(wire: Wire) -> Iterator[None]:
    """Hammer a captured pod from both sides while the block runs: all that arrives is captured."""
    count_direct(wire.outside, (80, 53))
    quick = 0.03
    out = [Call(OUTSIDE[family], 80, timeout_s=quick) for family in FAMILIES]
    dns = [Call(OUTSIDE[family], 53, udp=True, timeout_s=quick) for family in FAMILIES]
    into = [Call(POD[family], 8080, timeout_s=quick) for family in FAMILIES]
    with ExitStack() as hammers:
        counts = [
            hammers.enter_context(hammering(wire.pod, out)),
            hammers.enter_context(hammering(wire.pod, dns)),
            hammers.enter_context(hammering(wire.outside, into)),
        ]
        yield
        for count in counts:
            reached, limit = count().total(), time.monotonic() + 5
            while count().total() == reached:  # traffic flows again
                assert time.monotonic() < limit, "nothing gets through any more"
                time.sleep(0.01)
            assert set(count()) == {"proxy"}
    assert direct_arrivals(wire.outside) == 0


def test_witness_sees_a_gap(wire: Wire) -> None:
    """Without rules everything is direct, so the tests below can tell."""
    count_direct(wire.outside, (80, 53))
    reach(wire.pod, APPLICATION, Call(OUTSIDE[4], 80), Call(OUTSIDE[6], 53, udp=True))
    assert direct_arrivals(wire.outside) == 2
    with pytest.raises(AssertionError), no_gap(wire):
        pass


@variants
@pytest.mark.parametrize("failing", ["iptables", "ip6tables"])
def test_first_run_that_fails_leaves_nothing(
    netns: str, tmp_path: Path, variant: str, failing: str
) -> None:
    """The first table was committed, in either family; it is gone again, addresses as well."""
    if variant == "legacy":  # asking for these tables makes them, for good
        for base in ("iptables", "ip6tables"):
            for table in ("mangle", "nat", "raw"):
                inside(netns, [f"{base}-legacy", "-t", table, "-S"])
    before = state(netns)
    wrap_restore(tmp_path, f"{FIRST_TABLE_ONLY} echo 'line 7 failed' >&2; exit 1", (failing,))
    with pytest.raises(ProgrammingFailed) as failure:
        program(netns, config(variant, **TPROXY, **ALL_DNS), wrappers=tmp_path)
    assert failure.value.msg.startswith(
        f'{failing}-{variant}-restore failed (exit status 1): "line 7 failed"; '
    )
    assert "needs the kernel modules" in failure.value.msg
    assert "\n" not in failure.value.msg
    assert state(netns) == before


@variants
@pytest.mark.parametrize("complaint", [LOCK, "line 3: RULE_APPEND failed (No such file)"])
def test_failure_that_passes_is_retried(
    netns: str, tmp_path: Path, variant: str, complaint: str
) -> None:
    """Exit status 4 means that a resource was taken: the lock, or a table that just changed."""
    wrap_restore(tmp_path, f"{ONCE} cat > /dev/null; echo '{complaint}' >&2; exit 4")
    program(netns, config(variant), wrappers=tmp_path)
    assert (tmp_path / "failed").exists()
    program(netns, config(variant))
    clean = rules(netns)
    (tmp_path / "failed").unlink()
    program(netns, config(variant, **TPROXY, **ALL_DNS), wrappers=tmp_path)
    assert (tmp_path / "failed").exists()
    program(netns, config(variant))
    assert rules(netns) == clean


@variants
@pytest.mark.parametrize("rerun", [False, True])
def test_retry_after_the_first_table_completes_the_rest(
    netns: str, new_netns: Callable[[], str], tmp_path: Path, variant: str, rerun: bool
) -> None:
    """What was committed by then is not loaded a second time."""
    wanted = config(variant, **TPROXY, **ALL_DNS)
    if rerun:
        program(netns, config(variant))
    script = (
        f'if [ -e $HERE/failed ]; then exec $REAL "$@"; fi; {FIRST_TABLE_ONLY} : > $HERE/failed'
    )
    wrap_restore(tmp_path, f"{script}; echo '{LOCK}' >&2; exit 4")
    program(netns, wanted, wrappers=tmp_path)
    assert (tmp_path / "failed").exists()
    other = new_netns()
    program(other, wanted)
    assert rules(netns) == rules(other)


@variants
def test_retry_under_traffic_has_no_gap(wire: Wire, tmp_path: Path, variant: str) -> None:
    """Between two tries the drop rules stand, or the old rules do."""
    script = f"{FIRST_TABLE_ONLY} : > $HERE/failed; echo '{LOCK}' >&2; exit 4"
    wrap_restore(tmp_path, f'if [ -e $HERE/failed ]; then exec $REAL "$@"; fi; {script}')
    program(wire.pod, config(variant, **ALL_DNS))
    with no_gap(wire):
        for mode in (TPROXY, {}):
            program(wire.pod, config(variant, **mode, **ALL_DNS), wrappers=tmp_path)
            (tmp_path / "failed").unlink()


@variants
@pytest.mark.parametrize("failing", ["iptables", "ip6tables"])
@pytest.mark.parametrize("back", [False, True], ids=["to TPROXY", "to REDIRECT"])
def test_rerun_that_fails_keeps_capturing(
    wire: Wire, tmp_path: Path, variant: str, failing: str, back: bool
) -> None:
    """The old rules are back to the letter, and no connection got past the proxy meanwhile."""
    old, new = {**ALL_DNS}, {**TPROXY, **ALL_DNS}
    if back:
        old, new = new, old
    program(wire.pod, config(variant, **old))
    before = state(wire.pod)
    wrap_restore(tmp_path, f"{FIRST_TABLE_ONLY} sleep 0.05; exit 1", (failing,))
    with no_gap(wire):
        for _ in range(2):
            with pytest.raises(ProgrammingFailed):
                program(wire.pod, config(variant, **new), wrappers=tmp_path)
            assert state(wire.pod) == before


@variants
def test_switch_under_traffic_has_no_gap(wire: Wire, variant: str) -> None:
    """From REDIRECT to TPROXY and back, and everything written anew, while connections are made."""
    program(wire.pod, config(variant, **ALL_DNS))
    with no_gap(wire):
        for _ in range(3):
            program(wire.pod, config(variant, **TPROXY, **ALL_DNS))
            program(wire.pod, config(variant, **ALL_DNS))
            program(wire.pod, config(variant, **ALL_DNS), existing=apply.REWRITE)


def test_move_to_the_other_variant_has_no_gap(wire: Wire) -> None:
    """Rules are in the new place before they leave the old one."""
    program(wire.pod, config("nft", **ALL_DNS))
    with no_gap(wire):
        for _ in range(2):
            for variant in ("legacy", "nft"):
                program(wire.pod, config(variant, **ALL_DNS))
                assert set(holders(wire.pod).values()) == {variant}


def test_move_that_fails_has_no_gap(wire: Wire, tmp_path: Path) -> None:
    """If the old place cannot be cleared, the old rules are whole before the new ones go."""
    program(wire.pod, config("nft", **ALL_DNS))
    before = rules(wire.pod).partition("== ip6tables")[0]
    wrap(tmp_path, "iptables-nft-restore", f"{FIRST_TABLE_ONLY} sleep 0.05; exit 1")
    with no_gap(wire):
        for _ in range(2):
            with pytest.raises(ProgrammingFailed):
                program(wire.pod, config("legacy", **ALL_DNS), wrappers=tmp_path)
            assert set(holders(wire.pod).values()) == {"nft"}
            assert rules(wire.pod).startswith(before.partition("== iptables legacy")[0])


@variants
def test_clean_up_that_fails_keeps_capturing(wire: Wire, tmp_path: Path, variant: str) -> None:
    """A clean-up is all or nothing too, and nothing gets past the proxy before it is undone."""
    program(wire.pod, config(variant, **TPROXY, **ALL_DNS))
    before = state(wire.pod)
    wrap_restore(tmp_path, f"{FIRST_TABLE_ONLY} sleep 0.05; exit 1")
    with no_gap(wire):
        with pytest.raises(ProgrammingFailed):
            clean_up(wire.pod, wrappers=tmp_path)
        assert state(wire.pod) == before
