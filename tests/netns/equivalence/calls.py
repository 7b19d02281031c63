"""Many connections at once, each from a port of its own, and where each ended.

Most calls that rules drop end in nothing, which can only be waited for. So all are begun before any
is waited for, and the wait is over when nothing has happened for a while, not a while for each.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from netns.traffic import APPLICATION, PROXY, Arrival, endpoint

from .places import Ending
from .probes import STRAY_ICMP, STRAY_TCP, TCP, UDP, UDP_SECOND, Probe
from .strays import read_packet, send_echo_reply, send_syn_ack
from .traveller import Traveller

PATIENCE_S = 0.3

_TRANSPARENT = {4: (socket.SOL_IP, 19), 6: (socket.IPPROTO_IPV6, 75)}
_TOLD = {4: (socket.SOL_IP, 13), 6: (socket.IPPROTO_IPV6, 66)}  # the mark of the pod's witness
_RECVERR = {4: (socket.SOL_IP, 11), 6: (socket.IPPROTO_IPV6, 25)}


class _Attempt(NamedTuple):
    """A call under way: the socket that its end is read from, and what was read."""

    probe: Probe
    port: int
    socket: socket.socket
    lines: list[bytes]


def make_calls(
    places: Mapping[str, str], probes: Sequence[Probe], first_port: int, patience_s: float
) -> list[Ending]:
    """Make all calls at once; those that are open when nothing happens any more are timeouts."""
    endings: list[Ending] = ["timeout"] * len(probes)
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        with Traveller(places) as traveller:
            for index, probe in enumerate(probes):
                try:
                    attempt = _start(traveller, opened, probe, first_port + index)
                except OSError as error:
                    endings[index] = os.strerror(error.errno or 0)
                else:
                    selector.register(attempt.socket, selectors.EVENT_READ, (index, attempt))
        while selector.get_map() and (ready := selector.select(patience_s)):
            for key, _ in ready:
                index, attempt = key.data
                ending = _read(attempt)
                if ending:
                    endings[index] = ending
                    selector.unregister(attempt.socket)
    return endings


def _start(traveller: Traveller, opened: ExitStack, probe: Probe, port: int) -> _Attempt:
    starts = {
        **{TCP: _connect, UDP: _question, UDP_SECOND: _second_question},
        **{STRAY_TCP: send_syn_ack, STRAY_ICMP: send_echo_reply},
    }
    return _Attempt(probe, port, starts[probe.kind](traveller, opened, probe, port), [])


def _connect(traveller: Traveller, opened: ExitStack, probe: Probe, port: int) -> socket.socket:
    owner = (probe.uid, probe.gid)
    client = traveller.open(probe.origin, probe.family, socket.SOCK_STREAM, owner=owner)
    opened.enter_context(client)
    if probe.mark:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack("=I", probe.mark))
        client.setsockopt(*_TRANSPARENT[probe.family], 1)
    client.bind((probe.source, port))
    with suppress(BlockingIOError):
        client.connect((probe.host, probe.port))
    return client


def _question(traveller: Traveller, opened: ExitStack, probe: Probe, port: int) -> socket.socket:
    owner = (probe.uid, probe.gid)
    client = traveller.open(probe.origin, probe.family, socket.SOCK_DGRAM, owner=owner)
    opened.enter_context(client)
    for option in (_RECVERR, _TOLD):
        client.setsockopt(*option[probe.family], 1)
    client.bind((probe.source, port))
    client.sendto(b"?", (probe.host, probe.port))
    return client


def _second_question(
    traveller: Traveller, opened: ExitStack, probe: Probe, port: int
) -> socket.socket:
    """Ask once the other of proxy and application has asked the same from the same port."""
    other = APPLICATION if probe.uid == PROXY else PROXY
    with ExitStack() as first:
        asker = _question(traveller, first, probe._replace(uid=other, gid=other), port)
        select.select([asker], [], [], PATIENCE_S)
    return _question(traveller, opened, probe, port)


def _read(attempt: _Attempt) -> Ending:
    """Return where a call has ended; "" if it has not."""
    try:
        if attempt.probe.kind == TCP:
            return _read_line(attempt)
        data, told, _, sender = attempt.socket.recvmsg(512, 64)
    except BlockingIOError:
        return ""
    except OSError as error:
        return os.strerror(error.errno or 0)
    if attempt.probe.kind in (UDP, UDP_SECOND):
        unasked = " (unasked)" if told and told[0][2][0] else ""
        replied_from = endpoint(*sender[:2]) + unasked
        return _arrival(data)._replace(replied_from=replied_from)
    return read_packet(attempt.probe, attempt.port, data)


def _read_line(attempt: _Attempt) -> Ending:
    piece = attempt.socket.recv(512)
    if piece:
        attempt.lines.append(piece)
        return ""
    line = b"".join(attempt.lines)
    return _arrival(line) if line else "no answer"


def _arrival(line: bytes) -> Arrival:
    """Read an answer; NAT may change the client's port where it is taken, that is no difference."""
    arrival = Arrival(*json.loads(line))
    return arrival._replace(client=arrival.client.rpartition(":")[0])
