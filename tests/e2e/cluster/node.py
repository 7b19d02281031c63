"""The private namespaces of a node, and the programs that run in them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import build, configs, janitor
from .needs import PATH, PLUGINS, ClusterFailed

PREFIX = f"istio-cni-e2e-{os.getpid()}-"  # what is left of a run can be told from another's
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 3.0
PROGRAM_TIMEOUT_S = 60.0
POLL_S = 0.05


class Node:
    """Namespaces that end with this object, or with this process, and leave nothing.

    `state` is the node's directory on disk, seen inside and outside under the same path. Without
    `iptables` there is no program for packet filters on the node, nft included. The programs and
    the CNI plugins of `runtime`, a directory, take the place of the machine's.
    """

    def __init__(self, parent: Path, runtime: Path | None = None, *, iptables: bool = True) -> None:
        self.state = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self.cgroup = self.state.name
        self._unshare: subprocess.Popen[bytes] | None = None
        self._path = f"{runtime}:{PATH}" if runtime else PATH
        self._components: dict[str, subprocess.Popen[bytes]] = {}
        self._janitor = subprocess.Popen(
            [sys.executable, janitor.__file__, self.cgroup, str(self.state)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            for name in ("etc", "log", "etcd"):
                (self.state / name).mkdir()
            self._make_cgroups()
            plugins = runtime / build.PLUGINS_DIR if runtime else PLUGINS
            self._start_namespaces(plugins, iptables=iptables)
        except BaseException:
            self.close()
            raise

    def _make_cgroups(self) -> None:
        """Make the cgroup that all pods are in; a new cpuset starts empty and must be filled."""
        for hierarchy in janitor.hierarchies():
            directory = hierarchy / self.cgroup
            directory.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (directory / name).exists():
                    (directory / name).write_text((hierarchy / name).read_text())

    def _start_namespaces(self, plugins: Path, *, iptables: bool) -> None:
        script = self.state / "etc" / "init.sh"
        script.write_text(configs.first_process(self.state, plugins, iptables=iptables))
        unshare = ("unshare", "-m", "-n", "-p", "-u", "-i", "--fork", "--kill-child",
                   "--mount-proc")  # fmt: skip
        with self.log("init").open("w") as log:
            self._unshare = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *unshare, "bash", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        ready = self.state / "init.ready"
        self.wait(ready.exists, what="the namespaces", timeout_s=START_TIMEOUT_S, of="init")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self.init = int(children.read_text())
        assert self._janitor.stdin is not None
        self._janitor.stdin.write(b"%d\n" % self.init)
        self._janitor.stdin.flush()

    def log(self, component: str) -> Path:
        """Return the file that a component's output goes to."""
        return self.state / "log" / f"{component}.log"

    def path(self, inside: str) -> Path:
        """Return a file of the node as this process sees it; absolute links lead outside."""
        return Path(f"/proc/{self.init}/root{inside}")

    def command(self, *argv: str) -> list[str]:
        """Return the command line that runs a program inside; it ends when `nsenter` does."""
        return ["nsenter", "-t", str(self.init), "-m", "-n", "-p", "-u", "-i", "--",
                "setpriv", "--pdeathsig", "KILL", *argv]  # fmt: skip

    def run(
        self, *argv: str, stdin: str = "", timeout_s: float = PROGRAM_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside until it ends; raises ClusterFailed if that takes too long."""
        return self._run(self.command(*argv), argv, stdin, timeout_s)

    def _run(
        self, command: Sequence[str], argv: Sequence[str], stdin: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                env=self._environment(),
            )
        except subprocess.TimeoutExpired:
            raise ClusterFailed(f"{' '.join(argv)} was at it for {timeout_s:g} s") from None

    def succeed(self, *argv: str, stdin: str = "", timeout_s: float = PROGRAM_TIMEOUT_S) -> str:
        """Run a program inside and return what it prints; raises ClusterFailed if it fails."""
        return _output(argv, self.run(*argv, stdin=stdin, timeout_s=timeout_s))

    def look(self, netns: str, *argv: str) -> str:
        """Run a program of the machine's in a network namespace of the node, by its path there.

        So the node itself need not have it. Returns what it prints; raises ClusterFailed.
        """
        enter = ["nsenter", f"--net={self.path(netns)}", "--"]
        return _output(argv, self._run([*enter, *argv], argv, "", PROGRAM_TIMEOUT_S))

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a component; its output is appended to its log."""
        with self.log(name).open("a") as log:
            self._components[name] = subprocess.Popen(
                self.command(*argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
            )

    def _environment(self) -> dict[str, str]:
        return {"PATH": self._path, "HOME": "/root", "KUBECACHEDIR": str(self.state / "kubecache")}

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a component by a signal; `nsenter` passes none on, so its child gets it.

        The API server would wait for a minute for those who watch, so patience ends before.
        """
        outer = self._components[name]
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), number)
        try:
            outer.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            outer.kill()  # and so its child, by its own wish
            outer.wait(START_TIMEOUT_S)
        del self._components[name]

    def runs(self, name: str) -> bool:
        """Tell whether a component was started, and not ended, by us."""
        return name in self._components

    def ended(self) -> str:
        """Return the name of a component that ended by itself, "" if all run."""
        return next((name for name, it in self._components.items() if it.poll() is not None), "")

    def wait(
        self, is_so: Callable[[], object], *, what: str, timeout_s: float, of: str = ""
    ) -> None:
        """Poll until something is so; raises ClusterFailed with the end of a component's log."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            gone = self.ended()
            if gone or time.monotonic() > deadline:
                why = f"{gone} ended" if gone else f"not within {timeout_s:.0f} s"
                raise ClusterFailed(f"{what}: {why}{self._tail(gone or of)}")
            time.sleep(POLL_S)

    def _tail(self, component: str) -> str:
        if not component or not self.log(component).exists():
            return ""
        lines = self.log(component).read_text(errors="replace").splitlines()[-15:]
        return "\n".join(["", f"the end of {component}'s log:", *lines])

    def close(self) -> None:
        """End everything and wait until nothing is left."""
        logs, keep = self.state / "log", os.environ.get("KEEP_LOGS")
        if keep and logs.exists():  # not, when closed a second time
            shutil.copytree(logs, keep, dirs_exist_ok=True)
        assert self._janitor.stdin is not None
        if self._unshare is not None:
            self._unshare.kill()  # and with it, by its own wish, all it started
            self._unshare.wait()
        self._janitor.stdin.close()
        status = self._janitor.wait(janitor.PATIENCE_S + 5)
        for process in self._components.values():
            process.wait(START_TIMEOUT_S)
        if status != 0:
            raise ClusterFailed(f"the node left something behind: {self.cgroup}")


def _output(argv: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
    """Return what a program has printed; raises ClusterFailed if it has failed."""
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ClusterFailed(f"{' '.join(argv)} ended with {done.returncode}: {said}")
    return done.stdout
