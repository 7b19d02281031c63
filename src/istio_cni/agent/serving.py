"""An HTTP server with a bound on everything: connections, threads, time and what is read.

The standard library's serves each connection in a thread of its own, for as long as the client
likes. Here the oldest connection makes room for a new one, so clients that say nothing cost others
a fraction of a second and the agent a fixed number of threads, and a connection has an age that it
does not outlive, however slowly it trickles.
"""

from __future__ import annotations

import http.server
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

CONNECTIONS_MAX = 32
AGE_MAX_S = 5.0
ROOM_WAIT_S = 0.2  # for a connection to end by itself, and again once the oldest was ended
BACKLOG = 128
POLL_S = 0.5  # how often ages are looked at, and the longest that `shutdown` takes


class BoundedServer(http.server.ThreadingHTTPServer):
    """Serves on a listening socket from now on, in threads; `name` is theirs."""

    daemon_threads = True

    def __init__(
        self, listening: socket.socket, handler: Callable[..., Handler], name: str
    ) -> None:
        # not TCPServer's, which makes a socket of its own
        socketserver.BaseServer.__init__(self, listening.getsockname(), handler)
        self.socket = listening
        self._ages: dict[object, float] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self.serve_forever, args=(POLL_S,), name=name, daemon=True).start()

    @property
    def connections(self) -> int:
        """How many connections there are now."""
        return len(self._ages)

    def close(self) -> None:
        """Serve no longer; what is being answered may be answered."""
        self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; out of descriptors, pause instead of trying without end."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.05)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, or end it if no other one makes room."""
        if self._make_room(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _make_room(self, request: object) -> bool:
        """Count a connection; the oldest is ended if there are too many for long."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, ROOM_WAIT_S):
                _hang_up(next(iter(self._ages)))
                self._changed.wait_for(self._has_room, ROOM_WAIT_S)
            if self._has_room():
                self._ages[request] = time.monotonic()
                return True
            return False

    def _has_room(self) -> bool:
        return len(self._ages) < CONNECTIONS_MAX

    def service_actions(self) -> None:
        """End connections that are too old."""
        oldest_allowed = time.monotonic() - AGE_MAX_S
        with self._changed:
            for request, began in self._ages.items():
                if began > oldest_allowed:
                    break
                _hang_up(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and count it no longer."""
        super().shutdown_request(request)
        with self._changed:
            if self._ages.pop(request, None) is not None:
                self._changed.notify_all()

    def handle_error(self, request: object, client_address: object) -> None:
        """Forgive clients that left; their end is no line of our log."""


def _hang_up(request: object) -> None:
    """Wake up the thread that serves a connection; it closes it."""
    if isinstance(request, socket.socket):
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


class Handler(http.server.BaseHTTPRequestHandler):
    """One request of one connection."""

    timeout = AGE_MAX_S

    def answer(
        self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        """Send the whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Tell nobody what we are made of."""
        return "istio-cni"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the library's name
        """Keep silent: probes come every few seconds."""
