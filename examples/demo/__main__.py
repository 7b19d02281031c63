"""`python -m examples.demo`: shows on one machine, in seconds, what istio-cni does.

Needs root, iproute2, iptables and the standard CNI plugins; changes nothing on the machine. Exit
status: 0 all checks passed, 1 some did not, 2 something is missing, 128 + n stopped by signal n.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack

from . import needs, node, story
from .process import DemoFailed, Stopped, ignore_signals, stop_on_signals
from .show import Show

TIMEOUT_S = 120  # of all; every step has a bound of its own, too


def main() -> int:
    """Run the demo and take everything down again, whatever happens; return the exit status."""
    os.environ["PATH"] = ":".join(filter(None, (os.environ.get("PATH"), needs.SBIN)))
    families = node.families()
    missing = needs.missing(families)
    if missing:
        return _complain(f"cannot run here: {'; '.join(missing)}", 2)
    undo = ExitStack()
    show = Show(sys.stdout, os.environ)
    begin = time.monotonic()
    try:
        try:
            stop_on_signals()
            signal.alarm(TIMEOUT_S)
            story.tell(show, undo, needs.search_path(), families)
            show.summary(time.monotonic() - begin)
        finally:
            ignore_signals()
    except DemoFailed as error:
        return _complain(str(error), 1)
    except Stopped as stopped:
        name = signal.Signals(stopped.number).name
        return _complain(f"stopped by {name}; everything is taken down", 128 + stopped.number)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:  # a signal comes once at most: none can interrupt this
        undo.close()
    return 1 if show.failed else 0


def _complain(text: str, status: int) -> int:
    sys.stderr.write(f"demo: {text}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
