"""The cache of this node's pods, following a server of the real protocol over TLS."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_apiserver import Reply
from fake_watch import NODE, FakeWatchServer, Order, pod, serving_pods, until
from istio_cni.agent.pods import Pace, Pauses, PodCache
from istio_cni.edge import kube
from istio_cni.edge.kube import stream
from istio_cni.edge.kube.stream import Expired, Garbled, ServerTrouble, Silent, Unauthorized
from istio_cni.edge.kube.watch import NodePods, Patience
from istio_cni.errors import KubeconfigUnusable
from istio_cni.plugin.identity import is_same_pod

PATIENCE = Patience(connect_s=1.0, answer_s=1.0, list_s=5.0, idle_s=10.0, watch_s=60.0)
PACE = Pace(first_s=0.005, most_s=0.02, lasting_s=0.0)
Start = Callable[..., PodCache]

# ssl.SSLSocket leaves a socket open whose peer went before the handshake
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def server() -> Iterator[FakeWatchServer]:
    """Serve three pods of this node and one of another."""
    with serving_pods() as server:
        yield server


@pytest.fixture
def start(server: FakeWatchServer, tmp_path: Path) -> Iterator[Start]:
    """Start a cache; it is stopped in the end."""
    caches: list[PodCache] = []

    def start(pace: Pace = PACE, **patience: Any) -> PodCache:
        env = server.write_account(tmp_path)
        source = NodePods(str(tmp_path), env, NODE, patience=PATIENCE._replace(**patience))
        caches.append(PodCache(source, pace=pace))
        caches[-1].start()
        return caches[-1]

    yield start
    for cache in caches:
        cache.stop()


def has(cache: PodCache, name: str) -> bool:
    """Whether the cache has a pod."""
    return cache.find("shop", name, f"uid-{name}") is not None


def lists(server: FakeWatchServer) -> int:
    """Count the lists that were asked for."""
    return sum("watch" not in query for query in server.asked())


def watches(server: FakeWatchServer) -> list[str]:
    """Return the versions that were watched from."""
    return [query["resourceVersion"] for query in server.asked() if "watch" in query]


def test_the_nodes_own_pods_are_listed_and_watched(server: FakeWatchServer, start: Start) -> None:
    """And no other one is asked for."""
    cache = start()
    until(lambda: not cache.trouble)
    assert cache.is_synced
    assert cache.size == 3
    assert has(cache, "a")
    assert not has(cache, "d")
    server.put(pod("shop", "e", "uid-e"))
    server.put(pod("shop", "f", "uid-f", node="node-2"))
    server.put(pod("shop", "a", "uid-a", _inject="false"))
    server.delete("shop", "b")
    until(lambda: has(cache, "e") and not has(cache, "b"))
    found = cache.find("shop", "a", "uid-a")
    assert found is not None
    assert found.annotations == {"sidecar.istio.io/inject": "false"}
    assert cache.size == 3
    assert lists(server) == 1
    assert watches(server) == ["104"]
    assert server.objects_sent == 6


def test_before_the_first_list_nothing_is_known(server: FakeWatchServer, start: Start) -> None:
    """Which is said."""
    server.always = Reply(500, "not yet")
    cache = start()
    assert not cache.is_synced
    assert cache.age_s == float("inf")
    until(lambda: "not yet" in cache.trouble)
    assert not has(cache, "a")
    server.always = Reply()
    until(lambda: not cache.trouble)
    assert has(cache, "a")
    assert cache.age_s < 5


@pytest.mark.parametrize("uid", ["", "uid-b", "uid-of-a-former-pod"])
def test_only_the_very_pod_is_found(start: Start, uid: str) -> None:
    """Not a former or later one of its name; and none at all for who does not know the uid."""
    cache = start()
    until(lambda: not cache.trouble)
    assert cache.find("shop", "a", uid) is None
    assert cache.find("default", "a", "uid-a") is None


def test_a_static_pod_is_found_by_the_kubelets_uid(server: FakeWatchServer, start: Start) -> None:
    """The mirror's own is another."""
    mirror = pod("shop", "static", "uid-of-mirror", **{"kubernetes.io/config.mirror": "uid-static"})
    server.put(mirror)
    cache = start()
    until(lambda: not cache.trouble)
    assert has(cache, "static")
    assert cache.find("shop", "static", "uid-of-mirror") is not None


def test_a_pod_that_has_ended_stays_until_it_is_deleted(
    server: FakeWatchServer, start: Start
) -> None:
    """Its sandbox may be asked about still."""
    cache = start()
    until(lambda: not cache.trouble)
    server.put(pod("shop", "a", "uid-a") | {"status": {"phase": "Succeeded"}})
    server.put(pod("shop", "e", "uid-e"))
    until(lambda: has(cache, "e"))
    assert has(cache, "a")


