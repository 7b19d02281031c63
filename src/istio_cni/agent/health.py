"""/healthz and /readyz over plain HTTP, for the kubelet's probes."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable

from istio_cni.errors import IOFailure

REQUEST_TIMEOUT_S = 5.0


class HealthServer(http.server.ThreadingHTTPServer):
    """Serves from now on, on all addresses; `missing` says what is not ready, "" if all is.

    Raises IOFailure when the port is not to be had.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, missing: Callable[[], str]) -> None:
        self.missing = missing
        self.address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            super().__init__(("", port), _Handler)
        except OSError as error:
            raise IOFailure(f"cannot serve health on port {port}: {error.strerror}") from error
        threading.Thread(target=self.serve_forever, name="health", daemon=True).start()

    def server_bind(self) -> None:
        """Bind for IPv4, too, and without asking anyone for this host's name."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: object, client_address: object) -> None:
        """Forgive clients that left; their end is no line of our log."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: HealthServer
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:  # the library's name
        """Answer a probe."""
        path = self.path.partition("?")[0]
        missing = self.server.missing() if path == "/readyz" else ""
        known = path in ("/healthz", "/readyz")
        body = f"{missing or 'ok'}\n".encode() if known else b"not found\n"
        self.send_response(404 if not known else 503 if missing else 200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the library's name
        """Keep silent: probes come every few seconds."""
