"""The API server's address: the plugin must not ask the node's name service for it.

Resolving a name loads whatever modules the node's nsswitch.conf lists, which were built for the
node's C library and not for the bundle's.
"""

from __future__ import annotations

import ipaddress
import socket


def is_numeric(host: str) -> bool:
    """Tell whether a host is an address, with or without the brackets of a URL."""
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def resolve(host: str) -> str:
    """Return the first address of a name. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])
