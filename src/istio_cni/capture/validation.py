"""Prove from inside a pod that its traffic is captured: connect, and see where the connection ends.

A pod that started before its node's CNI plugin was ready has no rules and would run outside the
mesh without anyone noticing. So an init container, running as the proxy will, listens on the
proxy's two ports and connects to an address that nobody serves. Capture turns this connection to
a listener, which learns from its original destination that it is the one; without capture it leads
nowhere. Only what arrives decides, the connecting side is merely logged. One loop waits for both
sides, so that the time limit holds whatever any of them does.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from contextlib import suppress

from istio_cni.constants import PROXY_ID
from istio_cni.errors import CaptureNotWorking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

CONNECT_INTERVAL_S = 1.0

_ORIGINAL_DESTINATION = 80  # linux/netfilter_ipv4.h and netfilter_ipv6/ip6_tables.h agree


def validate(
    host_is_ipv6: bool,
    outbound_port: int,
    inbound_port: int,
    probe_port: int,
    timeout_s: float,
    log: Callable[[str], None],
) -> None:
    """Return as soon as a connection to `probe_port` was redirected to one of the proxy's ports.

    The family tried is that of the host's address. Raises CaptureNotWorking when `timeout_s` has
    passed, or at once if neither port can be listened on. `log` gets what happens on the way.
    """
    deadline = time.monotonic() + timeout_s
    ports = tuple(dict.fromkeys((outbound_port, inbound_port)))
    with _Probe(host_is_ipv6, probe_port, log) as probe:
        listening = [probe.listen(port) for port in ports]
        tried = " nor ".join(probe.listener(port) for port in ports)
        if not any(listening):
            raise CaptureNotWorking(
                f"traffic capture cannot be validated: neither {tried} can be listened on; "
                "is a proxy running in this pod already?"
            )
        if not probe.arrives_before(deadline):
            raise CaptureNotWorking(
                f"traffic capture does not work: within {timeout_s:g} s no connection from "
                f"{probe.source} to {probe.target} arrived at {tried.replace('nor', 'or')}. "
                "The pod may have been scheduled before the CNI plugin of its node was ready, and "
                "have no redirect rules; a pod created in its place would have them. The check ran "
                f"as user id {os.getuid()} and works only as the proxy's, usually {PROXY_ID}."
            )
        log(f"traffic capture works: a connection to {probe.target} was redirected")


class _Probe:
    """Listeners on loopback and one connection attempt at a time, in one address family."""

    def __init__(self, ipv6: bool, port: int, log: Callable[[str], None]) -> None:
        self._family = socket.AF_INET6 if ipv6 else socket.AF_INET
        self.source, self._address = ("::1", "::6") if ipv6 else ("127.0.0.1", "127.0.0.6")
        self._port = port
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[int, socket.socket] = {}
        self._client: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
        for listener in self._listeners.values():
            listener.close()
        self._selector.close()

    @property
    def target(self) -> str:
        """Where connections go if nothing redirects them, for people to read."""
        return _shown(self._address, self._port)

    def listener(self, port: int) -> str:
        """Where the proxy would listen, for people to read."""
        return _shown(self.source, port)

    def listen(self, port: int) -> bool:
        """Listen where the proxy would; False, and a line in the log, if that is not possible."""
        try:
            listener = socket.create_server(
                (self.source, port), family=self._family, reuse_port=True
            )
        except OSError as error:
            self._log(f"listening on {self.listener(port)}: {_reason(error)}")
            return False
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener
        self._selector.register(listener, selectors.EVENT_READ)
        return True

    def arrives_before(self, deadline: float) -> bool:
        """Connect once a second until a listener gets a connection; False when the time is over."""
        attempt_at = time.monotonic()
        while (now := time.monotonic()) < deadline:
            if now >= attempt_at:
                self._connect()
                attempt_at = now + CONNECT_INTERVAL_S
            for key, _ in self._selector.select(min(deadline, attempt_at) - now):
                listener = self._listeners.get(key.fd)
                if listener is None:
                    self._finish_connecting()
                elif self._accept(listener):
                    return True
        return False

    def _accept(self, listener: socket.socket) -> bool:
        """Take a connection and answer with the port that it was meant for; True if it is ours."""
        try:
            connection, _ = listener.accept()
        except OSError as error:  # it may have been reset meanwhile
            self._log(f"accepting a connection: {_reason(error)}")
            return False
        with connection:
            try:
                port = _original_port(connection)
            except OSError as error:
                self._log(f"reading a connection's original destination: {_reason(error)}")
                return False
            with suppress(OSError):  # the client does not wait for it
                connection.send(str(port).encode())
        if port != self._port:
            self._log(f"a connection to port {port} arrived, and was not ours")
        return port == self._port

    def _connect(self) -> None:
        """Start an attempt; one that is still pending is given up."""
        self._hang_up()
        try:
            self._client = socket.socket(self._family)
            self._client.setblocking(False)
            self._selector.register(self._client, selectors.EVENT_WRITE)
            self._client.bind((self.source, 0))
            self._client.connect((self._address, self._port))
        except BlockingIOError:
            pass  # the loop is told of the outcome
        except OSError as error:
            self._fail_connecting(error)

    def _finish_connecting(self) -> None:
        code = self._client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if self._client else 0
        if code:
            self._fail_connecting(OSError(code, os.strerror(code)))
        self._hang_up()

    def _fail_connecting(self, error: OSError) -> None:
        self._log(f"connecting from {self.source} to {self.target}: {_reason(error)}")
        self._hang_up()

    def _hang_up(self) -> None:
        if self._client is not None:
            self._selector.unregister(self._client)
            self._client.close()
            self._client = None


def _original_port(connection: socket.socket) -> int:
    """Read which port a connection was made to before it was redirected.

    The kernel answers with a socket address, whose port is the third and fourth byte in both
    families; ENOENT means that it does not track the connection, so nothing redirected it.
    """
    ipv6 = connection.family == socket.AF_INET6
    level, size = (socket.IPPROTO_IPV6, 28) if ipv6 else (socket.SOL_IP, 16)
    return int.from_bytes(connection.getsockopt(level, _ORIGINAL_DESTINATION, size)[2:4], "big")


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _shown(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
