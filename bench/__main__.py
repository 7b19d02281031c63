"""`python -m bench`: measures the frozen programs against a frozen one that does nothing.

Calls go through the launcher, to the node agent or to the plugin in its place. Each round runs
every row once, in an order that moves on by one a round, so that other work on the machine meets
all alike; a burst of pods comes every tenth round. One JSON object a row on stdout; on a terminal
progress and a table on stderr. Exit status: 0 all rows keep their budgets, 1 some do not, 2 there
is nothing to measure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import NoReturn

from e2e.cluster import ClusterFailed

from . import objects, pods, programs
from .agent import Agent
from .cases import AGENT, BASES, BUDGETS, NATIVE, VARIANTS, Case, Programs, cases
from .figures import FLOOR, Figure, Size, figures, table
from .node import PATH, Node
from .process import BenchFailed

Samples = dict[str, list[float]]
ROUNDS = 40
SIZES: dict[str, float | None] = {
    f"agent RSS, {objects.PODS} cached pods": 110.0,
    f"agent and workshop PSS, {objects.PODS} cached pods": None,
}
"""Memory in MiB, and how much may be taken."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge; return the exit status."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _stop)
    node = Node()
    try:
        samples, sizes = _samples(node, options)
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
    found: list[Figure | Size] = [*rows, *sizes]
    for row in found:
        sys.stdout.write(f"{row.to_json()}\n")
    if sys.stderr.isatty():
        sys.stderr.write(table(rows, sizes))
    return 0 if all(row.ok for row in found) else 1


def _samples(node: Node, options: argparse.Namespace) -> tuple[Samples, list[Size]]:
    """Measure what is wanted of what can be measured here. Raises BenchFailed."""
    made = Programs(programs.frozen(), programs.floor(), programs.static())
    if made.static is None:
        _say("static is left out: no C compiler here that links static programs")
    variants = _variants()
    agent = Agent(node.directory, node.memory, made.frozen) if variants else None
    found = _wanted(cases(made, variants, node, agent), options.rows)
    node.install(made.frozen)
    rows = [row for case in found for row in case.rows]
    sizes = SIZES if _is_wanted(SIZES, options.rows) else {}
    if not (sizes or any(row.startswith(AGENT) for row in rows)):
        agent = None
    if agent is not None or any("captured" in row for row in rows):
        env = node.serve_pods()
        if agent is not None:
            node.at_end(agent.stop)
            agent.start(env)
    samples = measure(found, options.rounds)
    taken: list[Size] = []
    if agent is not None:
        agent.expect()
        memory = agent.memory_mib(objects.PODS)
        taken = [Size(name, mib, SIZES[name]) for name, mib in zip(sizes, memory, strict=False)]
    if _is_wanted(pods.ROWS, options.rows):
        samples |= _pods(max(options.rounds // 4, 1))
    return samples, taken


def _pods(rounds: int) -> Samples:
    """Measure pods on a real node, where one can be made; say why not otherwise."""
    try:
        return pods.measure(rounds)
    except ClusterFailed as error:
        _say(f"pods on a node are left out: {error}")
        return {}


def measure(found: Sequence[Case], rounds: int) -> Samples:
    """Return the samples of each row, in seconds: one a round, or every so many rounds.

    Before them is a round that does not count: it fills the caches and proves the work done.
    """
    samples: Samples = {row: [] for case in found for row in case.rows}
    for number in range(rounds + 1):
        _progress(number, rounds)
        present = [case for case in found if number == 0 or (number - 1) % case.every == 0]
        for case in present:
            case.prepare()
        turn = number % len(present)
        for case in (*present[turn:], *present[:turn]):
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
    chosen = [case for case in found if _is_wanted(case.rows, words)]
    others = (*SIZES, *pods.ROWS)
    if not chosen and not _is_wanted(others, words):
        rows = "\n  ".join((*(row for case in found for row in case.rows), *others))
        raise BenchFailed(f"no row has one of these words in its name; there are:\n  {rows}")
    floor = [case for case in found if FLOOR in case.rows and case not in chosen]
    return [*floor, *chosen]


def _is_wanted(rows: Iterable[str], words: Sequence[str] | None) -> bool:
    """Tell whether one of the rows has one of the words in its name; no words: all are wanted."""
    return not words or any(word in row for row in rows for word in words)


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
