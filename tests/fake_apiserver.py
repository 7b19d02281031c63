"""An API server that keeps state, for tests and benchmarks: pods, real TLS, faults on demand.

It holds pods, knows tokens and mints others, logs requests and answers with the Status objects of
the real one. What a test wants to go wrong is a `Reply`, queued in `script` for one request or set
as `always`:

    with FakeApiServer() as server:
        server.add_pod("default", "web", uid="1234")
        server.script.append(Reply(429, headers={"Retry-After": "3"}))
        server.write_kubeconfig(path)
"""

from __future__ import annotations

import datetime
import functools
import http
import http.server
import json
import os
import pathlib
import socket
import socketserver
import ssl
import struct
import sys
import tempfile
import threading
import urllib.parse
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Self

import yaml

from certificates import Certificate, authority

Pod = dict[str, object]
CLIENT_PATIENCE_S = 10.0  # a handler waits no longer for a client's bytes


class Reply(NamedTuple):
    """How to answer one request; what is left out follows from the state.

    `fault` after the request was read: "hang" never answers, "cut" closes after half of the answer,
    "reset" aborts the connection, "dribble" sends a byte now and then. `before` runs first, in the
    server's thread: for what changes while a request is under way.
    """

    status: int = 0
    message: str = ""
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    delay_s: float = 0.0
    fault: Literal["", "hang", "cut", "reset", "dribble"] = ""
    before: Callable[[], object] | None = None


