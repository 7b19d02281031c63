"""Runs that are killed, and runs at the same time: in the end there is one whole rule set."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from istio_cni.errors import TryAgainLater
from istio_cni.rules.config import CaptureConfig
from netns.programming import (
    ALL_DNS,
    FIRST_TABLE_ONLY,
    FORK,
    TPROXY,
    VARIANTS,
    clean_up,
    config,
    program,
    residents,
    started,
    state,
    wait_until,
    wrap,
)

pytestmark = pytest.mark.netns

variants = pytest.mark.parametrize("variant", VARIANTS)
STOPS = ": > $HERE/stopped; sleep 60 & sleep 60; exit 1"


def clean_state(new_netns: Callable[[], str], wanted: CaptureConfig) -> str:
    """Return what one undisturbed run makes of a fresh namespace."""
    path: str = new_netns()
    program(path, wanted)
    return state(path)


def without_empty_tables(text: str) -> str:
    """Leave tables without rules out of a state: who made them cannot be known after a kill."""
    lines = [line for line in text.splitlines() if not line.endswith(" ACCEPT")]
    return re.sub(r"^\*\w+\n(?![:-])", "", "\n".join(lines), flags=re.MULTILINE)


def stopping(directory: Path, variant: str) -> Path:
    """Wrap restore so that it stops after the first of several tables."""
    wrap(directory, f"iptables-{variant}-restore", f"{FIRST_TABLE_ONLY} {STOPS}")
    return directory


@variants
@pytest.mark.parametrize("rerun", [False, True])
def test_killed_between_tables_and_run_again(
    netns: str, new_netns: Callable[[], str], tmp_path: Path, variant: str, rerun: bool
) -> None:
    """The next run completes it; nobody of the killed one goes on programming, or holds it up."""
    wanted = config(variant, **TPROXY, **ALL_DNS)
    if rerun:
        program(netns, config(variant, **ALL_DNS))
    wrappers = stopping(tmp_path, variant)
    with started(program, netns, wanted, wrappers=wrappers):
        wait_until((tmp_path / "stopped").exists, "the first table is loaded")
        assert len(residents(netns)) > 1
    assert wait_until(lambda: not residents(netns), "everybody has ended") < 0.5
    begin = time.monotonic()
    program(netns, wanted)
    assert time.monotonic() - begin < 2
    assert state(netns) == clean_state(new_netns, wanted)


@variants
def test_killed_at_any_moment_and_run_again(
    netns: str, new_netns: Callable[[], str], variant: str
) -> None:
    """Wherever the kill strikes, in the rules or in the routes, the next run converges."""
    plain, other = config(variant, **ALL_DNS), config(variant, **TPROXY)
    clean = clean_state(new_netns, plain)
    moments = random.Random(variant)  # noqa: S311 - the same moments each time
    for _ in range(12):
        with started(program, netns, other):
            time.sleep(moments.uniform(0.005, 0.1))
        program(netns, plain)
        assert without_empty_tables(state(netns)) == without_empty_tables(clean)


@variants
def test_clean_up_completes_a_killed_run(netns: str, tmp_path: Path, variant: str) -> None:
    """Chains without jumps and drop rules without rules are ours as well."""
    before = state(netns)
    program(netns, config(variant, **ALL_DNS))
    wrappers = stopping(tmp_path, variant)
    with started(program, netns, config(variant, **TPROXY), wrappers=wrappers):
        wait_until((tmp_path / "stopped").exists, "the first table is loaded")
    clean_up(netns)
    assert state(netns) == before


@variants
def test_two_equal_runs_at_once_both_succeed(new_netns: Callable[[], str], variant: str) -> None:
    """They take turns, and the second finds nothing to do."""
    wanted = config(variant, **ALL_DNS)
    clean = clean_state(new_netns, wanted)
    netns = new_netns()
    with ProcessPoolExecutor(2, FORK) as pool:
        for _ in range(8):
            runs = [pool.submit(program, netns, wanted) for _ in range(2)]
            changes = [bool(run.result().changed) for run in runs]
            assert sorted(changes) == [False, True]
            assert state(netns) == clean
            clean_up(netns)


@variants
def test_two_different_runs_at_once_end_as_one_of_them(
    new_netns: Callable[[], str], variant: str
) -> None:
    """The later one replaces the earlier one as a whole."""
    configs = config(variant, **ALL_DNS), config(variant, **TPROXY)
    clean = [clean_state(new_netns, wanted) for wanted in configs]
    netns = new_netns()
    with ProcessPoolExecutor(2, FORK) as pool:
        for _ in range(8):
            for run in [pool.submit(program, netns, wanted) for wanted in configs]:
                run.result()
            assert state(netns) in clean


@variants
def test_many_pods_at_once(new_netns: Callable[[], str], variant: str) -> None:
    """Runs in different namespaces do not see each other."""
    wanted = config(variant, **ALL_DNS)
    paths = [new_netns() for _ in range(8)]
    with ProcessPoolExecutor(8, FORK) as pool:
        for outcome in pool.map(program, paths, [wanted] * 8):
            assert outcome.changed
            assert outcome.warnings == []
    assert len({state(path) for path in paths}) == 1
    assert state(paths[0]) == clean_state(new_netns, wanted)


def test_run_that_does_not_finish_holds_others_up_in_bounds(netns: str, tmp_path: Path) -> None:
    """A second run waits for its turn until its own time is over, and says why."""
    wrappers = stopping(tmp_path, "nft")
    with started(program, netns, config("nft", **ALL_DNS), wrappers=wrappers):
        wait_until((tmp_path / "stopped").exists, "the first table is loaded")
        begin = time.monotonic()
        with pytest.raises(TryAgainLater, match="another process is programming this network"):
            program(netns, config("nft"), seconds=0.5)
        assert time.monotonic() - begin < 1
