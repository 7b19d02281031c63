"""An API server whose pods are listed in pages and watched, and whose streams go wrong on demand.

It keeps a history by resource versions, as etcd does, so a watch goes on from where it was, until
`compact` forgets. Status codes come by `script`, as with any FakeApiServer; what a stream is to do
is an order, given to it or, in `orders`, to the next one that begins:

    with FakeWatchServer() as server:
        server.put(pod("default", "web", "1234"))
        server.orders.append([Order("torn")])
        env = server.write_account(tmp_path)
"""

from __future__ import annotations

import bisect
import copy
import json
import pathlib
import socket
import struct
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from certificates import authority
from fake_apiserver import Exchange, FakeApiServer, Pod, status_object

NODE = "node-1"
LOOK_S = 0.05  # how often a stream looks whether the server is closing


class Change(NamedTuple):
    """Something that happened to a pod, which is a copy."""

    version: int
    kind: Literal["ADDED", "MODIFIED", "DELETED"]
    pod: Pod


class Order(NamedTuple):
    """What a stream is to do: send `raw` bytes, a "bookmark" or "gone", an event with code 410.

    Or how it is to end: in an orderly way, "torn" in the middle of a line, with a "reset" there; or
    "mute": it stays open, and nothing comes any more.
    """

    kind: Literal["raw", "bookmark", "gone", "end", "torn", "reset", "mute"]
    raw: bytes = b""


def pod(namespace: str, name: str, uid: str, node: str = NODE, **annotations: str) -> Pod:
    """Make a small pod; `_` in the name of an annotation stands for the usual prefix."""
    about = {name.replace("_", "sidecar.istio.io/"): each for name, each in annotations.items()}
    metadata = {"namespace": namespace, "name": name, "uid": uid, "annotations": about}
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": [{"name": "app"}]}}


