"""The clusters that the stories stand on, one a kind of node, ended without a trace."""

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
from e2e.nodes import BARE, IPTABLES, KINDS, MODERN, kinds_of

HERE = Path(__file__).parent
DIFFERENT = {BARE: {"iptables": False}, MODERN: {"modern": True}}
FIRST = "test_cluster.py"  # the ground the stories stand on, and without a mesh so far


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a story a cluster of each kind of node that it runs on."""
    if "cluster" in metafunc.fixturenames:
        kinds = kinds_of(metafunc.definition.get_closest_marker("nodes"))
        metafunc.parametrize("cluster", kinds, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the stories, those of one cluster in a row; they run only when asked for, by path."""
    asked = any(HERE in (path := Path(argument.split("::")[0]).resolve(), *path.parents)
                for argument in config.args)  # fmt: skip
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.e2e)
    items.sort(key=lambda item: _place(item) if item in ours else (-1, False))
    if not asked:
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)


def _place(item: pytest.Item) -> tuple[int, bool]:
    """Return where a story comes: one cluster after the other, each one's ground first."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return KINDS.index(parameters.get("cluster", IPTABLES)), item.path.name != FIRST


@pytest.fixture(scope="session")
def before() -> Iterator[leaks.Seen]:
    """Look at the machine before the cluster, and after it see that nothing is left."""
    seen = leaks.machine()
    yield seen
    assert not leaks.remaining(leaks.machine, seen)
    assert not leaks.remaining(lambda: leaks.of_node(PREFIX))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, before: leaks.Seen) -> Iterator[Cluster]:
    """Run a cluster of one node of a kind, Ready, without a mesh."""
    kind = request.param
    capture = request.config.pluginmanager.getplugin("capturemanager")
    try:
        with ExitStack() as stack:
            with capture.global_and_fixture_disabled():  # building takes minutes, and says so
                running = stack.enter_context(Cluster.started(**DIFFERENT.get(kind, {})))
            request.config.stash.setdefault(TOOK, {})[kind] = running.took_s
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


TOOK = pytest.StashKey[dict[str, dict[str, float]]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how long each cluster took to start."""
    for kind, took_s in terminalreporter.config.stash.get(TOOK, {}).items():
        steps = ", ".join(f"{step} {spent_s:.1f} s" for step, spent_s in took_s.items())
        terminalreporter.write_line(f"cluster, {kind}: {sum(took_s.values()):.1f} s ({steps})")