def test_a_pod_that_the_watch_has_not_delivered_is_one_get(
    server: FakeWatchServer, start: Start, tmp_path: Path
) -> None:
    """Of that pod, with the plugin's kubeconfig."""
    cache = start()
    until(lambda: not cache.trouble)
    server.order(Order("mute"))
    server.put(pod("shop", "new", "uid-new"))
    before = len(server.requests)
    assert cache.find("shop", "new", "uid-new") is None
    kubeconfig = str(tmp_path / "kubeconfig")
    server.write_kubeconfig(kubeconfig)
    found: Any = kube.fetch_pod(
        kubeconfig, "shop", "new", time.monotonic() + 5, lambda pod: is_same_pod(pod, "uid-new")
    )
    assert found["metadata"]["uid"] == "uid-new"
    (request,) = server.requests[before:]
    assert (request.method, request.path) == ("GET", "/api/v1/namespaces/shop/pods/new")


ENDS = [
    Order("end"),
    Order("torn"),
    Order("reset"),
    Order("mute"),
    Order("gone"),
    Order("raw", b"garbage\n"),
    Order("raw", b"x" * 70_000),
    Order("raw", b'{"type":"DELETED","object":{}}\n'),
]


@pytest.mark.parametrize("order", ENDS, ids=lambda order: f"{order.kind} {order.raw[:9].decode()}")
def test_no_end_of_a_stream_loses_a_delete(
    server: FakeWatchServer, start: Start, monkeypatch: pytest.MonkeyPatch, order: Order
) -> None:
    """What happened behind the end comes with the next stream, or the next list."""
    monkeypatch.setattr(stream, "LINE_MAX_BYTES", 65536)
    cache = start(idle_s=0.3 if order.kind == "mute" else 10.0)
    until(lambda: server.streams)
    server.delete("shop", "a")
    until(lambda: not has(cache, "a"))
    with server.changed:
        server.order(order)
        server.delete("shop", "b")
        server.put(pod("shop", "e", "uid-e"))
    until(lambda: has(cache, "e"))
    assert not has(cache, "b")
    assert cache.size == 2
    until(lambda: len(watches(server)) > 1)
    anew = order.kind in ("gone", "raw")
    assert lists(server) == 1 + anew
    assert watches(server)[:2] == ["104", "107" if anew else "105"]


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_version_that_has_expired_is_listed_anew_at_once(
    server: FakeWatchServer, start: Start, in_stream: bool
) -> None:
    """What has vanished meanwhile goes, what was added twice is there once."""
    server.gone_in_stream = in_stream
    cache = start(Pace(first_s=60.0, most_s=60.0, lasting_s=0.0))
    until(lambda: server.streams)
    with server.changed:
        server.order(Order("end"))
        server.delete("shop", "a")
        server.put(pod("shop", "e", "uid-e"))
        server.compact()
        server.orders.append([])
    until(lambda: has(cache, "e"))
    assert not has(cache, "a")
    assert lists(server) == 2
    server.put(pod("shop", "e", "uid-e"))
    server.delete("shop", "b")
    until(lambda: not has(cache, "b"))
    assert cache.size == 2


def test_bookmarks_keep_the_version_fresh(server: FakeWatchServer, start: Start) -> None:
    """So that a quiet node does not have to list anew."""
    cache = start()
    until(lambda: server.streams)
    server.put(pod("shop", "f", "uid-f", node="node-2"))
    server.compact()
    server.order(Order("bookmark"))
    server.order(Order("end"))
    until(lambda: len(watches(server)) == 2)
    assert watches(server) == ["104", "106"]
    server.delete("shop", "a")
    until(lambda: not has(cache, "a"))
    assert lists(server) == 1


