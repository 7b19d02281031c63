"""The agent's own log: one output for all lines, that holds nobody up."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from istio_cni.agent import log
from istio_cni.agent.log import Line, Output
from istio_cni.plugin.log import Log

JSON = dict[str, object]
ROOM = 8192


class Pipe:
    """A pipe that little fits into, with an output at one end."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, ROOM)
        os.set_blocking(self.reading, False)
        self.stream: TextIO = os.fdopen(writing, "w")
        self.output = Output(self.stream)

    def read(self) -> str:
        """Read what there is."""
        try:
            return os.read(self.reading, 1 << 20).decode()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        """Close both ends."""
        os.close(self.reading)
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Make a pipe."""
    pipe = Pipe()
    yield pipe
    pipe.close()


def line(text: str) -> str:
    """Make a line."""
    return json.dumps({"msg": text}) + "\n"


def record(message: str, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    """Make a record of the agent's own."""
    logger = logging.Logger("cni-agent")
    return logger.makeRecord("cni-agent", level, "f", 1, message, (), None, extra=extra)


# -- lines -----------------------------------------------------------------------------------------


def test_a_line_has_the_keys_of_the_plugins() -> None:
    """The request id and what else a call is known by come from `extra`; other extras do not."""
    text = Line().format(
        record("x\x7f", logging.WARNING, request_id="ab", verb="ADD", code=0, lunch="soup")
    )
    found = json.loads(text)
    assert list(found) == ["time", "level", "scope", "msg", "request_id", "verb", "code"]
    assert (found["level"], found["scope"], found["code"]) == ("warn", "cni-agent", 0)
    assert text.isascii()
    assert text.isprintable()


def test_the_library_and_calls_share_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The level is the agent's own for all of them; libraries may warn."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    root = logging.getLogger()
    before, level = root.handlers[:], logging.getLogger("cni-agent").level
    try:
        output = log.start("info")
        logging.getLogger("cni-agent").info("own")
        logging.getLogger("urllib3").info("library")
        call = Log(sink=output.sink, request_id="ab")
        call.configure("debug", "")
        call.debug("input")
        call.info("captured")
    finally:
        root.handlers[:] = before
        logging.getLogger("cni-agent").setLevel(level)
    lines = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert [(each["scope"], each["msg"]) for each in lines] == [
        ("cni-agent", "own"),
        ("cni-plugin", "captured"),
    ]


@pytest.mark.parametrize(
    ("level", "wanted"), [("debug", 4), ("info", 3), ("warn", 2), ("error", 1)]
)
def test_an_output_wants_what_is_at_its_level(level: str, wanted: int) -> None:
    """Levels that the agent does not know are not wanted."""
    output = Output(io.StringIO(), level)
    levels = ("debug", "info", "warn", "error", "fatal", "none", "")
    assert sum(output.wants(each) for each in levels) == wanted


def test_lines_of_many_threads_do_not_interleave(pipe: Pipe) -> None:
    """Also those that are longer than a pipe takes at once."""
    texts: list[str] = []
    ended = threading.Event()

    def drain() -> None:
        while not (ended.is_set() and texts[-1:] == [""]):
            texts.append(pipe.read())

    def work(name: str) -> None:
        for _ in range(20):
            pipe.output.write(line(name * 6000))

    reader = threading.Thread(target=drain)
    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    reader.join()
    lines = [json.loads(text)["msg"] for text in "".join(texts).splitlines()]
    assert len(lines) == 80
    assert all(len({*message}) == 1 for message in lines)


# -- nobody reads ----------------------------------------------------------------------------------


def test_whoever_does_not_read_holds_nobody_up(pipe: Pipe) -> None:
    """One wait for all, then none; later a line says what is missing."""
    began = time.monotonic()
    for number in range(100):
        pipe.output.write(line(f"{number} " + "x" * 500))
    assert time.monotonic() - began < 2 * log.WAIT_S + 2
    kept = pipe.read().splitlines()
    pipe.output.write(line("again"))
    lost, again = (json.loads(text) for text in pipe.read().splitlines())
    assert lost["msg"] == f"{100 - len(kept)} lines were lost: nobody read them in time"
    assert (lost["level"], lost["scope"], again["msg"]) == ("warn", "cni-agent", "again")
    pipe.output.write(line("and on"))
    assert pipe.read() == line("and on")


def test_half_a_line_ends_before_the_next(pipe: Pipe) -> None:
    """So that one is lost, and not two."""
    pipe.output.write(line("x" * 3 * ROOM))
    assert pipe.read()[-1] == "x"
    pipe.output.write(line("next"))
    empty, lost, found = pipe.read().split("\n")[:3]
    assert empty == ""
    assert json.loads(lost)["msg"].startswith("1 lines were lost")
    assert json.loads(found)["msg"] == "next"


def test_many_workers_wait_at_once_and_not_in_turn(pipe: Pipe) -> None:
    """A worker's line costs it the bound, however many others write."""
    pipe.output.write(line("x" * (ROOM - 200)))
    took: list[float] = []

    def work() -> None:
        began = time.monotonic()
        pipe.output.write(line("y" * 1000))
        took.append(time.monotonic() - began)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(took) < 2 * log.WAIT_S + 1  # in turn it would be three seconds


def test_the_librarys_own_lock_is_not_waited_for(pipe: Pipe) -> None:
    """It would be held for as long as somebody writes."""
    handler = log._Handler(pipe.output)  # noqa: SLF001
    lock = handler.lock
    assert lock is not None
    with lock:
        thread = threading.Thread(target=handler.handle, args=(record("x"),))
        thread.start()
        thread.join(2)
        assert not thread.is_alive()
    assert json.loads(pipe.read())["msg"] == "x"


def test_a_reader_that_has_gone_is_no_trouble(pipe: Pipe) -> None:
    """A log that cannot be written fails nothing."""
    os.close(pipe.reading)
    for _ in range(3):
        pipe.output.write(line("x"))
    pipe.reading = os.open("/dev/null", os.O_RDONLY)


def test_a_stream_that_is_closed_is_no_trouble() -> None:
    """Nor one that is no file."""
    stream = io.StringIO()
    output = Output(stream)
    output.write(line("x"))
    stream.close()
    output.write(line("y"))
