"""`install-cni`: one a node, started by the DaemonSet; puts the plugin there and backs it.

On SIGTERM it takes its entry out of the network configuration, then the rest away, and ends with 0.
Being killed is no harm: what is there stays whole, and the next start goes on.

Signals are blocked and waited for, between two looks. The program is process 1 of its container, to
which a signal without handler does not happen at all, and a handler would have to be careful about
what it interrupts. So nothing that takes long is imported before they are blocked. The workshop is
forked while the process is small and has one thread.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from istio_cni.errors import InvalidSettings, as_ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.agent.workshop import Workshop

LOG = logging.getLogger("cni-agent")
END = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    """Run until a signal; return the exit status: 2 for wrong settings, 1 for a start in vain."""
    signal.pthread_sigmask(signal.SIG_BLOCK, END)
    from istio_cni.agent.workshop import Workshop

    workshop = Workshop()
    try:
        return _run(workshop)
    finally:
        workshop.close()


def _run(workshop: Workshop) -> int:
    from istio_cni.agent import daemon, log  # half a second, libraries included
    from istio_cni.agent.settings import read_settings

    try:
        settings = read_settings(sys.argv[1:], os.environ)
        output = log.start(settings.log_level)
        daemon.run(settings, os.environ, output, workshop, _is_over)
    except InvalidSettings as error:
        sys.stderr.writelines(f"install-cni: {problem}\n" for problem in error.problems)
        return 2
    except Exception as error:  # the one place that turns errors into a line and a status
        known = as_ours(error)
        LOG.debug("%s", known.msg, exc_info=error)
        sys.stderr.write(f"install-cni: {known.msg}\n")
        return 1
    return 0


def _is_over(wait_s: float) -> bool:
    """Wait for a signal, that long at most; tell whether it came."""
    return signal.sigtimedwait(END, wait_s) is not None


if __name__ == "__main__":
    raise SystemExit(main())
