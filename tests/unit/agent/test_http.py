"""The HTTP server: what each port serves, and that no client costs others more than moments."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from istio_cni.agent import serving
from istio_cni.agent.health import HealthServer, serve_monitoring
from istio_cni.agent.metrics import Metrics
from waiting import wait

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def get(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    """Return status, content type and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def metrics() -> Metrics:
    """Make metrics."""
    return Metrics()


@pytest.fixture
def server(metrics: Metrics) -> Iterator[HealthServer]:
    """Serve metrics until the test ends."""
    server = serve_monitoring(free_port(), lambda: "no bundle", metrics.render)
    assert server is not None
    yield server
    server.close()


def port_of(server: HealthServer) -> int:
    """Return the port of a server."""
    return int(server.socket.getsockname()[1])


# -- pages -----------------------------------------------------------------------------------------


def test_the_monitoring_port_serves_metrics_and_both_probes(
    server: HealthServer, metrics: Metrics
) -> None:
    """Anything else is not there."""
    port = port_of(server)
    metrics.request("ADD", 0)
    status, kind, text = get(port, "/metrics?x=1")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert 'istio_cni_plugin_requests_total{code="0",verb="ADD"} 1.0' in text
    assert get(port, "/healthz")[::2] == (200, "ok\n")
    assert get(port, "/readyz")[::2] == (503, "no bundle\n")
    for path in ("/", "/metrics/", "/metrics/../healthz", "/%6detrics"):
        assert get(port, path)[0] == 404


def test_openmetrics_is_served_to_those_who_ask_for_it(server: HealthServer) -> None:
    """Prometheus does."""
    _, kind, text = get(port_of(server), "/metrics", Accept=OPENMETRICS)
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_metrics_that_cannot_be_written_are_an_error_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here and in the log; the probes go on."""

    def fail(_: str) -> tuple[bytes, str]:
        raise RuntimeError("broken")

    server = HealthServer(free_port(), lambda: "", fail)
    with caplog.at_level(logging.ERROR, "cni-agent"):
        status, _, text = get(port_of(server), "/metrics")
    assert (status, "broken" in text) == (500, True)
    assert "metrics cannot be written" in caplog.text
    assert get(port_of(server), "/readyz")[0] == 200
    server.close()


@pytest.mark.parametrize("port", [0, -1])
def test_monitoring_can_be_switched_off(port: int, metrics: Metrics) -> None:
    """As in the reference."""
    assert serve_monitoring(port, lambda: "", metrics.render) is None


@pytest.mark.parametrize("in_use", [True, False])
def test_a_port_that_is_not_to_be_had_is_logged_only(
    server: HealthServer, metrics: Metrics, in_use: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One in use, or one that is none: the agent can do without."""
    port = port_of(server) if in_use else 70_000
    with caplog.at_level(logging.ERROR, "cni-agent"):
        assert serve_monitoring(port, lambda: "", metrics.render) is None
    assert f"cannot serve metrics on port {port}: " in caplog.text


def test_a_server_tells_nobody_what_it_is_made_of(server: HealthServer) -> None:
    """Versions of Python are for those who have the image."""
    with socket.create_connection(("127.0.0.1", port_of(server)), 5) as client:
        client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b"Server: istio-cni\r\n" in client.recv(4096)


# -- bounds ----------------------------------------------------------------------------------------


def idle(server: HealthServer, count: int) -> list[socket.socket]:
    """Connect and say nothing."""
    address = ("127.0.0.1", port_of(server))
    return [socket.create_connection(address, 5) for _ in range(count)]


def test_idle_clients_do_not_keep_others_out(server: HealthServer) -> None:
    """The oldest make room; there are never more threads than connections allowed."""
    before = threading.active_count()
    clients = idle(server, serving.CONNECTIONS_MAX + 3)
    began = time.monotonic()
    for _ in range(3):
        assert get(port_of(server), "/healthz")[0] == 200
    assert time.monotonic() - began < 4 * serving.ROOM_WAIT_S + 3
    assert threading.active_count() <= before + serving.CONNECTIONS_MAX
    assert clients[0].recv(1) == b""  # ended
    clients[-1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        clients[-1].recv(1)
    for client in clients:
        client.close()


def test_a_client_that_trickles_does_not_outlive_its_time(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then would satisfy any limit for one read."""
    monkeypatch.setattr(serving, "AGE_MAX_S", 0.2)
    (client,) = idle(server, 1)
    began = time.monotonic()
    try:
        while time.monotonic() - began < 5:
            client.sendall(b"G")
            time.sleep(0.05)
    except OSError:
        pass
    assert time.monotonic() - began < 0.2 + 2 * serving.POLL_S + 1
    client.close()


def test_where_no_connection_makes_room_a_new_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are being answered are not waited for without end."""
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 2)
    gate, entered = threading.Event(), []

    def missing() -> str:
        entered.append(1)
        gate.wait(10)
        return ""

    server = HealthServer(free_port(), missing)
    clients = idle(server, 2)
    for client in clients:
        client.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
    wait(lambda: len(entered) == 2, "both are served")
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        get(port_of(server), "/healthz")
    gate.set()
    wait(lambda: get(port_of(server), "/healthz")[0] == 200, "there is room again")
    for client in clients:
        client.close()
    server.close()


def test_a_request_that_does_not_end_is_read_to_a_limit(server: HealthServer) -> None:
    """A line, and a number of headers."""
    for text in (b"GET /" + b"x" * 70_000, b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 200):
        with socket.create_connection(("127.0.0.1", port_of(server)), 5) as client:
            try:
                client.sendall(text + b"\r\n\r\n")
                answer = client.recv(4096)
            except ConnectionError:
                continue
            assert answer == b"" or answer.split()[1] in (b"414", b"431")


def test_connections_are_forgotten_when_they_end(server: HealthServer) -> None:
    """Or the server would be full one day."""
    for _ in range(2 * serving.CONNECTIONS_MAX):
        assert get(port_of(server), "/healthz")[0] == 200
    wait(lambda: server.connections == 0, "all have ended")


def test_without_descriptors_the_server_goes_on_later(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses meanwhile instead of trying as fast as it can."""
    failures = iter([1, 1])
    accept = socket.socket.accept

    def failing(self: socket.socket) -> object:
        if next(failures, None):
            raise OSError(24, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    assert get(port_of(server), "/healthz")[0] == 200
    assert next(failures, None) is None
