"""What the benchmark makes of its samples: figures, verdicts, and the lines that tools read."""

from __future__ import annotations

import json

import pytest
from bench import __main__ as program
from bench import cases
from bench.agent import Agent
from bench.figures import Figure, Size, figures, percentile, table
from bench.programs import FROZEN

SAMPLES = {
    "floor": [0.010, 0.012, 0.010],
    "fast": [0.030, 0.009, 0.020],
    "slow": [0.021, 0.020, 0.022],
    "free": [0.900, 0.900, 0.900],
}
BUDGETS = {"fast": 2.0, "slow": 2.0}


def test_a_ratio_is_of_medians_of_the_same_run() -> None:
    """In the order of the samples, in milliseconds."""
    floor, fast, slow, free = figures(SAMPLES, BUDGETS)
    assert (floor.name, floor.ratio, floor.budget) == ("floor", 1.0, None)
    assert (fast.median_ms, fast.p90_ms) == (pytest.approx(20.0), pytest.approx(30.0))
    assert slow.ratio == pytest.approx(2.1)
    assert free.ratio == pytest.approx(90.0)


def test_a_row_may_be_compared_with_another_than_the_floor() -> None:
    """The row says which."""
    _, fast, slow, _ = figures(SAMPLES, BUDGETS, {"slow": "fast"})
    assert (fast.base, slow.base) == ("floor", "fast")
    assert slow.ratio == pytest.approx(1.05)
    assert slow.ok


def test_a_budget_is_kept_up_to_its_very_value() -> None:
    """And a row without one is for information."""
    assert [row.ok for row in figures(SAMPLES, BUDGETS)] == [True, True, False, True]


@pytest.mark.parametrize(
    ("count", "percent", "expected"),
    [(1, 90, 1), (2, 50, 1), (10, 90, 9), (11, 90, 10), (40, 90, 36), (5, 100, 5), (5, 0, 1)],
)
def test_percentiles_are_samples(count: int, percent: int, expected: int) -> None:
    """By nearest rank, whatever the order of the samples."""
    assert percentile(range(count, 0, -1), percent) == expected


def test_a_row_is_one_json_object_a_line() -> None:
    """With these keys; rounded for people, judged before."""
    line = Figure("ADD captured nft", 70.12345, 80.0, 6.30049, 6.3).to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "name": "ADD captured nft",
        "median_ms": 70.123,
        "p90_ms": 80.0,
        "ratio": 6.3,
        "to": "floor",
        "budget": 6.3,
        "ok": False,
    }
    assert json.loads(Figure("floor", 1.0, 1.0, 1.0, None).to_json())["budget"] is None


def test_the_table_says_which_rows_are_over() -> None:
    """A line a row, columns aligned, no verdict without a budget."""
    head, *lines = table(figures(SAMPLES, BUDGETS, {"slow": "fast"})).splitlines()
    assert head.split() == ["row", "median", "ms", "p90", "ms", "ratio", "budget", "to"]
    assert [line.split()[-1] for line in lines] == ["1.00", "ok", "fast", "90.00"]
    assert len({line.index(".") for line in lines}) == 1


def test_memory_has_a_budget_of_its_own() -> None:
    """In MiB, in a line with other keys, and in the same table."""
    kept, over, free = Size("small", 80.04, 110.0), Size("big", 110.1, 110.0), Size("any", 900.0)
    assert [size.ok for size in (kept, over, free)] == [True, False, True]
    assert json.loads(kept.to_json()) == {
        "name": "small",
        "mib": 80.0,
        "budget": 110.0,
        "ok": True,
    }
    *_, shown, too_much, _ = table(figures(SAMPLES, BUDGETS), (kept, over, free)).splitlines()
    assert shown.split() == ["small", "80.0", "MiB", "110", "ok"]
    assert too_much.split()[-1] == "over"


def test_budgets_are_those_of_rows() -> None:
    """A budget under a misspelt name would never be judged."""
    place = cases.node.Node()
    try:
        variants = (*cases.VARIANTS, cases.NATIVE)
        programs = cases.Programs(FROZEN, "floor", "static")
        agent = Agent(place.directory, place.memory, FROZEN)
        found = cases.cases(programs, variants, place, agent)
        without = cases.cases(programs, (), place, None)
    finally:
        place.close()
    rows = [row for case in found for row in case.rows]
    assert len(rows) == len(set(rows))
    assert {*cases.BUDGETS, *cases.BASES, *cases.BASES.values()} <= set(rows)
    assert not set(program.SIZES) & set(rows)
    assert not [row for case in without for row in case.rows if row.startswith(cases.AGENT)]
