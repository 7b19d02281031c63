"""Options of all tests, which of them need root, and how skipped ones are shown."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter

import pytest


def pytest_configure() -> None:
    """Be a process as a person starts it, and so all programs that tests start.

    Ctrl-C is ignored where a shell has us in the background. Where bytecode is not kept, a program
    compiles all of itself at each start, which takes longer than most tests.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites expected files; they are then read in review."""
    parser.addoption(
        "--refresh-expected",
        action="store_true",
        help="write what the code gives now into the expected files instead of comparing",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs network namespaces where they cannot be made."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("netns"):
            item.add_marker(pytest.mark.skip(reason="needs root, for network namespaces"))


def pytest_collection_finish() -> None:
    """Take what stays to the end from the garbage collector.

    In a forked child, each of its rounds would copy all memory of the tests: 0.2 s.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show skipped tests in a line a reason, with their number."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture
def refresh_expected(request: pytest.FixtureRequest) -> bool:
    """Whether expected files are to be rewritten."""
    return bool(request.config.getoption("--refresh-expected"))
