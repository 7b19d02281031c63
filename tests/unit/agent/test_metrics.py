"""What is counted, under which names, and that nothing from outside makes a series."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from istio_cni.agent import metrics as module
from istio_cni.agent.metrics import DECIDE, LOOK_UP, PROGRAM, QUEUE, TOTAL, Metrics, durations

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
LIBRARY = ("python_", "process_")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return a sample as a scrape shows it."""
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            if (sample.name, sample.labels) == (name, labels):
                return sample.value
    return None


def names(metrics: Metrics) -> set[str]:
    """Return the names of all samples."""
    return set(re.findall(r"^(\w+)", metrics.render()[0].decode(), re.M))


def requests(metrics: Metrics, verb: str, code: str) -> float | None:
    """Return how many calls were counted."""
    return value(metrics, "istio_cni_plugin_requests_total", verb=verb, code=code)


# -- calls -----------------------------------------------------------------------------------------


def test_calls_are_counted_by_verb_and_code() -> None:
    """Success is code 0, and is there from the start."""
    metrics = Metrics()
    assert requests(metrics, "ADD", "0") == 0
    for code in (0, 0, 11, 11, 102):
        metrics.request("ADD", code)
    metrics.request("DEL", 0)
    assert requests(metrics, "ADD", "0") == 2
    assert requests(metrics, "ADD", "11") == 2
    assert requests(metrics, "ADD", "102") == 1
    assert requests(metrics, "DEL", "0") == 1


def test_values_that_are_not_known_share_one_series() -> None:
    """Whatever somebody sends, there are as many series as before."""
    metrics = Metrics()
    for number in range(100):
        metrics.request(f"ADD{number}", 0)
        metrics.request("ADD", 10_000 + number)
        metrics.request("\x00", 999)
        metrics.fallback(f"word{number}")
        metrics.declined("")
    assert requests(metrics, "other", "0") == 100
    assert requests(metrics, "ADD", "other") == 100
    assert requests(metrics, "other", "999") == 100
    assert value(metrics, "istio_cni_plugin_fallbacks_total", reason="other") == 100
    assert value(metrics, "istio_cni_plugin_declined_total", reason="other") == 100
    text = metrics.render()[0].decode()
    assert len(re.findall(r"^istio_cni_plugin_requests_total\{", text, re.M)) == 9
    assert "word" not in text


def test_an_add_is_observed_by_phase() -> None:
    """Buckets from half a millisecond to ten seconds; a phase that was not entered has none."""
    metrics = Metrics()
    metrics.add_took({QUEUE: 0.0004, DECIDE: 0.003, TOTAL: 11.0, "lunch": 3600.0, PROGRAM: -1e-9})
    name = "istio_cni_plugin_add_duration_seconds"
    assert value(metrics, f"{name}_bucket", phase=QUEUE, le="0.0005") == 1
    assert value(metrics, f"{name}_bucket", phase=DECIDE, le="0.002") == 0
    assert value(metrics, f"{name}_bucket", phase=DECIDE, le="0.005") == 1
    assert value(metrics, f"{name}_bucket", phase=TOTAL, le="10.0") == 0
    assert value(metrics, f"{name}_bucket", phase=TOTAL, le="+Inf") == 1
    assert value(metrics, f"{name}_sum", phase=TOTAL) == 11.0
    assert value(metrics, f"{name}_sum", phase=PROGRAM) == 0
    assert value(metrics, f"{name}_count", phase=LOOK_UP) == 0
    assert value(metrics, f"{name}_count", phase="lunch") is None


def test_durations_add_up_what_was_entered_twice() -> None:
    """A phase ends where the next one begins; the total is all of it."""
    marks = [(QUEUE, 1.0), (DECIDE, 2.0), (LOOK_UP, 4.0), (DECIDE, 8.0), (PROGRAM, 16.0)]
    assert durations(marks, 32.0) == {
        QUEUE: 1.0,
        DECIDE: 10.0,
        LOOK_UP: 4.0,
        PROGRAM: 16.0,
        TOTAL: 31.0,
    }
    assert durations([], 5.0) == {}


def test_lines_of_plugins_are_counted_by_the_word_of_the_launcher() -> None:
    """Other lines are not; a word that is no text counts as any other."""
    metrics = Metrics()
    for line in ({"msg": "captured"}, {"fallback": "died"}, {"fallback": "died"}, {"fallback": 5}):
        metrics.plugin_line(line)
    name = "istio_cni_plugin_fallbacks_total"
    assert value(metrics, name, reason="died") == 2
    assert value(metrics, name, reason="other") == 1
    assert value(metrics, name, reason="absent") == 0


def test_calls_are_counted_from_many_threads() -> None:
    """None is lost."""
    metrics = Metrics()

    def work() -> None:
        for _ in range(500):
            metrics.request("ADD", 7)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert requests(metrics, "ADD", "7") == 4000


def test_counting_an_add_is_cheap() -> None:
    """Twenty microseconds or so here, against two milliseconds that an ADD takes."""
    metrics = Metrics()
    marks = [(QUEUE, 0.0), (DECIDE, 0.1), (LOOK_UP, 0.2), (DECIDE, 0.3), (PROGRAM, 0.4)]
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(50):
            metrics.add_took(durations(marks, 0.5))
            metrics.request("ADD", 0)
        best = min(best, (time.perf_counter() - began) / 50)
    assert best < 200e-6


