"""Cleans up behind a node, whatever ends the tests: a process that outlives them by a moment.

    python janitor.py CGROUP STATE_DIRECTORY      # one line on stdin: the namespaces' first process

It waits until its standard input is closed, which the kernel does also for a killed test process,
then ends the namespaces and removes the cgroups and the state. The normal way out is the same one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 20.0


def main(cgroup: str, state: str) -> int:
    """Wait for the end of the tests, then leave nothing of the node."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, whose end is ours
    if line := sys.stdin.readline().strip():
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            process = os.pidfd_open(int(line))  # held from now on, so never another process's
            sys.stdin.read()
            signal.pidfd_send_signal(process, signal.SIGKILL)
    sys.stdin.read()
    deadline = time.monotonic() + PATIENCE_S
    while not (remove_cgroups(cgroup) and _remove_state(Path(state))):
        if time.monotonic() > deadline:
            sys.stderr.write(f"could not remove all of {cgroup} and {state}\n")
            return 1
        time.sleep(0.05)
    return 0


def hierarchies() -> list[Path]:
    """Return the roots of the machine's cgroups: one, or in version 1 several."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    return [path for path in root.iterdir() if path.is_dir() and path.name != "unified"]


def cgroup_directories(cgroup: str) -> list[Path]:
    """Return where a cgroup is now, also where the runtime made it: in version 2 beside 1."""
    root = Path("/sys/fs/cgroup")
    return [path for path in (root / cgroup, *root.glob(f"*/{cgroup}")) if path.exists()]


def remove_cgroups(cgroup: str) -> bool:
    """Remove a cgroup with all below it; False while processes are in it."""
    left = cgroup_directories(cgroup)
    if left:
        command = ["find", *left, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]
        subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
    return not cgroup_directories(cgroup)


def _remove_state(state: Path) -> bool:
    shutil.rmtree(state, ignore_errors=True)
    return not state.exists()


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
