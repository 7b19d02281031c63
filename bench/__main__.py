"""`python -m bench`: measures the frozen plugin against a frozen program that does nothing.

Each round runs every row once, in an order that moves on by one a round, so that other work on the
machine meets all rows alike. One JSON object a row on stdout; on a terminal progress and a table on
stderr. Exit status: 0 all rows keep their budgets, 1 some do not, 2 there is nothing to measure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from e2e.cluster import ClusterFailed

from . import pods, programs
from .cases import BASES, BUDGETS, NATIVE, VARIANTS, Case, cases
from .figures import FLOOR, figures, table
from .node import PATH, Node
from .process import BenchFailed

ROUNDS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge; return the exit status."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _stop)
    node = Node()
    try:
        plugin, floor, static = programs.plugin(), programs.floor(), programs.static()
        if static is None:
            _say("static is left out: no C compiler here that links static programs")
        found = _wanted(cases(plugin, floor, static, _variants(), node), options.rows)
        if any("captured" in row for case in found for row in case.rows):
            node.serve_pods()
        samples = measure(found, options.rounds)
        if not options.rows or any(word in row for row in pods.ROWS for word in options.rows):
            samples |= _pods(max(options.rounds // 4, 1))
    except BenchFailed as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        node.close()
    rows = figures(samples, BUDGETS, BASES)
    for row in rows:
        sys.stdout.write(f"{row.to_json()}\n")
    if sys.stderr.isatty():
        sys.stderr.write(table(rows))
    return 0 if all(row.ok for row in rows) else 1


def _pods(rounds: int) -> dict[str, list[float]]:
    """Measure pods on a real node, where one can be made; say why not otherwise."""
    try:
        return pods.measure(rounds)
    except ClusterFailed as error:
        _say(f"pods on a node are left out: {error}")
        return {}


def measure(found: Sequence[Case], rounds: int) -> dict[str, list[float]]:
    """Return the samples of each row, one a round, in seconds.

    Before them is a round that does not count: it fills the caches and proves the work done.
    """
    samples: dict[str, list[float]] = {row: [] for case in found for row in case.rows}
    for number in range(rounds + 1):
        _progress(number, rounds)
        for case in found:
            case.prepare()
        turn = number % len(found)
        for case in (*found[turn:], *found[:turn]):
            taken = case.measure(prove=number == 0)
            if number > 0:
                for row, sample in zip(case.rows, taken, strict=True):
                    samples[row].append(sample)
    return samples


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=_count, default=ROUNDS, help="rounds to measure")
    parser.add_argument(
        "--rows", nargs="+", metavar="WORD", help="only rows with one of these words in their name"
    )
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _wanted(found: Sequence[Case], words: Sequence[str] | None) -> list[Case]:
    """Return the cases with a row that is wanted, and the floor in any case."""
    chosen = [
        case
        for case in found
        if not words or any(word in row for row in case.rows for word in words)
    ]
    if not chosen:
        if any(word in row for row in pods.ROWS for word in words or ()):
            return [case for case in found if FLOOR in case.rows]
        rows = ", ".join((*(row for case in found for row in case.rows), *pods.ROWS))
        raise BenchFailed(f"no row has one of these words in its name; there are: {rows}")
    floor = [case for case in found if FLOOR in case.rows and case not in chosen]
    return [*floor, *chosen]


def _variants() -> list[str]:
    """Return the variants of iptables that are here, and nftables; say what is missing."""
    missing = "ip" if shutil.which("ip", path=PATH) is None else ""
    if os.geteuid() != 0 or missing:
        _say(f"captured pods are left out: they need {missing or 'root'}")
        return []
    present = []
    for variant in VARIANTS:
        names = [f"{base}-{variant}" for base in ("iptables", "ip6tables")]
        absent = [name for name in names if shutil.which(name, path=PATH) is None]
        if absent:
            _say(f"captured pods with {variant} are left out: {', '.join(absent)} not found")
        else:
            present.append(variant)
    if shutil.which("nft", path=PATH) is None:
        _say("rows with nftables are left out: nft not found, which is compared with")
        return present
    return [*present, NATIVE]


def _progress(number: int, rounds: int) -> None:
    if sys.stderr.isatty():
        text = f"round {number} of {rounds}" if number else "proof"
        sys.stderr.write(f"\r\033[K{text}" if number < rounds else "\r\033[K")
        sys.stderr.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
