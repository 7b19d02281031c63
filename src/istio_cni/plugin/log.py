"""The plugin's log: one JSON object a line on stderr, in a rolling file, and in the agent's log.

The plugin's process keeps its lines and sends them to the node agent once, at its end. The file,
from info on, exists because the agent is down exactly when logs matter. A log that cannot be
written never fails a call, nor does it hold one up. The standard library's logging costs a pod
15 ms; this does not.

In the agent's own worker threads the same class writes to a sink, which is the agent's log itself;
the agent looks after old files then, and not with every pod.

Source: istio cni/pkg/log and cni/pkg/plugin (setupLogging).
"""

from __future__ import annotations

import os
import time

from istio_cni import constants
from istio_cni.cni.serve import write
from istio_cni.errors import json_string, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    from istio_cni.errors import IstioCNIError

_RANK = {"debug": 0, "info": 1, "warn": 2, "error": 3, "fatal": 4, "none": 9}
_STREAM_WAIT_S = 0.2  # for whoever reads stderr
_PIPE_BUF = 4096  # bytes that a writable pipe takes at once
_KEPT_MAX_BYTES = 256 * 1024  # of lines for the agent; as JSON strings they are twice that at most


class Log:
    """A log with fields bound to every line. Lines below the level, at first info, are dropped.

    Lines go to `stream` and are kept for the agent until `close`; or else to `sink(level, line)`,
    which must not wait for long, and are kept for nobody. `request_id` ties them to those of the
    launcher's call. One thread at a time may use a log; each call has its own.
    """

    __slots__ = ("_directory", "_expired", "_fields", "_kept", "_level", "_once", "_show")

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        sink: Callable[[str, str], object] | None = None,
        request_id: str = "",
    ) -> None:
        self._kept = _Kept() if sink is None else None
        self._show = sink or _Stream(stream).show
        self._fields: dict[str, str | int] = {}
        self._once: dict[str, str | int] = {}
        self._level = _RANK["info"]
        self._directory = ""
        self._expired = sink is not None
        self.bind(request_id=request_id)

    def bind(self, **fields: str) -> None:
        """Add fields to every line from now on; empty ones are left out, long ones are cut."""
        limit = constants.QUOTED_MAX_BYTES
        self._fields.update({key: value[:limit] for key, value in fields.items() if value})

    def bind_next(self, **fields: str) -> None:
        """Add fields to the next line that is written, and to that one only."""
        self._once.update({key: value for key, value in fields.items() if value})

    def configure(self, level: str, directory: str) -> None:
        """Set the level and the run dir; an unknown level counts as info and is reported.

        The file gets what was written before, as far as the level wants it.
        """
        self._level = _RANK.get(level, _RANK["info"])
        earlier = self._kept.lines if self._kept is not None and not self._directory else []
        self._directory = directory
        for rank, text in earlier:
            if rank >= self._level:
                self._append(text)
        if level not in _RANK:
            allowed = ", ".join(_RANK)
            self.warn(
                f"plugin_log_level: unknown level {quoted(level)}; info is used; allowed: {allowed}"
            )

    def wants(self, level: str) -> bool:
        """Tell whether lines of a level are written."""
        return _RANK[level] >= self._level

    def debug(self, message: str, **fields: str | int) -> None:
        """Write the inputs of a decision."""
        self.write("debug", message, **fields)

    def info(self, message: str, **fields: str | int) -> None:
        """Write a decision."""
        self.write("info", message, **fields)

    def warn(self, message: str, **fields: str | int) -> None:
        """Write what somebody should look at."""
        self.write("warn", message, **fields)

    def error(self, message: str, **fields: str | int) -> None:
        """Write what went wrong."""
        self.write("error", message, **fields)

    def failure(self, error: IstioCNIError) -> None:
        """Write an error with its code and details."""
        details = {"details": error.details} if error.details else {}
        self.error(error.msg, code=error.code, **details)

    def write(self, level: str, message: str, **fields: str | int) -> None:
        """Write one line where its level belongs."""
        if not self.wants(level):
            return
        now = time.time()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        line = {
            "time": f"{moment}.{int(now % 1 * 1e6):06d}Z",
            "level": level,
            "scope": "cni-plugin",
            "msg": message,
            **self._fields,
            **self._once,
            **fields,
        }
        self._once = {}
        members = ", ".join(f"{json_string(key)}: {_json(value)}" for key, value in line.items())
        text = f"{{{members}}}\n".replace("\x7f", "\\u007f")
        self._show(level, text)
        if self._kept is not None:
            self._kept.add(_RANK[level], text)
        if level != "debug":
            self._append(text)

    def close(self) -> None:
        """Send what was kept to the agent, if there is one; the log is not used afterwards."""
        kept = self._kept
        if kept is None or not kept.lines or not _is_socket(self._directory):
            return
        if kept.dropped:
            self.warn(f"{kept.dropped} earlier lines are not in the node agent's log")
        self._kept = None
        from istio_cni.edge import logsocket  # where there is an agent

        logsocket.send(self._directory, constants.LOG_SOCKET, [text for _, text in kept.lines])

    def _append(self, text: str) -> None:
        """Append a line to the rolling file; what goes wrong there is nobody's failure."""
        if not self._directory:
            return
        try:
            if not self._expired:
                self._expired = True
                expire(self._directory)
            _append(self._directory, text)
        except OSError:
            return


