"""What comes from an API server that is asked for pods: pages, events, refusals.

Nothing is skipped. An event that cannot be read may have been the end of a pod, and whoever goes on
behind it would keep that pod for good; so whatever is not understood ends the stream, by an error
that says how to go on: from the last version, or from a new list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from istio_cni.errors import TryAgainLater, quoted

WHAT = "the pods of this node are not to be had"
PAGE_MAX_BYTES = 64 * 1024 * 1024
LINE_MAX_BYTES = 8 * 1024 * 1024  # etcd refuses objects beyond 1.5 MiB
EVENTS = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK")

JSON = dict[str, object]


class ServerTrouble(TryAgainLater):
    """The server gave no answer that is of use; it may have said after how many seconds to come."""

    def __init__(self, msg: str, retry_after_s: float = 0.0) -> None:
        super().__init__(msg)
        self.retry_after_s = retry_after_s


class Expired(ServerTrouble):
    """What was to be continued is no longer known (410): list anew."""


class Unauthorized(ServerTrouble):
    """The token is not accepted (401): there may be another one in its place by now."""


class Silent(ServerTrouble):
    """An answer had begun, and nothing came any more: the other end may be gone without a word."""


class Garbled(ServerTrouble):
    """Something came that is no event or no page: what it was is lost, so list anew."""


class Event(NamedTuple):
    """One of EVENTS; `pod` is as the server has it, `version` what to continue from."""

    kind: str
    pod: JSON
    version: str


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield whole lines, none of them longer than LINE_MAX_BYTES."""
    begun = bytearray()
    for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            line = bytes(begun + end)
            begun.clear()
            if line.strip():
                yield line
        begun += rest
        if len(begun) > LINE_MAX_BYTES:
            raise Garbled(f"{WHAT}: an event of more than {LINE_MAX_BYTES} bytes")
    if begun.strip():
        raise ServerTrouble(f"{WHAT}: the connection was closed in the middle of an event")


def whole(pieces: Iterable[bytes]) -> bytearray:
    """Return a body of at most PAGE_MAX_BYTES."""
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > PAGE_MAX_BYTES:
            raise Garbled(f"{WHAT}: a list of more than {PAGE_MAX_BYTES} bytes")
    return body


def event(line: bytes) -> Event:
    """Read one event. Raises what it says in an event of type ERROR, or Garbled."""
    document = _object(line)
    kind, pod = document.get("type"), document.get("object")
    if kind == "ERROR" and isinstance(pod, dict):
        raise _trouble(pod.get("code"), pod)
    if not isinstance(kind, str) or kind not in EVENTS or not isinstance(pod, dict):
        raise Garbled(f"{WHAT}: an event of type {quoted(kind)}")
    metadata = _metadata(pod) if kind == "BOOKMARK" else _metadata(pod, "name", "namespace")
    return Event(kind, pod, version(metadata))


def page(body: bytes | bytearray) -> tuple[JSON, list[JSON]]:
    """Read one page of a list: its metadata and its pods."""
    document = _object(body)
    metadata, items = _metadata(document), document.get("items")
    if items is None:  # Go's empty list
        items = []
    if not isinstance(items, list):
        raise Garbled(f"{WHAT}: a list without items")
    for item in items:
        _metadata(item, "name", "namespace")
    return metadata, items


def _object(text: bytes | bytearray) -> JSON:
    try:
        document = json.loads(text, object_hook=_slim)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise Garbled(f"{WHAT}: an answer that is no JSON object")
    return document


def _slim(found: JSON) -> JSON:
    """Let go of the bulk of a pod as soon as it is read: a page in memory costs a tenth then."""
    if isinstance(found.get("managedFields"), list):
        del found["managedFields"]
    if isinstance(found.get("status"), dict):  # a label of that name is a string
        del found["status"]
    return found


def _metadata(document: object, *names: str) -> JSON:
    """Return the metadata of an object, in which `names` are not empty."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(metadata, dict):
        raise Garbled(f"{WHAT}: an object without metadata")
    for name in names:
        if not isinstance(metadata.get(name), str) or not metadata[name]:
            raise Garbled(f"{WHAT}: an object without {name}")
    return metadata


def version(metadata: JSON) -> str:
    """Return the resource version; "" and "0" would let a watch begin anywhere."""
    version = metadata.get("resourceVersion")
    if not isinstance(version, str) or version in ("", "0"):
        raise Garbled(f"{WHAT}: resourceVersion {quoted(version)}")
    return version


def refusal(code: int, body: bytes, retry_after: str, token: str) -> ServerTrouble:
    """Make the error for a status that is not 200; `token` is what it must not show."""
    try:
        status = json.loads(body.replace(token.encode(), b"<token>"))
    except (ValueError, RecursionError):
        status = None
    is_number = retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 9
    wait_s = float(retry_after) if is_number else 0.0
    return _trouble(code, status if isinstance(status, dict) else {}, wait_s)


def _trouble(code: object, status: JSON, retry_after_s: float = 0.0) -> ServerTrouble:
    """Make the error that a Status object, of a refusal or in a stream, stands for."""
    shown = f"{WHAT}: HTTP {quoted(code)}: {quoted(status.get('message') or '')}"
    if code == 401:
        return Unauthorized(shown, retry_after_s)
    if code == 403:
        shown = f"{shown}; allow this pod's account to list and watch pods"
    if code == 410 or status.get("reason") in ("Expired", "Gone") or _is_ahead(status):
        return Expired(shown, retry_after_s)
    return ServerTrouble(shown, retry_after_s)


def _is_ahead(status: JSON) -> bool:
    """Whether the server has not got as far as our version: it may be back from a backup."""
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return isinstance(causes, list) and any(
        isinstance(cause, dict) and cause.get("reason") == "ResourceVersionTooLarge"
        for cause in causes
    )
