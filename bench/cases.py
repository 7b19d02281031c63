"""What is measured: each case makes one sample of each of its rows a round.

A captured pod is one case of three rows, ADD, CHECK and DEL of the same attachment, in a namespace
that is new each time. Every call must have answered as it should, or its time would mean nothing;
that it has also done what it should is looked at before the first round that counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from . import applying, burst, node, objects
from .agent import Agent
from .figures import FLOOR
from .process import BenchFailed, run
from .programs import Frozen
from .way import Way, configuration, environment

VERSION, EXCLUDED, OUTSIDE = "VERSION", "ADD excluded namespace", "ADD no sidecar"
PLAIN_START = f"{VERSION}, plain start"
AGENT = "agent "
NATIVE = "nftables"
LOOKED_UP, FRESH = (
    f"{AGENT}{OUTSIDE}, looked up",
    f"{AGENT}ADD captured {NATIVE}, own configuration",
)
VARIANTS = ("nft", "legacy")
BUDGETS = {
    VERSION: 1.3,
    EXCLUDED: 2.0,
    OUTSIDE: 2.0,
    **{f"ADD captured {variant}": 8.0 for variant in VARIANTS},
    f"ADD captured {NATIVE}": 6.0,
    **{f"{AGENT}{row}": 0.15 for row in (VERSION, EXCLUDED, OUTSIDE)},
    LOOKED_UP: 0.15,
    **{f"{AGENT}ADD captured {variant}": 0.7 for variant in VARIANTS},
    f"{AGENT}ADD captured {NATIVE}": 0.3,
    burst.ADDS: 0.25,
    applying.OURS: 0.4,
}
"""The ratio to its base that a row may have; those that are not here are for information."""
BASES = {
    applying.OURS: applying.NFT,
    applying.WHOLE: applying.NFT,
    burst.ADDS: burst.FLOORS,
}
"""What a row is compared with, where that is not the floor."""


class Case(Protocol):
    """One thing to measure, every so many rounds."""

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of its rows."""

    @property
    def every(self) -> int:
        """How many rounds are from one of its own to the next."""

    def prepare(self) -> None:
        """Make ready for a round, untimed."""

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Return a sample for each row, in seconds; with `prove`, see that work was done."""


class Program:
    """A program that is started with nothing and does nothing."""

    every = 1

    def __init__(self, row: str, path: str) -> None:
        self.rows = (row,)
        self._path = path

    def prepare(self) -> None:
        """Need nothing."""

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Start it once."""
        outcome = run([self._path], {})
        if prove and (outcome.status, outcome.stdout) != (0, b""):
            raise BenchFailed(f"{self.rows[0]} has exit status {outcome.status}")
        return (outcome.took_s,)