class _Stream:
    """Writes lines to a stream; one that nobody reads is given up, with its other lines."""

    __slots__ = ("_lost", "_stream")

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lost = False

    def show(self, level: str, text: str) -> None:
        """Write a line."""
        if self._stream is None:
            return
        deadline = time.monotonic() + _STREAM_WAIT_S
        for start in range(0, len(text), _PIPE_BUF):
            self._lost = self._lost or not _takes(self._stream, deadline)
            if self._lost or not write(self._stream, text[start : start + _PIPE_BUF]):
                return


class _Kept:
    """Lines for the agent, each with the rank of its level; of too many, the last ones."""

    __slots__ = ("_size", "dropped", "lines")

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.dropped = 0
        self._size = 0

    def add(self, rank: int, text: str) -> None:
        """Keep a line, at the expense of the oldest ones."""
        self.lines.append((rank, text))
        self._size += len(text)
        while self._size > _KEPT_MAX_BYTES:
            self._size -= len(self.lines.pop(0)[1])
            self.dropped += 1


def _takes(stream: TextIO, deadline: float) -> bool:
    """Wait until a stream takes `_PIPE_BUF` bytes; False when the time is over."""
    import select  # a C module

    try:
        file = stream.fileno()
    except (OSError, ValueError):  # memory, or closed: nothing to wait for
        return True
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _is_socket(directory: str) -> bool:
    """Tell whether there is an agent that takes lines; one system call where there is none."""
    try:
        mode = os.lstat(os.path.join(directory, constants.LOG_SOCKET)).st_mode if directory else 0
    except (OSError, ValueError):  # ValueError: no path at all
        return False
    return mode & 0o170000 == 0o140000  # the module `stat` would cost a load


def _json(value: str | int) -> str:
    return json_string(value) if isinstance(value, str) else str(value)


def _append(directory: str, text: str) -> None:
    """Append a line to the file with one write, and rotate the file when it is full."""
    path = os.path.join(directory, constants.LOG_FILE)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o600)
    try:
        os.write(file, text.encode())
        if os.fstat(file).st_size > constants.LOG_FILE_BYTES:
            _rotate(directory, path, file)
    finally:
        os.close(file)


def _rotate(directory: str, path: str, file: int) -> None:
    """Rename the full file away and keep no older one, unless another process is doing that."""
    from fcntl import LOCK_EX, LOCK_NB, flock  # once in many thousand pods

    flock(file, LOCK_EX | LOCK_NB)  # of the file, not of its name: it goes with the descriptor
    if os.stat(path).st_ino != os.fstat(file).st_ino:
        return
    for backup in _backups(directory):
        os.unlink(backup)
    stem, suffix = os.path.splitext(constants.LOG_FILE)
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime())
    os.rename(path, os.path.join(directory, f"{stem}-{stamp}{suffix}"))


def expire(directory: str) -> None:
    """Remove backups that were written to too long ago. Raises OSError."""
    for backup in _backups(directory):
        if time.time() - os.stat(backup).st_mtime > constants.LOG_BACKUP_MAX_AGE_S:
            os.unlink(backup)


def _backups(directory: str) -> Iterator[str]:
    stem, suffix = os.path.splitext(constants.LOG_FILE)
    for name in os.listdir(directory):
        if name.startswith(f"{stem}-") and name.endswith(suffix):
            yield os.path.join(directory, name)
