"""One HTTP/1.1 answer to one GET, read from a stream whose end is the connection's.

http.client would do, but loads the whole of `email` to read a dozen headers: 8 ms for every
captured pod. What is read here is what a server may send to a request that offers no encoding, no
upgrade and no further request; what is ambiguous or beyond a limit is no answer. A body that has
ended by its own account is whole, whatever may follow.

Source: RFC 9112, sections 2.2, 4, 5, 6.3, 7.1; RFC 9110, section 15.2.
"""

from __future__ import annotations

LINE_MAX_BYTES = 65536
HEADERS_MAX = 100
INTERIM_MAX = 10  # 1xx answers before the real one
WITHOUT_BODY = (204, 304)
DIGITS = frozenset("0123456789")
HEX_DIGITS = DIGITS | frozenset("abcdefABCDEF")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


class Answer:
    """What the server said; `body` has at most one byte more than the limit it was read with."""

    __slots__ = ("body", "retry_after", "status")

    def __init__(self, status: int, body: bytes, retry_after: str) -> None:
        self.status = status
        self.body = body
        self.retry_after = retry_after


def read_answer(stream: BinaryIO, body_max_bytes: int) -> Answer:
    """Read one answer; of a body beyond the limit no more than one byte is returned.

    Raises ConnectionError when the stream ends before the answer does, or holds something else.
    """
    for _ in range(INTERIM_MAX + 1):
        status = _status(_line(stream))
        headers = _headers(stream)
        if not 100 <= status < 200:
            body = b"" if status in WITHOUT_BODY else _body(stream, headers, body_max_bytes + 1)
            return Answer(status, body, headers.get("retry-after", [""])[0])
        if status == 101:
            break
    raise _broken(f"status {status} instead of an answer")


def _broken(what: str) -> ConnectionError:
    return ConnectionError(f"no whole HTTP answer: {what}")


def _line(stream: BinaryIO) -> str:
    """Read a line without its end, which may be a bare line feed."""
    line = stream.readline(LINE_MAX_BYTES + 1)
    if len(line) > LINE_MAX_BYTES:
        raise _broken(f"a line of more than {LINE_MAX_BYTES} bytes")
    if not line.endswith(b"\n"):
        raise _broken("the connection was closed in the middle of the answer")
    return line[:-1].removesuffix(b"\r").decode("latin-1")


def _status(line: str) -> int:
    version, _, rest = line.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or len(status) != 3 or not DIGITS.issuperset(status):
        raise _broken("it does not begin as one")
    if rest[3:4] not in ("", " ") or status < "100":
        raise _broken("it does not begin as one")
    return int(status)


def _headers(stream: BinaryIO) -> dict[str, list[str]]:
    """Read the header up to the empty line: the values of each name, in lower case."""
    headers: dict[str, list[str]] = {}
    last: list[str] = []
    for _ in range(HEADERS_MAX + 1):
        line = _line(stream)
        if not line:
            return headers
        name, colon, value = line.partition(":")
        if line[0] in " \t" and last:  # the old way to go on with a value
            last[-1] = f"{last[-1]} {line.strip()}"
        elif colon and name and name == name.strip():
            last = headers.setdefault(name.lower(), [])
            last.append(value.strip())
        else:
            raise _broken("a header line that is none")
    raise _broken(f"more than {HEADERS_MAX} header lines")


def _body(stream: BinaryIO, headers: dict[str, list[str]], limit: int) -> bytes:
    """Read a body by whatever says how long it is, but no more than `limit` bytes."""
    coding = ",".join(headers.get("transfer-encoding", ())).lower()
    if coding == "chunked":  # counts more than a length
        return _chunks(stream, limit)
    if coding:
        raise _broken("a transfer encoding that was not offered")
    if "content-length" not in headers:
        return stream.read(limit)
    lengths = {text.strip() for text in ",".join(headers["content-length"]).split(",")}
    if len(lengths) > 1:
        raise _broken("several lengths")
    return _exactly(stream, min(_number(lengths.pop(), DIGITS, 10), limit))


def _chunks(stream: BinaryIO, limit: int) -> bytes:
    body = bytearray()
    while len(body) < limit:
        size = _number(_line(stream).partition(";")[0].strip(" \t"), HEX_DIGITS, 16)
        if size == 0:
            break  # trailers follow, of which none is of interest
        body += _exactly(stream, min(size, limit - len(body)))
        if len(body) < limit and _line(stream):
            raise _broken("a chunk that is longer than it says")
    return bytes(body)


def _exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise _broken("the connection was closed in the middle of the answer")
    return data


def _number(text: str, digits: frozenset[str], base: int) -> int:
    if not text or len(text) > 16 or not digits.issuperset(text):
        raise _broken("a length that is no number")
    return int(text, base)
