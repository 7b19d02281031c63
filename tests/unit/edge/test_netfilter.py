"""What a program's version and its complaints tell."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from istio_cni.edge.netfilter import CommandFailed, Netfilter, Tool, parse_version
from istio_cni.errors import TryAgainLater


@pytest.mark.parametrize(
    ("text", "variant", "version"),
    [
        ("iptables v1.8.7 (nf_tables)\n", "nft", (1, 8, 7)),
        ("iptables-save v1.8.9 (legacy)\n", "legacy", (1, 8, 9)),
        ("iptables v1.4.21\n", "legacy", (1, 4, 21)),
        ("iptables v1.8.10.1 (nf_tables)\n", "nft", (1, 8, 10, 1)),
        ("", "legacy", (0, 0, 0)),
        ("a very old one\n", "legacy", (0, 0, 0)),
    ],
)
def test_version_tells_the_variant(text: str, variant: str, version: tuple[int, ...]) -> None:
    """A text without version is that of a very old iptables-legacy."""
    assert parse_version(text) == (variant, version)


@pytest.mark.parametrize(
    ("status", "stderr", "transient", "lock_held"),
    [
        (4, "Another app is currently holding the xtables lock.", True, True),
        (4, "line 3: RULE_APPEND failed (No such file or directory)", True, False),
        (4, "Could not fetch rule set generation id: Invalid argument", False, False),
        (4, "Permission denied (you must be root)", False, False),
        (3, "can't initialize iptables table `nat': Table does not exist", False, False),
        (2, "xtables lock", False, False),
        (1, "line 3 failed", False, False),
        (None, "not found", False, False),
    ],
)
def test_only_a_resource_that_was_taken_is_worth_another_try(
    status: int | None, stderr: str, transient: bool, lock_held: bool
) -> None:
    """Exit status 4 is that, unless the complaint says that it will stay so."""
    error = CommandFailed("iptables-restore", status, stderr)
    assert (error.transient, error.lock_held) == (transient, lock_held)


@pytest.mark.parametrize(
    ("status", "how"),
    [(1, "exit status 1"), (-9, "killed by signal 9"), (None, "could not be started")],
)
def test_failure_is_one_line(status: int | None, how: str) -> None:
    """Whatever a program prints, it is quoted and cut."""
    error = CommandFailed("iptables-restore", status, "line 1\nline 2\x1b[31m" + "x" * 1000)
    assert error.msg.startswith(f"iptables-restore failed ({how}): ")
    assert error.msg.isprintable()
    assert len(error.msg) < 400


def test_program_that_is_missing_is_told_from_one_that_cannot_run(tmp_path: Path) -> None:
    """The first is to be installed, the second to be looked at; directories are no programs."""
    net = Netfilter(deadline=time.monotonic() + 5, search_path=f":{tmp_path}")
    (tmp_path / "iptables-save").mkdir()
    with pytest.raises(CommandFailed, match="not found") as failure:
        net.find("iptables", 4)
    assert failure.value.missing
    (tmp_path / "iptables-nft-save").touch()
    with pytest.raises(CommandFailed, match="iptables-nft-save is not executable") as failure:
        net.find("iptables-nft", 4)
    assert not failure.value.missing


def test_nothing_is_started_when_time_is_over() -> None:
    """A call that is late says what it had no time for."""
    net = Netfilter(deadline=time.monotonic() - 1)
    with pytest.raises(TryAgainLater, match=r"^no time left to run iptables-save$"):
        net.save(Tool("iptables", 4, "/bin/false", "/bin/false", "legacy", (1, 8, 9)))


def test_a_program_is_asked_for_its_version_once_and_another_one_again(tmp_path: Path) -> None:
    """Processes that do many pods' tasks know it; what takes its place is another program."""

    def put(version: str) -> None:
        for end in ("save", "restore"):
            file = tmp_path / f".iptables-{end}"
            file.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho {version}\n")
            file.chmod(0o755)
            file.rename(tmp_path / f"iptables-{end}")

    def found() -> tuple[str, tuple[int, ...]]:
        net = Netfilter(deadline=time.monotonic() + 5, search_path=str(tmp_path))
        tool = net.find("iptables", 4)
        return tool.variant, tool.version

    put("'iptables v1.8.9 (nf_tables)'")
    assert {found() for _ in range(3)} == {("nft", (1, 8, 9))}
    assert (tmp_path / "asked").read_text().count("asked") == 1
    put("'iptables v1.8.10 (legacy)'")
    assert {found() for _ in range(3)} == {("legacy", (1, 8, 10))}
    assert (tmp_path / "asked").read_text().count("asked") == 2
