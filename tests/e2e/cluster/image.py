"""Container images made of files of this machine: docker-archives that containerd imports.

No registry and no builder are needed. A dynamic program brings along the libraries that it needs
here and the loader that finds them, at the same paths.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .needs import BUSYBOX, ClusterFailed

DIRECTORIES = ("bin", "dev", "etc", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var")
USERS = "root:x:0:0:root:/root:/bin/sh\nistio-proxy:x:1337:1337::/:/bin/false\n"
GROUPS = "root:x:0:\nistio-proxy:x:1337:\n"


class Image:
    """A root file system in the making, and how it is started."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
        for name in DIRECTORIES:
            self._directory(name)
        self.add_text("/etc/passwd", USERS)
        self.add_text("/etc/group", GROUPS)
        self.add_link("/var/run", "/run")

    def add_text(self, target: str, text: str) -> None:
        """Add a file that says this."""
        self._file(target, text.encode(), 0o644)

    def add_link(self, target: str, leads_to: str) -> None:
        """Add a symbolic link."""
        entry = self._entry(target, tarfile.SYMTYPE, 0o777)
        entry.linkname = leads_to

    def add_busybox(self) -> None:
        """Add a static busybox under the names of all its commands."""
        self._file("/bin/busybox", BUSYBOX.read_bytes(), 0o755)
        names = subprocess.check_output([BUSYBOX, "--list"], text=True, timeout=20).split()
        for name in names:
            if name != "busybox":
                self.add_link(f"/bin/{name}", "busybox")

    def add_tree(self, target: str, source: Path) -> None:
        """Add a directory with all below it, links as links, and what its programs need."""
        for path in sorted(source.rglob("*")):
            self._add(f"{target}/{path.relative_to(source)}", path)

    def add_program(self, target: str, source: Path) -> None:
        """Add a program or library with the libraries and the loader that it needs."""
        self._file(target, source.read_bytes(), 0o755)
        said = subprocess.run(["ldd", str(source)], capture_output=True, text=True, timeout=20)
        for path in re.findall(r"(/\S+) \(0x", said.stdout):
            self._file(path, Path(path).read_bytes(), 0o755)

    def _add(self, target: str, source: Path) -> None:
        if source.is_symlink():
            self.add_link(target, os.readlink(source))
        elif source.is_dir():
            self._directory(target)
        elif source.read_bytes()[:4] == b"\x7fELF":
            self.add_program(target, source)
        else:
            self._file(target, source.read_bytes(), source.stat().st_mode & 0o777)

    def _directory(self, target: str) -> None:
        self._entry(target, tarfile.DIRTYPE, 0o1777 if target.strip("/") == "tmp" else 0o755)

    def _file(self, target: str, content: bytes, mode: int) -> None:
        entry = self._entry(target, tarfile.REGTYPE, mode)
        entry.size = len(content)
        self._entries[entry.name] = (entry, content)

    def _entry(self, target: str, kind: bytes, mode: int) -> tarfile.TarInfo:
        name = target.strip("/")
        parent = os.path.dirname(name)
        if parent and parent not in self._entries:
            self._directory(parent)
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = kind, mode
        self._entries.setdefault(name, (entry, b""))
        return self._entries[name][0]

    def write(
        self, archive: Path, tags: Sequence[str], *, command: Sequence[str], env: Mapping[str, str]
    ) -> None:
        """Write the image as a docker-archive of one layer."""
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            for entry, content in self._entries.values():
                tar.addfile(entry, io.BytesIO(content) if entry.isreg() else None)
        digest = hashlib.sha256(layer.getvalue()).hexdigest()
        config = {
            "architecture": _architecture(),
            "os": "linux",
            "config": {"Cmd": list(command), "Env": [f"{key}={env[key]}" for key in env]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        manifest = [{"Config": "c.json", "RepoTags": list(tags), "Layers": ["l.tar"]}]
        members = {
            "c.json": json.dumps(config).encode(),
            "l.tar": layer.getvalue(),
            "manifest.json": json.dumps(manifest).encode(),
        }
        with tarfile.open(archive, mode="w") as tar:
            for name, content in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def _architecture() -> str:
    machine = os.uname().machine
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    if machine not in names:
        raise ClusterFailed(f"no image can be made for {machine}")
    return names[machine]
