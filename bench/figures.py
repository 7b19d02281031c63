"""From samples to verdicts, pure: medians, ratios, budgets, and how they are shown.

A machine's milliseconds are its own; a ratio to a program that does nothing, measured in the same
rounds, is comparable between machines and survives other work beside it. So budgets are ratios.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

FLOOR = "floor"
COLUMNS = ("row", "median ms", "p90 ms", "ratio", "budget", "", "to")


class Figure(NamedTuple):
    """One row of a run; `ratio` is its median over that of `base`, `budget` the ratio allowed."""

    name: str
    median_ms: float
    p90_ms: float
    ratio: float
    budget: float | None
    base: str = FLOOR

    @property
    def ok(self) -> bool:
        """Whether the row keeps its budget; a row without one always does."""
        return self.budget is None or self.ratio <= self.budget

    def to_json(self) -> str:
        """Write the row as one line."""
        document = {
            "name": self.name,
            "median_ms": round(self.median_ms, 3),
            "p90_ms": round(self.p90_ms, 3),
            "ratio": round(self.ratio, 3),
            "to": self.base,
            "budget": self.budget,
            "ok": self.ok,
        }
        return json.dumps(document)


class Size(NamedTuple):
    """How much memory something takes, and how much it may."""

    name: str
    mib: float
    budget: float | None = None

    @property
    def ok(self) -> bool:
        """Whether it keeps its budget; one without always does."""
        return self.budget is None or self.mib <= self.budget

    def to_json(self) -> str:
        """Write it as one line."""
        document = {
            "name": self.name,
            "mib": round(self.mib, 1),
            "budget": self.budget,
            "ok": self.ok,
        }
        return json.dumps(document)


def figures(
    samples: Mapping[str, Sequence[float]],
    budgets: Mapping[str, float],
    bases: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Figure, ...]:
    """Judge the samples (seconds) of each row, in their order.

    `bases` names the row that a row is compared with, where that is not the floor.
    """
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    return tuple(
        Figure(
            name,
            median_ms=1e3 * medians[name],
            p90_ms=1e3 * percentile(taken, 90),
            ratio=medians[name] / medians[bases.get(name, FLOOR)],
            budget=budgets.get(name),
            base=bases.get(name, FLOOR),
        )
        for name, taken in samples.items()
    )


def percentile(samples: Sequence[float], percent: int) -> float:
    """Return the smallest sample that so many percent of all do not exceed (nearest rank)."""
    rank = -(-percent * len(samples) // 100)  # rounded up
    return sorted(samples)[max(rank, 1) - 1]


def table(rows: Sequence[Figure], sizes: Sequence[Size] = ()) -> str:
    """Lay the figures out for a person."""
    cells = [COLUMNS, *map(_cells, rows), *map(_size_cells, sizes)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *numbers in cells:
        aligned = (text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *aligned)).rstrip())
    return "".join(f"{line}\n" for line in lines)


def _cells(row: Figure) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.median_ms:.2f}",
        f"{row.p90_ms:.2f}",
        f"{row.ratio:.2f}",
        *_verdict(row),
        "" if row.base == FLOOR else row.base,
    )


def _size_cells(size: Size) -> tuple[str, ...]:
    return (size.name, "", "", f"{size.mib:.1f} MiB", *_verdict(size), "")


def _verdict(row: Figure | Size) -> tuple[str, str]:
    """Return the cells of a budget, and of what came of it."""
    if row.budget is None:
        return "", ""
    return f"{row.budget:g}", "ok" if row.ok else "over"
