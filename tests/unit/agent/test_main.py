"""`install-cni` as a process, from its first line to its last, against an API server over TLS."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates import authority
from fake_apiserver import FakeApiServer, Reply
from istio_cni.edge.kube import load_kubeconfig
from waiting import PATIENCE_S, wait

LIST = {"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge"}]}


class Agent:
    """A node's directories, and install-cni on it."""

    def __init__(self, directory: Path, server: FakeApiServer) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        for name in ("net", "bin", "run", "account", "bundle"):
            (directory / name).mkdir()
        self.conflist = directory / "net/10-pods.conflist"
        self.conflist.write_text(json.dumps(LIST))
        for name in ("istio-cni", "launcher"):
            (directory / "bundle" / name).write_text(name)
        for name, text in (("token", "token-1"), ("ca.crt", authority().certificate)):
            (directory / "account" / name).write_text(text)
        (directory / "account/namespace").write_text("mesh\n")
        (directory / "proc/1/ns").mkdir(parents=True)
        for name in ("net", "mnt"):
            (directory / "proc/1/ns" / name).symlink_to(f"/proc/self/ns/{name}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.env = {
            "MOUNTED_CNI_NET_DIR": str(directory / "net"),
            "MOUNTED_CNI_BIN_DIR": str(directory / "bin"),
            "CNI_AGENT_RUN_DIR": str(directory / "run"),
            "BUNDLE_DIR": str(directory / "bundle"),
            "SERVICE_ACCOUNT_DIR": str(directory / "account"),
            "HOST_PROC_DIR": str(directory / "proc"),
            "HEALTH_PORT": str(self.port),
            "MONITORING_PORT": "0",
            "KUBERNETES_SERVICE_HOST": server.host,
            "KUBERNETES_SERVICE_PORT": str(server.port),
            "LOG_LEVEL": "debug",
        }

    def start(self, **env: str) -> None:
        """Start the agent; its lines are collected."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "istio_cni.agent.main"],
            env={**self.env, **env},
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._collect).start()

    def _collect(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            self.lines.extend(stream)

    def ready(self) -> tuple[int, str]:
        """Ask as the kubelet does; 0 while nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def wait_ready(self, status: int = 200) -> str:
        """Wait for an answer of the readiness probe; return its text."""
        wait(lambda: self.ready()[0] == status, f"status {status}: {self.lines}")
        return self.ready()[1]

    def types(self) -> list[str]:
        """Return the plugins in the conflist."""
        return [plugin["type"] for plugin in json.loads(self.conflist.read_text())["plugins"]]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(10)


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    """Serve tokens of the plugin's account."""
    with FakeApiServer() as server:
        server.accounts.add(("mesh", "istio-cni-plugin"))
        yield server


@pytest.fixture
def agent(tmp_path: Path, server: FakeApiServer) -> Iterator[Agent]:
    """Make a node, and leave no process behind."""
    agent = Agent(tmp_path, server)
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.process.kill()
        agent.process.wait()


def test_a_life_from_start_to_end(agent: Agent, server: FakeApiServer) -> None:
    """Installs, restores what somebody changes, and takes everything away on SIGTERM."""
    run, bin_dir = agent.directory / "run", agent.directory / "bin"
    (run / "attachments").mkdir()
    agent.start(REPAIR_ENABLED="true")
    assert agent.wait_ready() == "ok\n"
    assert agent.types() == ["bridge", "istio-cni"]
    assert (bin_dir / "istio-cni").read_text() == "launcher"
    token = load_kubeconfig(str(run / "istio-cni-kubeconfig")).token
    assert token in server.tokens - {"token-1"}

    agent.conflist.write_text(json.dumps(LIST))
    wait(lambda: agent.types() == ["bridge", "istio-cni"], "the entry is back")

    began = time.monotonic()
    assert agent.end() == 0
    assert time.monotonic() - began < 8
    assert json.loads(agent.conflist.read_text()) == LIST
    assert os.listdir(bin_dir) == []
    assert os.listdir(run / "agent") == []
    assert sorted(os.listdir(run)) == ["agent", "attachments"]  # pods stay captured

    wait(lambda: "removed" in agent.lines[-1], "the last line")
    lines = [json.loads(line) for line in agent.lines]
    assert all(line.keys() >= {"time", "level", "msg", "scope"} for line in lines)
    assert {line["scope"] for line in lines} == {"cni-agent"}
    assert lines[0]["settings"]["mounted_cni_bin_dir"] == str(bin_dir)
    warnings = [line["msg"] for line in lines if line["level"] == "warn"]
    assert [text for text in warnings if not text.startswith("not in place: no token")] == [
        "repair is not part of this version; set in vain: repair_enabled",
        "NODE_NAME is not set: each pod is asked for when it starts",
    ]
    text = "".join(agent.lines)
    assert not any(secret in text for secret in server.tokens)


