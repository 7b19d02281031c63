"""`python -m bench.apiserver POD KUBECONFIG`: a fake API server with one pod, as its own process.

In the process that measures, its Python would compete with the clock. It writes the kubeconfig,
says `ready` and serves until its stdin ends, so that it never outlives the benchmark.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from fake_apiserver import FakeApiServer


def main() -> None:
    """Serve until the end of stdin."""
    manifest, kubeconfig = sys.argv[1:]
    pod = yaml.safe_load(Path(manifest).read_text(encoding="utf-8"))
    about = pod["metadata"]
    with FakeApiServer() as server:
        server.pods[about["namespace"], about["name"]] = pod
        server.write_kubeconfig(kubeconfig)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
