"""The log: which lines are written where, what they hold, and that they never fail a call."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import time
from pathlib import Path

import pytest

from istio_cni.constants import LOG_BACKUP_MAX_AGE_S, LOG_FILE, LOG_FILE_BYTES
from istio_cni.errors import TryAgainLater
from istio_cni.plugin.log import Log

JSON = dict[str, object]
LEVELS = ("debug", "info", "warn", "error")


class Pair:
    """A log and what it wrote."""

    def __init__(self, directory: Path | str = "", level: str = "info") -> None:
        self.stream = io.StringIO()
        self.file = Path(directory) / LOG_FILE
        self.log = Log(self.stream)
        self.log.configure(level, str(directory))

    def lines(self) -> list[JSON]:
        """Read what is on the stream."""
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def write_all(self) -> None:
        """Write one line of each level."""
        for level in LEVELS:
            getattr(self.log, level)(level)


# -- lines -----------------------------------------------------------------------------------------


def test_a_line_is_one_json_object_with_time_level_scope_and_message() -> None:
    """The fields of a call come after them, as do those of the line itself."""
    pair = Pair()
    pair.log.bind(verb="ADD", container_id="c", ifname="", netns="/n")
    pair.log.bind(pod="a/b")
    pair.log.info("captured", changed="all", tries=3)
    (line,) = pair.lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", str(line.pop("time")))
    assert list(line.items()) == [
        ("level", "info"),
        ("scope", "cni-plugin"),
        ("msg", "captured"),
        ("verb", "ADD"),
        ("container_id", "c"),
        ("netns", "/n"),
        ("pod", "a/b"),
        ("changed", "all"),
        ("tries", 3),
    ]


def test_no_value_forges_a_line_or_moves_a_cursor() -> None:
    """ASCII only, control characters escaped, bound fields cut."""
    pair = Pair()
    pair.log.bind(netns="x" * 1000, pod="\udcff")
    pair.log.warn('a\n{"level": "info"}\x1b[2J\x7f\x9bü', cause="\r\n")
    text = pair.stream.getvalue()
    assert text.isascii()
    assert text.count("\n") == 1
    assert text[:-1].isprintable()
    (line,) = pair.lines()
    assert line["msg"] == 'a\n{"level": "info"}\x1b[2J\x7f\x9bü'
    assert len(str(line["netns"])) == 256


def test_a_failure_is_logged_with_code_and_details() -> None:
    """Details only where there are any."""
    pair = Pair()
    pair.log.failure(TryAgainLater("lock held", "by 4711"))
    pair.log.failure(TryAgainLater("lock held"))
    first, second = pair.lines()
    assert (first["level"], first["msg"], first["code"]) == ("error", "lock held", 11)
    assert first["details"] == "by 4711"
    assert "details" not in second


# -- levels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", LEVELS),
        ("info", LEVELS[1:]),
        ("warn", LEVELS[2:]),
        ("error", LEVELS[3:]),
        ("fatal", ()),
        ("none", ()),
    ],
)
def test_lines_below_the_level_are_dropped(
    tmp_path: Path, level: str, written: tuple[str, ...]
) -> None:
    """The file gets no debug lines, whatever the level."""
    pair = Pair(tmp_path, level)
    pair.write_all()
    assert tuple(line["msg"] for line in pair.lines()) == written
    assert [pair.log.wants(each) for each in LEVELS] == [each in written for each in LEVELS]
    filed = pair.file.read_text().splitlines() if pair.file.exists() else []
    assert tuple(json.loads(line)["msg"] for line in filed) == tuple(
        each for each in written if each != "debug"
    )


@pytest.mark.parametrize("level", ["", "INFO", "warning", "\x1b[2J" * 100])
def test_an_unknown_level_is_info_and_is_reported(level: str) -> None:
    """A typing mistake must not silence the log."""
    pair = Pair(level=level)
    pair.write_all()
    first, *others = pair.lines()
    assert first["level"] == "warn"
    assert "unknown level" in str(first["msg"])
    assert "allowed: debug, info, warn, error" in str(first["msg"])
    assert len(str(first["msg"])) < 500
    assert [line["level"] for line in others] == ["info", "warn", "error"]


# -- what cannot be written ------------------------------------------------------------------------


@pytest.mark.parametrize("directory", ["/nonexistent", "/dev/null", "/proc", "", "relative/none"])
def test_a_file_that_cannot_be_written_costs_the_file_only(directory: str) -> None:
    """Each line is on stderr."""
    pair = Pair(directory)
    pair.log.info("a")
    pair.log.info("b")
    assert [line["msg"] for line in pair.lines()] == ["a", "b"]


def test_neither_a_link_nor_a_pipe_is_written_to(tmp_path: Path) -> None:
    """Whatever stands in the file's place, the call goes on."""
    for make in (lambda path: path.symlink_to(tmp_path / "target"), os.mkfifo, Path.mkdir):
        directory = tmp_path / str(make)
        directory.mkdir()
        make(directory / LOG_FILE)
        pair = Pair(directory)
        pair.log.info("a")
        assert len(pair.lines()) == 1
    assert not (tmp_path / "target").exists()


