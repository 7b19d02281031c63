"""A netlink socket, and the frames that go through it.

Every wait is bounded by a timeout, every answer is matched to its question, and an error comes with
the kernel's own words where it has any (the extended acknowledgement).

Source: include/uapi/linux/netlink.h
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from contextlib import suppress

from istio_cni.errors import ProgrammingFailed, TryAgainLater
from istio_cni.rules.netlink import HEADER, attributes, frame, padded, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

DUMP = 0x300
CREATE = 0x400
CREATE_NEW = 0x600  # CREATE | EXCL: an error if it exists
DUMP_TRIES, DUMP_PAUSE_S = 5, 0.01

_SOL_NETLINK, _CAP_ACK, _EXT_ACK, _GET_STRICT_CHECK = 270, 10, 11, 12
_ACK, _DUMP_INTERRUPTED, _ACK_HAS_ATTRIBUTES = 0x4, 0x10, 0x200
_ERROR, _DONE = 2, 3
_FIRST_REQUEST = 1 << 24  # its sequence number; lower ones are places in a batch
_RECEIVE_BYTES = 1 << 16  # the kernel writes lists in pieces of 32 KiB at most
_ALWAYS_SENT_BYTES = 100_000  # half of the usual send buffer
_SO_SNDBUFFORCE = 32
_SO_NETNS_COOKIE = 71
_GRACE_PERIOD_S = 0.03


class Refused(ProgrammingFailed):
    """The kernel answered with an error; `errno` says which, `place` to what of a batch."""

    errno = 0
    place: int | None = None


class Netlink:
    """One netlink socket of the calling thread's namespace; a context manager."""

    def __init__(self, protocol: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sequence = _FIRST_REQUEST
        self._is_read_out = True
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        try:
            self._socket = socket.socket(socket.AF_NETLINK, kind, protocol)
        except OSError as error:
            raise refusal("opening a netlink socket", error.errno or 0) from error
        self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, as a file does."""
        return self._socket.fileno()

    def cookie(self) -> int:
        """Identify the socket's namespace; see `namespace_cookie`."""
        try:
            return _cookie(self._socket)
        except OSError:
            return 0

    def check_strictly(self) -> bool:
        """Have the kernel heed what a request for a list says; False before Linux 4.20."""
        try:
            self._socket.setsockopt(_SOL_NETLINK, _GET_STRICT_CHECK, 1)
        except OSError:
            return False
        return True

    def ask(self, doing: str, kind: int, flags: int, body: bytes) -> list[bytes]:
        """Send one request and return the payloads of its replies; none if it is only acknowledged.

        A list that changed while the kernel wrote it is asked for again, `DUMP_TRIES` times in all.
        Of an earlier one that was not read to its end, the rest is passed over.
        """
        self._pass_over(doing)
        for _ in range(DUMP_TRIES):
            self._sequence += 1
            self._send(doing, frame(kind, flags | _ACK, self._sequence, body))
            replies, interrupted = self._replies(doing)
            if not interrupted:
                return replies
            time.sleep(DUMP_PAUSE_S)
        raise TryAgainLater(f"{doing}: the list changed each of {DUMP_TRIES} times it was read")

    def change(self, doing: str, kind: int, flags: int, body: bytes, unless: int) -> bool:
        """Send one request; False if the kernel answers with the error number `unless`."""
        try:
            self.ask(doing, kind, flags, body)
        except Refused as refused:
            if refused.errno != unless:
                raise
            return False
        return True

    def batch(self, doing: str, data: bytes) -> None:
        """Send the messages of a batch in one datagram and raise the first error that comes back.

        Each message's sequence number is its place. The kernel has carried them out, and queued all
        replies, when sending returns; so nothing is waited for, and no acknowledgement asked for:
        kernels before 6.10 do not send the last one, and those of single messages overflow the
        receive buffer, while the batch is carried out.
        """
        self._pass_over(doing)
        self._make_room(len(data))
        self._send(doing, data)
        first: Refused | None = None
        with suppress(BlockingIOError):
            while True:
                for kind, flags, place, payload in self._take(doing, socket.MSG_DONTWAIT):
                    if kind == _ERROR and place < _FIRST_REQUEST:
                        first = first or _refused(doing, place, flags, payload)
        self._is_read_out = True
        if first is not None:
            raise first

    def _make_room(self, size: int) -> None:
        """Let the kernel take a datagram of this size; beyond the system's limit root may ask."""
        if size <= _ALWAYS_SENT_BYTES:
            return
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, size)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def _send(self, doing: str, data: bytes) -> None:
        self._is_read_out = False
        try:
            self._socket.sendto(data, (0, 0))
        except OSError as error:
            raise refusal(doing, error.errno or 0) from error

    def _replies(self, doing: str) -> tuple[list[bytes], bool]:
        """Collect the answers to the last request, and say whether their list was interrupted."""
        replies: list[bytes] = []
        interrupted = False
        while True:
            for kind, flags, sequence, payload in self._receive(doing):
                if sequence != self._sequence:  # late: its request has timed out
                    continue
                interrupted |= bool(flags & _DUMP_INTERRUPTED)
                if kind in (_ERROR, _DONE):
                    self._is_read_out = True
                    _check(doing, kind, flags, payload)
                    return replies, interrupted
                replies.append(payload)

    def _pass_over(self, doing: str) -> None:
        """Take what is left of earlier answers, if somebody was interrupted while they came.

        The kernel writes one list at a time, and errors of one batch are not those of the next.
        """
        while not self._is_read_out:
            try:
                self._take(doing, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._is_read_out = True
            except Refused as refused:
                if refused.errno != errno.ENOBUFS:  # some are lost, and nobody wants them
                    raise

    def _receive(self, doing: str) -> list[tuple[int, int, int, bytes]]:
        """Wait for one datagram and take it."""
        try:
            return self._take(doing, 0)
        except BlockingIOError as error:
            late = f"{doing}: no answer from the kernel within {self._timeout_s:g} s"
            raise ProgrammingFailed(late) from error

    def _take(self, doing: str, how: int) -> list[tuple[int, int, int, bytes]]:
        """Take one datagram: type, flags, sequence number and payload of each message in it.

        Raises BlockingIOError if none comes in time.
        """
        try:
            data, sender = self._socket.recvfrom(_RECEIVE_BYTES, how)
        except BlockingIOError:
            raise
        except OSError as error:
            raise refusal(doing, error.errno or 0) from error
        found: list[tuple[int, int, int, bytes]] = []
        if sender[0] != 0:  # port 0 is the kernel; a process could forge a reply
            return found
        at, last = 0, len(data) - HEADER.size
        while at <= last:
            size, kind, flags, sequence, _ = HEADER.unpack_from(data, at)
            found.append((kind, flags, sequence, data[at + HEADER.size : at + size]))
            at += max(padded(size), HEADER.size)
        return found


def _check(doing: str, kind: int, flags: int, payload: bytes) -> None:
    """Raise the error that the last message of a reply reports, if it does."""
    code = -struct.unpack_from("=i", payload)[0] if len(payload) >= 4 else 0
    if code == 0:
        return
    copied = HEADER.size if kind == _ERROR else 0  # an error repeats the header of the request
    said = dict(attributes(payload, 4 + copied)) if flags & _ACK_HAS_ATTRIBUTES else {}
    raise refusal(doing, code, text(said.get(1, b"")))


def _refused(doing: str, place: int, flags: int, payload: bytes) -> Refused | None:
    """Return the error that an answer to a message of a batch reports, None if it does not."""
    try:
        _check(doing, _ERROR, flags, payload)
    except Refused as refused:
        refused.place = place
        return refused
    return None


def refusal(doing: str, code: int, words: str = "") -> Refused:
    """Make the error that the kernel has answered with."""
    refused = Refused(f"{doing}: {os.strerror(code)}" + (f" ({words})" if words else ""))
    refused.errno = code
    return refused


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def wait_for_packets() -> None:
    """Wait until no packet is under way that has met rules as they were before.

    The kernel does so (synchronize_net) when a packet socket is closed; who may not open one waits
    for about as long.
    """
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0).close()
    except OSError:
        time.sleep(_GRACE_PERIOD_S)


def namespace_cookie() -> int:
    """Identify the calling thread's network namespace until the next boot; 0 before kernel 5.14.

    Unlike the inode number of a namespace file it is never used a second time.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
            return _cookie(any_socket)
    except OSError:
        return 0


def _cookie(any_socket: socket.socket) -> int:
    """Return what the kernel calls the namespace of a socket. Raises OSError."""
    raw = any_socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    return int(struct.unpack("=Q", raw)[0])
