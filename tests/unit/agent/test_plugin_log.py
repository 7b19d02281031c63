"""The log socket: lines of plugins come out whole, in order and harmless, whatever is sent."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from istio_cni.agent import plugin_log, serving
from istio_cni.agent.log import Output
from istio_cni.agent.plugin_log import BURST, Lines, PluginLog
from istio_cni.constants import LOG_BACKUP_MAX_AGE_S, LOG_SOCKET
from istio_cni.edge import logsocket
from istio_cni.errors import IOFailure
from istio_cni.plugin.log import Log
from waiting import wait

JSON = dict[str, object]
TIME = "2026-01-02T03:04:05.678901Z"


def text(message: str = "captured", level: str = "info", **fields: object) -> str:
    """Make a line as the plugin does."""
    line = {"time": TIME, "level": level, "scope": "x", "msg": message, **fields}
    return json.dumps(line) + "\n"


class Taken:
    """Lines taken without a socket, at a time that a test sets."""

    def __init__(self, level: str = "info") -> None:
        self.stream = io.StringIO()
        self.now = 100.0
        self.seen: list[object] = []
        self.lines = Lines(
            Output(self.stream, level), lambda line: self.seen.append(line["msg"]), lambda: self.now
        )

    def take(self, *elements: object) -> list[JSON]:
        """Take one request; return what it wrote."""
        self.stream.seek(0)
        self.stream.truncate()
        self.lines.take(json.dumps(elements).encode())
        return self.written()

    def written(self) -> list[JSON]:
        """Read what was written."""
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


class Served:
    """The socket of a run dir."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / LOG_SOCKET
        self.stream = io.StringIO()
        self.server = PluginLog(str(run_dir), Lines(Output(self.stream)))

    def lines(self, count: int) -> list[JSON]:
        """Wait for lines, and read them."""
        wait(lambda: self.stream.getvalue().count("\n") >= count, f"{count} lines")
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def connect(self) -> socket.socket:
        """Connect, however long the path."""
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(5)
        directory = os.open(self.run_dir, os.O_RDONLY)
        client.connect(f"/proc/self/fd/{directory}/{LOG_SOCKET}")
        os.close(directory)
        return client

    def send(self, data: bytes) -> bytes:
        """Send a request and return the answer."""
        with self.connect() as client:
            client.sendall(data)
            return b"".join(iter(lambda: client.recv(4096), b""))

    def post(self, body: bytes, path: str = "/log") -> int:
        """Post a body and return the status."""
        head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        return int(self.send(head.encode() + body).split()[1])


@pytest.fixture
def taken() -> Taken:
    """Make what takes lines."""
    return Taken()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Serve a run dir until the test ends."""
    served = Served(tmp_path / "run")
    yield served
    served.server.close()


# -- lines -----------------------------------------------------------------------------------------


def test_a_line_keeps_its_time_and_its_labels(taken: Taken) -> None:
    """The message is trimmed, the scope is ours."""
    (line,) = taken.take(text(" captured\n", verb="ADD", tries=3, ok=True, none=None, share=0.5))
    assert list(line.items()) == [
        ("time", TIME),
        ("level", "info"),
        ("scope", "cni-plugin"),
        ("msg", "captured"),
        ("verb", "ADD"),
        ("tries", 3),
        ("ok", True),
        ("none", None),
        ("share", 0.5),
    ]


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["debug", "info", "warn", "error"]),
        ("info", ["info", "warn", "error"]),
        ("warn", ["warn", "error"]),
        ("error", ["error"]),
    ],
)
def test_lines_below_the_agents_level_are_not_written(level: str, written: list[str]) -> None:
    """Nor those of other levels; each is seen all the same."""
    taken = Taken(level)
    levels = ["debug", "info", "warn", "error", "fatal", "none", "WARN", ""]
    lines = taken.take(*(text(each, each) for each in levels))
    assert [line["msg"] for line in lines] == written
    assert taken.seen == levels


BAD = [
    5,
    None,
    ["x"],
    {"msg": "x"},
    "",
    "{",
    "5",
    "[]",
    "{}",
    json.dumps({"time": TIME, "level": "info"}),
    json.dumps({"level": "info", "msg": "x"}),
    json.dumps({"time": "yesterday", "level": "info", "msg": "x"}),
    json.dumps({"time": TIME + "\n{}", "level": "info", "msg": "x"}),
    json.dumps({"time": TIME, "level": ["info"], "msg": "x"}),
    json.dumps({"time": TIME, "level": "info", "msg": {}}),
    "[" * 100_000,
    "1" * 5000,
]


def test_what_is_no_line_is_skipped(taken: Taken, caplog: pytest.LogCaptureFixture) -> None:
    """The others of its request are not; told at debug, and briefly."""
    with caplog.at_level(logging.DEBUG, "cni-agent"):
        lines = taken.take(text("a"), *BAD, text("b"))
    assert [line["msg"] for line in lines] == ["a", "b"]
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * len(BAD)
    assert max(len(record.getMessage()) for record in caplog.records) < 400


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"5", b"[", b"\xff\xfe\x00", b"null", b"[" * 1_000_000, b"1" * 5000, b'"a"'],
    ids=range(9),
)
def test_what_is_no_array_is_one_error(
    taken: Taken, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is written."""
    with caplog.at_level(logging.ERROR, "cni-agent"):
        taken.lines.take(body)
    (record,) = caplog.records
    assert record.getMessage().startswith("no lines of a plugin: ")
    assert len(record.getMessage()) < 400
    assert taken.written() == []


