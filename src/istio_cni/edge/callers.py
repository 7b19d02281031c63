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

from istio_cni.errors import DecodingFailure, IOFailure, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

BACKLOG = 512  # callers that wait; the launcher of one more runs the plugin itself
DESCRIPTORS_MAX = 16  # taken from one message, to be closed
_READ_WAIT_S = 2.0  # for a whole call: its launcher sends it at once
_ANSWER_WAIT_S = 2.0
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


class Caller:
    """One connection and all the descriptors that came through it; a context manager."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(_READ_WAIT_S)
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
        raw = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(raw)[1])

    def read(self, count: int) -> bytes:
        """Read so many bytes, and take the descriptors in.

        Raises DecodingFailure if the caller leaves before, takes too long or sends too many.
        """
        data = bytearray(count)
        view, at = memoryview(data), 0
        room = socket.CMSG_SPACE(4 * DESCRIPTORS_MAX)
        while at < count:
            if time.monotonic() > self._read_ends:
                raise DecodingFailure("the call took too long to come")
            try:
                size, sent, flags, _ = self._connection.recvmsg_into(
                    [view[at:]], room, socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError as error:
                raise DecodingFailure("the call took too long to come") from error
            except OSError as error:
                raise DecodingFailure(f"the call cannot be read: {error.strerror}") from error
            for level, kind, content in sent:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._keep(content)
            if flags & socket.MSG_CTRUNC:
                raise DecodingFailure("the call came with too many descriptors")
            if size == 0:
                raise DecodingFailure("the call ended in the middle")
            at += size
        return bytes(data)

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


def has_left(connection: int) -> bool:
    """Tell whether the other end of a connection is closed."""
    poll = select.poll()
    poll.register(connection, select.POLLHUP | select.POLLRDHUP | select.POLLERR)
    return bool(poll.poll(0))


class Listener:
    """A socket that callers find by its path, from the moment in which they can be served."""

    def __init__(self, path: str) -> None:
        """Bind and listen; what had the path goes. Raises IOFailure."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._directory = _private_directory(os.path.dirname(path))
            try:
                self._bind(os.path.basename(path))
            except BaseException:
                os.close(self._directory)
                raise
        except OSError as error:
            self._socket.close()
            raise IOFailure(f"cannot listen at {quoted(path)}: {error.strerror}") from error

    def _bind(self, name: str) -> None:
        """Bind under another name first; a path would have to be short."""
        temporary = f".{name}.{os.getpid()}"
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._directory)
        self._socket.bind(f"/proc/self/fd/{self._directory}/{temporary}")
        os.chmod(temporary, 0o600, dir_fd=self._directory)
        self._socket.listen(BACKLOG)
        self._inode = os.stat(temporary, dir_fd=self._directory).st_ino
        os.rename(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def accept(self) -> Caller:
        """Wait for the next caller; raises OSError once the listener is closed."""
        connection, _ = self._socket.accept()
        return Caller(connection)

    def close(self) -> None:
        """Take no more callers, and wake those who wait in `accept`.

        The path goes if it still leads here, and not to a successor.
        """
        name = os.path.basename(self._path)
        with suppress(OSError):
            status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
            if status.st_ino == self._inode:
                os.unlink(name, dir_fd=self._directory)
        os.close(self._directory)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _private_directory(path: str) -> int:
    """Open a directory that is root's alone, made if it is missing."""
    os.makedirs(path, 0o700, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    os.fchmod(directory, 0o700)
    return directory
