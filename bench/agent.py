"""The frozen node agent as a process on the benchmark's node, and what it tells of itself.

It is started as its pod would start it, but for its directories, which are the benchmark's: it
installs the launcher and follows this node's pods. That calls were really carried out by it is
proved by what it counts: one call of a launcher is one request here, and no plugin process ran.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .process import BenchFailed
from .programs import Frozen

PATIENCE_S = 60.0
LOOK_S = 0.02
SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')
REQUESTS = "istio_cni_plugin_requests_total"
FALLBACKS, DECLINED = "istio_cni_plugin_fallbacks_total", "istio_cni_plugin_declined_total"
CACHED = "istio_cni_pod_cache_size"
PRIMARY = {"cniVersion": "1.0.0", "name": "k8s-pod-network", "plugins": [{"type": "bridge"}]}


class Agent:
    """An agent in directories of its own, once it was started; the run dir is one in `memory`."""

    def __init__(self, directory: str, memory: str, frozen: Frozen) -> None:
        self._directory = Path(directory, "agent")
        self._frozen = frozen
        self._log = self._directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._health = self._monitoring = 0
        self.calls = 0
        """How many calls went to it so far; the callers count."""
        self.run_dir = os.path.join(memory, "agent")
        self.launcher = str(self._directory / "bin" / "istio-cni")

    def start(self, env: Mapping[str, str]) -> None:
        """Start it with what every pod of the node is told, and wait until it is ready.

        Raises BenchFailed.
        """
        os.makedirs(self.run_dir)
        for name in ("net", "bin", "proc/1/ns"):
            (self._directory / name).mkdir(parents=True)
        for name in ("net", "mnt"):  # this is the host, as the agent is to see it
            (self._directory / "proc/1/ns" / name).symlink_to(f"/proc/self/ns/{name}")
        (self._directory / "net/10-pods.conflist").write_text(json.dumps(PRIMARY))
        self._health, self._monitoring = _free_port(), _free_port()
        own = {
            "PATH": os.environ["PATH"],
            "MOUNTED_CNI_NET_DIR": str(self._directory / "net"),
            "MOUNTED_CNI_BIN_DIR": str(self._directory / "bin"),
            "CNI_AGENT_RUN_DIR": self.run_dir,
            "HOST_PROC_DIR": str(self._directory / "proc"),
            "BUNDLE_DIR": self._frozen.bundle,
            "EXCLUDE_NAMESPACES": "kube-system",
            "HEALTH_PORT": str(self._health),
            "MONITORING_PORT": str(self._monitoring),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self._frozen.agent],
                env={**own, **env},
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self._wait(self._is_ready, "does not become ready")

    def stop(self) -> None:
        """End it; that takes two seconds, which it leaves to runtimes."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        self._process.kill()
        self._process.wait()

    def metrics(self) -> str:
        """Return what it counts, as Prometheus reads it. Raises BenchFailed."""
        return self._get(self._monitoring, "/metrics")

    def requests(self) -> int:
        """Return how many calls it has carried out."""
        return round(total(self.metrics(), REQUESTS))

    def expect(self) -> None:
        """Wait until it has counted all calls; raise BenchFailed if others did some of them.

        It counts a call after it has answered.
        """
        self._wait(lambda: self.requests() >= self.calls, f"has not done {self.calls} calls")
        text = self.metrics()
        counted = round(total(text, REQUESTS))
        others = {name: total(text, name) for name in (FALLBACKS, DECLINED)}
        if counted != self.calls or any(others.values()):
            raise BenchFailed(f"the agent counts {counted} calls, not {self.calls}, and {others}")

    def memory_mib(self, pods: int) -> tuple[float, float]:
        """Return its resident memory, and the proportional shares of it and all of its workshop.

        Raises BenchFailed unless it knows so many pods.
        """
        known = round(total(self.metrics(), CACHED))
        if self._process is None or known != pods:
            raise BenchFailed(f"the agent knows {known} pods, not {pods}")
        process = self._process.pid
        shares = (_kib(f"/proc/{each}/smaps_rollup", "Pss") for each in _family(process))
        return _kib(f"/proc/{process}/status", "VmRSS") / 1024, sum(shares) / 1024

    def _is_ready(self) -> bool:
        try:
            return self._get(self._health, "/readyz") == "ok\n"
        except BenchFailed:
            return False

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self._process is None or self._process.poll() is not None:
                raise BenchFailed(f"the agent has ended: {self._last_lines()}")
            if time.monotonic() > deadline:
                raise BenchFailed(f"the agent {what}: {self._last_lines()}")
            time.sleep(LOOK_S)

    def _get(self, port: int, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise BenchFailed(f"the agent does not answer {path}: {error}") from error
        finally:
            connection.close()

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return " / ".join(lines[-3:]) or "its log is empty"


def total(text: str, name: str, **labels: str) -> float:
    """Add up the series of a metric that have these labels, in the text that Prometheus reads."""
    found = 0.0
    for line in text.splitlines():
        series = SERIES.match(line)
        if series and series[1] == name and labels.items() <= set(LABEL.findall(series[2] or "")):
            found += float(series[3])
    return found


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _family(process: int) -> list[int]:
    """Return a process and all that come from it; only the agent itself has several threads."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(each for child in children for each in _family(int(child)))]


def _kib(path: str, field: str) -> int:
    """Read one number of a file of the kernel's about a process."""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise BenchFailed(f"there is no {field} in {path}")
