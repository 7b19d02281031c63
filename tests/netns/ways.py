"""The two ways of a call through the launcher: to an agent, or to the plugin in its place.

Both are to end alike, so tests that get a node from the fixture `node` run both ways. Those that
are about the plugin's process are marked `in_process`, and say why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from netns.plugin import PROGRAM, Way

CHECKOUT = Path(__file__).resolve().parents[2]
PROCESS, AGENT = "process", "agent"
WAYS = (PROCESS, AGENT)


@contextmanager
def running_agent(directory: Path) -> Iterator[Path]:
    """Serve launchers from a process of its own; return its socket. Its log is `log`, beside it."""
    socket = directory / "agent" / "agent.sock"
    with (directory / "log").open("w") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "agent_process", str(socket)],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT / "tests")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    with agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"ready\n", (directory / "log").read_text()
        yield socket
        agent.communicate(timeout=15)
    assert agent.returncode == 0, (directory / "log").read_text()


@pytest.fixture(scope="session")
def launcher() -> Path:
    """Return the launcher, built from its source where that has changed."""
    sys.path.insert(0, str(CHECKOUT / "packaging"))
    try:
        import launcher as recipe  # type: ignore[import-not-found] # a program, not a package
    finally:
        sys.path.pop(0)
    if not recipe.has_compiler():
        pytest.skip("needs the package ziglang, which compiles the launcher")
    built: Path = recipe.build(output=CHECKOUT / "build" / "launcher" / "istio-cni")
    return built


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run one agent for all tests; return its socket."""
    if os.geteuid() != 0:
        pytest.skip("needs root, whom alone an agent serves")
    with running_agent(tmp_path_factory.mktemp("agent")) as socket:
        yield socket


def install(directory: Path, launcher: Path, socket: Path | None = None) -> Path:
    """Put a launcher beside the installed plugin as its bundle, and a link to an agent."""
    bundle = directory / "istio-cni.d" / "installed"
    bundle.mkdir(parents=True)
    (bundle / "istio-cni").symlink_to(PROGRAM)
    (directory / "istio-cni.d" / "current").symlink_to(bundle.name)
    if socket is not None:
        (directory / "istio-cni.d" / "agent.sock").symlink_to(socket)
    return Path(shutil.copy(launcher, directory / "istio-cni"))


@pytest.fixture
def way(request: pytest.FixtureRequest, tmp_path: Path, launcher: Path) -> Way:
    """Make one of the two ways."""
    if request.param == PROCESS:
        return Way(install(tmp_path / "bin", launcher))
    socket = request.getfixturevalue("agent")
    return Way(install(tmp_path / "bin", launcher, socket), socket.parents[1] / "log")
