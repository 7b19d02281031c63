"""The pods of one node, from the API server: listed in pages, then followed event by event.

The official client has the credentials, TLS and the connection; objects stay the JSON that they
are. Its `kubernetes.watch.Watch` is not used: what it cannot parse it skips (a DELETED would be
lost for good), after a 410 it asks for the same version again, and neither a line nor a silent
connection has a bound (version 37; kubernetes-client/python issues 2223, 2462). `CoreV1Api` is not
used either, since it would cost 20 MiB for one GET.

A list asks for the newest state, not for any ("resourceVersion=0"), which another API server's
cache may have from before what was seen here. Source: Kubernetes API concepts, "Efficient detection
of changes".
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from http.client import HTTPException
from typing import NamedTuple, TypeVar
from urllib.parse import urlencode

import kubernetes.client
from kubernetes.client.exceptions import ApiException
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, ReadTimeoutError

from istio_cni.constants import VERSION
from istio_cni.edge.kube import incluster, stream
from istio_cni.edge.kube.stream import JSON, WHAT, Event, Expired, ServerTrouble, Silent
from istio_cni.errors import quoted

PATH = "/api/v1/pods"
PAGE_PODS = 128  # one page for a usual full node, in memory as a whole
REFUSAL_MAX_BYTES = 64 * 1024
READ_BYTES = 64 * 1024
GRACE_S = 30.0  # for a server that should have ended a stream by itself
TIMEOUT_JITTER = 0.1  # share by which streams differ in length, so that nodes do not march in step
KEEPALIVE = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]

T = TypeVar("T")


class Patience(NamedTuple):
    """How long to wait for what, in seconds."""

    connect_s: float = 5.0  # TLS included
    answer_s: float = 10.0  # for each part of a list
    list_s: float = 60.0  # for all of it
    idle_s: float = 90.0  # for an event; bookmarks come about once a minute
    watch_s: float = 290.0  # until the server is to end a stream


class NodePods:
    """The pods that are bound to `node`, asked for with the credentials of this pod.

    `env` has KUBERNETES_SERVICE_HOST and _PORT. Each request has a connection of its own and
    credentials that were just read. All errors are ServerTrouble, or KubeconfigUnusable where there
    are no credentials. One thread lists and watches; any other may interrupt it.
    """

    def __init__(
        self,
        credentials_dir: str,
        env: Mapping[str, str],
        node: str,
        *,
        patience: Patience | None = None,
        page_pods: int = PAGE_PODS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not node:
            raise ValueError("no node")  # that would select the pods which have none
        self._credentials_dir = credentials_dir
        self._env = env
        self._selector = f"spec.nodeName={node}"
        self._patience = patience or Patience()
        self._page_pods = page_pods
        self._clock = clock
        self._lock = threading.Lock()
        self._interrupted = False
        self._answer: BaseHTTPResponse | None = None

    def list_pods(self, keep: Callable[[JSON], T]) -> tuple[str, list[T]]:
        """Return the version to watch from, and what `keep` makes of each pod.

        A list that expires between two pages is asked for once more, in one page.
        """
        try:
            return self._list(keep, {"limit": str(self._page_pods)})
        except Expired:
            return self._list(keep, {})

    def watch_pods(self, version: str) -> Generator[Event, None, None]:
        """Yield what happened after `version`, until the server ends the stream.

        A stream begins with a bookmark of ours: the server has agreed to go on from `version`.
        """
        jitter = TIMEOUT_JITTER * random.SystemRandom().uniform(-1, 1)
        length_s = self._patience.watch_s * (1 + jitter)
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(length_s))),
        }
        with self._ask(query, self._patience.idle_s) as answer:
            yield Event("BOOKMARK", {}, version)
            for line in stream.lines(self._pieces(answer, length_s + GRACE_S)):
                yield stream.event(line)

    def interrupt(self) -> None:
        """Let what is under way fail now, and everything later at once."""
        with self._lock:
            self._interrupted = True
            if self._answer is not None:
                with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has just ended
                    self._answer.shutdown()

    def _list(self, keep: Callable[[JSON], T], query: Mapping[str, str]) -> tuple[str, list[T]]:
        """Ask for page after page; all of them show the state of the first one's version."""
        version, kept = "", list[T]()
        asked, end = dict(query), self._clock() + self._patience.list_s
        while True:
            with self._ask(asked, self._patience.answer_s) as answer:
                body = stream.whole(self._pieces(answer, end - self._clock()))
            metadata, items = stream.page(body)
            version = version or stream.version(metadata)
            kept += map(keep, items)
            following = metadata.get("continue")
            if not following:
                return version, kept
            asked = {**query, "continue": str(following)}

    @contextlib.contextmanager
    def _ask(self, query: Mapping[str, str], read_s: float) -> Iterator[BaseHTTPResponse]:
        """Ask on a new connection and yield the answer, if it is one; `read_s` bounds each wait."""
        self._hold(None)
        configuration = incluster.configuration(self._credentials_dir, self._env)
        configuration.socket_options = KEEPALIVE
        client = kubernetes.client.ApiClient(configuration)
        headers = {"Accept": "application/json", "User-Agent": f"istio-cni/{VERSION}"}
        client.update_params_for_auth(headers, [], ["BearerToken"], PATH, "GET", None)
        url = f"{configuration.host}{PATH}?{urlencode({'fieldSelector': self._selector, **query})}"
        timeouts = (self._patience.connect_s, read_s)
        answer: BaseHTTPResponse | None = None
        try:
            answer = client.call_api("GET", url, headers, _request_timeout=timeouts).response
            self._hold(answer)
            if answer.status != 200:
                body = answer.read1(REFUSAL_MAX_BYTES, decode_content=False)
                wait = answer.headers.get("Retry-After", "")
                raise stream.refusal(answer.status, body, wait, _token(configuration))
            yield answer
        except ApiException as error:  # TLS failed
            raise ServerTrouble(f"{WHAT}: {quoted(error.reason)}") from error
        except ReadTimeoutError as error:
            kind = ServerTrouble if answer is None else Silent
            raise kind(f"{WHAT}: no byte for {read_s:.0f} s") from error
        except (HTTPError, HTTPException, OSError) as error:
            raise ServerTrouble(f"{WHAT}: {quoted(str(error))}") from error
        finally:
            with self._lock:
                self._answer = None
            if answer is not None:
                answer.close()
            client.rest_client.pool_manager.clear()

    def _hold(self, answer: BaseHTTPResponse | None) -> None:
        """Keep what is under way where it can be interrupted, unless that has happened."""
        with self._lock:
            if self._interrupted:
                raise ServerTrouble(f"{WHAT}: interrupted")
            self._answer = answer

    def _pieces(self, answer: BaseHTTPResponse, limit_s: float) -> Iterator[bytes]:
        """Yield bytes as they come, for `limit_s` at most."""
        end = self._clock() + limit_s
        while piece := answer.read1(READ_BYTES, decode_content=False):
            yield piece
            if self._clock() > end:
                raise ServerTrouble(f"{WHAT}: the answer does not end")


def _token(configuration: kubernetes.client.Configuration) -> str:
    """Return the token that a configuration sends."""
    return (configuration.api_key["BearerToken"] or "").rpartition(" ")[2]
