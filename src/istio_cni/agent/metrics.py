"""What the node agent counts, under the reference's names where it has them; docs/metrics.md.

Label values come from closed sets, whatever a caller passes: a value that is none of them counts as
"other", so that nothing from outside makes a series. Those that matter for alerts exist from the
start, at 0, so that the first event is an increase. What is counted for each call is resolved once.

Source: istio cni/pkg/install/monitoring.go, cni/pkg/nodeagent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder

from istio_cni.cni.request import VERBS
from istio_cni.errors import IstioCNIError
from istio_cni.plugin.host import DECIDE, LOOK_UP, PROGRAM

OTHER = "other"
QUEUE, TOTAL = "queue", "total"  # beside the phases that hosts know
PHASES = (QUEUE, LOOK_UP, DECIDE, PROGRAM, TOTAL)
BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
FALLBACKS = (
    *("absent", "untrusted", "busy", "declined", "timeout", "died", "garbled", "unfit"),
    OTHER,
)  # launcher/istio-cni.c
UNTRUSTED, MALFORMED, UNKNOWN_VERSION = "untrusted", "malformed", "version"
DECLINED = (UNTRUSTED, MALFORMED, UNKNOWN_VERSION, OTHER)
SUCCESS = "SUCCESS"
FAILURES = {
    "Bundle": "COPY_BINARIES_FAILURE",
    "Credentials": "CREATE_KUBECONFIG_FAILURE",
    "Network": "CREATE_CNI_CONFIG_FAILURE",
}  # by the part of the installation that failed


def _codes(kind: type[IstioCNIError] = IstioCNIError) -> Iterator[int]:
    """Return all codes that a call can fail with."""
    yield kind.code
    for each in kind.__subclasses__():
        yield from _codes(each)


def durations(marks: Sequence[tuple[str, float]], end: float) -> dict[str, float]:
    """Return the seconds of each phase, and in all, from the instants at which phases began.

    A phase ends where the next one begins; what was entered several times is added up.
    """
    if not marks:
        return {}
    took: dict[str, float] = {}
    ends = [began for _, began in marks[1:]] + [end]
    for (phase, began), ended in zip(marks, ends, strict=True):
        took[phase] = took.get(phase, 0.0) + ended - began
    return took | {TOTAL: end - marks[0][1]}


class Metrics:
    """All metrics of one agent, in a registry of their own; any thread may call any method."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # a series more for each, which nobody asks for
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._rendering = threading.Lock()
        self._codes = {0, *_codes()}
        self._requests = self._counter(
            "istio_cni_plugin_requests_total",
            "CNI calls that the node agent carried out, by verb and CNI error code; 0 is success.",
            ("verb", "code"),
        )
        phases = Histogram(
            "istio_cni_plugin_add_duration_seconds",
            "Time that an ADD took in the node agent, by phase.",
            ("phase",),
            registry=self.registry,
            buckets=BUCKETS_S,
        )
        self._phases = {phase: phases.labels(phase) for phase in PHASES}
        self._fallbacks = self._resolved(
            "istio_cni_plugin_fallbacks_total",
            "CNI calls that the plugin's own process carried out instead of the node agent.",
            "reason",
            FALLBACKS,
        )
        self._declined = self._resolved(
            "istio_cni_plugin_declined_total",
            "CNI calls that the node agent declined to carry out.",
            "reason",
            DECLINED,
        )
        self._installs = self._resolved(
            "istio_cni_installs_total",
            "Installations on this node, by result.",
            "result",
            (SUCCESS, *FAILURES.values()),
        )
        self._calls = {(verb, 0): self._requests.labels(verb, "0") for verb in (*VERBS, OTHER)}

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _resolved(
        self, name: str, text: str, label: str, values: tuple[str, ...]
    ) -> dict[str, Counter]:
        """Make a counter and all its series."""
        counter = self._counter(name, text, (label,))
        return {value: counter.labels(value) for value in values}

    # -- calls ---------------------------------------------------------------------------------

    def request(self, verb: str, code: int) -> None:
        """Count a call that was carried out; `code` is its CNI error code, 0 for success."""
        series = self._calls.get((verb, code))
        if series is None:
            verb = verb if verb in VERBS else OTHER
            shown = str(code) if code in self._codes else OTHER
            series = self._requests.labels(verb, shown)
            if shown != OTHER:
                self._calls[verb, code] = series
        series.inc()

    def add_took(self, phases: Mapping[str, float]) -> None:
        """Note how many seconds an ADD spent in each phase; those it had not are left out."""
        for phase, seconds in phases.items():
            series = self._phases.get(phase)
            if series is not None:
                series.observe(max(0.0, seconds))

    def declined(self, reason: str) -> None:
        """Count a call that was declined."""
        self._declined.get(reason, self._declined[OTHER]).inc()

    def fallback(self, reason: str) -> None:
        """Count a call that a plugin process carried out, by the launcher's word for the reason."""
        self._fallbacks.get(reason, self._fallbacks[OTHER]).inc()

    def plugin_line(self, line: Mapping[str, object]) -> None:
        """Count what a line of a plugin process tells."""
        if "fallback" in line:
            self.fallback(str(line["fallback"]))

    # -- state ---------------------------------------------------------------------------------

    def watch_cache(self, size: Callable[[], float], age_s: Callable[[], float]) -> None:
        """Show the watch cache: its pods, and the seconds since the API server was heard of."""
        self._gauge("istio_cni_pod_cache_size", "Pods in the watch cache.", size)
        self._gauge(
            "istio_cni_pod_cache_age_seconds",
            "Time since the watch cache was last known to be current.",
            age_s,
        )

    def watch_install(self, ready: Callable[[], bool]) -> None:
        """Show whether all is in place on the node."""
        self._gauge("istio_cni_install_ready", "1 while all is in place on this node.", ready)

    def installed(self, failed: str = "") -> None:
        """Count an installation; `failed` is the class of the part that failed, "" if none did."""
        if not failed:
            self._installs[SUCCESS].inc()
        elif failed in FAILURES:
            self._installs[FAILURES[failed]].inc()

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        def measured() -> float:
            try:
                return float(value())
            except Exception:  # one value must not cost all the others
                return float("nan")

        Gauge(name, text, registry=self.registry).set_function(measured)

    # -- text ----------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Write all metrics as an Accept header wants them; return the text and its type."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
        with self._rendering:
            return encode(self.registry), content_type