class FakeWatchServer(FakeApiServer):
    """A FakeApiServer that also lists pods and lets them be watched."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 100
        self.oldest = 100
        self.history: list[Change] = []
        self.changed = threading.Condition()
        self.orders: deque[list[Order]] = deque()
        self.streams: list[Stream] = []
        self.gone_in_stream = False
        self.objects_sent = 0
        self._snapshots: dict[str, list[Pod]] = {}

    def put(self, pod: Pod) -> None:
        """Create a pod or replace it."""
        with self.changed:
            about: Any = pod["metadata"]
            key = about["namespace"], about["name"]
            self._record("MODIFIED" if key in self.pods else "ADDED", pod)
            self.pods[key] = self.history[-1].pod

    def delete(self, namespace: str, name: str) -> None:
        """End a pod."""
        with self.changed:
            self._record("DELETED", self.pods.pop((namespace, name)))

    def _record(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], pod: Pod) -> None:
        self.version += 1
        copied: Any = copy.deepcopy(pod)
        copied["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Change(self.version, kind, copied))
        self.changed.notify_all()

    def compact(self) -> None:
        """Forget what happened so far, and the pages of lists under way."""
        with self.changed:
            self.version += 1  # something else than a pod
            self.oldest = self.version
            self._snapshots.clear()

    def order(self, order: Order) -> None:
        """Tell the newest stream."""
        with self.changed:
            self.streams[-1].orders.append(order)
            self.changed.notify_all()

    def write_account(self, directory: pathlib.Path, token: str = "token-1") -> dict[str, str]:  # noqa: S107 – a test's
        """Write the credentials of a pod into a directory, and return its environment."""
        temporary = directory / ".token"
        temporary.write_text(token)
        temporary.replace(directory / "token")
        (directory / "ca.crt").write_text(authority().certificate)
        return {"KUBERNETES_SERVICE_HOST": self.host, "KUBERNETES_SERVICE_PORT": str(self.port)}

    def asked(self) -> list[dict[str, str]]:
        """Return the queries of all requests for lists and watches."""
        return [
            _query(request.path)
            for request in list(self.requests)
            if request.path.startswith("/api/v1/pods?")
        ]

    def of(self, node: str) -> dict[tuple[str, str], Pod]:
        """Return the pods of a node."""
        with self.changed:
            return {key: pod for key, pod in self.pods.items() if _is_on(node, pod)}

    def answer(self, method: str, target: str) -> tuple[int, bytes]:
        """Answer a list."""
        if method != "GET" or urllib.parse.urlsplit(target).path != "/api/v1/pods":
            return super().answer(method, target)
        query = _query(target)
        with self.changed:
            return self._list(query)

    def _list(self, query: dict[str, str]) -> tuple[int, bytes]:
        node, limit = _node(query), int(query.get("limit", "1000000"))
        version, _, begin = query.get("continue", f"{self.version}:0").partition(":")
        if "continue" not in query:
            self._snapshots[version] = [pod for pod in self.pods.values() if _is_on(node, pod)]
        if version not in self._snapshots:
            return 410, status_object(410, "The provided continue parameter is too old")
        pods = self._snapshots[version]
        end = int(begin) + limit
        metadata = {"resourceVersion": version}
        if end < len(pods):
            metadata["continue"] = f"{version}:{end}"
        page = pods[int(begin) : end]
        self.objects_sent += len(page)
        return 200, json.dumps({"kind": "PodList", "metadata": metadata, "items": page}).encode()

    def stream(self, exchange: Exchange) -> bool:
        """Answer a watch, as long as it goes."""
        query = _query(exchange.path)
        if not exchange.path.startswith("/api/v1/pods?") or query.get("watch") != "true":
            return False
        with self.changed:
            stream = Stream(self, exchange, query)
            if stream.version < self.oldest and not self.gone_in_stream:
                stream.refuse(410, f"too old resource version: {stream.version}")
                return True
            self.streams.append(stream)
            stream.orders.extend(self.orders.popleft() if self.orders else ())
            if stream.version < self.oldest:
                stream.orders.append(Order("gone"))
            self.changed.notify_all()
        stream.run()
        return True


class Stream:
    """One watch: sends what happens on its node, and follows orders."""

    def __init__(self, server: FakeWatchServer, exchange: Exchange, query: dict[str, str]) -> None:
        self.orders: deque[Order] = deque()
        self.version = int(query["resourceVersion"])
        self._server = server
        self._exchange = exchange
        self._node = _node(query)
        self._ends_at = time.monotonic() + float(query["timeoutSeconds"])
        self._next = bisect.bisect_right(server.history, self.version, key=lambda each: each[0])

    def refuse(self, code: int, message: str) -> None:
        """Answer with a status."""
        body = status_object(code, message)
        self._exchange.send_response(code)
        self._exchange.send_header("Content-Length", str(len(body)))
        self._exchange.end_headers()
        self._exchange.wfile.write(body)

    def run(self) -> None:
        """Send until an order, or time, ends it."""
        self._exchange.send_response(200)
        self._exchange.send_header("Content-Type", "application/json")
        self._exchange.send_header("Transfer-Encoding", "chunked")
        self._exchange.end_headers()
        self._exchange.wfile.flush()
        while not self._server.closing.is_set() and time.monotonic() < self._ends_at:
            order, data = self._wait()
            if data:
                self._send(data)
            if order and not self._follow(order):
                return
        self._exchange.wfile.write(b"0\r\n\r\n")

    def _wait(self) -> tuple[Order | None, bytes]:
        """Return an order or else what happened."""
        with self._server.changed:
            news = self._server.history[self._next :]
            if self.orders and not (news and self.orders[0].kind == "bookmark"):
                return self.orders.popleft(), b""
            if not news:
                self._server.changed.wait(LOOK_S)
                return None, b""
            self._next += len(news)
            mine = [change for change in news if _is_on(self._node, change.pod)]
            self._server.objects_sent += len(mine)
        return None, b"".join(_line(change.kind, change.pod) for change in mine)

    def _follow(self, order: Order) -> bool:
        """Do as told; return whether the stream goes on."""
        match order.kind:
            case "raw":
                self._send(order.raw)
            case "bookmark":
                self._send(_line("BOOKMARK", {"metadata": {"resourceVersion": self._sent()}}))
            case "gone":
                self._send(_line("ERROR", json.loads(status_object(410, "too old"))))
            case "mute":
                self._server.closing.wait()
                return False
            case "end":
                self._exchange.wfile.write(b"0\r\n\r\n")
                return False
            case "torn":
                self._send(b'{"type": "DELE')
                self._exchange.wfile.write(b"0\r\n\r\n")
                return False
            case "reset":
                self._send(b'{"type": "DELE')
                self._exchange.wfile.flush()
                linger = struct.pack("ii", 1, 0)
                self._exchange.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self._exchange.connection.close()
                return False
        return True

    def _sent(self) -> str:
        """Return the version up to which everything has been sent."""
        with self._server.changed:
            later = self._server.history[self._next :]
            return str(later[0].version - 1 if later else self._server.version)

    def _send(self, data: bytes) -> None:
        """Send a chunk."""
        self._exchange.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self._exchange.wfile.flush()


def until(holds: Callable[[], object], patience_s: float = 5.0) -> None:
    """Wait for what another thread is about to do; fail when it does not."""
    end, tick = time.monotonic() + patience_s, threading.Event()
    while not holds():
        assert time.monotonic() < end, "in vain"
        tick.wait(0.002)


def _line(kind: str, about: Pod) -> bytes:
    return json.dumps({"type": kind, "object": about}).encode() + b"\n"


def _query(target: str) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(target).query))


def _node(query: dict[str, str]) -> str | None:
    """Return the node that is selected, None for all."""
    name, _, node = query.get("fieldSelector", "").partition("=")
    return node if name == "spec.nodeName" else None


def _is_on(node: str | None, pod: Pod) -> bool:
    spec: Any = pod["spec"]
    return node is None or spec.get("nodeName") == node


@contextmanager
def serving_pods() -> Iterator[FakeWatchServer]:
    """Serve three pods of this node and one of another."""
    with FakeWatchServer() as server:
        for name in ("a", "b", "c"):
            server.put(pod("shop", name, f"uid-{name}"))
        server.put(pod("shop", "d", "uid-d", node="node-2"))
        yield server
