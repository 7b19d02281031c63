"""The socket on which the launcher asks: bound so that nobody finds half of it, read with a bound.

Only root may ask. Descriptors come along with the first byte; those that nobody waits for are
closed, as are all of a caller's once it has been answered.

Source: unix(7), cmsg(3).
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from contextlib import suppress

from istio_cni.errors import DecodingFailure, GivenUp, IOFailure, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

BACKLOG = 512  # callers that wait; the launcher of one more runs the plugin itself
DESCRIPTORS_MAX = 16  # taken from one caller, to be closed
_READ_WAIT_S = 2.0  # for a whole call: its launcher sends it at once
_READ_WAIT = struct.pack("@ll", int(_READ_WAIT_S), 0)  # as the kernel reads it
_PIECE_BYTES = 1 << 16  # most calls are one piece
_ANSWER_WAIT_S = 2.0
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


class Caller:
    """One connection and all the descriptors that came through it; a context manager."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _READ_WAIT)
        self._ahead = b""  # read, but not asked for yet
        self._read_ends = time.monotonic() + _READ_WAIT_S
        self.descriptors: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        self._connection.close()

    @property
    def uid(self) -> int:
        """The user that asks, as the kernel says."""
        return peer_uid(self._connection)

    def read(self, count: int) -> bytes:
        """Read so many bytes, and take the descriptors in.

        Raises DecodingFailure if the caller leaves before, takes too long or sends too many.
        """
        data = bytearray(self._ahead)
        while len(data) < count:
            data += self._receive(max(count - len(data), _PIECE_BYTES))
        self._ahead = bytes(data[count:])
        return bytes(data[:count])

    def _receive(self, at_most: int) -> bytes:
        """Wait for what comes next, and take its descriptors."""
        if time.monotonic() > self._read_ends:
            raise DecodingFailure("the call took too long to come")
        room = socket.CMSG_SPACE(4 * DESCRIPTORS_MAX)
        try:
            data, sent, flags, _ = self._connection.recvmsg(at_most, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError as error:
            raise DecodingFailure("the call took too long to come") from error
        except OSError as error:
            raise DecodingFailure(f"the call cannot be read: {error.strerror}") from error
        for level, kind, content in sent:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._keep(content)
        if flags & socket.MSG_CTRUNC or len(self.descriptors) > DESCRIPTORS_MAX:
            raise DecodingFailure("the call came with too many descriptors")
        if not data:
            raise DecodingFailure("the call ended in the middle")
        return data

    def _keep(self, content: bytes) -> None:
        numbers = array.array("i")
        numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
        self.descriptors += numbers

    def fileno(self) -> int:
        """Return the connection's descriptor, as a file does."""
        return self._connection.fileno()

    def has_left(self) -> bool:
        """Tell whether the caller has given up."""
        return has_left(self._connection.fileno())

    def answer(self, data: bytes) -> bool:
        """Send an answer whole; False if the caller does not take it."""
        self._connection.settimeout(_ANSWER_WAIT_S)
        try:
            self._connection.sendall(data)
        except OSError:
            return False
        return True


def peer_uid(connection: socket.socket) -> int:
    """Return the user at the other end of a connection, as the kernel says."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def confirm(deadline: float, *connections: int) -> None:
    """Raise GivenUp once the other end of any connection is closed, or a deadline has passed."""
    if time.monotonic() >= deadline:
        raise GivenUp("the caller stops waiting; nothing is changed any more")
    if has_left(*connections):
        raise GivenUp("the caller has gone; nothing is changed any more")


def has_left(*connections: int) -> bool:
    """Tell whether the other end of any connection is closed."""
    poll = select.poll()
    for each in connections:
        poll.register(each, select.POLLHUP | select.POLLRDHUP | select.POLLERR)
    return bool(poll.poll(0))


class Listening:
    """A Unix socket that listens at a path, where nobody finds it before it does.

    What had the path goes. A `private` directory is root's alone.
    """

    def __init__(self, path: str, *, private: bool = False, backlog: int = BACKLOG) -> None:
        """Bind and listen, and make the directory if it is missing. Raises IOFailure."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._name = os.path.basename(path)
        try:
            self._directory = _open_directory(os.path.dirname(path), private=private)
            try:
                self._inode = self._bind(backlog)
            except BaseException:
                os.close(self._directory)
                raise
        except OSError as error:
            self.socket.close()
            problem = error.strerror or str(error)
            raise IOFailure(f"cannot listen at {quoted(path)}: {problem}") from error

    def _bind(self, backlog: int) -> tuple[int, int]:
        temporary = f".{self._name}.{os.urandom(4).hex()}"
        self.socket.bind(f"/proc/self/fd/{self._directory}/{temporary}")  # paths must be short
        try:
            os.chmod(temporary, 0o600, dir_fd=self._directory)
            self.socket.listen(backlog)
            inode = self._identity(temporary)
            os.rename(temporary, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self._directory)
            raise
        return inode

    def _identity(self, name: str) -> tuple[int, int]:
        status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        return status.st_dev, status.st_ino

    def withdraw(self) -> None:
        """Remove the path, if it still leads here and not to a successor; the socket stays."""
        with suppress(OSError):
            if self._identity(self._name) == self._inode:
                os.unlink(self._name, dir_fd=self._directory)
        os.close(self._directory)


class Listener:
    """Where callers come from, from the moment in which they can be served."""

    def __init__(self, path: str) -> None:
        """Listen at a path. Raises IOFailure."""
        self._listening = Listening(path, private=True)

    def accept(self) -> Caller:
        """Wait for the next caller; raises OSError once the listener is closed."""
        connection, _ = self._listening.socket.accept()
        return Caller(connection)

    def has_callers(self) -> bool:
        """Tell whether somebody waits to be accepted; nobody does once it is closed."""
        poll = select.poll()
        try:
            poll.register(self._listening.socket, select.POLLIN)
        except ValueError:
            return False
        return bool(poll.poll(0))

    def close(self) -> None:
        """Take no more callers, and wake those who wait in `accept`."""
        self._listening.withdraw()
        with suppress(OSError):
            self._listening.socket.shutdown(socket.SHUT_RDWR)
        self._listening.socket.close()


def _open_directory(path: str, *, private: bool) -> int:
    os.makedirs(path, 0o700 if private else 0o750, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if private:
        os.fchmod(directory, 0o700)
    return directory
