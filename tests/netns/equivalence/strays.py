"""Packets that belong to no connection, and what comes of them.

Rules that drop what conntrack calls invalid show with such packets alone. No ordinary socket sends
them, so they are made here byte by byte: a SYN+ACK, which the pod's kernel answers with a reset if
it gets to see it, and an echo reply, which has no answer and is listened for in the pod.
"""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack

from .places import Ending
from .probes import STRAY_TCP, Probe
from .traveller import Traveller

_ICMP = {4: (socket.IPPROTO_ICMP, 0), 6: (socket.IPPROTO_ICMPV6, 129)}  # type of an echo reply
_IPV6_CHECKSUM = 7
_HEADER = {4: 20, 6: 0}  # what a raw socket gives of the IP header
_SYN_ACK, _RST = 0x12, 0x04


def send_syn_ack(traveller: Traveller, opened: ExitStack, probe: Probe, port: int) -> socket.socket:
    """Send a SYN+ACK that nobody asked for; the pod's kernel refuses it, or does not see it."""
    stray = traveller.open(probe.origin, probe.family, socket.SOCK_RAW, socket.IPPROTO_TCP)
    opened.enter_context(stray)
    stray.bind((probe.source, 0))
    stray.connect((probe.host, 0))
    segment = struct.pack("!HHIIBBHHH", port, probe.port, 1, 1, 5 << 4, _SYN_ACK, 1024, 0, 0)
    if probe.family == 6:
        stray.setsockopt(socket.IPPROTO_IPV6, _IPV6_CHECKSUM, 16)
    else:
        ends = socket.inet_aton(probe.source) + socket.inet_aton(probe.host)
        pseudo = ends + struct.pack("!HH", socket.IPPROTO_TCP, len(segment))
        segment = segment[:16] + _checksum(pseudo + segment) + segment[18:]
    stray.send(segment)
    return stray


def send_echo_reply(
    traveller: Traveller, opened: ExitStack, probe: Probe, port: int
) -> socket.socket:
    """Send an echo reply that nobody asked for, and listen in the pod whether it comes through."""
    protocol, kind = _ICMP[probe.family]
    listener = traveller.open("pod", probe.family, socket.SOCK_RAW, protocol)
    opened.enter_context(listener)
    listener.bind((probe.host, 0))
    listener.connect((probe.source, 0))
    with traveller.open(probe.origin, probe.family, socket.SOCK_RAW, protocol) as stray:
        stray.bind((probe.source, 0))
        reply = struct.pack("!BBHHH", kind, 0, 0, port, 1)
        if probe.family == 4:
            reply = reply[:2] + _checksum(reply) + reply[4:]
        stray.sendto(reply, (probe.host, 0))
    return listener


def _checksum(data: bytes) -> bytes:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


def read_packet(probe: Probe, port: int, data: bytes) -> Ending:
    """Return what a packet tells of the stray that was sent from a port; "" if it is another's."""
    packet = data[_HEADER[probe.family] :]
    if probe.kind == STRAY_TCP:
        mine = struct.unpack_from("!HH", packet)[1] == port and packet[13] & _RST
        return "reset" if mine else ""
    mine = struct.unpack_from("!BBHH", packet)[::3] == (_ICMP[probe.family][1], port)
    return "delivered" if mine else ""