def test_no_line_forges_another_or_moves_a_cursor(taken: Taken) -> None:
    """Control characters are escaped, in names of labels as well."""
    taken.take(text('a\n{"level": "error"}\x1b[2J\x7f\x9b\udcffü', **{"k\n\x1b\x7f": "v\r\n"}))
    written = taken.stream.getvalue()
    assert written.isascii()
    assert written.count("\n") == 1
    assert written[:-1].isprintable()


def test_everything_in_a_line_has_a_bound(taken: Taken) -> None:
    """Values, names, nesting, numbers, and how many there are."""
    deep: object = "x"
    for _ in range(100):
        deep = [deep]
    odd = {"long": "ü" * 1000, "n" * 1000: 1, "deep": deep, "wide": {str(n): n for n in range(999)}}
    numbers = {"huge": 10**300, "tiny": -(10**300)}
    (line,) = taken.take(
        text("m" * 10_000, **odd, **numbers, **{f"k{number}": number for number in range(100)})
    )
    assert len(line) == 4 + 32
    assert len(str(line["msg"])) == 4096 + 1
    assert line["long"] == "ü" * 128 + "…"
    for key, value in line.items():
        assert len(key) <= 257
        assert isinstance(value, int) or len(str(value)) <= 4097
    assert str(line["deep"]).startswith("[[[")
    assert str(line["huge"]).startswith("1000")


def test_what_json_has_no_form_for_stays_valid_json(taken: Taken) -> None:
    """Infinite and missing numbers become texts."""
    line = text()[:-2] + ', "a": NaN, "b": Infinity, "c": 1e999, "d": [NaN]}'
    (found,) = taken.take(line)
    assert (found["a"], found["b"], found["c"], found["d"]) == (
        "NaN",
        "Infinity",
        "Infinity",
        "[NaN]",
    )


def test_labels_do_not_replace_what_the_agent_says(taken: Taken) -> None:
    """A second `level` or `scope` in a line counts for nothing."""
    line = text(scope="cni-agent").strip().removesuffix("}") + ', "level": "warn"}'
    (found,) = taken.take(line)
    assert (found["scope"], found["level"]) == ("cni-plugin", "warn")


# -- rate ------------------------------------------------------------------------------------------


def test_lines_beyond_the_rate_are_dropped_and_counted(
    taken: Taken, caplog: pytest.LogCaptureFixture
) -> None:
    """The bucket fills again; the number is told at most every ten seconds."""
    burst = int(BURST)
    with caplog.at_level(logging.WARNING, "cni-agent"):
        assert len(taken.take(*[text()] * (burst + 7))) == burst
        taken.lines.tell()
        assert len(taken.take(text(), text())) == 0
        taken.lines.tell()
        taken.now += 0.5
        assert len(taken.take(*[text()] * 600)) == 500
        taken.now += 10
        taken.lines.tell()
        taken.lines.tell()
        taken.now += 60
        taken.lines.tell()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "7 lines of plugins were dropped: more than 1000 a second",
        "102 lines of plugins were dropped: more than 1000 a second",
    ]
    assert len(taken.take(*[text()] * (burst + 1))) == burst


def test_errors_count_as_lines(taken: Taken, caplog: pytest.LogCaptureFixture) -> None:
    """A process that sends nonsense as fast as it can fills no disk."""
    with caplog.at_level(logging.ERROR, "cni-agent"):
        taken.take(*[text()] * (int(BURST) - 1))
        for _ in range(5):
            taken.lines.take(b"{}")
    assert len(caplog.records) == 1


# -- the socket ------------------------------------------------------------------------------------


def test_a_plugins_log_arrives(served: Served) -> None:
    """In order, with the request id that ties it to the agent's lines."""
    log = Log(io.StringIO(), request_id="0123abcd")
    log.configure("info", str(served.run_dir))
    log.bind(verb="ADD")
    log.info("one")
    log.warn("two", fallback="died")
    log.close()
    one, two = served.lines(2)
    assert (one["msg"], one["request_id"], one["verb"]) == ("one", "0123abcd", "ADD")
    assert (two["msg"], two["fallback"], two["scope"]) == ("two", "died", "cni-plugin")


