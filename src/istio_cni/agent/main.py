"""`install-cni`: one a node, started by the DaemonSet; puts the plugin there and keeps it there.

On SIGTERM it takes its entry out of the network configuration, then the rest away, and ends with 0.
Being killed is no harm: what is there stays whole, and the next start goes on.

Signals are blocked and waited for, between two looks. The program is process 1 of its container, to
which a signal without handler does not happen at all, and a handler would have to be careful about
what it interrupts. So nothing that takes long is imported before they are blocked.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from istio_cni.constants import VERSION
from istio_cni.errors import InternalError, InvalidSettings, IstioCNIError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.agent.settings import Settings

LOG = logging.getLogger("cni-agent")
END = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    """Run until a signal; return the exit status: 2 for wrong settings, 1 for a start in vain."""
    signal.pthread_sigmask(signal.SIG_BLOCK, END)
    from istio_cni.agent import log  # a third of a second, libraries included
    from istio_cni.agent.settings import read_settings

    try:
        settings = read_settings(sys.argv[1:], os.environ)
        log.start(settings.log_level)
        _run(settings)
    except InvalidSettings as error:
        sys.stderr.writelines(f"install-cni: {problem}\n" for problem in error.problems)
        return 2
    except Exception as error:  # the one place that turns errors into a line and a status
        known = error if isinstance(error, IstioCNIError) else InternalError.of(error)
        LOG.debug("%s", known.msg, exc_info=error)
        sys.stderr.write(f"install-cni: {known.msg}\n")
        return 1
    return 0


def _run(settings: Settings) -> None:
    """Install, look every second, and take everything away when it is time to end."""
    from istio_cni.agent import node
    from istio_cni.agent.health import HealthServer
    from istio_cni.install.run import LOOK_EVERY_S, Installer

    parts = node.parts(settings, os.environ)
    LOG.info("install-cni %s", VERSION, extra={"settings": settings.effective()})
    if wishes := settings.repair_wishes():
        LOG.warning("repair is not part of this version; set in vain: %s", ", ".join(wishes))
    installer = Installer(parts)
    server = HealthServer(settings.health_port, lambda: installer.missing)
    delay_s = 0.0
    while signal.sigtimedwait(END, delay_s) is None:
        installer.look()
        delay_s = LOOK_EVERY_S
    LOG.info("told to end: the plugin is taken off this node; pods that run stay captured")
    installer.remove(time.sleep)
    server.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
