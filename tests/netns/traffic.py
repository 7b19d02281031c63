"""Real connections: a pod and the outside on one wire, with servers that tell who was reached.

Each server answers with one JSON line: where it stands, the port it listens on, and the destination
that the client meant (SO_ORIGINAL_DST, or the socket's own address where nothing was redirected).
So one connection proves both that it was captured and that the proxy could forward it. Servers run
in children that end with their parent; clients run in a child with the user id asked for.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import select
import selectors
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from namespaces import call_inside_as, enter, inside, ip

PROXY, APPLICATION = 1337, 1000  # user and group ids
OUTBOUND, INBOUND, DNS = 15001, 15006, 15053  # the proxy's listeners
OUTSIDE = {4: "10.99.0.1", 6: "fd99::1"}
POD = {4: "10.99.0.2", 6: "fd99::2"}
LOOPBACK = {4: "127.0.0.1", 6: "::1"}
PASSTHROUGH = {4: "127.0.0.6", 6: "::6"}
FAMILIES = (4, 6)
PACE_S = 0.001
"""How long a hammer rests: then it is woken in time, and what it watches has a processor."""

_SO_ORIGINAL_DST, _SOL_IPV6 = 80, 41
_IP_TRANSPARENT, _IPV6_TRANSPARENT = 19, 75
_AF = {4: socket.AF_INET, 6: socket.AF_INET6}
_ANY = {4: "0.0.0.0", 6: "::"}


class Listener(NamedTuple):
    """What a server listens on: a port of both families, and how."""

    port: int
    uid: int = APPLICATION
    udp: bool = False
    transparent: bool = False
    loopback: bool = False


class Arrival(NamedTuple):
    """Where a connection ended, by the word of the server that took it."""

    at: str
    port: int
    destination: str
    client: str
    replied_from: str = ""


PROXY_LISTENERS = (
    Listener(OUTBOUND, PROXY),
    Listener(INBOUND, PROXY),
    Listener(DNS, PROXY, loopback=True),
    Listener(DNS, PROXY, udp=True, loopback=True),
)
TRANSPARENT_LISTENERS = tuple(
    listener._replace(transparent=listener.port == INBOUND and not listener.udp)
    for listener in PROXY_LISTENERS
)


# -- the wire ----------------------------------------------------------------------------------


def join(pod: str, outside: str, families: Sequence[int] = FAMILIES) -> None:
    """Lay a wire from a pod's eth0 to the outside, with addresses and the pod's default routes."""
    pod, outside = os.path.basename(pod), os.path.basename(outside)
    ip("link", "add", "eth0", "netns", pod, "type", "veth", "peer", "pod0", "netns", outside)
    for name, link, own, other in (
        (outside, "pod0", OUTSIDE, POD),
        (pod, "eth0", POD, OUTSIDE),
    ):
        lines = ["link set lo up", f"link set {link} up"]
        for family in families:
            length = {4: 24, 6: 64}[family]
            lines.append(f"addr add {own[family]}/{length} dev {link} {'nodad' * (family == 6)}")
            if own is POD:
                lines.append(f"route add default via {other[family]}")
        inside(f"/run/netns/{name}", ["ip", "-batch", "-"], stdin="\n".join(lines))


# -- servers -----------------------------------------------------------------------------------


@contextmanager
def serving(path: str, at: str, listeners: Sequence[Listener]) -> Iterator[None]:
    """Run servers in the namespace at `path`, under the name `at`, until the block ends."""
    ready, tell_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        _serve(path, at, listeners, tell_ready)
    os.close(tell_ready)
    try:
        if not select.select([ready], [], [], 10)[0] or os.read(ready, 1) != b"+":
            raise AssertionError(f"the servers {at} do not start")
        yield
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(path: str, at: str, listeners: Sequence[Listener], tell_ready: int) -> None:
    try:
        _become_child_in(path)
        selector = selectors.DefaultSelector()
        for listener in listeners:
            for family in FAMILIES:
                selector.register(_listen(listener, family), selectors.EVENT_READ, listener)
        os.write(tell_ready, b"+")
        while True:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                _answer(key.fileobj, key.data, at)
    finally:
        os._exit(0)


def _become_child_in(path: str) -> None:
    """Die with the parent, and move into a namespace."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    enter(path)


def _listen(listener: Listener, family: int) -> socket.socket:
    """Open a socket that belongs to the listener's user: owner matches look at who opened it."""
    kind = socket.SOCK_DGRAM if listener.udp else socket.SOCK_STREAM
    os.setegid(listener.uid)
    os.seteuid(listener.uid)
    server = socket.socket(_AF[family], kind)
    os.seteuid(0)
    os.setegid(0)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == 6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if listener.transparent and family == 4:
        server.setsockopt(socket.SOL_IP, _IP_TRANSPARENT, 1)
    elif listener.transparent:
        server.setsockopt(_SOL_IPV6, _IPV6_TRANSPARENT, 1)
    server.bind(((LOOPBACK if listener.loopback else _ANY)[family], listener.port))
    if not listener.udp:
        server.listen(128)
    server.setblocking(False)
    return server


def _answer(server: socket.socket, listener: Listener, at: str) -> None:
    try:
        if listener.udp:
            _, client = server.recvfrom(512)
            line = _line(at, listener.port, "", _shown(client))
            server.sendto(line, client)
            return
        connection, client = server.accept()
        with connection:
            connection.settimeout(1)
            line = _line(at, listener.port, _destination(connection), _shown(client))
            connection.sendall(line)
    except OSError:  # the client's trouble
        return


