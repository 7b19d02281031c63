"""Programs built once from Go modules into a cache outside the checkout.

    ~/.cache/istio-cni-e2e/kubernetes-<version>-<digest>/kubelet, kube-apiserver, …
    ~/.cache/istio-cni-e2e/containerd-<version>-<digest>/containerd, …, cni/bridge, …

The digest covers versions, checksums and flags, so a cache never serves other programs than these.
The first build takes five to ten minutes for Kubernetes and half as long for containerd on two
cores, and 4 GB of Go's own caches.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .locks import locked, say
from .needs import ClusterFailed

MODULES = Path(__file__).resolve().parent.parent
KUBERNETES = "k8s.io/kubernetes"
KUBERNETES_COMMANDS = (
    "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
    "kubectl",
)  # fmt: skip
CONTAINERD = "github.com/containerd/containerd/v2"
CONTAINERD_COMMANDS = ("containerd", "containerd-shim-runc-v2", "ctr")
PLUGINS = "github.com/containernetworking/plugins/plugins"
PLUGIN_COMMANDS = ("ipam/host-local", "main/bridge", "main/loopback", "meta/portmap")
PLUGINS_DIR = "cni"  # beside containerd, not in its directory: iproute2 has a `bridge`, too
TIMEOUT_S = 1800.0
TELL_EVERY_S = 30.0


class Source(NamedTuple):
    """What `go build` makes of the modules that a go.mod names, its version, and how it does so.

    `packages` are by the directory, in that of all the programs, where each becomes a program.
    """

    name: str
    takes: str
    module: Path
    version: str
    flags: Sequence[str]
    packages: Mapping[str, Sequence[str]]

    @property
    def go_version(self) -> str:
        """Return the version of Go that the modules ask for, as "1.26.0"."""
        return _first(self.module, r"^go (\S+)$")

    def commands(self) -> list[list[str]]:
        """Return what `go build` is told for each directory, but for the directory itself.

        The flags are part of the keys of Go's own cache, too.
        """
        return [["-mod=readonly", *self.flags, *packages] for packages in self.packages.values()]

    def digest(self) -> str:
        """Return what changes with anything that the programs are made of."""
        told = [word for command in self.commands() for word in command]
        digest = hashlib.sha256("\0".join(told).encode())
        for name in ("go.mod", "go.sum"):
            digest.update((self.module / name).read_bytes())
        return digest.hexdigest()[:12]


def kubernetes() -> Source:
    """Return Kubernetes' programs, which say what version they are."""
    module = MODULES / "kubernetes"
    version = _version_of(KUBERNETES, module)
    major, minor = re.findall(r"\d+", version)[:2]
    package = "k8s.io/component-base/version"
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    linked = " ".join(f"-X {package}.{name}={value}" for name, value in values.items())
    packages = [f"{KUBERNETES}/cmd/{name}" for name in KUBERNETES_COMMANDS]
    flags = ["-ldflags", f"-s -w {linked}"]
    return Source("Kubernetes", "5 to 10 minutes", module, version, flags, {".": packages})


def containerd() -> Source:
    """Return containerd with what it starts, and the standard CNI plugins of its time."""
    module = MODULES / "containerd"
    packages = {
        ".": [f"{CONTAINERD}/cmd/{name}" for name in CONTAINERD_COMMANDS],
        PLUGINS_DIR: [f"{PLUGINS}/{name}" for name in PLUGIN_COMMANDS],
    }
    flags = ["-tags", "no_btrfs,no_devmapper,no_zfs,no_tracing", "-ldflags", "-s -w"]
    version = _version_of(CONTAINERD, module)
    return Source("containerd", "2 to 5 minutes", module, version, flags, packages)


def _version_of(dependency: str, module: Path) -> str:
    return _first(module, rf"^\s*(?:require )?{re.escape(dependency)} (v\S+)$")


def _first(module: Path, pattern: str) -> str:
    found = re.search(pattern, (module / "go.mod").read_text(), re.MULTILINE)
    if found is None:
        raise ClusterFailed(f"{module}/go.mod has no line like {pattern}")
    return found[1]


def cache_dir() -> Path:
    """Return the directory of what is kept between runs; it may have to be made."""
    parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(parent, "istio-cni-e2e")


def binaries(source: Source, cache: Path) -> Path:
    """Return the directory of the programs, building them if they are not there yet."""
    directory = cache / f"{source.name.lower()}-{source.version}-{source.digest()}"
    with locked(cache / "build.lock"):  # a second run waits for the first one's programs
        if not directory.exists():
            _build(source, cache, directory)
    return directory


def _build(source: Source, cache: Path, directory: Path) -> None:
    for killed in cache.glob("building-*"):
        shutil.rmtree(killed)
    named = f"{source.name} {source.version}"
    say(f"{named} is being built, which takes {source.takes}, once")
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as work:
        output = Path(work, "bin")
        started = time.monotonic()
        for where, command in zip(source.packages, source.commands(), strict=True):
            (output / where).mkdir(parents=True, exist_ok=True)
            argv = ["go", "build", "-o", f"{output / where}/", *command]
            _run(argv, source, Path(work, "log"), started)
        output.rename(directory)
    say(f"{named} is built, in {_minutes(started)}")


def _run(argv: Sequence[str], source: Source, log: Path, started: float) -> None:
    """Run Go beside a go.mod until it ends; raises ClusterFailed if it fails."""
    # not empty, or what `go env -w` has stored would hold
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"}
    command = ["setpriv", "--pdeathsig", "KILL", *argv]
    with log.open("w") as stream:
        go = subprocess.Popen(command, cwd=source.module, env=env, stdout=stream, stderr=stream)
        try:
            _wait(go, started)
        finally:
            go.kill()
            go.wait()
    if go.returncode != 0:
        raise ClusterFailed(f"{source.name} could not be built:\n{log.read_text()[-4000:]}")


def _wait(go: subprocess.Popen[bytes], started: float) -> None:
    """Wait for Go, and say now and then that it is at work."""
    while True:
        try:
            go.wait(TELL_EVERY_S)
        except subprocess.TimeoutExpired:
            spent_s = time.monotonic() - started
            if spent_s > TIMEOUT_S:
                raise ClusterFailed(f"Go is still building after {spent_s:.0f} s") from None
            say(f"still building, for {_minutes(started)}")
        else:
            return


def _minutes(started: float) -> str:
    return f"{(time.monotonic() - started) / 60:.1f} min"
