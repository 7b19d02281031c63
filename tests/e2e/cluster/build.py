"""Kubernetes' programs, built once from Go modules into a cache outside the checkout.

    ~/.cache/istio-cni-e2e/<digest>/kubelet, kube-apiserver, …

The digest covers versions, checksums and flags, so a cache never serves other programs than these.
The first build takes five to ten minutes on two cores, and 4 GB of Go's own caches.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .needs import ClusterFailed

MODULE = Path(__file__).resolve().parent.parent / "kubernetes"
COMMANDS = (
    "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
    "kubectl",
)  # fmt: skip
TIMEOUT_S = 1800.0
TELL_EVERY_S = 30.0


def cache_dir() -> Path:
    """Return the directory of what is kept between runs; it exists."""
    parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(parent, "istio-cni-e2e")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


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
    with (cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second run waits for the first one's programs
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
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as work:
        output = Path(work, "bin")
        output.mkdir()
        argv = ["go", "build", "-o", f"{output}/", *_arguments()]
        env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
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
    _say(f"built in {time.monotonic() - started:.0f} s")


def _wait(go: subprocess.Popen[bytes], started: float) -> None:
    """Wait for Go, and say now and then that it is at work."""
    _say("building the programs; the first time this takes some minutes")
    while True:
        try:
            go.wait(TELL_EVERY_S)
        except subprocess.TimeoutExpired:
            spent_s = time.monotonic() - started
            if spent_s > TIMEOUT_S:
                raise ClusterFailed(f"Go is still building after {spent_s:.0f} s") from None
            _say(f"still building, {spent_s:.0f} s")
        else:
            return


def _say(what: str) -> None:
    print(
        f"kubernetes {kubernetes_version()}: {what}", file=sys.__stderr__, flush=True
    )  # for who waits
