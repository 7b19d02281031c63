"""What the benchmark reads of the agent, the pods it makes, and how it starts many programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import pytest
from bench import agent, burst, objects
from bench.process import BenchFailed
from bench.way import configuration, environment

from istio_cni.plugin.pod import Pod
from istio_cni.plugin.select import after_look_up

TEXT = """# HELP calls_total Calls.
# TYPE calls_total counter
calls_total{verb="ADD",code="0"} 3.0
calls_total{verb="ADD",code="11"} 1.0
calls_total{verb="DEL",code="0"} 2.0
calls_total_more 7.0
size 110.0
"""


def test_series_are_added_up_by_their_labels() -> None:
    """Of one metric only; none is 0."""
    assert agent.total(TEXT, "calls_total") == 6
    assert agent.total(TEXT, "calls_total", verb="ADD") == 4
    assert agent.total(TEXT, "calls_total", verb="DEL", code="0") == 2
    assert agent.total(TEXT, "calls_total", verb="GC") == 0
    assert agent.total(TEXT, "size") == 110


def test_a_full_node_has_pods_of_the_size_of_real_ones() -> None:
    """All with names and uids of their own; one is outside the mesh."""
    pods = objects.pods("node-1")
    sizes = [len(json.dumps(pod)) for pod in pods]
    names = {(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in pods}
    assert (len(pods), len(names)) == (110, 110)
    assert min(sizes) >= 10_000
    assert 30_000 < max(sizes) < 36_000
    outside = [number for number, pod in enumerate(pods) if after_look_up(Pod(pod))]
    assert outside == [objects.PLAIN]


def test_each_round_has_a_pod_with_its_own_configuration() -> None:
    """108 of them, then once more from the first."""
    numbers = [objects.own(number) for number in range(109)]
    assert numbers[108] == numbers[0]
    assert not {0, objects.PLAIN} & set(numbers)
    assert len({objects.port(number) for number in numbers}) == 108


def test_a_call_is_as_containerd_makes_it() -> None:
    """With the uid that the agent needs to answer from its cache."""
    env = environment("ADD", "/run/netns/x", objects.name(0))
    assert env["CNI_ARGS"].endswith(f";K8S_POD_UID={objects.name(0).uid}")
    document = json.loads(configuration("/run", objects.PLAIN, backend="nftables"))
    handed_over = document["runtimeConfig"]["io.kubernetes.cri.pod-annotations"]
    assert handed_over["kubernetes.io/config.source"] == "api"
    assert "sidecar.istio.io/status" not in handed_over
    assert document["backend"] == "nftables"
    assert "runtimeConfig" not in json.loads(configuration("/run", None))


def _starts(code: str) -> Callable[[int], int]:
    """Start Python with some code, which gets the number."""

    def start(number: int) -> int:
        argv = [sys.executable, "-ISc", code, str(number)]
        return os.posix_spawn(sys.executable, argv, {})

    return start


def test_no_more_programs_run_at_a_time_than_told() -> None:
    """And all of them are run."""
    begun: list[int] = []
    start = _starts("pass")

    def noted(number: int) -> int:
        begun.append(number)
        return start(number)

    assert burst.run_abreast(noted, 5, 2) > 0
    assert begun == [0, 1, 2, 3, 4]


def test_one_program_that_fails_fails_all() -> None:
    """It is named by its number."""
    with pytest.raises(BenchFailed, match="start 1 ended with status 7"):
        burst.run_abreast(_starts("import sys; sys.exit(7 * (sys.argv[1] == '1'))"), 3, 2)