def test_batches_do_not_interleave(served: Served) -> None:
    """Lines of one process stand together."""

    def send(name: str) -> None:
        for _ in range(5):
            lines = [text(name) for _ in range(20)]
            assert logsocket.send(str(served.run_dir), LOG_SOCKET, lines)

    threads = [threading.Thread(target=send, args=(str(number),)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    messages = [line["msg"] for line in served.lines(600)]
    for start in range(0, 600, 20):
        assert len({*messages[start : start + 20]}) == 1


def test_the_answer_is_200_whatever_is_sent(served: Served) -> None:
    """Also for what is no array, no line, or nothing."""
    for body in (b"[]", b"[5]", b"{", b"", b"\xff", json.dumps([text()]).encode()):
        assert served.post(body) == 200
    assert served.send(b"POST /log HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")[9:12] == b"200"
    assert len(served.lines(1)) == 1


def test_other_paths_are_not_there(served: Served) -> None:
    """And what is sent there is not read."""
    for path in ("/", "/metrics", "/log/"):
        assert served.post(b"[]", path) == 404


@pytest.mark.parametrize("size", [str((1 << 20) + 1), "9" * 40])
def test_more_than_a_mebibyte_is_refused_unread(served: Served, size: str) -> None:
    """By what it says of itself; a mebibyte is taken."""
    answer = served.send(f"POST /log HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode())
    assert answer.split()[1] == b"413"
    line = text("x" * 1000)
    full = json.dumps([line] * 900).encode()
    assert len(full) < 1 << 20
    assert served.post(full.ljust(1 << 20)) == 200


def test_a_sender_that_leaves_or_stalls_costs_itself(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a request is none, and is not waited for longer than the bound."""
    monkeypatch.setattr(serving, "AGE_MAX_S", 0.2)
    with served.connect() as client:
        client.sendall(b"POST /log HTTP/1.1\r\nContent-Length: 100\r\n\r\n[")
    stalled = served.connect()
    stalled.sendall(b"POST /log HTTP/1.1\r\nContent-Length: 100\r\n\r\n[")
    began = time.monotonic()
    assert stalled.recv(4096) == b""
    assert time.monotonic() - began < 2
    stalled.close()
    assert served.post(json.dumps([text("after")]).encode()) == 200
    assert served.lines(1)[0]["msg"] == "after"


def test_only_root_gets_in(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the kernel says of the other end; the file's mode says the same."""
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600
    getsockopt = socket.socket.getsockopt

    def as_user(self: socket.socket, level: int, option: int, *size: int) -> object:
        if option == socket.SO_PEERCRED:
            return struct.pack("=iII", os.getpid(), 1000, 0)
        return getsockopt(self, level, option, *size)

    monkeypatch.setattr(socket.socket, "getsockopt", as_user)
    body = json.dumps([text()]).encode()
    with pytest.raises((ConnectionError, IndexError)):
        served.post(body)
    monkeypatch.undo()
    assert served.post(json.dumps([text("root")]).encode()) == 200
    assert [line["msg"] for line in served.lines(1)] == ["root"]


# -- the path --------------------------------------------------------------------------------------


def test_a_stale_socket_is_replaced_and_nothing_is_left_at_the_end(tmp_path: Path) -> None:
    """In a run dir that is made if it is missing."""
    run_dir = tmp_path / "a" / "run"
    first = Served(run_dir)
    assert stat.S_IMODE(run_dir.stat().st_mode) & 0o027 == 0
    second = Served(run_dir)  # as after a kill: the path is there
    first.server.close()
    assert second.post(b"[]") == 200  # the path of a successor stays
    assert os.listdir(run_dir) == [LOG_SOCKET]
    second.server.close()
    assert os.listdir(run_dir) == []


def test_a_path_may_be_longer_than_a_socket_address(tmp_path: Path) -> None:
    """Both ends go through the directory."""
    run_dir = tmp_path / ("d" * 120)
    served = Served(run_dir)
    assert logsocket.send(str(run_dir), LOG_SOCKET, [text()])
    assert len(served.lines(1)) == 1
    served.server.close()


@pytest.mark.parametrize("where", ["/dev/null", "/proc/nonexistent"])
def test_a_socket_that_cannot_be_made_is_a_clear_error(where: str) -> None:
    """The agent can do without, and says so."""
    with pytest.raises(IOFailure, match="cannot listen at"):
        PluginLog(where, Lines(Output(io.StringIO())))


def test_a_directory_in_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    """Somebody's files are not ours to remove."""
    (tmp_path / LOG_SOCKET / "file").mkdir(parents=True)
    with pytest.raises(IOFailure, match="cannot listen at"):
        PluginLog(str(tmp_path), Lines(Output(io.StringIO())))
    assert os.listdir(tmp_path) == [LOG_SOCKET]


def test_limits_of_both_ends_agree() -> None:
    """What the plugin keeps fits into one request, whatever is in it."""
    from istio_cni.plugin import log

    assert 2 * log._KEPT_MAX_BYTES + 8192 < plugin_log.REQUEST_MAX_BYTES  # noqa: SLF001


def test_old_backups_are_removed(tmp_path: Path) -> None:
    """Calls that the agent carries out do not look for them."""
    old, young = (tmp_path / f"istio-cni-2026-0{n}-01T00-00-00.log" for n in (1, 2))
    for file in (old, young):
        file.touch()
    long_ago = time.time() - LOG_BACKUP_MAX_AGE_S - 60
    os.utime(old, (long_ago, long_ago))
    server = PluginLog(str(tmp_path), Lines(Output(io.StringIO())))
    try:
        wait(lambda: not old.exists(), "it is removed")
        assert young.exists()
    finally:
        server.shutdown()
        server.server_close()
