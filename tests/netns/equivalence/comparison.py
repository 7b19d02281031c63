"""Program both pods, make the same connections in both, and find what did not end alike.

What seems to differ is looked at once more with more patience before it counts: on a busy machine
an answer may come too late, and one false report in a long run would make all of them doubtful. A
run also counts where connections ended, since a comparison in which all end alike because nothing
gets through proves nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from netns.programming import clean_up, program
from netns.traffic import DNS, OUTBOUND

from .calls import PATIENCE_S
from .configurations import Configuration
from .known import known
from .places import OWN_OUTBOUND, Ending, Endings, Settings
from .pods import Failed, Pod
from .probes import Probe, probes_of

SECOND_PATIENCE_S = 2.0
FIRST_PORT, PORTS = 20000, 40000  # of clients, one after the other


class Difference(NamedTuple):
    """A configuration under which the pods disagree: about which probes, or about programming."""

    configuration: Configuration
    endings: dict[Probe, Endings]
    failures: tuple[str, str] = ("", "")


class Run:
    """Configurations put into both pods, one after the other, and what came of it."""

    def __init__(self, pods: tuple[Pod, Pod]) -> None:
        self.pods = pods
        self.configurations = 0
        self.ended: defaultdict[Probe, Counter[str]] = defaultdict(Counter)
        self.known: Counter[str] = Counter()
        self.settled_later = 0
        self._port = 0

    @property
    def places(self) -> Counter[str]:
        """How many probes ended in which kind of place, all in all."""
        return sum(self.ended.values(), Counter())

    def both(self, what: Callable[..., Any], *args: Sequence[object]) -> tuple[str, str]:
        """Do something in both pods at once; return what failed."""
        for pod, own in zip(self.pods, args or ((), ()), strict=True):
            pod.ask(what, pod.path, *own)
        failures = ["", ""]
        for index, pod in enumerate(self.pods):
            try:
                pod.answer()
            except Failed as failure:
                failures[index] = str(failure)
        return failures[0], failures[1]

    def call(self, probes: Sequence[Probe], patience_s: float = PATIENCE_S) -> dict[Probe, Endings]:
        """Make the same connections in both pods; where each ended."""
        if self._port + len(probes) > PORTS:
            self._port = 0
        for pod in self.pods:
            pod.ask_calls(probes, FIRST_PORT + self._port, patience_s)
        self._port += len(probes)
        return dict(
            zip(probes, zip(*(pod.answer() for pod in self.pods), strict=True), strict=True)
        )

    def program(self, configuration: Configuration) -> tuple[str, str]:
        """Program a configuration, a back end a pod; return what failed."""
        failures = self.both(clean_up) if configuration.fresh else ("", "")
        if any(failures):
            return failures
        return self.both(program, (configuration.iptables,), (configuration.nftables,))

    def examine(self, configuration: Configuration) -> Difference | None:
        """Compare what the back ends make of a configuration; what differs is looked at twice."""
        self.configurations += 1
        failures = self.program(configuration)
        if any(failures):
            return Difference(configuration, {}, failures)
        endings = self.call(probes_of(configuration.settings))
        suspects = unexpected(configuration.settings, endings)
        if suspects:
            endings |= self.call(tuple(suspects), SECOND_PATIENCE_S)
        differing = unexpected(configuration.settings, endings)
        self.settled_later += len(suspects) - len(differing)
        self._count(configuration.settings, endings)
        return Difference(configuration, differing) if differing else None

    def _count(self, settings: Settings, endings: Mapping[Probe, Endings]) -> None:
        for probe, (ending, _) in endings.items():
            self.ended[probe][kind_of(ending)] += 1
            expected = known(settings, probe)
            if expected:
                self.known[expected.topic] += 1


def unexpected(settings: Settings, endings: Mapping[Probe, Endings]) -> dict[Probe, Endings]:
    """Return what did not end alike, or not as different as is known."""
    found = {}
    for probe, ended in endings.items():
        expected = known(settings, probe)
        alike = ended[0] == ended[1]
        if ended != (expected.iptables, expected.nftables) if expected else not alike:
            found[probe] = ended
    return found


def kind_of(ending: Ending) -> str:
    """Sum up where a probe ended: who took it, and on which side of the proxy."""
    if isinstance(ending, str):
        return ending
    ports = {OUTBOUND: "outbound", OWN_OUTBOUND: "outbound", DNS: "DNS"}
    return f"proxy, {ports.get(ending.port, 'inbound')}" if ending.at == "proxy" else ending.at
