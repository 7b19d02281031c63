"""What a node could leave on the machine, seen from outside: compared before and after a run.

Other tests may run beside; what they make for a moment is gone by the second look, and their
network namespaces have names of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from e2e.cluster import build, configs

Seen = dict[str, set[str]]
DIRECTORIES = (
    "/etc/cdi", "/etc/cni", "/etc/kubernetes", "/opt/cni", "/opt/containerd", "/root/.kube",
    "/run/cdi", "/run/cni-ipam", "/run/containerd", "/run/istio-cni", "/run/netns", "/run/nri",
    "/usr/libexec/kubernetes", "/var/lib/cni", "/var/lib/containerd", "/var/lib/kubelet",
    "/var/log/containers", "/var/log/pods",
)  # fmt: skip
RULES = (("nft", "-s", "list", "ruleset"), ("iptables-legacy-save",), ("ip6tables-legacy-save",))
OTHER_TESTS = "/run/netns/istio-"
PATIENCE_S = 10.0


def machine() -> Seen:
    """Look at all that is the machine's own: mounts, links, rules, kernel settings, files."""
    return {
        "mounts": {line for line in _lines("/proc/self/mounts") if OTHER_TESTS not in line},
        "links": set(re.findall(r"^\d+: ([^:@]+)", _said("ip", "-o", "link"), re.MULTILINE)),
        "addresses": set(re.findall(r"inet6? \S+", _said("ip", "addr"))),
        "rules": {rule for command in RULES for rule in _rules(_said(*command))},
        "settings": {f"{name} = {_setting(name)}" for name in configs.SYSCTLS},
        "files": {path for name in DIRECTORIES for path in _listed(name)},
    }


def of_node(name: str) -> Seen:
    """Look for processes, cgroups and state of the nodes whose names begin like this."""
    places = (Path(tempfile.gettempdir()), build.cache_dir())
    return {
        "processes": {text for text in map(_process, _processes()) if name in text},
        "cgroups": set(_cgroups(name)),
        "state": {str(path) for place in places for path in place.glob(f"{name}*")},
    }


def _cgroups(name: str) -> Iterator[str]:
    """Find cgroups whose names begin like this, also while they are being removed."""
    for parent, names, _ in os.walk("/sys/fs/cgroup"):  # passes over what has just gone
        yield from (os.path.join(parent, each) for each in names if each.startswith(name))


def remaining(look: Callable[[], Seen], before: Seen | None = None) -> Seen:
    """Return what was not there before and does not go away soon."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        old = before or {}
        new = {kind: seen - old.get(kind, set()) for kind, seen in look().items()}
        found = {kind: seen for kind, seen in new.items() if seen}
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _said(*argv: str) -> str:
    """Return what a program prints; without it or its rights there is nothing to be seen."""
    if shutil.which(argv[0]) is None:
        return ""
    return subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout


def _rules(text: str) -> list[str]:
    """Return the lines of a rule listing without comments and counters."""
    lines = re.sub(r"\[\d+:\d+\]", "", text).splitlines()
    return [line.strip() for line in lines if not line.startswith("#")]


def _setting(name: str) -> str:
    path = Path("/proc/sys", name)
    return path.read_text().strip() if path.exists() else ""


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _listed(directory: str) -> list[str]:
    try:
        paths = [directory, *(f"{directory}/{name}" for name in os.listdir(directory))]
    except (FileNotFoundError, PermissionError):
        return []
    return [path for path in paths if OTHER_TESTS not in path]


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _process(pid: str) -> str:
    """Tell a process by its command line and cgroups, "" once it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        return f"{pid} {' '.join(words)} {Path(f'/proc/{pid}/cgroup').read_text()}"
    except OSError:
        return ""
