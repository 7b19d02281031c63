"""The cluster that the stories stand on, made once and ended without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import Cluster, ClusterFailed

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the stories; they run only when they are asked for, by path."""
    asked = any(HERE in (path := Path(argument.split("::")[0]).resolve(), *path.parents)
                for argument in config.args)  # fmt: skip
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.e2e)
    if not asked:
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of one node, Ready, without a mesh."""
    try:
        with Cluster.started() as running:
            request.config.stash.setdefault(TOOK, {}).update(running.took_s)
            yield running
    except ClusterFailed as error:
        pytest.exit(f"make e2e: {error}", returncode=1)


TOOK = pytest.StashKey[dict[str, float]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how long the cluster took to start."""
    took_s = terminalreporter.config.stash.get(TOOK, {})
    if took_s:
        steps = ", ".join(f"{step} {spent_s:.1f} s" for step, spent_s in took_s.items())
        terminalreporter.write_line(f"cluster: {sum(took_s.values()):.1f} s ({steps})")