def _line(at: str, port: int, destination: str, client: str) -> bytes:
    return json.dumps(Arrival(at, port, destination, client)).encode() + b"\n"


def _destination(connection: socket.socket) -> str:
    """Tell what the client connected to, before any redirection."""
    v6 = connection.family == socket.AF_INET6
    try:
        if v6:
            raw = connection.getsockopt(_SOL_IPV6, _SO_ORIGINAL_DST, 28)
            port, packed = struct.unpack_from("!H", raw, 2)[0], raw[8:24]
        else:
            raw = connection.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
            port, packed = struct.unpack_from("!H", raw, 2)[0], raw[4:8]
    except OSError:  # nothing tracks connections here, so nothing was redirected
        return _shown(connection.getsockname())
    return _shown((str(ipaddress.ip_address(packed)), port))


def _shown(address: tuple[object, ...]) -> str:
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint(host: str, port: int) -> str:
    """Write an address as arrivals have it."""
    return _shown((host, port))


# -- clients -----------------------------------------------------------------------------------


class Call(NamedTuple):
    """One connection, or with `udp` one question: to where, and from which address."""

    host: str
    port: int
    source: str = ""
    udp: bool = False
    timeout_s: float = 2.0


def reach(path: str, uid: int, *calls: Call) -> list[Arrival | str]:
    """Make connections from the namespace at `path` as a user; where each ended, or its failure."""

    def connect() -> list[Arrival | str]:
        return [attempt(call) for call in calls]

    arrivals: list[Arrival | str] = call_inside_as(uid, path, connect)
    return arrivals


def attempt(call: Call) -> Arrival | str:
    """Make one connection from where the calling process is."""
    family = socket.AF_INET6 if ":" in call.host else socket.AF_INET
    kind = socket.SOCK_DGRAM if call.udp else socket.SOCK_STREAM
    with socket.socket(family, kind) as client:
        client.settimeout(call.timeout_s)
        try:
            if call.source:
                client.bind((call.source, 0))
            if call.udp:
                client.sendto(b"?", (call.host, call.port))
                line, sender = client.recvfrom(512)
                return Arrival(*json.loads(line))._replace(replied_from=_shown(sender))
            client.connect((call.host, call.port))
            line = b""
            while piece := client.recv(512):
                line += piece
            return Arrival(*json.loads(line))
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return os.strerror(error.errno or 0)
        except ValueError:
            return "no answer"


@contextmanager
def hammering(
    path: str, calls: Sequence[Call], uid: int = APPLICATION
) -> Iterator[Callable[[], Counter[str]]]:
    """Make connections over and over while the block runs; the value counts them by where they end.

    The block begins when each of them has ended somewhere.
    """
    ended, tell_ended = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)
        _hammer(path, uid, calls, tell_ended)
    os.close(tell_ended)
    os.set_blocking(ended, False)
    seen: Counter[str] = Counter()

    def count() -> Counter[str]:
        with suppress(BlockingIOError):
            while piece := os.read(ended, 1 << 16):
                seen.update(piece.decode().split())
        return seen

    try:
        limit = time.monotonic() + 10
        while count().total() < len(calls):
            if time.monotonic() > limit:
                raise AssertionError("no connection gets through even before the test")
            time.sleep(0.005)
        yield count
    finally:
        os.close(ended)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _hammer(path: str, uid: int, calls: Sequence[Call], tell_ended: int) -> None:
    try:
        _become_child_in(path)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        while True:
            for call in calls:
                arrival = attempt(call)
                if isinstance(arrival, Arrival):
                    os.write(tell_ended, f"{arrival.at}\n".encode())
                time.sleep(PACE_S)
    finally:
        os._exit(0)


# -- witnesses ---------------------------------------------------------------------------------


def count_direct(outside: str, ports: Sequence[int]) -> None:
    """Count in the outside's own packet filter what arrives for some ports, whoever answers."""
    listed = ", ".join(map(str, ports))
    text = f"""
        table inet witness {{
            counter direct {{ }}
            chain arrivals {{
                type filter hook prerouting priority -400
                tcp dport {{ {listed} }} tcp flags & (syn | ack) == syn counter name direct
                udp dport {{ {listed} }} counter name direct
            }}
        }}
    """
    inside(outside, ["nft", "-f", "-"], stdin=text)


def direct_arrivals(outside: str) -> int:
    """Return how many connections have arrived since `count_direct`."""
    text = inside(outside, ["nft", "-j", "list", "counter", "inet", "witness", "direct"])
    packets = [
        item["counter"]["packets"] for item in json.loads(text)["nftables"] if "counter" in item
    ]
    return int(packets[0])


class Wire(NamedTuple):
    """A pod and the outside, by the paths of their namespaces."""

    pod: str
    outside: str


@contextmanager
def wired(
    new_netns: Callable[[], str],
    pod: Sequence[Listener],
    outside: Sequence[Listener] = (),
    families: Sequence[int] = FAMILIES,
) -> Iterator[Wire]:
    """Set up a pod and the outside in fresh namespaces, servers running in both."""
    wire = Wire(new_netns(), new_netns())
    join(*wire, families)
    with ExitStack() as servers:
        servers.enter_context(serving(wire.pod, "pod", pod))
        if outside:
            servers.enter_context(serving(wire.outside, "outside", outside))
        yield wire
