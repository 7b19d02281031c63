"""What the kubelet's probes are told."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest

from istio_cni.agent.health import HealthServer
from istio_cni.errors import IOFailure


class Served:
    """A server on a free port, and what it says is missing."""

    def __init__(self) -> None:
        self.missing = "no bundle"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.server = HealthServer(self.port, lambda: self.missing)

    def get(self, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
        """Return status and text of an answer."""
        connection = http.client.HTTPConnection(host, self.port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@pytest.fixture
def served() -> Iterator[Served]:
    """Serve until the test ends."""
    served = Served()
    yield served
    served.server.shutdown()
    served.server.server_close()


def test_ready_says_what_is_missing(served: Served) -> None:
    """503 with one line, until nothing is."""
    assert served.get("/readyz") == (503, "no bundle\n")
    served.missing = ""
    assert served.get("/readyz?verbose") == (200, "ok\n")


def test_healthy_is_whoever_answers(served: Served) -> None:
    """Other paths are not there."""
    assert served.get("/healthz") == (200, "ok\n")
    assert served.get("/metrics") == (404, "not found\n")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_both_families_are_served(served: Served) -> None:
    """The kubelet probes a pod's first address, whichever that is."""
    assert served.get("/healthz", "::1")[0] == 200


def test_a_client_that_leaves_is_no_line_in_the_log(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one that speaks something else."""
    for text in (b"", b"\x16\x03\x01\n\n", b"GET /readyz HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(text)
    assert served.get("/healthz")[0] == 200
    assert capsys.readouterr().err == ""


def test_a_port_in_use_is_a_clear_error(served: Served) -> None:
    """The agent would never become ready, without a word."""
    with pytest.raises(IOFailure, match=f"cannot serve health on port {served.port}"):
        HealthServer(served.port, lambda: "")
