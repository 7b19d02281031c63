"""Looking a pod up: what each behaviour of an API server leads to, and how long that may take.

The server is real and local, TLS included. Time is the test's own except where a server is silent.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import istio_cni
from certificates import Authority, Certificate, authority
from fake_apiserver import FakeApiServer, Reply
from istio_cni.constants import VERSION
from istio_cni.edge.kube import fetch_pod
from istio_cni.errors import KubeconfigUnusable, PodLookupFailed, TryAgainLater
from istio_cni.plugin.identity import is_same_pod

Pod = dict[str, object]
BEARER = "token-1"


class Lookup:
    """One look-up of default/web against a server, on a clock that only pauses advance."""

    def __init__(self, server: FakeApiServer, kubeconfig: Path) -> None:
        self.server = server
        self.kubeconfig = kubeconfig
        self.started = self.now = 1000.0
        self.pauses: list[float] = []
        self.during_pause: Callable[[], object] = lambda: None

    def clock(self) -> float:
        """Tell the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.pauses.append(seconds)
        self.now += seconds
        self.during_pause()

    def __call__(self, uid: str = "u1", name: str = "web", patience_s: float = 20.0) -> Pod:
        """Look up until the deadline."""
        return fetch_pod(
            str(self.kubeconfig),
            "default",
            name,
            self.started + patience_s,
            lambda pod: is_same_pod(pod, uid),
            clock=self.clock,
            sleep=self.sleep,
        )

    def failure(
        self, error: type[KubeconfigUnusable | PodLookupFailed | TryAgainLater], uid: str = "u1"
    ) -> str:
        """Look up in vain; return the message, after checking what all messages have."""
        with pytest.raises(error) as caught:
            self(uid)
        message = str(caught.value)
        assert BEARER not in message
        assert "\n" not in message
        if error is not KubeconfigUnusable or "look up" in message:
            assert '"default/web"' in message
            assert self.server.url in message
        return message

    @property
    def took_s(self) -> float:
        """Time that was spent in pauses."""
        return self.now - self.started


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    """Serve the pod default/web with uid u1."""
    with FakeApiServer() as server:
        server.add_pod("default", "web", "u1")
        yield server


@pytest.fixture
def lookup(server: FakeApiServer, tmp_path: Path) -> Lookup:
    """Prepare a look-up with a kubeconfig for that server."""
    path = tmp_path / "kubeconfig"
    server.write_kubeconfig(path)
    return Lookup(server, path)


def fetch(kubeconfig: Path, patience_s: float = 5.0) -> Pod:
    """Look up on the real clock."""
    deadline = time.monotonic() + patience_s
    return fetch_pod(str(kubeconfig), "default", "web", deadline, lambda _pod: True)


def encoded(text: str) -> str:
    """Encode as the -data keys are."""
    return b64encode(text.encode()).decode()


# -- the request ----------------------------------------------------------------------------------
def test_one_request_brings_the_pod(lookup: Lookup, server: FakeApiServer) -> None:
    """The good case is one GET with the usual headers, and no pause."""
    assert lookup() == server.pods["default", "web"]
    (request,) = server.requests
    assert (request.method, request.path) == ("GET", "/api/v1/namespaces/default/pods/web")
    assert request.headers["host"] == f"127.0.0.1:{server.port}"
    assert request.headers["accept"] == "application/json"
    assert request.headers["authorization"] == f"Bearer {BEARER}"
    assert request.headers["user-agent"] == f"istio-cni/{VERSION}"
    assert lookup.pauses == []


def test_names_are_encoded(lookup: Lookup, server: FakeApiServer) -> None:
    """A name cannot leave its place in the path or forge a line of the request."""
    name = "a/../b?c#d e\r\nX: 1"
    server.add_pod("default", name, "u1")
    lookup(name=name)
    (request,) = server.requests
    assert request.path == "/api/v1/namespaces/default/pods/a%2F..%2Fb%3Fc%23d%20e%0D%0AX%3A%201"