def test_a_stream_that_is_closed_costs_the_stream_only(tmp_path: Path) -> None:
    """The file still has the line."""
    pair = Pair(tmp_path)
    pair.stream.close()
    pair.log.info("a")
    assert json.loads(pair.file.read_text())["msg"] == "a"


@pytest.mark.parametrize("room", [0, 4096])
def test_a_pipe_that_nobody_reads_costs_the_stream_only(tmp_path: Path, room: int) -> None:
    """One short wait, also when only the beginning of a line fits; the file has every line."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 8192)
    os.write(writing, b"x" * (8192 - room))
    os.set_blocking(writing, True)
    with open(reading, "rb"), open(writing, "w") as stream:
        log = Log(stream)
        log.configure("info", str(tmp_path))
        began = time.monotonic()
        for _ in range(5):
            log.info("a" * 10_000)
        assert 0.1 < time.monotonic() - began < 0.5
    assert len((tmp_path / LOG_FILE).read_text().splitlines()) == 5


def test_a_long_line_reaches_a_pipe_whole() -> None:
    """It is written in parts that a pipe takes at once."""
    reading, writing = os.pipe()
    with open(reading) as reader:
        with open(writing, "w") as stream:
            Log(stream).info("a" * 20_000)
        assert json.loads(reader.read())["msg"] == "a" * 20_000


# -- the rolling file ------------------------------------------------------------------------------


def test_lines_are_appended_to_a_file_for_root_only(tmp_path: Path) -> None:
    """Several processes write to it, each line with one write."""
    for _ in range(2):
        Pair(tmp_path).log.info("a")
    file = tmp_path / LOG_FILE
    assert len(file.read_text().splitlines()) == 2
    assert file.stat().st_mode & 0o777 == 0o600


def backups(directory: Path) -> list[str]:
    """Name what else is in the directory."""
    return sorted(path.name for path in directory.iterdir() if path.name != LOG_FILE)


def fill(directory: Path, size: int = LOG_FILE_BYTES) -> None:
    """Make the file as large as that, mostly holes."""
    with (directory / LOG_FILE).open("ab") as file:
        file.truncate(size)


def test_a_full_file_becomes_the_only_backup(tmp_path: Path) -> None:
    """At 10 MB; what was a backup goes, other files of the run dir stay."""
    former = "istio-cni-2020-01-01T00-00-00.log"
    (tmp_path / "istio-cni-kubeconfig").touch()
    (tmp_path / former).touch()
    fill(tmp_path, LOG_FILE_BYTES - 10_000)
    pair = Pair(tmp_path)
    pair.log.info("still fits")
    assert backups(tmp_path) == [former, "istio-cni-kubeconfig"]
    fill(tmp_path)
    pair.log.info("the last one")
    backup, kubeconfig = backups(tmp_path)
    assert re.fullmatch(r"istio-cni-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.log", backup)
    assert (backup != former, kubeconfig) == (True, "istio-cni-kubeconfig")
    assert "the last one" in (tmp_path / backup).read_text()
    assert not pair.file.exists()
    pair.log.info("the next one")
    assert "the next one" in pair.file.read_text()


def test_only_one_process_rotates(tmp_path: Path) -> None:
    """Another one writes its line and goes on; else the new backup would be removed as old."""
    fill(tmp_path)
    with (tmp_path / LOG_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Pair(tmp_path).log.info("meanwhile")
        assert backups(tmp_path) == []
    assert "meanwhile" in (tmp_path / LOG_FILE).read_text()


@pytest.mark.parametrize(("age_s", "kept"), [(-60, True), (60, False)])
def test_a_backup_is_kept_for_two_days(tmp_path: Path, age_s: int, kept: bool) -> None:
    """Since it was last written to."""
    backup = tmp_path / "istio-cni-2020-01-01T00-00-00.log"
    backup.touch()
    written = time.time() - LOG_BACKUP_MAX_AGE_S - age_s
    os.utime(backup, (written, written))
    Pair(tmp_path).log.info("a")
    assert backup.exists() is kept
