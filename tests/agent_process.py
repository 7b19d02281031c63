"""`python -m agent_process SOCKET`: the serving part of the node agent alone, until stdin ends.

It says `ready` on stdout and logs on stderr. Pods come from wherever each call's configuration
says, as for the plugin: there is no cache. SIGTERM ends it, too.
"""

from __future__ import annotations

import argparse
import signal
import sys

from istio_cni.agent import call, log
from istio_cni.agent.metrics import Metrics
from istio_cni.agent.server import Server
from istio_cni.agent.workshop import Workshop
from istio_cni.edge import proc


def _end(*_: object) -> None:
    raise KeyboardInterrupt


def _wait() -> None:
    """Wait until it is time to end."""
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
    except KeyboardInterrupt:
        return


def _identity(text: str) -> tuple[int, int]:
    device, _, inode = text.partition(":")
    return int(device), int(inode)


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("--level", default="debug")
    parser.add_argument(
        "--host", type=_identity, help="device and inode of the host's network namespace"
    )
    arguments = parser.parse_args()
    workshop = Workshop()
    workshop.begin(None)
    output = log.start(arguments.level)
    own = proc.namespace(proc.OWN_NETNS)  # where the tests call from, unless said otherwise
    assert own is not None
    host = arguments.host or own
    node = call.Node(host, own, workshop, lambda *_: None, output.sink, Metrics())
    server = Server(arguments.socket, lambda *called: call.answer(node, *called))
    _wait()
    raise SystemExit(0 if server.stop(5.0) else 1)


if __name__ == "__main__":
    main()