class Request(NamedTuple):
    """One request as it came; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


class FakeApiServer:
    """Serves `pods` to bearers of `tokens` on a free port of `host`, from start to stop.

    They also get tokens of `accounts`, by namespace and name, for at most `token_max_s` seconds.

    With `client_ca` (PEM) a client certificate of that authority is as good as a token. While
    `mute` is true, connections are accepted and nothing more, not even TLS. After a stop, start
    serves on the same port again.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        tls: bool = True,
        certificate: Certificate | None = None,
        client_ca: str = "",
    ) -> None:
        self.host = host
        self.port = 0
        self.pods: dict[tuple[str, str], Pod] = {}
        self.tokens = {"token-1"}
        self.accounts: set[tuple[str, str]] = set()
        self.token_max_s = 24 * 3600
        self.script: deque[Reply] = deque()
        self.always = Reply()
        self.requests: list[Request] = []
        self.mute = False
        self.closing = threading.Event()
        self.context: ssl.SSLContext | None = None
        if tls:
            names = (host, "127.0.0.1", "::1", "localhost")
            self.context = _tls_context(certificate or _certificate(names), client_ca)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, and serve on a thread."""
        self.closing.clear()
        self._server = _Server(self)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """Close the listening socket and wait for the handlers; hanging ones end."""
        assert self._server is not None
        assert self._thread is not None
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The server's URL, as a kubeconfig has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.context else 'http'}://{host}:{self.port}"

    def stream(self, _exchange: Exchange) -> bool:
        """Answer in another way than with a status and a body; tell whether that was done."""
        return False

    def answer(self, _method: str, _target: str) -> tuple[int, bytes]:
        """Answer what this server knows nothing about, with a status and a body."""
        return 404, status_object(404, "the server could not find the requested resource")

    def add_pod(self, namespace: str, name: str, uid: str = "", **metadata: object) -> Pod:
        """Keep a pod, replacing a former one of that name."""
        about = {"namespace": namespace, "name": name, "uid": uid, **metadata}
        pod: Pod = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": {}}
        self.pods[namespace, name] = pod
        return pod

    def write_kubeconfig(
        self,
        path: str | os.PathLike[str],
        *,
        yaml: bool = False,
        token: str = "token-1",  # noqa: S107 – a test's
        cluster: Mapping[str, object] | None = None,
        user: Mapping[str, object] | None = None,
    ) -> None:
        """Write a kubeconfig for this server; `cluster` and `user` replace their defaults."""
        encoded = b64encode(authority().certificate.encode()).decode()
        trust = {"certificate-authority-data": encoded} if self.context else {}
        write_kubeconfig(
            path,
            {"server": self.url, **trust} if cluster is None else cluster,
            {"token": token} if user is None else user,
            as_yaml=yaml,
        )


def write_kubeconfig(
    path: str | os.PathLike[str],
    cluster: Mapping[str, object],
    user: Mapping[str, object],
    *,
    as_yaml: bool = False,
) -> None:
    """Write a kubeconfig of one cluster and one user, by renaming, as the installer does."""
    name, context = "istio-cni", "istio-cni-context"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": dict(cluster)}],
        "users": [{"name": name, "user": dict(user)}],
        "contexts": [{"name": context, "context": {"cluster": "local", "user": name}}],
        "current-context": context,
    }
    target = pathlib.Path(path)
    temporary = target.with_name(f".{target.name}.new")
    temporary.write_text(yaml.safe_dump(document) if as_yaml else json.dumps(document))
    temporary.chmod(0o600)
    temporary.replace(target)


@functools.cache
def _certificate(names: tuple[str, ...]) -> Certificate:
    return authority().issue(*names)


def _tls_context(certificate: Certificate, client_ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(certificate.certificate + certificate.key)
        file.flush()
        context.load_cert_chain(file.name)
    if client_ca:
        context.load_verify_locations(cadata=client_ca)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


class _Server(socketserver.ThreadingTCPServer):
    """Accepts; TLS and the request are the business of a thread per connection."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, owner: FakeApiServer) -> None:
        self.owner = owner
        self.address_family = socket.AF_INET6 if ":" in owner.host else socket.AF_INET
        super().__init__((owner.host, owner.port), Exchange)

    def finish_request(self, request: object, client_address: object) -> None:
        """Shake hands, then handle."""
        assert isinstance(request, socket.socket)
        if self.owner.mute:
            self.owner.closing.wait()
            return
        request.settimeout(CLIENT_PATIENCE_S)
        if self.owner.context is None:
            Exchange(request, client_address, self)
            return
        request.getpeername()  # of a client that has reset, `wrap_socket` leaves the socket open
        with self.owner.context.wrap_socket(request, server_side=True) as secured:
            Exchange(secured, client_address, self)

    def handle_error(self, _request: object, _client_address: object) -> None:
        """Forgive clients that left; anything else is a fault of the test."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            raise error


class Exchange(http.server.BaseHTTPRequestHandler):
    """One connection, one request."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one segment an answer: Nagle's wait would blur a benchmark
    server: _Server

    def finish(self) -> None:
        """Close both directions, also behind a client that left before it had read all."""
        try:
            super().finish()
        except OSError:
            self.rfile.close()

    def do_POST(self) -> None:
        """Do the same: a request differs by what its path and body ask for."""
        self.do_GET()

    def do_GET(self) -> None:
        """Log the request, then follow the script, or else the state."""
        owner = self.server.owner
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._body = self.rfile.read(int(headers.get("content-length", "0")))
        owner.requests.append(Request(self.command, self.path, headers, self._body))
        reply = owner.script.popleft() if owner.script else owner.always
        if reply.before:
            reply.before()
        if reply.delay_s:
            owner.closing.wait(reply.delay_s)
        self.close_connection = True
        if reply.fault == "hang":
            owner.closing.wait()
        elif reply.fault == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()  # before the server would end it in an orderly way
        else:
            self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        plain = not reply.status and not reply.fault and reply.body is None
        if plain and self._is_authorised() and self.server.owner.stream(self):
            return
        status, body = (reply.status, status_object(reply.status, reply.message))
        if not reply.status:
            status, body = self._look_up()
        body = body if reply.body is None else reply.body
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if reply.fault == "dribble":
            for octet in body:
                self.wfile.write(bytes([octet]))
                self.wfile.flush()
                if self.server.owner.closing.wait(0.01):
                    return
        else:
            self.wfile.write(body[: len(body) // 2] if reply.fault == "cut" else body)

    def _look_up(self) -> tuple[int, bytes]:
        """Answer as an API server with these pods and tokens does."""
        owner = self.server.owner
        if not self._is_authorised():
            return 401, status_object(401, "Unauthorized")
        parts = [urllib.parse.unquote(part) for part in self.path.split("/")]
        match [self.command, *parts]:
            case [
                "POST",
                "",
                "api",
                "v1",
                "namespaces",
                namespace,
                "serviceaccounts",
                name,
                "token",
            ]:
                if (namespace, name) in owner.accounts:
                    return 201, self._mint(name)
                return 404, status_object(404, f'serviceaccounts "{name}" not found')
            case ["GET", "", "api", "v1", "namespaces", namespace, "pods", name]:
                if pod := owner.pods.get((namespace, name)):
                    return 200, json.dumps(pod).encode()
                return 404, status_object(404, f'pods "{name}" not found')
        return owner.answer(self.command, self.path)

    def _is_authorised(self) -> bool:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        secured = isinstance(self.connection, ssl.SSLSocket)
        certified = secured and bool(self.connection.getpeercert())
        return certified or (scheme.lower() == "bearer" and token in self.server.owner.tokens)

    def _mint(self, account: str) -> bytes:
        """Answer a TokenRequest with a token that is good from now on."""
        owner = self.server.owner
        asked = json.loads(self._body)
        seconds = min(asked["spec"]["expirationSeconds"], owner.token_max_s)
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        token = f"{account}-{len(owner.tokens)}"
        owner.tokens.add(token)
        answer = {
            **asked,
            "metadata": {"name": account},
            "spec": {"audiences": ["api"], "expirationSeconds": seconds},
            "status": {"token": token, "expirationTimestamp": f"{end:%Y-%m-%dT%H:%M:%SZ}"},
        }
        return json.dumps(answer).encode()

    def log_message(self, *_: object) -> None:
        """Stay quiet: `requests` has it all."""


def status_object(status: int, message: str) -> bytes:
    """Write the object that Kubernetes answers errors with."""
    if not status:
        return b""
    reason = http.HTTPStatus(status).phrase.title().replace(" ", "")
    answer = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message or http.HTTPStatus(status).phrase,
        "reason": reason,
        "code": status,
    }
    return json.dumps(answer).encode()
