"""The node agent's log socket, as plugin processes reach it: one POST, then the process ends.

Nobody waits for the answer. It is 200 whatever was sent, and a stream socket keeps what it has
taken when its sender is gone: the agent reads it when it gets round to it. So lines cost a pod
some 0.1 ms however busy the agent is. http.client would cost 8 ms (response.py says why).

Source: istio cni/pkg/plugin (udsCore), cni/pkg/log; the receiver is agent/plugin_log.py.
"""

from __future__ import annotations

import os
import time

from istio_cni.errors import json_string

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Sequence

URL_PATH = "/log"
REQUEST_MAX_BYTES = 1 << 20
_SEND_S = 1.0  # all in all
_STALL_S = 0.2  # without the agent taking anything
_RETRY_S = 0.01


def send(directory: str, name: str, lines: Sequence[str]) -> bool:
    """Hand lines, JSON objects, to the agent whose socket is there; False if it does not take them.

    Raises nothing: what goes wrong here is nobody's failure.
    """
    try:
        return _post(directory, name, f"[{','.join(map(json_string, lines))}]".encode())
    except OSError:
        return False


def _post(directory: str, name: str, body: bytes) -> bool:
    from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_STREAM, socket

    head = (
        f"POST {URL_PATH} HTTP/1.0\r\nHost: agent\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    if len(body) > REQUEST_MAX_BYTES:
        return False
    deadline = time.monotonic() + _SEND_S
    parent = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
    try:
        _connect(connection, f"/proc/self/fd/{parent}/{name}")  # 107 bytes are all that one takes
        rest = memoryview(head.encode() + body)
        while rest:
            connection.settimeout(min(_STALL_S, max(0.001, deadline - time.monotonic())))
            rest = rest[connection.send(rest) :]
            if rest and time.monotonic() >= deadline:
                return False
        return True
    finally:
        connection.close()
        os.close(parent)


def _connect(connection: socket, path: str) -> None:
    """Connect, with a little patience for an agent whose queue is full; raises OSError."""
    connection.settimeout(0)
    deadline = time.monotonic() + _STALL_S
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_S)
