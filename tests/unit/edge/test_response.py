"""Reading one HTTP answer: every way to say how long a body is, and what is no answer at all.

http.client is the oracle for what is well formed.
"""

from __future__ import annotations

import http.client
import io
from typing import BinaryIO

import pytest

from istio_cni.edge.kube.response import (
    HEADERS_MAX,
    INTERIM_MAX,
    LINE_MAX_BYTES,
    Answer,
    read_answer,
)

OK = b"HTTP/1.1 200 OK\r\n"
LIMIT = 1000


class OneByteAtATime(io.RawIOBase):
    """A stream of which a read brings one byte, as a slow server's."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = iter(data)

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # callers pass one
        """Bring the next byte, if there is one."""
        for octet in self._data:
            buffer[0] = octet
            return 1
        return 0


class FakeSocket:
    """What http.client asks of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> BinaryIO:
        """Return the stream."""
        return io.BytesIO(self._data)


def read(data: bytes) -> Answer:
    """Read an answer that comes at once."""
    return read_answer(io.BytesIO(data), LIMIT)


@pytest.mark.parametrize(
    "data",
    [
        OK + b"Content-Length: 4\r\n\r\nbody",
        OK + b"Content-Length: 0\r\n\r\n",
        OK + b"content-length:4\r\n\r\nbody and more",
        OK + b"\r\nbody",
        OK + b"\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nbod\r\n1\r\ny\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: Chunked\r\n\r\n0004;name=value\r\nbody\r\n000\r\nX: y\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\nA\r\n0123456789\r\n0\r\n\r\n",
        OK.replace(b"\r", b"") + b"Content-Length: 4\n\nbody",
        OK + b"X-Long: " + b"x" * 60000 + b"\r\nContent-Length: 4\r\n\r\nbody",
        OK + b"X-Folded: one\r\n two\r\nContent-Length: 4\r\n\r\nbody",
        OK + b"X: \xff\xfe\r\nContent-Length: 4\r\n\r\nb\xffdy",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.0 503 \r\nRetry-After:  7\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 404\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 4\r\n\r\nbody",
    ],
)
def test_what_is_well_formed_is_read_as_the_library_reads_it(data: bytes) -> None:
    """Whether it comes at once or byte by byte."""
    oracle = http.client.HTTPResponse(FakeSocket(data))  # type: ignore[arg-type] # all it needs
    oracle.begin()
    expected = oracle.status, oracle.read(), oracle.getheader("Retry-After") or ""
    slow = read_answer(io.BufferedReader(OneByteAtATime(data)), LIMIT)
    for answer in (read(data), slow):
        assert (answer.status, answer.body, answer.retry_after) == expected


def test_all_interim_answers_are_passed_over() -> None:
    """With their headers, which are not the answer's."""
    hints = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 9\r\n\r\n"
    answer = read(hints * INTERIM_MAX + OK + b"\r\nbody")
    assert (answer.status, answer.body, answer.retry_after) == (200, b"body", "")


def test_a_length_may_be_repeated() -> None:
    """As long as it is the same one."""
    assert read(OK + b"Content-Length: 4\r\nContent-Length: 4, 4\r\n\r\nbody").body == b"body"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5000\r\n\r\n",
        b"\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n1388\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n3e7\r\n" + b"x" * 999 + b"\r\n999\r\n",
    ],
    ids=["length", "to the end", "one chunk", "chunks"],
)
def test_a_body_beyond_the_limit_is_not_read_to_its_end(head: bytes) -> None:
    """One byte too many tells."""
    stream = io.BytesIO(OK + head + b"x" * 5000)
    assert read_answer(stream, LIMIT).body == b"x" * (LIMIT + 1)
    assert stream.read(1)


def test_a_body_of_just_the_limit_is_whole() -> None:
    """It is not taken for one beyond."""
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n"
    assert len(read(chunked).body) == LIMIT


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 200", "closed"),
        (OK + b"Content-Length: 4\r\n", "closed"),
        (OK + b"Content-Length: 4\r\n\r\nbod", "closed"),
        (CHUNKED + b"4\r\nbody\r\n", "closed"),
        (CHUNKED + b"4\r\nbo", "closed"),
        (CHUNKED + b"4\r\nbody!\r\n0\r\n\r\n", "longer"),
        (CHUNKED + b"-4\r\nbody\r\n0\r\n\r\n", "no number"),
        (CHUNKED + b"0x4\r\nbody\r\n0\r\n\r\n", "no number"),
        (CHUNKED + b"\r\n", "no number"),
        (CHUNKED + b"1" * 17 + b"\r\n", "no number"),
        (OK + b"Content-Length: four\r\n\r\nbody", "no number"),
        (OK + b"Content-Length: +4\r\n\r\nbody", "no number"),
        (OK + b"Content-Length: 4\r\nContent-Length: 3\r\n\r\nbody", "several lengths"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "not offered"),
        (OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n", "not offered"),
        (OK + b"no header\r\n\r\n", "header line"),
        (OK + b"Name : value\r\n\r\n", "header line"),
        (OK + b" folded: first\r\n\r\n", "header line"),
        (OK + b": value\r\n\r\n", "header line"),
        (OK + b"X: y\r\n" * (HEADERS_MAX + 1) + b"\r\n", "header lines"),
        (OK + b"X: " + b"y" * LINE_MAX_BYTES + b"\r\n\r\n", "a line of more"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * (INTERIM_MAX + 1) + OK + b"\r\n", "status 100"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "status 101"),
        (b"HTTP/2 200\r\n\r\n", "begin"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "begin"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "begin"),
        (b"HTTP/1.1 099 OK\r\n\r\n", "begin"),
        (b"HTTP/1.1\r\n\r\n", "begin"),
        (b"\x15\x03\x01\x00\x02\x02\x16\n", "begin"),
    ],
)
def test_anything_else_is_no_answer(data: bytes, why: str) -> None:
    """Such a connection counts as broken: the look-up is tried again."""
    with pytest.raises(ConnectionError, match=f"^no whole HTTP answer: .*{why}"):
        read(data)
