"""A node for the plugin to work on: a run dir, an API server, pods' network namespaces.

Nothing of it is the machine's own. Namespaces are removed at the very end: the kernel dismantles
them in the background and with locks that a call being measured would wait for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path

from .process import BenchFailed
from .programs import ROOT

TESTS = ROOT / "tests"
POD = ROOT / "examples" / "pods" / "web.yaml"  # namespace shop, both families, DNS
ADDRESSES = ("192.0.2.5/24", "2001:db8::5/64")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIMEOUT_S = 30.0


class Node:
    """What the calls of one run share; `close` takes everything down."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self.run_dir = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="istio-bench."))

    def close(self) -> None:
        """Remove the namespaces and the run dir, end the API server."""
        self._undo.close()

    def serve_pods(self) -> None:
        """Start the API server and leave its kubeconfig in the run dir. Raises BenchFailed."""
        kubeconfig = Path(self.run_dir, "istio-cni-kubeconfig")
        server = subprocess.Popen(
            [sys.executable, "-m", "bench.apiserver", str(POD), str(kubeconfig)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the terminal is for the one that measures
        )
        self._undo.callback(_end, server)
        if server.stdout is None or server.stdout.readline() != b"ready\n":
            raise BenchFailed("the fake API server does not start")

    def new_pod(self) -> str:
        """Make a pod's network namespace with an address of each family; return its path."""
        name = f"istio-bench-{uuid.uuid4().hex[:8]}"
        _ip("netns", "add", name)
        self._undo.callback(_remove, name)
        for address in ADDRESSES:
            options = ["nodad"] if ":" in address else []
            _ip("-n", name, "addr", "add", address, "dev", "lo", *options)
        _ip("-n", name, "link", "set", "lo", "up")
        return f"/run/netns/{name}"


def rules(netns: str, variant: str) -> str:
    """Return what one variant of iptables holds in a namespace, of both families."""
    name = os.path.basename(netns)
    programs = (f"{base}-{variant}-save" for base in ("iptables", "ip6tables"))
    return "".join(_ip("netns", "exec", name, program) for program in programs)


def native_rules(netns: str) -> str:
    """Return what nf_tables holds in a namespace, as nft lists it."""
    return _ip("netns", "exec", os.path.basename(netns), "nft", "-s", "list", "ruleset")


def _end(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        server.communicate(timeout=TIMEOUT_S)


def _remove(name: str) -> None:
    with contextlib.suppress(BenchFailed):  # the others are to go, too
        _ip("netns", "del", name)


def _ip(*args: str) -> str:
    try:
        done = subprocess.run(  # in PATH, as every use of it here
            ["ip", *args],  # noqa: S607
            capture_output=True,
            text=True,
            env={"PATH": PATH},
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchFailed(f"ip {' '.join(args)}: {error}") from error
    if done.returncode != 0:
        raise BenchFailed(f"ip {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout
