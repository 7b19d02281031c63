"""The log: which lines are written where, what they hold, and that they never fail a call."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from istio_cni.constants import (
    LOG_BACKUP_MAX_AGE_S,
    LOG_FILE,
    LOG_FILE_BYTES,
    LOG_SOCKET,
)
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


# -- the agent's socket ----------------------------------------------------------------------------


class Agent:
    """Stands for the node agent: a log socket of a run dir, and what was sent there."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.socket = socket.socket(socket.AF_UNIX)
        directory = os.open(run_dir, os.O_RDONLY)
        self.socket.bind(f"/proc/self/fd/{directory}/{LOG_SOCKET}")
        os.close(directory)
        self.socket.listen(8)
        self.socket.settimeout(5)

    def request(self) -> tuple[str, list[str]]:
        """Take one request, whose sender may have gone; return its head and its lines."""
        connection, _ = self.socket.accept()
        with connection, connection.makefile("rb") as stream:
            head, _, body = stream.read().decode().partition("\r\n\r\n")
        assert f"Content-Length: {len(body)}\r\n" in head + "\r\n"
        return head, json.loads(body)

    def messages(self) -> list[object]:
        """Return the messages of one request."""
        return [json.loads(line)["msg"] for line in self.request()[1]]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """Listen at a run dir until the test ends."""
    agent = Agent(tmp_path)
    with agent.socket:
        yield agent


def test_lines_are_sent_once_at_the_end(agent: Agent) -> None:
    """Each as it was written; those before the run dir was known, too."""
    stream = io.StringIO()
    log = Log(stream, request_id="0123abcd")
    log.info("before", fallback="died")
    log.configure("debug", str(agent.run_dir))
    log.bind(verb="ADD")
    log.debug("input")
    log.warn('odd "\\\n\x1b')
    log.close()
    log.close()
    head, lines = agent.request()
    assert head.startswith("POST /log HTTP/1.0\r\n")
    assert "Content-Type: application/json" in head
    assert "".join(lines) == stream.getvalue()
    assert {json.loads(line)["request_id"] for line in lines} == {"0123abcd"}
    agent.socket.settimeout(0)
    with pytest.raises(BlockingIOError):
        agent.request()


def test_the_file_gets_what_was_written_before_it_was_known(tmp_path: Path) -> None:
    """As far as the level wants it; once."""
    for level, expected in (("info", ["early", "trouble", "late"]), ("warn", ["trouble"])):
        directory = tmp_path / level
        directory.mkdir()
        log = Log(io.StringIO())
        log.info("early")
        log.warn("trouble")
        log.configure(level, str(directory))
        log.configure(level, str(directory))
        log.info("late")
        lines = (directory / LOG_FILE).read_text().splitlines()
        assert [json.loads(line)["msg"] for line in lines] == expected


def test_nothing_is_sent_where_nothing_was_written(agent: Agent) -> None:
    """A DEL of a pod that is not ours says nothing to anybody."""
    Pair(agent.run_dir).log.close()
    agent.socket.settimeout(0)
    with pytest.raises(BlockingIOError):
        agent.request()


def test_of_too_many_lines_the_last_ones_are_sent(agent: Agent) -> None:
    """With how many are missing; the file has all, and the request fits what the agent takes."""
    log = Log(io.StringIO())
    log.configure("info", str(agent.run_dir))
    for number in range(40):
        log.info(f"{number} " + '"\\' * 5_000)
    sender = threading.Thread(target=log.close)
    sender.start()
    head, lines = agent.request()
    sender.join()
    messages = [str(json.loads(line)["msg"]) for line in lines]
    numbers = [int(message.split()[0]) for message in messages]
    dropped = numbers.pop()
    assert numbers == [*range(dropped, 40)]
    assert dropped > 20
    assert messages[-1] == f"{dropped} earlier lines are not in the node agent's log"
    assert int(head.rpartition(" ")[2]) < 1 << 20
    assert len((agent.run_dir / LOG_FILE).read_text().splitlines()) == 41


def no_agent(path: Path) -> None:
    """Leave the run dir without a socket."""


def stale(path: Path) -> None:
    """Leave a socket that nobody listens at."""
    with socket.socket(socket.AF_UNIX) as dead:
        directory = os.open(path.parent, os.O_RDONLY)
        dead.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.close(directory)


@pytest.mark.parametrize("make", [no_agent, stale, Path.touch, os.mkfifo, Path.mkdir])
def test_without_an_agent_nothing_is_sent_and_nothing_fails(
    tmp_path: Path, make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands in the socket's place, at once."""
    make(tmp_path / LOG_SOCKET)
    pair = Pair(tmp_path)
    pair.log.info("a")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    pair.log.close()
    assert len(pair.lines()) == 1


@pytest.mark.parametrize("directory", ["", "/nonexistent", "a\0b", "x" * 5000])
def test_a_run_dir_that_is_none_has_no_agent(directory: str) -> None:
    """The call has been answered by then."""
    log = Log(io.StringIO())
    log.info("a")
    log._directory = directory  # noqa: SLF001 # what configure() would look for
    log.close()


def test_an_agent_that_reads_nothing_is_not_waited_for(agent: Agent) -> None:
    """What fits into the socket is its business; a full one gets a fifth of a second."""
    log = Log(io.StringIO())
    log.configure("info", str(agent.run_dir))
    log.info("short")
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 0.9  # of the second that it may take
    log = Log(io.StringIO())
    log.configure("info", str(agent.run_dir))
    for _ in range(25):
        log.info('"' * 5_000)
    began = time.monotonic()
    log.close()
    assert 0.1 < time.monotonic() - began < 0.9
    assert agent.messages() == ["short"]  # its sender has gone long since


def test_an_agent_whose_queue_is_full_is_not_waited_for(agent: Agent) -> None:
    """A fifth of a second, as it may be busy."""
    agent.socket.listen(0)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    directory = os.open(agent.run_dir, os.O_RDONLY)
    for each in waiting:
        each.setblocking(False)
        with suppress(BlockingIOError):
            each.connect(f"/proc/self/fd/{directory}/{LOG_SOCKET}")
    log = Log(io.StringIO())
    log.configure("info", str(agent.run_dir))
    log.info("a")
    began = time.monotonic()
    log.close()
    assert 0.1 < time.monotonic() - began < 0.9
    os.close(directory)
    for each in waiting:
        each.close()


# -- in the agent ----------------------------------------------------------------------------------


def test_in_the_agent_lines_go_to_its_log_and_to_the_file(agent: Agent) -> None:
    """With their level, and never to its own socket."""
    written: list[tuple[str, str]] = []
    log = Log(sink=lambda level, text: written.append((level, text)), request_id="0123abcd")
    log.configure("debug", str(agent.run_dir))
    log.debug("input")
    log.info("captured")
    log.close()
    assert [level for level, _ in written] == ["debug", "info"]
    assert [json.loads(text)["request_id"] for _, text in written] == ["0123abcd"] * 2
    assert (agent.run_dir / LOG_FILE).read_text() == written[1][1]
    agent.socket.settimeout(0)
    with pytest.raises(BlockingIOError):
        agent.request()


# -- the process -----------------------------------------------------------------------------------

FALLBACK = {"CNI_ISTIO_FALLBACK": "died: it ended in the middle", "CNI_ISTIO_REQUEST_ID": "ab" * 16}


def run_plugin(run_dir: Path, namespace: str = "kube-system", **env: str) -> list[JSON]:
    """Run the plugin for a pod; return what it logged on stderr."""
    config = {
        "cniVersion": "1.1.0",
        "name": "k8s",
        "type": "istio-cni",
        "cni_agent_run_dir": str(run_dir),
        "exclude_namespaces": ["kube-system"],
        "prevResult": {"cniVersion": "1.1.0"},
    }
    call = {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "c1",
        "CNI_NETNS": "/nonexistent/netns",
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": f"K8S_POD_NAMESPACE={namespace};K8S_POD_NAME=web",
    }
    done = subprocess.run(
        [sys.executable, "-I", "-c", "from istio_cni.plugin.main import main; main()"],
        input=json.dumps(config),
        env={**call, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_process_tells_the_agent_why_it_was_started(agent: Agent) -> None:
    """One line with the launcher's word and its request id; then those of the call, on all ways."""
    first, second = run_plugin(agent.run_dir, **FALLBACK)
    assert first["msg"] == "the node agent did not carry this call out: it ended in the middle"
    assert (first["level"], first["fallback"]) == ("warn", "died")
    assert (first["verb"], first["container_id"]) == ("ADD", "c1")
    assert first["request_id"] == second["request_id"] == "ab" * 16
    assert "fallback" not in second
    _, sent = agent.request()
    assert [json.loads(line) for line in sent] == [first, second]
    filed = (agent.run_dir / LOG_FILE).read_text().splitlines()
    assert [json.loads(line) for line in filed] == [first, second]


@pytest.mark.parametrize(
    ("reason", "text", "word"),
    [
        ("busy", "busy", "busy"),
        ("garbled: a: b\n\x1b", "a: b", "garbled"),
        ("x" * 1000, "x" * 256, "x" * 256),
    ],
)
def test_whatever_the_launcher_wrote_is_one_line(
    tmp_path: Path, reason: str, text: str, word: str
) -> None:
    """A warning, before those of the call."""
    line, _ = run_plugin(tmp_path, CNI_ISTIO_FALLBACK=reason)
    assert (line["level"], line["fallback"]) == ("warn", word)
    assert str(line["msg"]).startswith(f"the node agent did not carry this call out: {text}")


def test_the_want_of_an_agent_is_no_trouble(tmp_path: Path) -> None:
    """It is a field of the line that the call has anyway."""
    (line,) = run_plugin(tmp_path, CNI_ISTIO_FALLBACK="absent: no socket")
    assert (line["level"], line["fallback"]) == ("info", "absent")
    assert str(line["msg"]).startswith("not captured: ")


def test_a_call_that_fails_tells_the_agent_too(agent: Agent) -> None:
    """At info, an ADD is three lines at most."""
    lines = run_plugin(agent.run_dir, "shop", **FALLBACK)
    assert [line["level"] for line in lines] == ["warn", "error"]
    assert agent.messages() == [line["msg"] for line in lines]


def test_version_logs_nothing(agent: Agent) -> None:
    """Runtimes ask it of every plugin."""
    assert run_plugin(agent.run_dir, CNI_COMMAND="VERSION", **FALLBACK) == []
    assert os.listdir(agent.run_dir) == [LOG_SOCKET]


def test_telling_the_agent_stays_light(agent: Agent) -> None:
    """The C module behind `socket` alone; the package loads enum and re, which cost 10 ms."""
    code = (
        "import io, sys; from istio_cni.plugin.log import Log; log = Log(io.StringIO());"
        "log.configure('info', sys.argv[1]); log.info('a'); log.close(); print(*sys.modules)"
    )
    run_dir = str(agent.run_dir)
    loaded = subprocess.check_output([sys.executable, "-I", "-c", code, run_dir], text=True).split()
    assert not {"socket", "enum", "re", "json", "http", "selectors"} & {*loaded}
    assert agent.messages() == ["a"]
