"""A node without anything: a root with empty directories, in which the bundled plugin is called.

    bare = BareNode(tmp_path, bundle())
    bare.node.add_pod()
    assert bare.call("ADD", netns).status == 0

The plugin is started by its own loader, as the launcher starts it, in a mount namespace of its own.
Only what is mounted is there: the bundle, the pods' manifests, the run dir, /proc, the namespaces.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fake_apiserver import FakeApiServer
from netns.plugin import JSON, Answer, Node

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packaging"))
import portable

CHECKOUT = Path(__file__).resolve().parents[2]
BUNDLE = CHECKOUT / "dist" / "istio-cni.d" / "current"
DUAL_STACK: JSON = {"name": "ISTIO_DUAL_STACK", "value": "true"}
MOUNT_POINTS = ("bundle", "manifests", "proc", "run/istio-cni", "run/netns", "tmp")
OPENED = re.compile(r'(?:open|openat|access|faccessat2?|execve)\([^"]*"(/[^"]*)"')


def bundle() -> Path:
    """Return the bundle's directory, if it was made of the sources as they are now; else skip."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for mount namespaces")
    if not BUNDLE.exists():
        pytest.skip("needs dist/: `make bundle` first")
    made = (BUNDLE / "istio-cni").stat().st_mtime
    packaging = [
        CHECKOUT / "packaging" / name for name in ("bundle.py", "bundle.spec", "portable.py")
    ]
    if any(path.stat().st_mtime > made for path in [*CHECKOUT.glob("src/**/*.py"), *packaging]):
        pytest.skip("dist/ is older than the sources: `make bundle` first")
    return BUNDLE.resolve()


class BareNode:
    """A node on which the plugin sees nothing but an empty root and what is mounted there.

    A test may put files into `root`, and change how the plugin is started: `mounts` are commands
    for a shell, run when all else is mounted; `around` runs chroot, and `within` is run by it;
    `redirections` are a shell's.
    """

    def __init__(self, directory: Path, bundle: Path, server: FakeApiServer | None = None) -> None:
        self.node = Node(directory, server)
        self.bundle = bundle
        self.root = directory / "root"
        for name in MOUNT_POINTS:
            (self.root / name).mkdir(parents=True)
        self.start = portable.recipe("/bundle")
        self.proc = True
        self.mounts: list[str] = []
        self.around: list[str] = []
        self.within: list[str] = []
        self.redirections = ""

    def put(self, path: str, content: bytes, mode: int = 0o755) -> Path:
        """Put a file into the root, at an absolute path there."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
        return file

    def call(
        self,
        verb: str,
        netns: str = "",
        *,
        env: Mapping[str, str | None] | None = None,
        **keys: object,
    ) -> Answer:
        """Call the bundled plugin for the pod in a namespace; keys are of its configuration.

        `env` changes the environment of the start.
        """
        places = {"cni_agent_run_dir": "/run/istio-cni"}
        if self.node.server is None:
            places["pod_source"] = "manifests:/manifests"
        config = self.node.config(**{**places, **keys})
        environment = {**self.start.env, **(env or {})}
        return self.node.call(
            verb, netns, config=config, env=environment, wrapper=self._wrapper(netns)
        )

    def _wrapper(self, netns: str) -> list[str]:
        """Return a command that takes the place of the program it is given, in a fresh view."""
        binds: dict[str, object] = {
            "": self.root,  # a mount point, as roots are
            "bundle": self.bundle,
            "manifests": self.node.manifests,
            "run/istio-cni": self.node.run_dir,
        }
        if self.proc:
            binds["proc"] = "/proc"
        mounts = [
            shlex.join(["mount", "--bind", str(source), str(self.root / name)])
            for name, source in binds.items()
        ]
        if netns:
            mounts.append(f"mount --rbind /run/netns {shlex.quote(str(self.root / 'run/netns'))}")
        program = [*self.around, "chroot", str(self.root), *self.within, *self.start.argv]
        start = f"exec {shlex.join(program)} {self.redirections}"
        script = " && ".join([*mounts, *self.mounts, start])
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]


def opened(trace: Path, loader: str) -> set[str]:
    """Return the absolute paths that a traced plugin tried to open, read or execute.

    `trace` is of strace, from before the start of the loader on.
    """
    _, _, after = trace.read_text().partition(f'execve("{loader}"')
    assert after, "the loader was not started"
    return set(OPENED.findall(after))


@pytest.fixture
def bare(tmp_path: Path) -> BareNode:
    """Make a node of an empty root and the bundle, with a pod of the mesh."""
    bare = BareNode(tmp_path, bundle())
    bare.node.add_pod(env=[DUAL_STACK])
    return bare
