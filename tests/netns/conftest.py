"""Namespaces for the tests that need the kernel."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fake_apiserver import FakeApiServer
from namespaces import ip
from netns.plugin import Node, Way, give_address
from netns.ways import PROCESS, WAYS, agent, launcher, way

__all__ = ["agent", "launcher", "way"]  # fixtures


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test both ways, unless it says that it is about one of them."""
    if "way" in metafunc.fixturenames:
        about_process = metafunc.definition.get_closest_marker("in_process")
        metafunc.parametrize("way", (PROCESS,) if about_process else WAYS, indirect=True)


@pytest.fixture
def new_netns() -> Iterator[Callable[[], str]]:
    """Make fresh network namespaces with `lo` up; all are removed afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2's ip")
    names: list[str] = []

    def make() -> str:
        name = f"istio-{uuid.uuid4().hex[:8]}"
        ip("netns", "add", name)
        names.append(name)
        ip("-n", name, "link", "set", "lo", "up")
        return f"/run/netns/{name}"

    try:
        yield make
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture
def netns(new_netns: Callable[[], str]) -> str:
    """Path of a fresh network namespace with `lo` up, removed afterwards."""
    return new_netns()


@pytest.fixture
def pod_netns(netns: str) -> str:
    """Path of a pod's namespace: eth0 has an address of each family, IPv4 first."""
    give_address(netns, "10.1.0.5/24", "fd00::5/64")
    return netns


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    """Serve pods over HTTPS on the test's own loopback."""
    with FakeApiServer() as running:
        yield running


@pytest.fixture
def node(tmp_path: Path, server: FakeApiServer, way: Way) -> Node:
    """Make a node whose pods are on the API server."""
    return Node(tmp_path, server, way)
