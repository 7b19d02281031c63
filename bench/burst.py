"""A node that fills up at once: a hundred starts, eight at a time.

Who starts them is one thread that waits for ends, since more would compete with what they start.
Streams are files, for the same reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import node, objects
from .process import BenchFailed
from .way import Way, configuration, environment

COUNT, ABREAST = 100, 8
EVERY = 10  # rounds
FLOORS = f"floor, {COUNT} at {ABREAST}"
ADDS = f"agent ADD captured nftables, {COUNT} at {ABREAST}"


class Burst:
    """A hundred pods through the agent, and as often the program that does nothing."""

    rows = (FLOORS, ADDS)
    every = EVERY

    def __init__(self, floor: str, way: Way, place: node.Node) -> None:
        self._floor = floor
        self._way = way
        self._node = place
        self._netns: list[str] = []
        self._turn = 0

    def prepare(self) -> None:
        """Make the pods' namespaces."""
        self._netns = self._node.new_pods(COUNT)

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Start all of one kind, then all of the other; what comes first takes turns."""
        self._turn += 1
        if self._turn % 2:
            floors, adds = self._floors(), self._call("ADD", silent=False)
        else:
            adds, floors = self._call("ADD", silent=False), self._floors()
        if prove and not all("istio" in node.native_rules(each) for each in self._netns[::25]):
            raise BenchFailed(f"{ADDS}: succeeds and does not capture")
        self._way.count(COUNT, prove=prove)
        self._call("DEL", silent=True)
        self._way.count(COUNT, prove=prove)
        self._node.retire(self._netns)
        return floors, adds

    def _floors(self) -> float:
        return _run_all(self._floor, [{}] * COUNT, b"", self._node.memory)[0]

    def _call(self, verb: str, *, silent: bool) -> float:
        """Call a verb for every pod; the answers must be as for a single one."""
        name = objects.name(0)
        environments = [environment(verb, netns, name) for netns in self._netns]
        config = configuration(self._way.run_dir, backend="nftables")
        program, directory = self._way.program, self._node.memory
        took_s, answers = _run_all(program, environments, config, directory)
        if wrong := [answer for answer in answers if bool(answer) == silent]:
            raise BenchFailed(f"{ADDS}: {verb} answers {wrong[0].decode(errors='replace')!r}")
        return took_s


def _run_all(
    program: str, environments: Sequence[Mapping[str, str]], stdin: bytes, directory: str
) -> tuple[float, list[bytes]]:
    """Run a program once in each environment; return the seconds, and what each run printed."""
    given = Path(directory, "burst.stdin")
    given.write_bytes(stdin)
    printed = [Path(directory, f"burst.{number}") for number in range(len(environments))]
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

    def start(number: int) -> int:
        streams = [
            (os.POSIX_SPAWN_OPEN, 0, str(given), os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(printed[number]), write, 0o600),
            (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
        ]
        return os.posix_spawn(program, [program], environments[number], file_actions=streams)

    took_s = run_abreast(start, len(environments), ABREAST)
    return took_s, [path.read_bytes() for path in printed]


def run_abreast(start: Callable[[int], int], count: int, abreast: int) -> float:
    """Keep so many processes running until all were started and have ended; return the seconds.

    `start` gets a number and returns a process. Raises BenchFailed if one fails.
    """
    running: dict[int, int] = {}
    failed, number = "", 0
    started = time.perf_counter()
    while number < count or running:
        while len(running) < abreast and number < count:
            running[start(number)] = number
            number += 1
        process, status = os.wait()
        which = running.pop(process, None)
        code = os.waitstatus_to_exitcode(status)
        if which is None:
            failed = f"a process beside those being measured has ended with status {code}"
        elif code != 0:
            failed = f"start {which} ended with status {code}"
    took_s = time.perf_counter() - started
    if failed:
        raise BenchFailed(failed)
    return took_s
