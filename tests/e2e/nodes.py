"""The nodes that stories run on: the usual one, and one without any program for packet filters."""

from __future__ import annotations

import pytest

IPTABLES, BARE = "iptables", "bare"
KINDS = (IPTABLES, BARE)  # in the order in which they are made
on_every_node = pytest.mark.nodes(*KINDS)
on_bare_nodes = pytest.mark.nodes(BARE)


def kinds_of(mark: pytest.Mark | None) -> tuple[str, ...]:
    """Return the kinds that a story's mark names; one without is about the usual node."""
    return mark.args if mark else (IPTABLES,)
