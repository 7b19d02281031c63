"""Makes a frozen folder independent of the node's libc, and says how such a folder is started.

    <folder>/istio-cni, istio-iptables
    <folder>/_internal/        Python and what it links to
    <folder>/_internal/libc/   the loader, and what a plain start takes from the node: libc, libm, …

A loader finds libraries by itself and must be of the same release as its libc, so the folder brings
both, and is started through its own loader, by its path. The libc has a directory of its own: a
plain start of a program uses the node's loader, which must not meet a foreign libc in `_internal`.

Nothing of the node is to be loaded. So no object has a search path of its own, everything that an
object names is there, and the loader's copy knows none of the two files of the node that it reads
whatever it is told. docs/bundle.md has the rest.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIBC_DIR = "_internal/libc"
LOADER = f"{LIBC_DIR}/ld-bundled.so.1"
"""PyInstaller's boot loader must see that it was started by a loader: `ld-<no dot>.so.<number>`."""

HARDWIRED = {
    b"/etc/ld.so.preload": b"/dev/null/.preload",  # libraries that every program is to load
    b"/etc/ld.so.cache": b"/dev/null/.cache",  # the start says so, too; a restart does not
}
"""Files that glibc's loader reads, and what its copy has instead: as long, below what is no
directory, so that it can never be there."""

UNNAMED = "libgcc_s.so.1"
"""What glibc loads without naming it as needed: ends of threads are unwound with it."""

MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SONAME, DT_RPATH, DT_RUNPATH = 0, 1, 5, 14, 15, 29
ENTRY = struct.Struct("<qQ")  # Elf64_Dyn


class BundleFailed(Exception):
    """Something could not be frozen, or does not work once it is; the message is for a person."""


class Start(NamedTuple):
    """How to start a program of a folder: what to execute, and what to add to its environment."""

    argv: list[str]
    env: dict[str, str]


def recipe(folder: str, program: str = "istio-cni") -> Start:
    """Return the start of a program that takes nothing from the node.

    `folder` is the folder's absolute path without links, as the program will see it. The rest of
    the environment is CNI_* and PATH, nothing else. The launcher does the same in C.

    The boot loader starts itself anew for the sake of LD_LIBRARY_PATH, unless its environment says
    that it did: the archive is realpath(argv[0]), byte for byte, and -1 is what its parent was.
    Source: PyInstaller 6.22.3, bootloader/src/pyi_main.c.
    """
    inner = os.path.join(folder, "_internal")
    path = os.path.join(folder, program)
    libraries = f"{os.path.join(folder, LIBC_DIR)}:{inner}"
    argv = [os.path.join(folder, LOADER), "--inhibit-cache", "--library-path", libraries, path]
    env = {
        "OPENSSL_CONF": "/dev/null",  # else the node's, which may allow nothing that we have
        "TZ": "/dev/null",  # else /etc/localtime is read; our times are UTC
        "_PYI_ARCHIVE_FILE": path,
        "_PYI_LINUX_PROCESS_NAME": program,  # for ps, which would show the loader's
        "_PYI_PARENT_PROCESS_LEVEL": "-1",
    }
    return Start(argv, env)


def complete(folder: Path) -> None:
    """Add to a frozen folder what it would take from the node. Raises BundleFailed."""
    objects = dict(_objects(folder))
    programs = [path for path in objects if path.parent == folder]
    interpreters = {objects[program].interpreter for program in programs}
    if len(interpreters) != 1 or "ld-linux" not in (interpreter := interpreters.pop()):
        raise BundleFailed("a portable bundle is made on a machine with glibc")
    target = folder / LIBC_DIR
    target.mkdir()
    _write(folder / LOADER, _without_hardwired(Path(interpreter)))
    for name, library in _borrowed(folder, list(objects)).items():
        if library.name != Path(interpreter).name:
            _write(target / name, library.read_bytes())
    for path, found in _objects(folder):
        if found.drop_search_paths():
            _write(path, found.data)
    verify(folder)


def verify(folder: Path) -> None:
    """Prove that all of a folder's objects find all they need there. Raises BundleFailed."""
    objects = dict(_objects(folder))
    there = {
        path.name for path in objects if path.parent in (folder / "_internal", folder / LIBC_DIR)
    }
    there.add(objects[folder / LOADER].soname)
    for path, found in objects.items():
        if missing := sorted(set(found.needed) - there):
            raise BundleFailed(f"{path} needs {', '.join(missing)}, which the bundle has not")
        if found.search_paths:
            raise BundleFailed(f"{path} looks for libraries in {found.search_paths}")


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o755)


