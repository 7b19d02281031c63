"""The log socket: lines of plugin processes reach the agent's log, whatever they hold.

Plugin processes run while the agent does not answer its callers, or in its place; at their end they
send their lines here. What is sent is foreign: a line is taken apart and written anew, its time
kept, everything in it bounded. A process that sends too much, too fast or nothing at all costs
itself.

Source: istio cni/pkg/log (UDS log server), with a mode, a rate and bounds that it has not.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from istio_cni.agent import log
from istio_cni.agent.serving import BACKLOG, BoundedServer, Handler
from istio_cni.constants import LOG_SOCKET, QUOTED_MAX_BYTES
from istio_cni.edge.callers import Listening, peer_uid
from istio_cni.edge.logsocket import REQUEST_MAX_BYTES, URL_PATH
from istio_cni.errors import quoted
from istio_cni.plugin.log import expire

LOG = logging.getLogger("cni-agent")
SCOPE = "cni-plugin"
LINES_PER_S, BURST = 1000.0, 5000.0
TELL_EVERY_S = 10.0  # of what was dropped
EXPIRE_EVERY_S = 3600.0
MESSAGE_MAX_BYTES = 4096
LABELS_MAX = 32
_FIXED = ("time", "level", "scope", "msg")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII)
_INT_MAX = 1 << 63

Watch = Callable[[Mapping[str, object]], object]


class Lines:
    """Takes requests apart and writes their lines; `watch` sees each line, written or not."""

    def __init__(
        self,
        output: log.Output,
        watch: Watch = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output = output
        self._watch = watch
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens, self._filled = BURST, clock()
        self._dropped, self._told = 0, clock() - TELL_EVERY_S

    def take(self, body: bytes) -> None:
        """Write the lines of one request, an array of JSON objects as strings, all at once."""
        with self._lock:  # one at a time: decoded, a request is many times as large
            try:
                elements = json.loads(body)
            except (ValueError, RecursionError) as error:
                elements = error
            if isinstance(elements, list):
                texts = [self._line(each) for each in elements[: self._allow(len(elements))]]
                self._output.write("".join(filter(None, texts)))
            elif self._allow(1):
                LOG.error("no lines of a plugin: %s", _why(elements))

    def tell(self) -> None:
        """Say now and then how many lines were dropped."""
        with self._lock:
            now = self._clock()
            if not self._dropped or now - self._told < TELL_EVERY_S:
                return
            dropped, self._dropped, self._told = self._dropped, 0, now
        LOG.warning("%d lines of plugins were dropped: more than %d a second", dropped, LINES_PER_S)

    def _allow(self, count: int) -> int:
        """Take tokens out of the bucket; return how many there were."""
        now = self._clock()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * LINES_PER_S)
        self._filled = now
        allowed = min(count, int(self._tokens))
        self._tokens -= allowed
        self._dropped += count - allowed
        return allowed

    def _line(self, element: object) -> str:
        """Write one line anew; "" if it is none, or not wanted at this level."""
        line = _parse(element)
        if line is None:
            LOG.debug("skipped, no line of a plugin: %s", quoted(element))
            return ""
        self._watch(line)
        if not self._output.wants(str(line["level"])):
            return ""
        return log.as_text(line) + "\n"


def _why(elements: object) -> str:
    if isinstance(elements, Exception):
        return quoted(f"{type(elements).__name__}: {elements}")
    return "an array of strings was expected"


def _parse(element: object) -> dict[str, object] | None:
    """Read a line, everything in it bounded; None if it is none."""
    if not isinstance(element, str):
        return None
    try:
        found = json.loads(element)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    moment, level, message = found.get("time"), found.get("level"), found.get("msg")
    if not (isinstance(moment, str) and isinstance(level, str) and isinstance(message, str)):
        return None
    if not _TIME.fullmatch(moment):
        return None
    line: dict[str, object] = {"time": moment, "level": level, "scope": SCOPE}
    line["msg"] = cut(message.strip(), MESSAGE_MAX_BYTES)
    labels = [key for key in found if key not in _FIXED]
    return line | {cut(key): _bounded(found[key]) for key in labels[:LABELS_MAX]}


def _bounded(value: object) -> object:
    """Keep a plain value as it is; what is long or nested becomes a text that is cut."""
    if isinstance(value, str):
        return cut(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -_INT_MAX <= value < _INT_MAX:
        return value
    if isinstance(value, float) and value - value == 0:  # neither infinite nor no number
        return value
    try:
        return cut(json.dumps(value))
    except (ValueError, RecursionError):
        return "…"


def cut(text: str, limit: int = QUOTED_MAX_BYTES) -> str:
    """Cut a text to so many bytes, and show that it was."""
    data = text[: limit + 1].encode("utf-8", "replace")
    if len(data) <= limit:
        return text
    return data[:limit].decode("utf-8", "ignore") + "…"


class PluginLog(BoundedServer):
    """Takes lines at `log.sock` of a run dir from now on, from root only. Raises IOFailure."""

    def __init__(self, run_dir: str, lines: Lines) -> None:
        self.lines = lines
        self._run_dir, self._expired = run_dir, -math.inf
        self._listening = Listening(os.path.join(run_dir, LOG_SOCKET), backlog=BACKLOG)
        super().__init__(self._listening.socket, _Post, "plugin-log")

    def verify_request(self, request: object, client_address: object) -> bool:
        """Let root in, and nobody else."""
        return isinstance(request, socket.socket) and peer_uid(request) == 0

    def service_actions(self) -> None:
        """Look at what time has brought."""
        super().service_actions()
        self.lines.tell()
        now = time.monotonic()
        if now - self._expired > EXPIRE_EVERY_S:
            self._expired = now
            with suppress(OSError):  # nor does it fail a call
                expire(self._run_dir)

    def server_close(self) -> None:
        """Stop; nobody finds the socket any more."""
        super().server_close()
        self.withdraw()

    def withdraw(self) -> None:
        """Take no lines from processes that begin now; waits for nothing."""
        self._listening.withdraw()


class _Post(Handler):
    server: PluginLog

    def do_POST(self) -> None:  # noqa: N802 # the library's name
        """Take lines; what is wrong with them is not the plugin's business."""
        if self.path != URL_PATH:
            self.answer(404, b"not found\n")
            return
        text = self.headers.get("Content-Length", "")
        length = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
        if length > REQUEST_MAX_BYTES or len(text) > 9:
            self.answer(413, b"too much\n")
            return
        self.server.lines.take(self.rfile.read(length))
        self.answer(200, b"")
