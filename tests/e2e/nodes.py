"""The nodes that stories run on: the usual one, and those that lack or have something.

A bare one has no program for packet filters; a modern one has containerd 2, which speaks CNI 1.1.
"""

from __future__ import annotations

import pytest

IPTABLES, BARE, MODERN = "iptables", "bare", "containerd2"
KINDS = (IPTABLES, BARE, MODERN)  # in the order in which they are made
on_every_node = pytest.mark.nodes(*KINDS)
on_bare_nodes = pytest.mark.nodes(BARE)
on_iptables_nodes = pytest.mark.nodes(IPTABLES, MODERN)
on_modern_nodes = pytest.mark.nodes(MODERN)


def kinds_of(mark: pytest.Mark | None) -> tuple[str, ...]:
    """Return the kinds that a story's mark names; one without is about the usual node."""
    return mark.args if mark else (IPTABLES,)
