"""What a node is made of, and what of it this machine lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .configs import COVERED, USR

PROGRAMS = (
    "etcd", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "openssl", "ip", "nft",
    "iptables", "iptables-nft", "iptables-legacy", "unshare", "nsenter", "setpriv", "mount",
)  # fmt: skip
PLUGINS = Path("/usr/lib/cni")
BUSYBOX = Path("/bin/busybox")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LAYERED = ("overlayfs", "tmpfs", "ramfs")  # no overlay stands on the first, and the rest is memory


class ClusterFailed(Exception):
    """The node could not be made or did something unexpected; the message is for a person."""


def check(places: Sequence[Path], go_versions: Mapping[Path, str]) -> Path:
    """Return the first place fit for the node's state.

    `go_versions` are wanted beside each go.mod. Raises ClusterFailed that names everything this
    machine lacks, at once.
    """
    lacking = []
    if os.geteuid() != 0:
        lacking.append("root, for namespaces")
    lacking += [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if not (PLUGINS / "bridge").exists():
        lacking.append(f"the standard CNI plugins in {PLUGINS}")
    if not _is_static(BUSYBOX):
        lacking.append(f"a static {BUSYBOX}")
    for module, wanted in go_versions.items():
        lacking += _lacking_go(module, wanted)
    against = {place: _against(place.resolve()) for place in places}
    fit = [place for place in places if not against[place]]
    if not fit:
        reasons = ", ".join(f"{place} is {reason}" for place, reason in against.items())
        lacking.append(f"a place for the node's state ({reasons}; TMPDIR sets another)")
    if lacking:
        raise ClusterFailed("a Kubernetes node needs what is not here: " + "; ".join(lacking))
    return fit[0]


def _against(place: Path) -> str:
    """Tell why the node's state cannot be in a place, "" if it can."""
    if place.parts[1:2] and place.parts[1] in (*COVERED, USR, "run"):
        return f"in /{place.parts[1]}, which the node covers"
    there = next(path for path in (place, *place.parents) if os.path.exists(path))
    command = ["stat", "-f", "-c", "%T", str(there)]
    kind = subprocess.check_output(command, text=True, timeout=20).strip()
    return f"on {kind}" if kind in LAYERED else ""


def _is_static(program: Path) -> bool:
    if not program.exists():
        return False
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=20)
    return said.returncode != 0


def _lacking_go(module: Path, wanted: str) -> list[str]:
    go = shutil.which("go")
    if go is None:
        return [f"Go {wanted} or newer, which builds {module.name}"]
    # beside go.mod, where Go may switch to a newer one of itself, as GOTOOLCHAIN says
    command = [go, "env", "GOVERSION"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=module, timeout=300)
    here = said.stdout.strip() or said.stderr.strip()
    if said.returncode != 0 or _version(here) < _version(wanted):
        return [f"Go {wanted} or newer; here is {here}"]
    return []


def _version(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:3]]