@pytest.mark.parametrize("host", ["::1", "localhost"])
@pytest.mark.parametrize("yaml", [False, True], ids=["json", "yaml"])
def test_server_addresses(tmp_path: Path, host: str, yaml: bool) -> None:
    """IPv6 addresses and names work like IPv4 addresses."""
    if host == "::1" and not _has_ipv6():
        pytest.skip("needs IPv6 on the loopback interface")
    with FakeApiServer(host=host) as server:
        pod = server.add_pod("default", "web")
        server.write_kubeconfig(tmp_path / "kubeconfig", yaml=yaml)
        assert fetch(tmp_path / "kubeconfig") == pod
        shown = "[::1]" if host == "::1" else host
        assert server.requests[0].headers["host"] == f"{shown}:{server.port}"


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def test_plain_http_where_the_url_says_so(tmp_path: Path) -> None:
    """Without TLS only if the kubeconfig asks for it."""
    with FakeApiServer(tls=False) as server:
        pod = server.add_pod("default", "web")
        server.write_kubeconfig(tmp_path / "kubeconfig")
        assert fetch(tmp_path / "kubeconfig") == pod


def test_a_path_before_the_api_is_kept(lookup: Lookup, server: FakeApiServer) -> None:
    """Some proxies serve several clusters on one host."""
    server.always = Reply(403)
    cluster = {"server": f"{server.url}/k8s/c-1/", "insecure-skip-tls-verify": True}
    server.write_kubeconfig(lookup.kubeconfig, cluster=cluster)
    lookup.failure(PodLookupFailed)
    assert server.requests[0].path == "/k8s/c-1/api/v1/namespaces/default/pods/web"


# -- trust ----------------------------------------------------------------------------------------
def test_a_foreign_authority_is_refused(lookup: Lookup, server: FakeApiServer) -> None:
    """The kubeconfig is read once more, then its authority is what is wrong; no token was sent."""
    other = encoded(Authority("other").certificate)
    cluster = {"server": server.url, "certificate-authority-data": other}
    server.write_kubeconfig(lookup.kubeconfig, cluster=cluster)
    message = lookup.failure(KubeconfigUnusable)
    assert "certificate is not accepted" in message
    assert str(lookup.kubeconfig) in message
    assert len(lookup.pauses) == 1
    assert server.requests == []


def test_a_renewed_authority_is_picked_up(lookup: Lookup, server: FakeApiServer) -> None:
    """A cluster's authority changes while the look-up is under way."""
    other = encoded(Authority("other").certificate)
    cluster = {"server": server.url, "certificate-authority-data": other}
    server.write_kubeconfig(lookup.kubeconfig, cluster=cluster)
    lookup.during_pause = lambda: server.write_kubeconfig(lookup.kubeconfig)
    assert lookup() == server.pods["default", "web"]


@pytest.mark.parametrize(
    ("certificate", "accepted"),
    [
        (authority().issue("127.0.0.1"), True),
        (authority().issue("127.0.0.2"), False),
        (authority().issue("kubernetes.default"), False),
        (authority().issue("127.0.0.1", days=-1), False),
    ],
    ids=["own", "other address", "other name", "expired"],
)
def test_the_certificate_must_be_the_servers(
    tmp_path: Path, certificate: Certificate, accepted: bool
) -> None:
    """Name and validity count."""
    with FakeApiServer(certificate=certificate) as server:
        server.add_pod("default", "web", "u1")
        server.write_kubeconfig(tmp_path / "kubeconfig")
        lookup = Lookup(server, tmp_path / "kubeconfig")
        if accepted:
            assert lookup()
        else:
            lookup.failure(KubeconfigUnusable)


def test_a_name_for_tls_alone(tmp_path: Path) -> None:
    """tls-server-name is what the certificate must be for."""
    with FakeApiServer(certificate=authority().issue("kubernetes.default")) as server:
        pod = server.add_pod("default", "web")
        cluster = {
            "server": server.url,
            "certificate-authority-data": encoded(authority().certificate),
            "tls-server-name": "kubernetes.default",
        }
        server.write_kubeconfig(tmp_path / "kubeconfig", cluster=cluster)
        assert fetch(tmp_path / "kubeconfig") == pod


