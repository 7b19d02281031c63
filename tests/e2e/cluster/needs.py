"""What a node is made of, and what of it this machine lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from .configs import COVERED

PROGRAMS = (
    "etcd", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "openssl", "ip", "nft",
    "iptables", "iptables-nft", "iptables-legacy", "unshare", "nsenter", "setpriv", "mount",
)  # fmt: skip
PLUGINS = Path("/usr/lib/cni")
BUSYBOX = Path("/bin/busybox")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LAYERED = ("overlay", "tmpfs", "ramfs")
"""File systems on which the node's overlays cannot stand."""


class ClusterFailed(Exception):
    """The node could not be made or did something unexpected; the message is for a person."""


def check(state_parent: Path, go_version: str) -> None:
    """Raise ClusterFailed that names everything this machine lacks, at once."""
    lacking = []
    if os.geteuid() != 0:
        lacking.append("root, for namespaces")
    lacking += [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if not (PLUGINS / "bridge").exists():
        lacking.append(f"the standard CNI plugins in {PLUGINS}")
    if not _is_static(BUSYBOX):
        lacking.append(f"a static {BUSYBOX}")
    lacking += _lacking_go(go_version)
    kind = file_system(state_parent)
    if kind in LAYERED:
        lacking.append(f"a disk for the node's state: {state_parent} is {kind}; TMPDIR chooses")
    if state_parent.resolve().parts[1] in (*COVERED, "run"):
        lacking.append(f"a place for its state that it does not cover: not {state_parent} (TMPDIR)")
    if lacking:
        raise ClusterFailed("a Kubernetes node needs what is not here: " + "; ".join(lacking))


def _is_static(program: Path) -> bool:
    if not program.exists():
        return False
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=20)
    return said.returncode != 0


def _lacking_go(wanted: str) -> list[str]:
    go = shutil.which("go")
    if go is None:
        return [f"Go {wanted} or newer, which builds Kubernetes"]
    said = subprocess.check_output([go, "env", "GOVERSION"], text=True, cwd="/", timeout=60)
    found = re.findall(r"\d+", said)[:2]
    if [int(part) for part in found] < [int(part) for part in wanted.split(".")[:2]]:
        return [f"Go {wanted} or newer; {said.strip()} is here"]
    return []


def file_system(path: Path) -> str:
    """Return the type of the file system that a directory is on."""
    command = ["stat", "-f", "-c", "%T", str(path)]
    return subprocess.check_output(command, text=True, timeout=20).strip()
