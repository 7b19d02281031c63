"""/healthz, /readyz and /metrics over plain HTTP, for the kubelet's probes and for Prometheus.

Two ports, as in the reference: the health port, without which a node agent would never be ready,
and the monitoring port, which it can do without.

Source: istio cni/pkg/install (healthServer), cni/cmd/install-cni (monitoring).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from istio_cni.agent.serving import BACKLOG, BoundedServer, Handler
from istio_cni.errors import InternalError, IOFailure

LOG = logging.getLogger("cni-agent")
PORT_MAX = 65535

Render = Callable[[str], tuple[bytes, str]]
"""Writes the metrics as an Accept header wants them: a body and its content type."""


class HealthServer(BoundedServer):
    """Serves from now on, on all addresses; `missing` says what is not ready, "" if all is.

    With `metrics`, /metrics, too. Raises IOFailure when the port is not to be had.
    """

    def __init__(
        self, port: int, missing: Callable[[], str], metrics: Render | None = None
    ) -> None:
        self.missing = missing
        self.metrics = metrics
        what = "metrics" if metrics is not None else "health"
        super().__init__(_listen(port, what), _Probe, what)


def serve_monitoring(port: int, missing: Callable[[], str], metrics: Render) -> HealthServer | None:
    """Serve metrics, too, unless the port is 0 or less; if that fails, it is logged only."""
    if port <= 0:
        return None
    try:
        return HealthServer(port, missing, metrics)
    except IOFailure as error:
        LOG.error("%s", error.msg)
        return None


def _listen(port: int, what: str) -> socket.socket:
    """Listen on all addresses of both families, or of IPv4 where there is no IPv6."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    if port > PORT_MAX:
        raise IOFailure(f"cannot serve {what} on port {port}: no such port")
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise IOFailure(f"cannot serve {what} on port {port}: {reason}") from error


class _Probe(Handler):
    server: HealthServer

    def do_GET(self) -> None:  # noqa: N802 # the library's name
        """Answer a probe or a scrape."""
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self.answer(200, b"ok\n")
        elif path == "/readyz":
            missing = self.server.missing()
            self.answer(503 if missing else 200, f"{missing or 'ok'}\n".encode())
        elif path == "/metrics" and self.server.metrics is not None:
            self._metrics(self.server.metrics)
        else:
            self.answer(404, b"not found\n")

    def _metrics(self, render: Render) -> None:
        try:
            body, content_type = render(self.headers.get("Accept", ""))
        except Exception as error:  # a fault of ours must not look like a client that left
            fault = InternalError.of(error)
            LOG.error("metrics cannot be written: %s", fault.msg)
            self.answer(500, f"{fault.msg}\n".encode())
        else:
            self.answer(200, body, content_type)