def test_the_servers_own_certificate_is_an_authority_too(tmp_path: Path) -> None:
    """Any certificate given as authority is trusted by itself, as with kubectl."""
    certificate = Authority("unknown").issue("127.0.0.1")
    with FakeApiServer(certificate=certificate) as server:
        pod = server.add_pod("default", "web")
        pinned = encoded(certificate.certificate)
        cluster = {"server": server.url, "certificate-authority-data": pinned}
        server.write_kubeconfig(tmp_path / "kubeconfig", cluster=cluster)
        assert fetch(tmp_path / "kubeconfig") == pod


def test_verification_can_be_switched_off(lookup: Lookup, server: FakeApiServer) -> None:
    """insecure-skip-tls-verify works without an authority."""
    cluster = {"server": server.url, "insecure-skip-tls-verify": True}
    server.write_kubeconfig(lookup.kubeconfig, cluster=cluster)
    assert lookup() == server.pods["default", "web"]


def test_without_authority_the_systems_are_asked(lookup: Lookup, server: FakeApiServer) -> None:
    """A missing authority does not mean that any server will do."""
    server.write_kubeconfig(lookup.kubeconfig, cluster={"server": server.url})
    assert "not accepted" in lookup.failure(KubeconfigUnusable)


def test_client_certificates(tmp_path: Path) -> None:
    """A certificate and its key do in place of a token."""
    with FakeApiServer(client_ca=authority().certificate) as server:
        pod = server.add_pod("default", "web")
        pair = authority().issue("istio-cni")
        user = {
            "client-certificate-data": encoded(pair.certificate),
            "client-key-data": encoded(pair.key),
        }
        server.write_kubeconfig(tmp_path / "kubeconfig", user=user)
        assert fetch(tmp_path / "kubeconfig") == pod
        assert "authorization" not in server.requests[0].headers


@pytest.mark.parametrize(
    ("cluster", "user", "said"),
    [
        ({"certificate-authority-data": "CERTIFICATE"}, {}, "certificate authority does not parse"),
        ({}, {"client-key-data": "PRIVATE KEY"}, "client certificate and key do not load"),
        (
            {},
            {"client-key-data": "ENCRYPTED PRIVATE KEY"},
            "client certificate and key do not load",
        ),
    ],
)
def test_pem_that_does_not_parse(
    lookup: Lookup,
    server: FakeApiServer,
    cluster: dict[str, str],
    user: dict[str, str],
    said: str,
) -> None:
    """PEM frames around nonsense make the kubeconfig unusable; nobody is asked for a password."""
    damaged = [
        {key: encoded(f"-----BEGIN {label}-----\nbm9uZQ==\n-----END {label}-----\n")}
        for section in (cluster, user)
        for key, label in section.items()
    ]
    ca = {"certificate-authority-data": encoded(authority().certificate)}
    certificate = {"client-certificate-data": encoded(authority().issue("me").certificate)}
    server.write_kubeconfig(
        lookup.kubeconfig,
        cluster={"server": server.url, **ca, **(damaged[0] if cluster else {})},
        user={"token": BEARER, **(certificate | damaged[0] if user else {})},
    )
    assert said in lookup.failure(KubeconfigUnusable)


# -- trouble that passes --------------------------------------------------------------------------
def test_pauses_double_up_to_two_seconds(lookup: Lookup, server: FakeApiServer) -> None:
    """A server in trouble is asked ever less often, by each node at other instants."""
    server.always = Reply(500, "etcd is slow")
    message = lookup.failure(TryAgainLater)
    assert 'HTTP 500: "etcd is slow"' in message
    assert f"(attempts: {len(server.requests)})" in message
    assert 17.5 <= lookup.took_s < 20.0
    for pause_s, base_s in zip(lookup.pauses, [0.2, 0.4, 0.8, 1.6] + 20 * [2.0], strict=False):
        assert 0.75 * base_s <= pause_s <= 1.25 * base_s
    assert len({pause_s % 1 for pause_s in lookup.pauses}) > len(lookup.pauses) / 2


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_that_recovers(lookup: Lookup, server: FakeApiServer, status: int) -> None:
    """Two bad answers cost two pauses and nothing else."""
    server.script.extend([Reply(status), Reply(status)])
    assert lookup() == server.pods["default", "web"]
    assert len(lookup.pauses) == 2


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_a_connection_that_breaks(lookup: Lookup, server: FakeApiServer, fault: str) -> None:
    """Half an answer is no answer, whether or not it would parse."""
    server.script.append(Reply(fault="cut" if fault == "cut" else "reset"))
    assert lookup() == server.pods["default", "web"]
    assert len(server.requests) == 2


