"""`python -m bench.apiserver KUBECONFIG ACCOUNT`: a fake API server of one full node's pods.

In the process that measures, its Python would compete with the clock. It writes the kubeconfig that
a plugin finds, and into the directory ACCOUNT what a pod gets of its account; prints, as JSON, the
environment of a pod; and serves until its stdin ends, so that it never outlives the benchmark.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fake_watch import NODE, FakeWatchServer

from . import objects

PLUGIN_ACCOUNT = "istio-cni-plugin"


def main() -> None:
    """Serve until the end of stdin."""
    kubeconfig, account = sys.argv[1:]
    with FakeWatchServer() as server:
        server.accounts.add((objects.AGENT_NAMESPACE, PLUGIN_ACCOUNT))
        for pod in objects.pods(NODE):
            server.put(pod)
        server.write_kubeconfig(kubeconfig)
        Path(account, "namespace").write_text(objects.AGENT_NAMESPACE)
        env = server.write_account(Path(account)) | {"NODE_NAME": NODE}
        sys.stdout.write(f"{json.dumps(env)}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
