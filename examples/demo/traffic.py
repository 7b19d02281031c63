"""Servers that say who they are, and clients that listen to them.

A server answers every connection and every datagram with one line of JSON: its name, its port, and
where the connection was going. The proxy asks the kernel for the latter, as Envoy does: a redirect
changes the destination, and SO_ORIGINAL_DST is how to learn what it was.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from .process import DemoFailed, Tell, call, start

SO_ORIGINAL_DST = 80  # linux/netfilter_ipv4.h; IP6T_SO_ORIGINAL_DST is the same number
CLIENT_TIMEOUT_S = 3.0
ANSWER_MAX_BYTES = 4096
FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
ANY = {4: "0.0.0.0", 6: "::"}
LOOPBACK = {4: "127.0.0.1", 6: "::1"}


class Server(NamedTuple):
    """A server to run: its name, its user, its ports, the address to listen on by family."""

    name: str
    uid: int
    tcp: tuple[int, ...]
    udp: tuple[int, ...] = ()
    address: Mapping[int, str] = ANY
    transparent: bool = False  # asks for the original destination


class Heard(NamedTuple):
    """Who answered a client, on which port; `meant_for` is "" over UDP, where nobody can know."""

    who: str
    port: int
    meant_for: str


def endpoint(address: str, port: int) -> str:
    """Write an address with its port."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def start_server(server: Server, netns: int, families: Sequence[int], undo: ExitStack) -> None:
    """Start a server in a child process, which `undo` ends; return once it listens."""
    start(lambda ready: _serve(server, families, ready), netns, server.uid, undo)


def _serve(server: Server, families: Sequence[int], ready: Tell) -> None:
    selector = selectors.DefaultSelector()
    for family in families:
        address = server.address[family]
        for kind, ports in ((socket.SOCK_STREAM, server.tcp), (socket.SOCK_DGRAM, server.udp)):
            for port in ports:
                selector.register(_listen(family, kind, address, port), selectors.EVENT_READ)
    ready("listening")
    while True:
        for key, _ in selector.select():
            if isinstance(key.fileobj, socket.socket):
                _answer(server, key.fileobj)


def _listen(family: int, kind: socket.SocketKind, address: str, port: int) -> socket.socket:
    listener = socket.socket(FAMILY[family], kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == 6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.bind((address, port))
    if kind == socket.SOCK_STREAM:
        listener.listen()
    return listener


def _answer(server: Server, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    if listener.type == socket.SOCK_DGRAM:
        _, client = listener.recvfrom(ANSWER_MAX_BYTES)
        listener.sendto(json.dumps([server.name, port, ""]).encode(), client)
        return
    connection, _ = listener.accept()
    with connection:
        address, its_port = connection.getsockname()[:2]
        if server.transparent:
            address, its_port = _original_destination(connection)
        told = endpoint(address, its_port)
        connection.sendall(json.dumps([server.name, port, told]).encode() + b"\n")


def _original_destination(connection: socket.socket) -> tuple[str, int]:
    """Ask the kernel where a redirected connection was going: a sockaddr of the family."""
    if connection.family == socket.AF_INET:
        raw = connection.getsockopt(socket.IPPROTO_IP, SO_ORIGINAL_DST, 16)
        port, packed = struct.unpack_from("!2xH4s", raw)
    else:
        raw = connection.getsockopt(socket.IPPROTO_IPV6, SO_ORIGINAL_DST, 28)
        port, packed = struct.unpack_from("!2xH4x16s", raw)
    return socket.inet_ntop(connection.family, packed), port


def ask(netns: int, uid: int, protocol: str, address: str, port: int) -> Heard | str:
    """Connect from inside a namespace, as a user; return who answers, or why nobody does."""
    try:
        answer = call(lambda: _ask(protocol, address, port), netns, uid)
    except DemoFailed as error:
        return str(error)
    match answer:
        case [str(who), int(number), str(meant_for)]:
            return Heard(who, number, meant_for)
    return f"an answer that is none: {answer!r}"


def _ask(protocol: str, address: str, port: int) -> object:
    kind = socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM
    with socket.socket(FAMILY[6 if ":" in address else 4], kind) as client:
        client.settimeout(CLIENT_TIMEOUT_S)
        client.connect((address, port))
        if protocol == "UDP":
            client.send(b"who is there?")
            data = client.recv(ANSWER_MAX_BYTES)
        else:
            data = client.makefile("rb").readline(ANSWER_MAX_BYTES)
    return json.loads(data) if data else "a closed connection"
