"""The plugin's bundle on real directories."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from istio_cni.constants import VERSION
from istio_cni.errors import IOFailure
from istio_cni.install.bundle import Bundle

SOCKET = "/var/run/istio-cni/agent/agent.sock"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a bundle as it lies in the image, behind its link."""
    return make_bundle(tmp_path / "image", "one")


def make_bundle(directory: Path, content: str) -> Path:
    """Make a bundle of two programs, a library in a directory, and a link."""
    inner = directory / "0.1.0" / "_internal"
    inner.mkdir(parents=True)
    for name in ("istio-cni", "launcher"):
        (inner.parent / name).write_text(f"{name} of {content}")
        (inner.parent / name).chmod(0o755)
    (inner / "lib.so.1").write_text(f"library of {content}")
    (inner / "lib.so").symlink_to("lib.so.1")
    (directory / "current").symlink_to("0.1.0")
    return directory / "current"


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    """Make the host's directory of plugins."""
    path = tmp_path / "bin"
    path.mkdir()
    return path


def make(source: Path, bin_dir: Path) -> Bundle:
    """Make what a process that has just started installs."""
    return Bundle(str(source), str(bin_dir), SOCKET)


def install(source: Path, bin_dir: Path) -> str:
    """Install, and return the bundle's name."""
    bundle = make(source, bin_dir)
    list(bundle.install())
    return bundle.name


def test_the_bundle_is_copied_behind_relative_links(source: Path, bin_dir: Path) -> None:
    """The host sees them under another path; the name has the version and what is inside."""
    name = install(source, bin_dir)
    assert re.fullmatch(rf"{re.escape(VERSION)}-[0-9a-f]{{8}}", name)
    assert os.readlink(bin_dir / "istio-cni.d/current") == name
    assert os.readlink(bin_dir / "istio-cni.d/agent.sock") == SOCKET
    inner = bin_dir / "istio-cni.d" / name / "_internal"
    assert os.readlink(inner / "lib.so") == "lib.so.1"
    assert (inner / "lib.so").read_text() == "library of one"
    assert (inner.parent / "istio-cni").stat().st_mode & 0o777 == 0o755


def test_the_launcher_is_the_program(source: Path, bin_dir: Path) -> None:
    """It looks beside itself for what it starts, so a link would lead it astray."""
    install(source, bin_dir)
    program = bin_dir / "istio-cni"
    assert not program.is_symlink()
    assert program.read_text() == "launcher of one"
    assert program.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("restart", [False, True])
def test_a_launcher_that_was_changed_is_put_back(
    source: Path, bin_dir: Path, *, restart: bool
) -> None:
    """Its content, its mode, or what the name stands for."""
    bundle = make(source, bin_dir)
    list(bundle.install())
    program = bin_dir / "istio-cni"

    def damages() -> Iterator[None]:
        yield program.write_text("two") and None
        yield program.chmod(0o700)
        yield program.unlink()
        program.unlink()
        yield program.symlink_to("bridge")

    for _ in damages():
        again = make(source, bin_dir) if restart else bundle
        assert len(list(again.install())) == 1
        assert program.read_text() == "launcher of one"
        assert list(again.install()) == []


def test_modes_are_those_of_the_image_whatever_the_umask(source: Path, bin_dir: Path) -> None:
    """Otherwise the copy would never be what is wanted."""
    former = os.umask(0o077)
    try:
        bundle = make(source, bin_dir)
        assert list(bundle.install())
        assert list(make(source, bin_dir).install()) == []
    finally:
        os.umask(former)
    assert (bin_dir / "istio-cni").stat().st_mode & 0o777 == 0o755


def test_what_is_in_place_is_not_touched(source: Path, bin_dir: Path) -> None:
    """Neither by the next look nor by the next process."""
    bundle = make(source, bin_dir)
    list(bundle.install())
    before = {path: path.lstat().st_mtime_ns for path in bin_dir.rglob("*")}
    assert list(bundle.install()) == list(bundle.install()) == []
    assert list(make(source, bin_dir).install()) == []
    assert {path: path.lstat().st_mtime_ns for path in bin_dir.rglob("*")} == before


@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_bundle_is_put_right_in_place(
    source: Path, bin_dir: Path, *, restart: bool
) -> None:
    """A file changed, one missing, one too many, a wrong mode, a link elsewhere."""
    bundle = make(source, bin_dir)
    list(bundle.install())
    target = bin_dir / "istio-cni.d" / bundle.name
    (target / "istio-cni").write_text("two")
    (target / "_internal/lib.so.1").unlink()
    (target / "_internal/lib.so").unlink()
    (target / "_internal/lib.so").symlink_to("/etc/passwd")
    (target / "_internal").chmod(0o700)
    os.mkfifo(target / "odd")
    again = make(source, bin_dir) if restart else bundle
    assert list(again.install()) == [f"bundle {bundle.name}: 4 files written"]
    assert list(again.install()) == []
    assert (target / "istio-cni").read_text() == "istio-cni of one"
    assert (target / "_internal/lib.so").read_text() == "library of one"
    assert sorted(os.listdir(target)) == ["_internal", "istio-cni", "launcher"]


def test_the_references_program_is_replaced(source: Path, bin_dir: Path) -> None:
    """The runtime finds one of the two at any time; other plugins stay."""
    (bin_dir / "istio-cni").write_text("the reference's")
    (bin_dir / "bridge").write_text("another plugin")
    install(source, bin_dir)
    assert (bin_dir / "istio-cni").read_text() == "launcher of one"
    assert (bin_dir / "bridge").read_text() == "another plugin"


def test_the_former_bundle_stays_and_older_ones_go(
    source: Path, bin_dir: Path, tmp_path: Path
) -> None:
    """A plugin may still run from it; after a restart that is the newest of the others."""
    first = install(source, bin_dir)
    second = install(make_bundle(tmp_path / "second", "two"), bin_dir)
    directory = bin_dir / "istio-cni.d"
    assert set(os.listdir(directory)) == {first, second, "agent.sock", "current"}
    third_source = make_bundle(tmp_path / "third", "three")
    third = install(third_source, bin_dir)
    assert set(os.listdir(directory)) == {second, third, "agent.sock", "current"}
    (directory / ".current.1-abcdef").symlink_to("gone")
    assert install(third_source, bin_dir) == third
    assert set(os.listdir(directory)) == {second, third, "agent.sock", "current"}


def test_removal_leaves_what_is_not_ours(source: Path, bin_dir: Path) -> None:
    """Another program that has taken the name stays, and so do other plugins."""
    bundle = make(source, bin_dir)
    (bin_dir / "bridge").touch()
    list(bundle.install())
    assert len(list(bundle.remove())) == 2
    assert os.listdir(bin_dir) == ["bridge"]
    list(bundle.install())
    (bin_dir / "istio-cni").unlink()
    (bin_dir / "istio-cni").write_text("the reference's")
    list(bundle.remove())
    assert sorted(os.listdir(bin_dir)) == ["bridge", "istio-cni"]


def test_a_directory_that_is_not_mounted_is_not_made(source: Path, tmp_path: Path) -> None:
    """It would be in this container, where no runtime looks."""
    bundle = make(source, tmp_path / "nowhere")
    with pytest.raises(IOFailure, match="to be mounted"):
        list(bundle.install())
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("left", ["", "current", "current/istio-cni"])
def test_an_image_without_bundle_is_refused(left: str, tmp_path: Path) -> None:
    """Missing, or without one of the programs."""
    if left:
        (tmp_path / left).mkdir(parents=True)
    with pytest.raises(IOFailure, match="current"):
        make(tmp_path / "current", tmp_path)
