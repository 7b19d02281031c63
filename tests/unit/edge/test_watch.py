"""Lists and watches of one node's pods, against a server of the real protocol over TLS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from fake_apiserver import FakeApiServer, Reply
from fake_watch import NODE, FakeWatchServer, Order, serving_pods, until
from istio_cni.edge.kube import stream
from istio_cni.edge.kube.stream import Event, Expired, Garbled, ServerTrouble, Silent, Unauthorized
from istio_cni.edge.kube.watch import NodePods, Patience
from istio_cni.errors import KubeconfigUnusable

QUICK = Patience(connect_s=0.5, answer_s=0.3, list_s=1.0, idle_s=0.2, watch_s=60.0)
PATIENT = Patience(connect_s=5.0, answer_s=5.0, list_s=10.0, idle_s=5.0, watch_s=60.0)
Make = Callable[..., NodePods]


@pytest.fixture
def server() -> Iterator[FakeWatchServer]:
    """Serve three pods of this node and one of another."""
    with serving_pods() as server:
        yield server


@pytest.fixture
def make(server: FakeWatchServer, tmp_path: Path) -> Make:
    """Make what asks this server."""

    def make(patience: Patience = PATIENT, **keys: Any) -> NodePods:
        return NodePods(
            str(tmp_path), server.write_account(tmp_path), NODE, patience=patience, **keys
        )

    return make


def name(pod: dict[str, Any]) -> str:
    """Return a pod's name."""
    return str(pod["metadata"]["name"])


def test_only_this_nodes_pods_are_listed(server: FakeWatchServer, make: Make) -> None:
    """The selector goes to the server; the newest state is asked for, not any."""
    assert make().list_pods(name) == ("104", ["a", "b", "c"])
    (query,) = server.asked()
    assert query == {"fieldSelector": "spec.nodeName=node-1", "limit": "128"}
    headers = server.requests[0].headers
    assert headers["user-agent"].startswith("istio-cni/")
    assert "accept-encoding" not in headers or headers["accept-encoding"] == "identity"


def test_a_list_comes_in_pages(server: FakeWatchServer, make: Make) -> None:
    """All of the first one's version, whatever happens meanwhile."""
    server.script.extend([Reply(), Reply(before=lambda: server.delete("shop", "c"))])
    assert make(page_pods=2).list_pods(name) == ("104", ["a", "b", "c"])
    assert [query.get("continue") for query in server.asked()] == [None, "104:2"]


def test_a_list_that_expires_between_pages_is_asked_for_in_one(
    server: FakeWatchServer, make: Make
) -> None:
    """What the first page had may be gone."""

    def change() -> None:
        server.delete("shop", "a")
        server.compact()

    server.script.extend([Reply(), Reply(before=change)])
    assert make(page_pods=2).list_pods(name) == ("106", ["b", "c"])
    assert [query.get("limit") for query in server.asked()] == ["2", "2", None]


def test_no_node_is_refused() -> None:
    """It would mean all pods that have none."""
    with pytest.raises(ValueError, match="no node"):
        NodePods("/", {}, "")


def test_a_watch_goes_on_from_a_version(server: FakeWatchServer, make: Make) -> None:
    """And begins with the news that the server has agreed."""
    server.delete("shop", "a")
    server.delete("shop", "d")
    server.orders.append([Order("bookmark"), Order("end")])
    begin, event, *rest = make().watch_pods("104")
    assert begin == Event("BOOKMARK", {}, "104")
    assert (event.kind, name(event.pod), event.version) == ("DELETED", "a", "105")
    assert rest == [Event("BOOKMARK", {"metadata": {"resourceVersion": "106"}}, "106")]
    (query,) = server.asked()
    assert 54 <= int(query.pop("timeoutSeconds")) <= 66
    assert query == {
        "fieldSelector": "spec.nodeName=node-1",
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "104",
    }


def test_the_server_ends_a_stream_in_time(make: Make) -> None:
    """It is told when."""
    assert len(list(make(PATIENT._replace(watch_s=0.01)).watch_pods("104"))) == 1


@pytest.mark.parametrize("in_stream", [False, True])
def test_an_old_version_has_expired(server: FakeWatchServer, make: Make, in_stream: bool) -> None:
    """As a status, or as an event of a stream."""
    server.gone_in_stream = in_stream
    server.compact()
    with pytest.raises(Expired, match="HTTP 410"):
        list(make().watch_pods("104"))


@pytest.mark.parametrize(
    ("order", "error", "said"),
    [
        (Order("torn"), ServerTrouble, "in the middle of an event"),
        (Order("reset"), ServerTrouble, "reset|closed|broken|violation|EOF"),
        (Order("mute"), Silent, "no byte for"),
        (Order("raw", b"<html>\n"), Garbled, "no JSON object"),
        (Order("raw", b"x" * 3000), Garbled, "more than 2048 bytes"),
        (Order("raw", b'{"type":"NEW","object":{}}\n'), Garbled, 'type "NEW"'),
    ],
)
def test_a_stream_that_goes_wrong_says_how(
    server: FakeWatchServer,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    order: Order,
    error: type[Exception],
    said: str,
) -> None:
    """On one line, in time; the next one is another connection."""
    monkeypatch.setattr(stream, "LINE_MAX_BYTES", 2048)
    server.orders.append([order])
    patience = QUICK if order.kind == "mute" else PATIENT
    with pytest.raises(ServerTrouble, match=said) as failure:
        list(make(patience).watch_pods("104"))
    assert type(failure.value) is error
    assert "\n" not in failure.value.msg
    assert "token-1" not in failure.value.msg
    server.orders.append([Order("end")])
    assert len(list(make().watch_pods("104"))) == 1


