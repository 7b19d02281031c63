"""Sockets in any namespace and of any user, opened by one process.

A socket stays in the namespace and with the user that it was opened by, and owner matches look at
nothing else. So no process a place or a user is needed: one thread goes there, opens, and goes on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from namespaces import enter

_AF = {4: socket.AF_INET, 6: socket.AF_INET6}


class Traveller:
    """Opens sockets in any namespace as any user: owner matches look at who opened a socket."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._at = ""

    def __enter__(self) -> Traveller:
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        enter(f"/proc/self/fd/{self._home}")
        os.close(self._home)

    def open(
        self, at: str, family: int, kind: int, protocol: int = 0, *, owner: tuple[int, int] = (0, 0)
    ) -> socket.socket:
        """Open a socket that does not block."""
        if at != self._at:
            enter(self._places[at])
            self._at = at
        os.setegid(owner[1])
        os.seteuid(owner[0])
        try:
            return socket.socket(_AF[family], kind | socket.SOCK_NONBLOCK, protocol)
        finally:
            os.seteuid(0)
            os.setegid(0)