# -- state -----------------------------------------------------------------------------------------


def test_gauges_show_what_is_watched_when_somebody_looks() -> None:
    """They are not there before there is something to watch."""
    metrics, pods, missing = Metrics(), [1, 2], ["no bundle"]
    assert value(metrics, "istio_cni_pod_cache_size") is None
    metrics.watch_cache(lambda: len(pods), lambda: 1.5)
    metrics.watch_install(lambda: not missing)
    assert value(metrics, "istio_cni_pod_cache_size") == 2
    assert value(metrics, "istio_cni_pod_cache_age_seconds") == 1.5
    assert value(metrics, "istio_cni_install_ready") == 0
    pods.append(3)
    missing.clear()
    assert value(metrics, "istio_cni_pod_cache_size") == 3
    assert value(metrics, "istio_cni_install_ready") == 1


def test_a_gauge_that_cannot_be_read_costs_no_other() -> None:
    """It is no number then."""
    metrics = Metrics()
    metrics.watch_cache(lambda: 1 / 0, lambda: 3.0)
    size = value(metrics, "istio_cni_pod_cache_size")
    assert size != size  # NaN
    assert value(metrics, "istio_cni_pod_cache_age_seconds") == 3.0


def test_installations_are_counted_by_what_failed() -> None:
    """The reference's words, from the names of our parts."""
    metrics = Metrics()
    for part in ("", "", "Bundle", "Credentials", "Network", "Lunch"):
        metrics.installed(part)
    name = "istio_cni_installs_total"
    assert value(metrics, name, result="SUCCESS") == 2
    assert value(metrics, name, result="COPY_BINARIES_FAILURE") == 1
    assert value(metrics, name, result="CREATE_KUBECONFIG_FAILURE") == 1
    assert value(metrics, name, result="CREATE_CNI_CONFIG_FAILURE") == 1


def test_parts_have_the_names_that_failures_go_by() -> None:
    """A class that is renamed would not be counted any more."""
    from istio_cni.install.bundle import Bundle
    from istio_cni.install.credentials import Credentials
    from istio_cni.install.network import Network

    assert [part.__name__ for part in (Bundle, Credentials, Network)] == [*module.FAILURES]


# -- text ------------------------------------------------------------------------------------------


def test_names_are_exact() -> None:
    """No creation times, no suffixes beyond those of the type; the library's own are there."""
    metrics = Metrics()
    metrics.watch_cache(lambda: 0, lambda: 0)
    metrics.watch_install(lambda: True)
    found = names(metrics)
    assert {name for name in found if not name.startswith(LIBRARY)} == {
        "istio_cni_plugin_requests_total",
        *(f"istio_cni_plugin_add_duration_seconds_{kind}" for kind in ("bucket", "count", "sum")),
        "istio_cni_plugin_fallbacks_total",
        "istio_cni_plugin_declined_total",
        "istio_cni_pod_cache_size",
        "istio_cni_pod_cache_age_seconds",
        "istio_cni_install_ready",
        "istio_cni_installs_total",
    }
    assert {"process_resident_memory_bytes", "process_open_fds", "python_info"} <= found
    openmetrics = metrics.render("application/openmetrics-text")[0].decode()
    assert "_created" not in openmetrics


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/html, application/json;q=0.9", "text/plain; version=0.0.4"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
        ("application/openmetrics-text;version=one", "text/plain; version=0.0.4"),
        ("\x00,,;;=", "text/plain; version=0.0.4"),
    ],
)
def test_the_format_is_what_was_asked_for(accept: str, kind: str) -> None:
    """OpenMetrics only if somebody asks for it; what cannot be understood is not asked for."""
    text, content_type = Metrics().render(accept)
    assert content_type.startswith(kind)
    assert text.endswith(b"# EOF\n") is ("openmetrics" in kind)


def test_two_agents_in_one_process_do_not_share() -> None:
    """Nor does anything go to the library's own registry."""
    first, second = Metrics(), Metrics()
    first.request("ADD", 0)
    assert requests(second, "ADD", "0") == 0


def test_the_page_lists_every_metric_with_its_labels() -> None:
    """And no other one."""
    metrics = Metrics()
    metrics.watch_cache(lambda: 0, lambda: 0)
    metrics.watch_install(lambda: True)
    rows = re.findall(r"^\| `(istio_cni_\w+)` \| (\w+) \| ([^|]*) \|", PAGE.read_text(), re.M)
    listed = {name: (kind, {*re.findall(r"`(\w+)`", labels)}) for name, kind, labels in rows}
    found = {}
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, labels)
    assert listed == {name: it for name, it in found.items() if not name.startswith(LIBRARY)}


def test_the_page_lists_every_value_of_a_label() -> None:
    """Whoever writes an alert looks them up there."""
    words = {*re.findall(r"`([\w]+)`", PAGE.read_text())}
    assert {*module.PHASES, *module.FALLBACKS, *module.DECLINED} <= words
    assert {module.SUCCESS, *module.FAILURES.values()} <= words
