"""The launcher as a program: what it is made of, for which machines, and that it is safe."""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from istio_cni.constants import SUPPORTED_VERSIONS, VERSION

ROOT = Path(__file__).parents[3]
MACHINE = {"x86_64": 62, "aarch64": 183}  # e_machine of an ELF header
OTHER = "aarch64" if platform.machine() == "x86_64" else "x86_64"
PT_DYNAMIC, PT_INTERP, PT_GNU_STACK, EXECUTABLE = 2, 3, 0x6474E551, 1


def segments(program: Path) -> dict[int, int]:
    """Return the kinds of an ELF file's segments, with their flags."""
    data = program.read_bytes()
    (start,) = struct.unpack_from("=Q", data, 32)
    size, count = struct.unpack_from("=HH", data, 54)
    heads = (struct.unpack_from("=II", data, start + size * number) for number in range(count))
    return dict(heads)


@pytest.fixture(scope="session")
def other(builder: ModuleType) -> Path:
    """Build the launcher for the other kind of machine."""
    if os.environ.get("LAUNCHER_ARCHITECTURES") != "all":
        pytest.skip("compiles a libc, for a minute or two: with LAUNCHER_ARCHITECTURES=all")
    path: Path = builder.build(OTHER, ROOT / "build" / "launcher" / f"istio-cni.{OTHER}")
    return path


@pytest.mark.parametrize("made", ["program", "other"])
def test_it_is_small_and_needs_nothing(request: pytest.FixtureRequest, made: str) -> None:
    """No interpreter, no library, no stack that runs; for both kinds of machine."""
    path: Path = request.getfixturevalue(made)
    arch = platform.machine() if made == "program" else OTHER
    kinds = segments(path)
    assert PT_INTERP not in kinds
    assert PT_DYNAMIC not in kinds
    assert not kinds[PT_GNU_STACK] & EXECUTABLE
    assert struct.unpack_from("=H", path.read_bytes(), 18) == (MACHINE[arch],)
    assert path.stat().st_size < 24_000


def test_it_runs_on_the_other_kind_of_machine(other: Path) -> None:
    """As far as an emulator can tell."""
    emulator = shutil.which(f"qemu-{OTHER}-static")
    if emulator is None:
        pytest.skip(f"needs qemu-{OTHER}-static")
    said = subprocess.run([emulator, other, "--version"], capture_output=True, check=True)
    assert said.stdout.decode() == f"istio-cni {VERSION}\n"
    env = {"CNI_COMMAND": "ADD"}
    failed = subprocess.run([emulator, other], env=env, input=b"{}", capture_output=True)
    assert failed.returncode == 1
    assert b"istio-cni.d/current: No such file or directory" in failed.stdout


def test_the_same_sources_give_the_same_bytes(
    program: Path, builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they lie, and whenever they are compiled."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "launcher", moved / "launcher")
    monkeypatch.setattr(builder, "ROOT", moved)
    monkeypatch.setattr(builder, "SOURCE", moved / "launcher" / "istio-cni.c")
    again = builder.build(None, tmp_path / "istio-cni")
    assert again.read_bytes() == program.read_bytes()
    assert str(ROOT).encode() not in again.read_bytes()


def test_what_is_newer_than_its_sources_is_kept(program: Path, builder: ModuleType) -> None:
    """Compiling takes a second."""
    before = program.stat()
    builder.build(None, program)
    assert program.stat() == before


def test_what_is_older_than_its_sources_is_replaced(
    program: Path, builder: ModuleType, tmp_path: Path
) -> None:
    """In one step: a program that is in use is not written to."""
    old = tmp_path / "istio-cni"
    old.write_text("old")
    os.utime(old, (0, 0))
    with old.open() as held:
        builder.build(None, old)
        assert held.read() == "old"
    assert old.read_bytes() == program.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["istio-cni"]


def test_a_failure_is_one_line_that_names_it(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing behind."""
    wrong = tmp_path / "wrong.c"
    wrong.write_text("int main(void) { return x; }\n")
    output = tmp_path / "out" / "istio-cni"
    monkeypatch.setattr(builder, "SOURCE", wrong)
    with pytest.raises(builder.LauncherFailed, match="undeclared identifier 'x'"):
        builder.build(None, output)
    assert list(output.parent.iterdir()) == []
    with pytest.raises(builder.LauncherFailed, match="no launcher for riscv64"):
        builder.build("riscv64", output)


def test_the_page_has_every_word_of_a_fallback() -> None:
    """People count them."""
    source = (ROOT / "launcher" / "istio-cni.c").read_text()
    given = set(re.findall(r'give_up\(call,[^"]*"(\w+)"', source))
    given |= set(re.findall(r'give_up\(call, errno == EAGAIN \? "(\w+)" : "(\w+)"', source)[0])
    page = (ROOT / "docs" / "launcher.md").read_text()
    listed = set(re.findall(r"^\| `([a-z]+)` \|", page, re.M))
    assert listed == given


def test_the_versions_are_the_plugins(program: Path) -> None:
    """Of the product and of the protocol, from the one place where they are written."""
    text = program.read_bytes()
    assert f"istio-cni {VERSION}: ".encode() in text
    assert ", ".join(SUPPORTED_VERSIONS).encode() in text


def test_hostile_input_finds_nothing(builder: ModuleType) -> None:
    """A small part of what `--fuzz` does, under the sanitizers of addresses and undefined acts."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("needs a C compiler with sanitizers")
    assert "20000 inputs, seed 1, " in builder.fuzz(20_000, 1)
