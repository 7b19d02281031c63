"""Waiting for what comes by itself, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 15.0


def wait(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds; fail with `what` did not come."""
    limit = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.01)