class Call:
    """A call of the plugin that leaves nothing behind."""

    every = 1

    def __init__(self, row: str, way: Way, env: Mapping[str, str], config: bytes) -> None:
        self.rows = (row,)
        self._way = way
        self._env = env
        self._config = config

    def prepare(self) -> None:
        """Need nothing."""

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Call once; the answer must be a document without error."""
        row = self.rows[0]
        return (self._way.call(row, self._env, self._config, silent=False, prove=prove),)


class Outside:
    """ADD of a pod that is not captured."""

    every = 1

    def __init__(
        self, row: str, way: Way, pod: objects.Name, config: bytes, place: node.Node | None
    ) -> None:
        """Let it have a namespace of `place`; with None, one that is not there."""
        self.rows = (row,)
        self._way = way
        self._pod = pod
        self._config = config
        self._node = place
        self._netns = "" if place else "/nonexistent"

    def prepare(self) -> None:
        """Make the pod's namespace once: nothing is left there."""
        if not self._netns and self._node:
            self._netns = self._node.new_pod()

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Call ADD; the answer must be a result."""
        env = environment("ADD", self._netns, self._pod)
        return (self._way.call(self.rows[0], env, self._config, silent=False, prove=prove),)


class Captured:
    """ADD, CHECK and DEL of a captured pod: a variant of iptables, or nf_tables directly."""

    every = 1

    def __init__(self, variant: str, way: Way, place: node.Node, prefix: str = "") -> None:
        self.rows: tuple[str, ...] = tuple(
            f"{prefix}{verb} captured {variant}" for verb in ("ADD", "CHECK", "DEL")
        )
        self._variant = variant
        self._way = way
        self._node = place
        self._netns: list[str] = []
        if variant == NATIVE:
            self._config = configuration(way.run_dir, backend=NATIVE)
        else:  # what an installer has found out about the node
            self._config = configuration(way.run_dir, node_backend=f"iptables-{variant}")

    def prepare(self) -> None:
        """Make the pod's namespace; that of the round before goes."""
        if self._netns:
            self._node.retire(self._netns)
        self._netns = [self._node.new_pod()]

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Call the three verbs one after the other."""
        add, check, delete = self.rows
        took = [self._call("ADD", add, prove=prove), self._call("CHECK", check, prove=prove)]
        if prove and not self._captures():
            raise BenchFailed(f"{add}: succeeds and does not capture both families")
        took.append(self._call("DEL", delete, prove=prove))
        if prove and "istio" in self._rules().lower():
            raise BenchFailed(f"{delete}: succeeds and leaves rules behind")
        return took

    def _captures(self) -> bool:
        rules = self._rules()
        if self._variant == NATIVE:
            return "counter jump istio-output" in rules and "ip6 daddr" in rules
        return rules.splitlines().count("-A OUTPUT -j ISTIO_OUTPUT") == 2  # both families

    def _rules(self) -> str:
        if self._variant == NATIVE:
            return node.native_rules(self._netns[0])
        return node.rules(self._netns[0], self._variant)

    def _call(self, verb: str, row: str, *, prove: bool) -> float:
        env = environment(verb, self._netns[0], objects.name(0))
        return self._way.call(row, env, self._config, silent=verb != "ADD", prove=prove)


class Fresh:
    """ADD of a pod with a configuration that the agent has not met: nothing of it is kept yet."""

    rows = (FRESH,)
    every = 1

    def __init__(self, way: Way, place: node.Node) -> None:
        self._way = way
        self._node = place
        self._netns: list[str] = []
        self._round = -1

    def prepare(self) -> None:
        """Make the pod's namespace."""
        if self._netns:
            self._node.retire(self._netns)
        self._netns = [self._node.new_pod()]
        self._round += 1

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Call ADD, and DEL untimed."""
        number = objects.own(self._round)
        pod, path = objects.name(number), self._netns[0]
        config = configuration(self._way.run_dir, number, backend=NATIVE)
        add, delete = (environment(verb, path, pod) for verb in ("ADD", "DEL"))
        took = self._way.call(FRESH, add, config, silent=False, prove=prove)
        if prove and objects.port(number) not in node.native_rules(path):
            raise BenchFailed(f"{FRESH}: no rule has the pod's own port")
        self._way.call(FRESH, delete, config, silent=True)
        return (took,)


class Programs(NamedTuple):
    """What is started: the frozen ones, and the two that set the scale."""

    frozen: Frozen
    floor: str
    static: str | None


def cases(
    programs: Programs, variants: Sequence[str], place: node.Node, agent: Agent | None
) -> list[Case]:
    """Return everything that can be measured here, the floor first.

    `variants` are the back ends, none if no namespaces can be made; `agent` may be started later.
    """
    alone = Way(place.alone, place.run_dir)
    plain = Way(programs.frozen.plugin, place.run_dir)
    pods = place if variants else None
    found: list[Case] = [
        Program(FLOOR, programs.floor),
        *([Program("static", programs.static)] if programs.static else []),
        Call(PLAIN_START, plain, {"CNI_COMMAND": "VERSION"}, b""),
        *_outside(alone, "", pods),
        *(Captured(variant, alone, place) for variant in variants),
        *([applying.Applied(place)] if NATIVE in variants else []),
    ]
    if agent is None:
        return found
    way = Way(agent.launcher, agent.run_dir, agent)
    unknown = configuration(way.run_dir, None)
    found += _outside(way, AGENT, pods)
    found.append(Outside(LOOKED_UP, way, objects.name(objects.PLAIN), unknown, pods))
    found += [Captured(variant, way, place, AGENT) for variant in variants]
    if NATIVE in variants:
        found += [Fresh(way, place), burst.Burst(programs.floor, way, place)]
    return found


def _outside(way: Way, prefix: str, place: node.Node | None) -> list[Case]:
    """Return the calls that need no look-up."""
    excluded = objects.name(0)._replace(namespace="kube-system")
    plain = objects.name(objects.PLAIN)
    handed_over = configuration(way.run_dir, objects.PLAIN)
    return [
        Call(f"{prefix}{VERSION}", way, {"CNI_COMMAND": "VERSION"}, b""),
        Outside(f"{prefix}{EXCLUDED}", way, excluded, configuration(way.run_dir), place),
        Outside(f"{prefix}{OUTSIDE}", way, plain, handed_over, place),
    ]