def test_an_answer_that_is_no_http(lookup: Lookup) -> None:
    """Something else listens on the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        cluster = {"server": f"http://127.0.0.1:{listening.getsockname()[1]}"}
        lookup.server.write_kubeconfig(lookup.kubeconfig, cluster=cluster)

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TryAgainLater, match="no whole HTTP answer: it does not begin"):
            lookup(patience_s=0.1)
        thread.join()


def test_retry_after_is_honoured(lookup: Lookup, server: FakeApiServer) -> None:
    """The server's wish counts where it is longer than the pause would be."""
    server.script.append(Reply(429, headers={"Retry-After": "3"}))
    server.script.append(Reply(503, headers={"Retry-After": "0"}))
    server.script.append(Reply(503, headers={"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}))
    lookup()
    assert lookup.pauses[0] == 3.0
    assert lookup.pauses[1] < 1.0
    assert lookup.pauses[2] < 2.0


def test_retry_after_beyond_the_deadline(lookup: Lookup, server: FakeApiServer) -> None:
    """Waiting would be in vain: the runtime is told at once."""
    server.script.append(Reply(429, "slow down", headers={"Retry-After": "60"}))
    assert 'HTTP 429: "slow down"' in lookup.failure(TryAgainLater)
    assert lookup.pauses == []


def test_a_server_that_is_down(lookup: Lookup, server: FakeApiServer) -> None:
    """Refused connections go on until the deadline."""
    server.stop()
    try:
        message = lookup.failure(TryAgainLater)
    finally:
        server.start()
    assert "Connection refused" in message
    assert 17.5 <= lookup.took_s < 20.0
    assert lookup.kubeconfig.exists()


def test_a_server_that_comes_back(lookup: Lookup, server: FakeApiServer) -> None:
    """The look-up survives a restart of the API server."""
    server.stop()
    lookup.during_pause = lambda: server.start() if len(lookup.pauses) == 2 else None
    assert lookup() == server.pods["default", "web"]
    assert len(lookup.pauses) == 2


def test_a_name_that_does_not_resolve(
    lookup: Lookup, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is trouble of the network like any other."""
    _resolve_names(monkeypatch, lambda: None)
    server.write_kubeconfig(lookup.kubeconfig, cluster={"server": "https://api.invalid:1"})
    with pytest.raises(TryAgainLater, match="Name or service not known"):
        lookup(patience_s=0.1)


def test_a_resolver_that_hangs(
    lookup: Lookup, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline holds although the system's resolver knows none."""
    over = threading.Event()
    _resolve_names(monkeypatch, lambda: over.wait(30))
    server.write_kubeconfig(lookup.kubeconfig, cluster={"server": "https://api.invalid:1"})
    started = time.monotonic()
    with pytest.raises(TryAgainLater, match=r"resolving api\.invalid timed out"):
        fetch(lookup.kubeconfig, 0.5)
    over.set()
    assert 0.4 < time.monotonic() - started < 5


def _resolve_names(monkeypatch: pytest.MonkeyPatch, delay: Callable[[], object]) -> None:
    """Replace the system's resolver, which tests must not depend on, by one that knows no name."""
    genuine = socket.getaddrinfo

    def resolve(host: bytes, port: int, **options: int) -> object:
        if not options.get("flags"):
            delay()
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return genuine(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize("silence", ["mute", "hang", "dribble"])
def test_a_silent_server_cannot_hold_the_look_up(
    lookup: Lookup, server: FakeApiServer, silence: str
) -> None:
    """No handshake, no answer, or one that never ends: the deadline holds, in real time."""
    server.mute = silence == "mute"
    server.always = Reply(fault="hang" if silence == "hang" else "dribble")
    started = time.monotonic()
    with pytest.raises(TryAgainLater, match="timed out"):
        fetch(lookup.kubeconfig, 0.15)
    assert 0.1 < time.monotonic() - started < 5


def test_one_attempt_does_not_take_all_the_time(
    lookup: Lookup, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that got lost is given up in time for another."""
    monkeypatch.setattr("istio_cni.edge.kube.lookup.ATTEMPT_MAX_S", 0.1)
    server.script.append(Reply(fault="hang"))
    assert lookup() == server.pods["default", "web"]
    assert len(lookup.pauses) >= 1


def test_a_deadline_that_is_over(lookup: Lookup, server: FakeApiServer) -> None:
    """Nothing is asked any more."""
    with pytest.raises(TryAgainLater, match="timed out"):
        lookup(patience_s=0.0)
    assert server.requests == []


# -- credentials ----------------------------------------------------------------------------------
def test_a_renewed_token_is_picked_up(lookup: Lookup, server: FakeApiServer) -> None:
    """The token expires, and its writer has renewed the file meanwhile."""
    (renewed,) = server.tokens = {"token-2"}
    lookup.during_pause = lambda: server.write_kubeconfig(lookup.kubeconfig, token=renewed)
    assert lookup() == server.pods["default", "web"]
    sent = [request.headers["authorization"] for request in server.requests]
    assert sent == ["Bearer token-1", "Bearer token-2"]


def test_a_token_that_stays_refused(lookup: Lookup, server: FakeApiServer) -> None:
    """The second 401 is the last, also with other trouble in between."""
    server.tokens.clear()
    server.script.extend([Reply(), Reply(500)])
    message = lookup.failure(PodLookupFailed)
    assert 'HTTP 401: "Unauthorized"' in message
    assert str(lookup.kubeconfig) in message
    assert len(server.requests) == 3


def test_a_kubeconfig_that_vanishes(lookup: Lookup, server: FakeApiServer) -> None:
    """Reading it once more may fail; then that is the reason."""
    server.tokens.clear()
    lookup.during_pause = lambda: lookup.kubeconfig.unlink()
    assert "cannot be read" in lookup.failure(KubeconfigUnusable)


def test_forbidden_is_final(lookup: Lookup, server: FakeApiServer) -> None:
    """A missing permission does not come by itself."""
    server.always = Reply(403, 'User "istio-cni" cannot get resource "pods"')
    message = lookup.failure(PodLookupFailed)
    assert r'HTTP 403: "User \"istio-cni\" cannot get' in message
    assert "allow the account" in message
    assert lookup.pauses == []


def test_redirects_are_not_followed(lookup: Lookup, server: FakeApiServer) -> None:
    """The token goes to the kubeconfig's server and nowhere else."""
    server.always = Reply(307, headers={"Location": f"{server.url}/elsewhere"})
    assert "redirects are not followed" in lookup.failure(PodLookupFailed)
    assert len(server.requests) == 1


def test_a_token_that_the_server_repeats_is_not_shown(
    lookup: Lookup, server: FakeApiServer
) -> None:
    """Some gateways print the request that they refuse."""
    server.always = Reply(400, body=f"Authorization: Bearer {BEARER}\r\n\x1b[2J".encode())
    assert r'HTTP 400: "Authorization: Bearer <token>\r\n\u001b[2J' in lookup.failure(
        PodLookupFailed
    )


# -- another object, or none ----------------------------------------------------------------------
def test_a_pod_that_appears_later(lookup: Lookup, server: FakeApiServer) -> None:
    """A cache behind the API server lags: 404 is not believed at once."""
    pod = server.pods.pop(("default", "web"))
    lookup.during_pause = lambda: server.pods.update({("default", "web"): pod})
    assert lookup() == pod


def test_a_pod_that_does_not_exist(lookup: Lookup, server: FakeApiServer) -> None:
    """After five seconds 404 is believed; the last look is at their end."""
    server.pods.clear()
    message = lookup.failure(PodLookupFailed)
    assert r'HTTP 404: "pods \"web\" not found"' in message
    assert lookup.took_s == pytest.approx(5.0)
    assert len(server.requests) >= 5


def test_five_seconds_count_from_the_first_404(lookup: Lookup, server: FakeApiServer) -> None:
    """Trouble before does not shorten them."""
    server.pods.clear()
    server.script.append(Reply(503, headers={"Retry-After": "6"}))
    lookup.failure(PodLookupFailed)
    assert lookup.took_s == pytest.approx(11.0)


def test_a_missing_pod_at_the_deadline(lookup: Lookup, server: FakeApiServer) -> None:
    """Little time does not turn a wrong answer into none."""
    server.pods.clear()
    with pytest.raises(PodLookupFailed):
        lookup(patience_s=1.0)
    assert lookup.took_s < 1.0


def test_a_former_pod_is_not_taken(lookup: Lookup, server: FakeApiServer) -> None:
    """An object of the same name with another uid is looked up again, and then refused."""
    server.add_pod("default", "web", "u0")
    message = lookup.failure(PodLookupFailed)
    assert 'uid mismatch: the object of this name has uid "u0"' in message
    assert lookup.took_s == pytest.approx(5.0)


def test_the_successor_is_taken(lookup: Lookup, server: FakeApiServer) -> None:
    """The cache catches up."""
    server.add_pod("default", "web", "u0")
    lookup.during_pause = lambda: server.add_pod("default", "web", "u1")
    assert lookup() == server.pods["default", "web"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "an answer that is not JSON"),
        (b"<html>", "an answer that is not JSON"),
        (b"\xff", "an answer that is not JSON"),
        (b"[" * 100_000, "an answer that is not JSON"),
        (b"null", "JSON that is no object with metadata"),
        (b"[]", "JSON that is no object with metadata"),
        (b'{"kind": "Pod", "metadata": null}', "JSON that is no object with metadata"),
        (b'{"kind": "PodList", "metadata": {}}', 'an object of kind "PodList"'),
        (b'{"kind": "Pod", "metadata": {"name": "web"}}', 'the object "None/web"'),
        (b'{"metadata": {"namespace": "default", "name": "x"}}', 'the object "default/x"'),
        (b" " * (8 * 1024 * 1024 + 1), "an answer of more than 8 MiB"),
    ],
)
def test_success_without_a_pod(
    lookup: Lookup, server: FakeApiServer, body: bytes, said: str
) -> None:
    """A proxy's page or a list is looked up again for a while, then refused."""
    server.always = Reply(200, body=body)
    assert f"HTTP 200 with {said} instead of the pod" in lookup.failure(PodLookupFailed)
    assert lookup.took_s == pytest.approx(5.0)


# -- what it costs the calls that never ask -------------------------------------------------------
def test_the_import_is_light() -> None:
    """Importing the edge loads none of the modules that only a look-up needs."""
    source = str(Path(istio_cni.__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {source!r}); import istio_cni.edge.kube, "
    code += "istio_cni.edge.manifests; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-I", "-S", "-c", code], text=True).split()
    assert "istio_cni.edge.kube.lookup" in loaded
    heavy = {"json", "ssl", "socket", "http", "yaml", "logging", "typing", "dataclasses", "re"}
    assert not heavy & {name.partition(".")[0] for name in loaded}


def test_a_look_up_loads_no_http_library(server: FakeApiServer, tmp_path: Path) -> None:
    """The standard one loads `email`, for 8 ms a captured pod."""
    path = tmp_path / "kubeconfig"
    server.write_kubeconfig(path)
    source = str(Path(istio_cni.__file__).parent.parent)
    code = f"import sys, time; sys.path.insert(0, {source!r}); from istio_cni.edge import kube; "
    code += f"kube.fetch_pod({str(path)!r}, 'default', 'web', time.monotonic() + 5, bool); "
    code += "print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-I", "-S", "-c", code], text=True).split()
    assert "ssl" in loaded
    assert not {"http", "email"} & {name.partition(".")[0] for name in loaded}