def test_without_primary_or_api_server_it_waits_and_says_for_what(
    agent: Agent, server: FakeApiServer
) -> None:
    """Healthy, not ready, and nothing in the conflist before all else is in place."""
    server.always = Reply(503, "down")
    agent.start()
    wait(lambda: "HTTP 503" in agent.ready()[1], "it waits for the API server")
    assert agent.types() == ["bridge"]
    agent.conflist.unlink()
    server.always = Reply()
    wait(lambda: "no valid configuration" in agent.ready()[1], "it waits for a primary")
    assert (agent.directory / "run/istio-cni-kubeconfig").exists()
    agent.conflist.write_text(json.dumps(LIST))
    agent.wait_ready()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_api_server_that_hangs_does_not_delay_the_end(
    agent: Agent, server: FakeApiServer, number: int
) -> None:
    """A second signal changes nothing: what was begun is done to the end."""
    server.always = Reply(fault="hang")
    agent.start()
    agent.wait_ready(503)
    began = time.monotonic()
    assert agent.process is not None
    agent.process.send_signal(number)
    time.sleep(0.1)
    assert agent.end(number) == 0
    assert time.monotonic() - began < 8
    assert os.listdir(agent.directory / "bin") == []


def test_a_signal_that_comes_first_is_not_lost(agent: Agent) -> None:
    """As process 1 it would be, before anybody waits for it; nothing is installed then."""
    agent.start()
    assert agent.process is not None
    status = Path(f"/proc/{agent.process.pid}/status")
    wait(lambda: "SigBlk:\t0000000000004002" in status.read_text(), "signals are blocked")
    assert agent.end() == 0
    assert agent.types() == ["bridge"]


def test_wrong_settings_end_it_with_a_line_each(agent: Agent) -> None:
    """Exit status 2; what the environment of a pod lacks is among them."""
    agent.start(AMBIENT_ENABLED="true", HEALTH_PORT="x")
    assert agent.process is not None
    assert agent.process.wait(PATIENCE_S) == 2
    wait(lambda: len(agent.lines) == 2, "two lines")
    assert all(line.startswith("install-cni: ") for line in agent.lines)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KUBERNETES_SERVICE_HOST", ""),
        ("KUBERNETES_SERVICE_PORT", "https"),
        ("KUBERNETES_SERVICE_PROTOCOL", "ftp"),
        ("POD_NAMESPACE", ""),
    ],
)
def test_a_start_outside_a_pod_is_refused(agent: Agent, name: str, value: str) -> None:
    """By the variable's name."""
    (agent.directory / "account/namespace").unlink()
    env = {"POD_NAMESPACE": "mesh", name: value}
    agent.start(**env)
    assert agent.process is not None
    assert agent.process.wait(PATIENCE_S) == 2
    wait(lambda: len(agent.lines) == 1, "one line")
    assert agent.lines[0].startswith(f'install-cni: {name}: "{value}" is not allowed')


def test_a_port_in_use_ends_it(agent: Agent) -> None:
    """Exit status 1 and a line that names the port."""
    with socket.create_server(("", agent.port)):
        agent.start(LOG_LEVEL="error")
        assert agent.process is not None
        assert agent.process.wait(PATIENCE_S) == 1
    wait(lambda: len(agent.lines) == 1, "one line")
    assert f"cannot serve health on port {agent.port}" in agent.lines[0]
