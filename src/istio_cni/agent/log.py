"""The node agent's log: one JSON object a line on stderr, with the keys of the plugin's lines.

All that the agent prints goes through one `Output`: lines of its own, of the calls that it carries
out (plugin/log.py with `sink`), and those that plugin processes send (agent/plugin_log.py). So they
do not interleave, and whoever does not read stderr holds nobody up.

Libraries may warn and nothing more: at debug level the API client prints answers, tokens included.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from typing import TextIO

from istio_cni.errors import quoted

LEVELS = {"debug": 10, "info": 20, "warn": 30, "error": 40}
SCOPE = "cni-agent"
EXTRA = ("settings", "request_id", "verb", "container_id", "netns", "pod", "code")
"""Keys of `extra=` that a line shows, as those of the plugin's lines."""
WAIT_S = 0.2  # for whoever reads stderr, or is writing there
_PIPE_BUF = 4096  # bytes that a writable pipe takes at once


class Line(logging.Formatter):
    """Writes a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        level = "warn" if record.levelname == "WARNING" else record.levelname.lower()
        line: dict[str, object] = {
            "time": timestamp(record.created),
            "level": level,
            "scope": record.name,
            "msg": record.getMessage(),
        }
        extra = {key: getattr(record, key, None) for key in EXTRA}
        line |= {key: value for key, value in extra.items() if value is not None}
        if record.exc_info:
            line["stack"] = quoted(self.formatException(record.exc_info))
        return as_text(line)


def timestamp(seconds: float) -> str:
    """Write a time of day as the plugin does: RFC 3339, UTC, microseconds."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{moment}.{int(seconds % 1 * 1e6):06d}Z"


def as_text(line: Mapping[str, object]) -> str:
    """Write a line in printable ASCII, without its end."""
    return json.dumps(line, default=str).replace("\x7f", "\\u007f")


class Output:
    """Where the agent's lines go, from any thread; `level` is the lowest that is written.

    A write ends within `WAIT_S`, whether it is done or not. Once nobody reads, lines are lost
    without more waiting, until there is room again; then a line says how many.
    """

    def __init__(self, stream: TextIO, level: str = "info") -> None:
        self._stream = stream
        self._lowest = LEVELS[level]
        self._lock = threading.Lock()
        self._file = _descriptor(stream)
        self._stuck = False
        self._torn = False
        self._lost = 0

    def wants(self, level: str) -> bool:
        """Tell whether lines of a level are written; those without a known one are not."""
        return LEVELS.get(level, 0) >= self._lowest

    def sink(self, level: str, text: str) -> None:
        """Write a line of a call that the agent carries out: `Log(sink=output.sink)`."""
        if self.wants(level):
            self.write(text)

    def write(self, text: str) -> None:
        """Write whole lines, and no other lines between them."""
        if not text:
            return
        deadline = time.monotonic() + (0.0 if self._stuck else WAIT_S)
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._lost += text.count("\n")  # not exact between threads, and near enough
            return
        try:
            done = self._write(self._before() + text, deadline)
            self._stuck = not done
            self._lost = 0 if done else self._lost + text.count("\n")
        finally:
            self._lock.release()

    def _before(self) -> str:
        """Return what must precede the next line: the end of half a line, and what was lost."""
        told = ""
        if self._lost:
            warning = f"{self._lost} lines were lost: nobody read them in time"
            line = {"time": timestamp(time.time()), "level": "warn", "scope": SCOPE, "msg": warning}
            told = as_text(line) + "\n"
        return "\n" + told if self._torn else told

    def _write(self, text: str, deadline: float) -> bool:
        """Write a text as far as the stream takes it in time; tell whether that is all of it."""
        if self._file is None:
            return self._keep(text)
        data = memoryview(text.encode("ascii", "backslashreplace"))
        poll = select.poll()
        poll.register(self._file, select.POLLOUT)
        begun = False
        try:
            while data:
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    break
                data = data[os.write(self._file, data[:_PIPE_BUF]) :]
                begun = True
        except OSError:  # nobody will ever read it
            pass
        self._torn = bool(data) and (begun or self._torn)
        return not data

    def _keep(self, text: str) -> bool:
        """Write to a stream that is no file."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            return False
        return True


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # memory, or closed
        return None


class _Handler(logging.Handler):
    """Hands records to an output, which takes care of threads; waiting for a lock has no end."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self.output = output
        self.setFormatter(Line())

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record without the library's lock."""
        wanted = bool(self.filter(record))
        if wanted:
            self.emit(record)
        return wanted

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; what cannot be written has been counted."""
        try:
            self.output.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


def start(level: str) -> Output:
    """Write from now on; `level` is this program's own. Returns where all other lines belong."""
    output = Output(sys.stderr or open(os.devnull, "w"), level)  # noqa: SIM115 # to the end
    logging.basicConfig(level=logging.WARNING, handlers=[_Handler(output)], force=True)
    logging.getLogger(SCOPE).setLevel(LEVELS[level])
    return output
