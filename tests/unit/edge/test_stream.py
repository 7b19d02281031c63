"""Pages, events and refusals of an API server: what cannot be read is never skipped."""

from __future__ import annotations

import json

import pytest

from istio_cni.edge.kube import stream
from istio_cni.edge.kube.stream import Event, Expired, Garbled, ServerTrouble, Unauthorized

POD = {"metadata": {"namespace": "shop", "name": "web", "resourceVersion": "7"}}


def line(kind: object, about: object) -> bytes:
    """Write an event."""
    return json.dumps({"type": kind, "object": about}).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_lines_do_not_depend_on_how_they_come(size: int) -> None:
    """A letter of several bytes may be torn apart, and empty lines are none."""
    text = 'one\n\n"ü"\n{}\r\n'.encode()
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    assert list(stream.lines(pieces)) == [b"one", '"ü"'.encode(), b"{}\r"]


def test_half_a_line_is_no_end() -> None:
    """What was before it counts."""
    found = stream.lines([b"one\ntw"])
    assert next(found) == b"one"
    with pytest.raises(ServerTrouble, match="in the middle of an event"):
        next(found)


def test_a_line_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it ends or not."""
    monkeypatch.setattr(stream, "LINE_MAX_BYTES", 10)
    assert list(stream.lines([b"0123456", b"789\n"])) == [b"0123456789"]
    with pytest.raises(Garbled, match="more than 10 bytes"):
        list(stream.lines([b"0123456", b"7890"]))


def test_a_page_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in memory as a whole."""
    monkeypatch.setattr(stream, "PAGE_MAX_BYTES", 4)
    assert stream.whole([b"01", b"23"]) == b"0123"
    with pytest.raises(Garbled, match="more than 4 bytes"):
        stream.whole([b"01", b"234"])


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
def test_an_event_of_a_pod(kind: str) -> None:
    """With the version to go on from."""
    assert stream.event(line(kind, POD)) == Event(kind, POD, "7")


def test_a_bookmark_has_a_version_only() -> None:
    """No name, no namespace."""
    about = {"kind": "Pod", "metadata": {"resourceVersion": "9"}, "spec": {"containers": None}}
    assert stream.event(line("BOOKMARK", about)).version == "9"


@pytest.mark.parametrize(
    "text",
    [
        *(b"{", b"\xff\xfe", b"[]", b"null", b"17", b"{}", b"[" * 100_000),
        *(line("RENAMED", POD), line(None, POD), line(["ADDED"], POD), line("ADDED", None)),
        *(line("ADDED", {}), line("ADDED", {"metadata": []}), line("ERROR", None)),
        line("DELETED", {"metadata": {"namespace": "shop", "name": "web"}}),
        line("DELETED", {"metadata": POD["metadata"] | {"resourceVersion": 7}}),
        line("DELETED", {"metadata": POD["metadata"] | {"resourceVersion": "0"}}),
        line("DELETED", {"metadata": POD["metadata"] | {"name": ""}}),
        line("DELETED", {"metadata": POD["metadata"] | {"namespace": None}}),
        line("BOOKMARK", {"metadata": {}}),
    ],
)
def test_what_is_no_event_ends_the_stream(text: bytes) -> None:
    """It may have been the end of a pod."""
    with pytest.raises(Garbled) as failure:
        stream.event(text)
    assert "\n" not in failure.value.msg


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ({"code": 410, "reason": "Expired"}, Expired),
        ({"code": 410}, Expired),
        ({"reason": "Gone"}, Expired),
        ({"code": 504, "details": {"causes": [{"reason": "ResourceVersionTooLarge"}]}}, Expired),
        ({"code": 504, "details": {"causes": [None]}}, ServerTrouble),
        ({"code": 504, "details": []}, ServerTrouble),
        ({"code": 401}, Unauthorized),
        ({"code": 403}, ServerTrouble),
        ({"code": 500, "message": "no\nmore"}, ServerTrouble),
        ({}, ServerTrouble),
    ],
)
def test_an_error_in_the_stream_says_how_to_go_on(
    status: dict[str, object], error: type[Exception]
) -> None:
    """By its code, or where a server leaves that out by its reason."""
    with pytest.raises(ServerTrouble) as failure:
        stream.event(line("ERROR", status))
    assert type(failure.value) is error
    assert "\n" not in failure.value.msg


@pytest.mark.parametrize(
    ("wait", "wait_s"), [("3", 3), ("", 0), ("-1", 0), ("Wed, 21 Oct 2026", 0), ("9" * 400, 0)]
)
def test_a_refusal_may_say_when_to_come_back(wait: str, wait_s: float) -> None:
    """In seconds; a date is not for us."""
    assert stream.refusal(429, b"{}", wait, "t").retry_after_s == wait_s


@pytest.mark.parametrize(
    "body", [b'{"message": "bearer SECRET is bad"}', b"<html>SECRET", b'"SECRET"', b"", b"\xff"]
)
def test_a_refusal_shows_no_token(body: bytes) -> None:
    """Whatever the server says."""
    error = stream.refusal(401, body, "", "SECRET")
    assert isinstance(error, Unauthorized)
    assert "SECRET" not in error.msg
    assert "HTTP 401" in error.msg


def test_a_page_is_metadata_and_items() -> None:
    """An empty list may be null."""
    about = {"resourceVersion": "7"}
    assert stream.page(json.dumps({"metadata": about, "items": [POD]}).encode()) == (about, [POD])
    assert stream.page(json.dumps({"metadata": about, "items": None}).encode()) == (about, [])


@pytest.mark.parametrize(
    "page",
    [
        {"items": []},
        {"metadata": {}, "items": {}},
        {"metadata": {}, "items": [1]},
        {"metadata": {}, "items": [{"metadata": {"name": "web"}}]},
    ],
)
def test_what_is_no_page_is_refused(page: object) -> None:
    """As a whole: a list without one of its pods would be wrong."""
    with pytest.raises(Garbled):
        stream.page(json.dumps(page).encode())


def test_the_bulk_of_a_pod_is_let_go_while_it_is_read() -> None:
    """A label or an annotation of such a name is not meant."""
    metadata = {**POD["metadata"], "labels": {"status": "x", "managedFields": "x"}}
    bulk = {"metadata": {**metadata, "managedFields": [{}]}, "spec": {}, "status": {"phase": "x"}}
    assert stream.event(line("ADDED", bulk)).pod == {"metadata": metadata, "spec": {}}
