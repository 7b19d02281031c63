"""A node for the plugin to work on: an API server, pods' network namespaces, a plugin on its own.

Nothing of it is the machine's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from .process import BenchFailed
from .programs import ROOT, Frozen

TESTS = ROOT / "tests"
ADDRESSES = ("192.0.2.5/24", "2001:db8::5/64")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MEMORY = "/dev/shm"  # noqa: S108 # what is made there has a name of its own
TIMEOUT_S = 30.0


class Node:
    """What the calls of one run share; `close` takes everything down."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self.directory = self._temporary(None)
        self.memory = self._temporary(MEMORY if on_tmpfs(MEMORY) else None)
        """For run dirs, which lie in memory on nodes."""
        self.run_dir = os.path.join(self.memory, "alone")
        os.makedirs(self.run_dir)
        self.alone = os.path.join(self._made("alone/bin"), "istio-cni")
        """The launcher where there is no agent."""
        self._keeper: subprocess.Popen[bytes] | None = None

    def _temporary(self, parent: str | None) -> str:
        made = tempfile.TemporaryDirectory(prefix="istio-bench.", dir=parent)
        return self._undo.enter_context(made)

    def _made(self, name: str) -> str:
        path = os.path.join(self.directory, name)
        os.makedirs(path)
        return path

    def close(self) -> None:
        """Remove the namespaces and the directories, end the API server."""
        self._undo.close()

    def at_end(self, callback: Callable[[], object]) -> None:
        """Have something done before the rest is taken down."""
        self._undo.callback(callback)

    def install(self, frozen: Frozen) -> None:
        """Install the launcher with its bundle, and without an agent."""
        shutil.copy(frozen.launcher, self.alone)
        current = Path(self.alone).parent / "istio-cni.d" / "current"
        current.parent.mkdir()
        current.symlink_to(os.path.realpath(frozen.bundle))

    def serve_pods(self) -> Mapping[str, str]:
        """Start the API server, leave its kubeconfig in the run dir, and an account for an agent.

        Returns the environment that pods on this node get. Raises BenchFailed.
        """
        account = self._made("agent/account")
        kubeconfig = os.path.join(self.run_dir, "istio-cni-kubeconfig")
        server = self._start("bench.apiserver", kubeconfig, account)
        line = server.stdout.readline() if server.stdout else b""
        if not line:
            raise BenchFailed("the fake API server does not start")
        env: Mapping[str, str] = json.loads(line)
        return {**env, "SERVICE_ACCOUNT_DIR": account}

    def new_pod(self) -> str:
        """Make a pod's network namespace with an address of each family; return its path."""
        return self.new_pods(1)[0]

    def new_pods(self, count: int) -> list[str]:
        """Make several; return their paths."""
        names = [f"istio-bench-{uuid.uuid4().hex[:8]}" for _ in range(count)]
        for name in names:
            self._undo.callback(_remove, name)
        ip("-batch", "-", stdin="".join(f"netns add {name}\n" for name in names))
        settings = ["link set lo up\n"]
        for address in ADDRESSES:
            options = " nodad" if ":" in address else ""
            settings.append(f"addr add {address} dev lo{options}\n")
        for name in names:
            ip("-n", name, "-batch", "-", stdin="".join(settings))
        return [f"/run/netns/{name}" for name in names]

    def retire(self, paths: Sequence[str]) -> None:
        """Take the names of namespaces away; the kernel dismantles them when all is measured."""
        if self._keeper is None:
            self._keeper = self._start("bench.keeper")
        keeper = self._keeper
        if keeper.stdin is None or keeper.stdout is None:
            raise BenchFailed("the keeper of namespaces has no streams")
        for path in paths:
            keeper.stdin.write(f"{path}\n".encode())
            keeper.stdin.flush()
            keeper.stdout.readline()
        names = (os.path.basename(path) for path in paths)
        ip("-batch", "-", stdin="".join(f"netns del {name}\n" for name in names))

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a part of the benchmark that is a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the terminal is for the one that measures
        )
        self._undo.callback(_end, process)
        return process


def on_tmpfs(directory: str) -> bool:
    """Tell whether a directory is where files are kept in memory, as /run is on nodes."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(mount.split()[1:3] == [directory, "tmpfs"] for mount in mounts)


def rules(netns: str, variant: str) -> str:
    """Return what one variant of iptables holds in a namespace, of both families."""
    name = os.path.basename(netns)
    programs = (f"{base}-{variant}-save" for base in ("iptables", "ip6tables"))
    return "".join(ip("netns", "exec", name, program) for program in programs)


def native_rules(netns: str) -> str:
    """Return what nf_tables holds in a namespace, as nft lists it."""
    return ip("netns", "exec", os.path.basename(netns), "nft", "-s", "list", "ruleset")


def _end(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        server.communicate(timeout=TIMEOUT_S)


def _remove(name: str) -> None:
    if os.path.exists(f"/run/netns/{name}"):
        with contextlib.suppress(BenchFailed):  # the others are to go, too
            ip("netns", "del", name)


def ip(*args: str, stdin: str = "") -> str:
    """Run `ip` and return what it prints. Raises BenchFailed."""
    try:
        done = subprocess.run(  # in PATH, as every use of it here
            ["ip", *args],  # noqa: S607
            input=stdin,
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
