"""Kubernetes' programs, built once from Go modules into a cache outside the checkout.

    ~/.cache/istio-cni-e2e/kubernetes-<version>-<digest>/kubelet, kube-apiserver, …

The digest covers versions, checksums and flags, so a cache never serves other programs than these.
The first build takes five to ten minutes on two cores, and 4 GB of Go's own caches.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from .locks import locked, say
from .needs import MODULE, ClusterFailed

COMMANDS = (
    "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
    "kubectl",
)  # fmt: skip
TIMEOUT_S = 1800.0
TELL_EVERY_S = 30.0


def cache_dir() -> Path:
    """Return the directory of what is kept between runs; it may have to be made."""
    parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(parent, "istio-cni-e2e")


def go_version() -> str:
    """Return the version of Go that the modules ask for, as "1.26.0"."""
    return _first(r"^go (\S+)$")


def kubernetes_version() -> str:
    """Return the version of Kubernetes that is built, as "v1.36.3"."""
    return _first(r"^\s*(?:require )?k8s\.io/kubernetes (v\S+)$")


def _first(pattern: str) -> str:
    found = re.search(pattern, (MODULE / "go.mod").read_text(), re.MULTILINE)
    if found is None:
        raise ClusterFailed(f"{MODULE}/go.mod has no line like {pattern}")
    return found[1]


def binaries(cache: Path) -> Path:
    """Return the directory of the programs, building them if they are not there yet."""
    digest = hashlib.sha256("\0".join(_arguments()).encode())
    for name in ("go.mod", "go.sum"):
        digest.update((MODULE / name).read_bytes())
    directory = cache / f"kubernetes-{kubernetes_version()}-{digest.hexdigest()[:12]}"
    with locked(cache / "build.lock"):  # a second run waits for the first one's programs
        if not directory.exists():
            _build(cache, directory)
    return directory


def _arguments() -> list[str]:
    """Return what `go build` is told; the flags are part of the keys of Go's own cache, too."""
    version = kubernetes_version()
    major, minor = re.findall(r"\d+", version)[:2]
    package = "k8s.io/component-base/version"
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    flags = " ".join(f"-X {package}.{name}={value}" for name, value in values.items())
    targets = [f"k8s.io/kubernetes/cmd/{name}" for name in COMMANDS]
    return ["-mod=readonly", "-ldflags", f"-s -w {flags}", *targets]


def _build(cache: Path, directory: Path) -> None:
    for killed in cache.glob("building-*"):
        shutil.rmtree(killed)
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as work:
        output = Path(work, "bin")
        output.mkdir()
        argv = ["setpriv", "--pdeathsig", "KILL", "go", "build", "-o", f"{output}/", *_arguments()]
        # not empty, or what `go env -w` has stored would hold
        env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"}
        started = time.monotonic()
        log = Path(work, "log")
        with log.open("w") as stream:
            go = subprocess.Popen(argv, cwd=MODULE, env=env, stdout=stream, stderr=stream)
            try:
                _wait(go, started)
            finally:
                go.kill()
                go.wait()
        if go.returncode != 0:
            raise ClusterFailed(f"Kubernetes could not be built:\n{log.read_text()[-4000:]}")
        output.rename(directory)
    say(f"Kubernetes {kubernetes_version()} is built, in {_minutes(started)}")


def _wait(go: subprocess.Popen[bytes], started: float) -> None:
    """Wait for Go, and say now and then that it is at work."""
    say(f"Kubernetes {kubernetes_version()} is being built, which takes 5 to 10 minutes, once")
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