def _without_hardwired(loader: Path) -> bytes:
    """Return a loader that reads neither of the two files; raises BundleFailed if it is unlike."""
    data = loader.read_bytes()
    for file, instead in HARDWIRED.items():
        found, wanted = (b"\0" + name + b"\0" for name in (file, instead))
        if (times := data.count(found)) != 1 or len(found) != len(wanted):
            raise BundleFailed(f"{loader} has {file.decode()} {times} times, not once")
        data = data.replace(found, wanted)
    return data


def _borrowed(folder: Path, objects: list[Path]) -> dict[str, Path]:
    """Return this machine's libraries that objects of a folder load, by the names they load."""
    environment = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": str(folder / "_internal"),
        "LD_PRELOAD": UNNAMED,
    }
    ldd = shutil.which("ldd")
    if ldd is None:
        raise BundleFailed("ldd is missing; it comes with glibc")
    done = subprocess.run([ldd, *objects], env=environment, capture_output=True, text=True)
    if done.returncode != 0 or "not found" in done.stdout or UNNAMED not in done.stdout:
        raise BundleFailed(f"ldd does not find all libraries:\n{done.stdout}{done.stderr}")
    found = re.findall(r"^\s+(\S+) => (/\S+) \(0x", done.stdout, re.MULTILINE)
    return {name: Path(path) for name, path in found if folder not in Path(path).parents}


def _objects(folder: Path) -> Iterator[tuple[Path, Elf]]:
    """Yield the programs and libraries of a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                continue
        yield path, Elf(path.read_bytes())


class Elf:
    """A program or library as far as the loader reads it: what it needs, and where it looks.

    Source: elf(5); System V ABI, "Dynamic Linking".
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        headers_at, size, number = _header(data)
        headers = [_program_header(data, headers_at + size * index) for index in range(number)]
        self._loads = [header for header in headers if header.kind == PT_LOAD]
        self._dynamic_at = next((it.offset for it in headers if it.kind == PT_DYNAMIC), None)
        self.interpreter = next(
            (self._text(it.offset) for it in headers if it.kind == PT_INTERP), ""
        )

    @property
    def needed(self) -> list[str]:
        """The names of the libraries it needs."""
        return self._names(DT_NEEDED)

    @property
    def soname(self) -> str:
        """The name others need it by; "" for none."""
        return next(iter(self._names(DT_SONAME)), "")

    @property
    def search_paths(self) -> list[str]:
        """Where it looks for what it needs, beside where the loader does."""
        return self._names(DT_RPATH, DT_RUNPATH)

    def drop_search_paths(self) -> bool:
        """Take them out, and tell whether there were any."""
        entries = self._entries()
        kept = [entry for entry in entries if entry[0] not in (DT_RPATH, DT_RUNPATH)]
        if kept == entries or self._dynamic_at is None:
            return False
        written = b"".join(ENTRY.pack(*entry) for entry in kept).ljust(
            len(entries) * ENTRY.size, b"\0"
        )
        end = self._dynamic_at + len(written)
        self.data = self.data[: self._dynamic_at] + written + self.data[end:]
        return True

    def _entries(self) -> list[tuple[int, int]]:
        """Return tag and value of what is before the end mark of the dynamic section."""
        entries: list[tuple[int, int]] = []
        if self._dynamic_at is None:
            return entries
        while (entry := ENTRY.unpack_from(self.data, self._dynamic_at + len(entries) * ENTRY.size))[
            0
        ]:
            entries.append(entry)
        return entries

    def _names(self, *tags: int) -> list[str]:
        entries = self._entries()
        table = dict(entries).get(DT_STRTAB, 0)
        return [self._text(self._offset(table) + value) for tag, value in entries if tag in tags]

    def _offset(self, address: int) -> int:
        """Return where in the file an address is."""
        for load in self._loads:
            if load.address <= address < load.address + load.size:
                return load.offset + address - load.address
        raise BundleFailed(f"no part of the file is at address {address:#x}")

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()


class _ProgramHeader(NamedTuple):
    kind: int
    offset: int
    address: int
    size: int


def _header(data: bytes) -> tuple[int, int, int]:
    """Return where the program headers are, the size of one, and their number."""
    (at,) = struct.unpack_from("<Q", data, 0x20)
    size, number = struct.unpack_from("<HH", data, 0x36)
    return at, size, number


def _program_header(data: bytes, at: int) -> _ProgramHeader:
    kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, at)
    return _ProgramHeader(kind, offset, address, size)
