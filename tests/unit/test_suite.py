"""The test suite itself: what is skipped without root, and how that is shown."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

import conftest


class Item:
    """Stands for a test with a mark, and takes those that are added."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.added: list[pytest.MarkDecorator] = []

    def get_closest_marker(self, name: str) -> bool:
        """Tell whether the test has a mark."""
        return name == self._mark

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        """Take a mark."""
        self.added.append(mark)


@pytest.mark.parametrize(("uid", "skipped"), [(0, 0), (1000, 1)])
def test_without_root_tests_in_namespaces_are_skipped(
    uid: int, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are marked, and no other."""
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    marked, other = Item("netns"), Item("")
    conftest.pytest_collection_modifyitems([marked, other])  # type: ignore[list-item]
    assert [mark.kwargs["reason"] for mark in marked.added] == [
        "needs root, for network namespaces"
    ] * skipped
    assert other.added == []


def test_skipped_tests_are_counted_by_their_reason() -> None:
    """A line a reason, the most frequent first."""
    lines: list[str] = []
    reports = [SimpleNamespace(longrepr=("x.py", 1, f"Skipped: {why}")) for why in ("b", "a", "a")]
    reporter = SimpleNamespace(getreports=lambda _: reports, write_line=lines.append)
    conftest.pytest_terminal_summary(reporter)  # type: ignore[arg-type]
    assert lines == ["skipped 2: a", "skipped 1: b"]