REPLIES = [
    (Reply(401), Unauthorized, "HTTP 401"),
    (Reply(403, "no"), ServerTrouble, 'HTTP 403: "no"; allow'),
    (Reply(410), Expired, "HTTP 410"),
    (Reply(429, headers={"Retry-After": "7"}), ServerTrouble, "HTTP 429"),
    (Reply(500, "broken"), ServerTrouble, 'HTTP 500: "broken"'),
    (Reply(503, body=b"<html>"), ServerTrouble, "HTTP 503"),
    (Reply(fault="reset"), ServerTrouble, "reset|closed|aborted|broken|EOF"),
    (Reply(fault="hang"), ServerTrouble, "no byte for"),
]


@pytest.mark.parametrize("watching", [False, True])
@pytest.mark.parametrize(("reply", "error", "said"), REPLIES)
def test_every_refusal_has_a_name(
    server: FakeWatchServer,
    make: Make,
    watching: bool,
    reply: Reply,
    error: type[Exception],
    said: str,
) -> None:
    """One line, no token, one request: who comes back is decided elsewhere."""
    server.always = reply
    pods = make(QUICK if reply.fault == "hang" else PATIENT)
    with pytest.raises(ServerTrouble, match=said) as failure:
        list(pods.watch_pods("104")) if watching else pods.list_pods(name)
    assert type(failure.value) is error
    assert failure.value.retry_after_s == (7 if reply.status == 429 else 0)
    assert "\n" not in failure.value.msg
    assert "token-1" not in failure.value.msg
    expired_list = error is Expired and not watching
    assert len(server.requests) == 1 + expired_list


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(fault="cut"), ServerTrouble),
        (Reply(fault="dribble"), ServerTrouble),
        (Reply(200, body=b"{}"), Garbled),
        (Reply(200, body=b'{"metadata": {}, "items": []}'), Garbled),
    ],
)
def test_a_list_that_is_none(
    server: FakeWatchServer, make: Make, reply: Reply, error: type[Exception]
) -> None:
    """Half of it, one that takes too long, something else."""
    server.always = reply
    with pytest.raises(ServerTrouble) as failure:
        make(PATIENT._replace(list_s=0.5)).list_pods(name)
    assert type(failure.value) is error


def test_a_redirect_gets_no_token(server: FakeWatchServer, make: Make) -> None:
    """It is not followed."""
    with FakeApiServer() as other:
        server.always = Reply(307, headers={"Location": f"{other.url}/api/v1/pods"})
        with pytest.raises(ServerTrouble, match="HTTP 307"):
            make().list_pods(name)
        assert other.requests == []


def test_a_server_that_is_gone_or_mute(server: FakeWatchServer, make: Make) -> None:
    """Not even TLS."""
    pods = make(QUICK)
    server.mute = True
    with pytest.raises(ServerTrouble, match="no byte for"):
        pods.list_pods(name)
    server.stop()
    try:
        with pytest.raises(ServerTrouble, match="refused"):
            list(pods.watch_pods("104"))
    finally:
        server.start()


def test_credentials_are_read_for_each_request(
    server: FakeWatchServer, make: Make, tmp_path: Path
) -> None:
    """The kubelet rotates them; none at all are named, another authority's are no use."""
    pods = make()
    server.tokens = {"token-9"}
    with pytest.raises(Unauthorized):
        pods.list_pods(name)
    server.write_account(tmp_path, "token-9\n")
    assert pods.list_pods(name)[1] == ["a", "b", "c"]
    (tmp_path / "token").unlink()
    with pytest.raises(KubeconfigUnusable, match="credentials"):
        pods.list_pods(name)
    server.write_account(tmp_path, "token-9")
    (tmp_path / "ca.crt").write_text(Authority("another").certificate)
    with pytest.raises(ServerTrouble, match="certificate"):
        pods.list_pods(name)


def test_interruption_ends_a_silent_stream_at_once(server: FakeWatchServer, make: Make) -> None:
    """Whoever waits gets an error; whoever comes later, too."""
    pods = make(PATIENT._replace(idle_s=30.0))
    errors: list[ServerTrouble] = []

    def watch() -> None:
        try:
            list(pods.watch_pods("104"))
        except ServerTrouble as error:
            errors.append(error)

    server.orders.append([Order("mute")])
    thread = threading.Thread(target=watch)
    thread.start()
    until(lambda: server.streams and pods._answer)  # noqa: SLF001 – it waits from there on
    began = time.monotonic()
    pods.interrupt()
    thread.join(5)
    assert not thread.is_alive()
    assert time.monotonic() - began < 1
    assert len(errors) == 1
    with pytest.raises(ServerTrouble, match="interrupted"):
        pods.list_pods(name)