def test_a_token_that_was_replaced_is_read_at_once(
    server: FakeWatchServer, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a pause or a line in the log."""
    caplog.set_level(logging.INFO)
    cache = start(Pace(first_s=60.0, most_s=60.0, lasting_s=0.0))
    until(lambda: not cache.trouble)
    server.tokens = {"token-2"}
    server.script.append(Reply(401, before=lambda: server.write_account(tmp_path, "token-2")))
    server.order(Order("end"))
    server.delete("shop", "a")
    until(lambda: not has(cache, "a"))
    assert len(server.requests) == 4
    assert lists(server) == 1
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


def test_a_token_that_stays_wrong_is_no_reason_to_storm(
    server: FakeWatchServer, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once at once, then more and more seldom; the cache goes on answering; one warning."""
    cache = start()
    until(lambda: not cache.trouble)
    server.tokens = {"token-2"}
    server.order(Order("end"))
    until(lambda: len(server.requests) > 6)
    assert "HTTP 401" in cache.trouble
    assert has(cache, "a")
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    server.write_account(tmp_path, "token-2")
    server.delete("shop", "a")
    until(lambda: not has(cache, "a"))
    until(lambda: not cache.trouble)
    assert "token-" not in caplog.text


@pytest.mark.parametrize("reply", [Reply(429), Reply(500), Reply(504), Reply(fault="reset")])
def test_a_server_in_trouble_is_tried_again(
    server: FakeWatchServer, start: Start, reply: Reply
) -> None:
    """From the same version; no new list."""
    cache = start()
    until(lambda: server.streams)
    server.script.extend([reply] * 3)
    server.order(Order("end"))
    server.delete("shop", "a")
    until(lambda: not has(cache, "a"))
    assert lists(server) == 1
    assert watches(server) == ["104"] * 5


def test_a_server_that_was_away_is_found_again(server: FakeWatchServer, start: Start) -> None:
    """Under the same address; the cache answers meanwhile and grows older."""
    cache = start()
    until(lambda: not cache.trouble)
    server.stop()
    try:
        until(lambda: "refused" in cache.trouble)
        age_s = cache.age_s
        assert has(cache, "a")
        until(lambda: cache.age_s > age_s)
        server.delete("shop", "a")
    finally:
        server.start()
    until(lambda: not has(cache, "a"))
    assert lists(server) == 1


def test_stop_ends_a_silent_watch_at_once(server: FakeWatchServer, start: Start) -> None:
    """Nothing is asked for after that."""
    server.orders.append([Order("mute")])
    cache = start(idle_s=60.0)
    until(lambda: not cache.trouble)
    began = time.monotonic()
    cache.stop()
    assert time.monotonic() - began < 1
    cache.stop()
    assert len(server.requests) == 2
    assert not cache._thread.is_alive()  # noqa: SLF001 – there is no other way to see it


def test_stop_ends_a_pause_at_once(server: FakeWatchServer, start: Start) -> None:
    """However long the server wants to be left alone."""
    server.always = Reply(429, headers={"Retry-After": "60"})
    cache = start()
    until(lambda: "429" in cache.trouble)
    began = time.monotonic()
    cache.stop()
    assert time.monotonic() - began < 1
    assert len(server.requests) == 1


def test_stop_waits_for_a_connection_no_longer_than_told(
    server: FakeWatchServer, start: Start
) -> None:
    """A server may accept and say nothing."""
    server.mute = True
    cache = start()
    began = time.monotonic()
    cache.stop(0.05)
    assert time.monotonic() - began < 0.8


def test_a_cache_that_was_not_started_stops(tmp_path: Path) -> None:
    """Nothing happens."""
    PodCache(NodePods(str(tmp_path), {}, NODE)).stop()


def test_a_fault_of_ours_is_survived(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, and a new list is the way on."""
    with monkeypatch.context() as patch:
        patch.setattr(stream, "page", lambda _: 1 / 0)
        cache = start()
        until(lambda: "internal error: ZeroDivisionError" in cache.trouble)
    until(lambda: not cache.trouble)
    assert has(cache, "a")
    assert "internal error" in caplog.text


def test_missing_credentials_may_come(
    server: FakeWatchServer, start: Start, tmp_path: Path
) -> None:
    """They are waited for."""
    server.always = Reply(500)
    cache = start()
    (tmp_path / "token").unlink()
    server.always = Reply()
    until(lambda: "credentials" in cache.trouble)
    server.write_account(tmp_path)
    until(lambda: has(cache, "a"))


def pauses(*ends: Exception | None, jitter: float = 0.0) -> list[float]:
    """Return the pauses after ends in a row."""
    found = Pauses(Pace(), lambda: jitter)
    return [found.after(end) for end in ends]  # type: ignore[arg-type] # all are errors of ours


def test_pauses_grow() -> None:
    """From 0.2 to 30 s."""
    trouble = [ServerTrouble("x")] * 10
    first = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15.0, 15.0, 15.0]
    assert pauses(*trouble) == pytest.approx(first)
    assert pauses(*trouble, jitter=1.0) == pytest.approx([2 * each for each in first])


@pytest.mark.parametrize("end", [None, Expired("x"), Silent("x"), Unauthorized("x")])
def test_an_everyday_end_is_excused_once(end: Exception | None) -> None:
    """The second one is trouble."""
    assert pauses(end, end, end) == pytest.approx([0.0, 0.2, 0.4])
    assert pauses(ServerTrouble("x"), end, end) == pytest.approx([0.2, 0.0, 0.4])


@pytest.mark.parametrize("end", [Garbled("x"), KubeconfigUnusable("x")])
def test_other_ends_are_not_excused(end: Exception) -> None:
    """They do not go by themselves."""
    assert pauses(end) == pytest.approx([0.2])


def test_a_server_may_want_to_be_left_alone() -> None:
    """For a time, but not for days; not all nodes come back at once."""
    assert pauses(ServerTrouble("x", 7.0), jitter=0.5) == [10.5]
    assert pauses(Unauthorized("x", 7.0)) == [7.0]
    assert pauses(ServerTrouble("x", 1e6)) == [120.0]


def test_a_stream_that_lasted_settles_it() -> None:
    """As if nothing had been."""
    found = Pauses(Pace(), lambda: 0.0)
    for _ in range(5):
        found.after(ServerTrouble("x"))
        found.after(None)
    found.settle()
    assert found.after(None) == 0.0
    assert found.after(ServerTrouble("x")) == 0.2
