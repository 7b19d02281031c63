"""The cluster that the stories stand on, made once and ended without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e import images as images_of
from e2e import leaks
from e2e.cluster import Cluster, ClusterFailed
from e2e.cluster.node import PREFIX
from e2e.install import INSTALLER, Mesh
from e2e.mesh import PROXY, mesh_pod, validation_container

HERE = Path(__file__).parent
FIRST = "test_cluster.py"  # the ground the stories stand on, and without a mesh so far


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the stories; they run only when they are asked for, by path."""
    asked = any(HERE in (path := Path(argument.split("::")[0]).resolve(), *path.parents)
                for argument in config.args)  # fmt: skip
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.e2e)
    items.sort(key=lambda item: item in ours and item.path.name != FIRST)
    if not asked:
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)


@pytest.fixture(scope="session")
def before() -> Iterator[leaks.Seen]:
    """Look at the machine before the cluster, and after it see that nothing is left."""
    seen = leaks.machine()
    yield seen
    assert not leaks.remaining(leaks.machine, seen)
    assert not leaks.remaining(lambda: leaks.of_node(PREFIX))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, before: leaks.Seen) -> Iterator[Cluster]:
    """Run a cluster of one node, Ready, without a mesh."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    try:
        with ExitStack() as stack:
            with capture.global_and_fixture_disabled():  # building takes minutes, and says so
                running = stack.enter_context(Cluster.started())
            request.config.stash.setdefault(TOOK, {}).update(running.took_s)
            yield running
    except ClusterFailed as error:
        pytest.exit(f"make e2e: {error}", returncode=1)


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> None:
    """Load what the stories' pods are made of."""
    cluster.load(images_of.proxy(), [PROXY])
    cluster.load(images_of.installer(), [INSTALLER], command=["install-cni"])


@pytest.fixture(scope="session")
def early(cluster: Cluster, images: None) -> str:
    """Start a pod of the mesh on a node without plugin, and return its name."""
    cluster.apply(mesh_pod("early", init=[validation_container()]))
    cluster.wait(lambda: cluster.addresses("early"), what="the early pod has its addresses")
    return "early"


@pytest.fixture(scope="session")
def mesh(cluster: Cluster, early: str) -> Mesh:
    """Apply the DaemonSet as users do, and wait until it is ready."""
    installed = Mesh(cluster)
    installed.install()
    return installed


TOOK = pytest.StashKey[dict[str, float]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how long the cluster took to start."""
    took_s = terminalreporter.config.stash.get(TOOK, {})
    if took_s:
        steps = ", ".join(f"{step} {spent_s:.1f} s" for step, spent_s in took_s.items())
        terminalreporter.write_line(f"cluster: {sum(took_s.values()):.1f} s ({steps})")
