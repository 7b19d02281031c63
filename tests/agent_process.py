"""`python -m agent_process SOCKET`: the serving part of the node agent alone, until stdin ends.

It says `ready` on stdout and logs on stderr. Pods come from wherever each call's configuration
says, as for the plugin: there is no cache.
"""

from __future__ import annotations

import sys

from istio_cni.agent import call, log
from istio_cni.agent.metrics import Metrics
from istio_cni.agent.server import Server
from istio_cni.agent.workshop import Workshop
from istio_cni.edge import proc
from istio_cni.plugin import source


def main() -> None:
    """Serve until stdin ends."""
    workshop = Workshop()
    workshop.open(None)
    output = log.start("debug")
    own = proc.namespace(proc.OWN_NETNS)  # where the tests call from
    assert own is not None
    node = call.Node(own, own, workshop, source.find_pod, output.sink, Metrics())
    server = Server(sys.argv[1], lambda caller: call.answer(node, caller))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    raise SystemExit(0 if server.stop(5.0) else 1)


if __name__ == "__main__":
    main()
