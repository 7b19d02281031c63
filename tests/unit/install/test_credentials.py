"""The plugin's kubeconfig: written when it must be, renewed in time, never in anybody's way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from certificates import authority
from istio_cni.edge.kube import load_kubeconfig
from istio_cni.errors import IOFailure, KubeconfigUnusable, TryAgainLater
from istio_cni.install import plan
from istio_cni.install.credentials import Credentials, Target

SERVER = "https://10.96.0.1:443"


class Server:
    """Stands for whoever mints tokens; `failure` is what it answers with instead."""

    def __init__(self) -> None:
        self.minted = 0
        self.asked = 0
        self.failure: Exception | None = None
        self.before: Callable[[], object] = lambda: None

    def mint(self) -> tuple[str, float]:
        """Return the next token, good for an hour."""
        self.asked += 1
        self.before()
        if self.failure:
            raise self.failure
        self.minted += 1
        return f"token-{self.minted}", 3600.0


class Node:
    """A run dir, an authority's file and a clock."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.server = Server()
        self.ca = directory / "ca.crt"
        self.ca.write_text(f"\n{authority().certificate}\n\n")
        self.kubeconfig = directory / "run" / "istio-cni-kubeconfig"
        self.target = Target(str(directory / "run"), SERVER, str(self.ca))
        self.credentials = self.start()

    def start(self) -> Credentials:
        """Return what a new process has."""
        return Credentials(self.target, self.server.mint, lambda: self.now)

    def look(self, after_s: float = 0.0) -> list[str]:
        """Look once, some seconds later, until no question is under way."""
        self.now += after_s
        done = list(self.credentials.install())
        for thread in threading.enumerate():
            if thread.name == "token":
                thread.join()
        return done + list(self.credentials.install())

    def token(self) -> str:
        """Return the token that the plugin has now."""
        return load_kubeconfig(str(self.kubeconfig)).token


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Make a node without kubeconfig."""
    return Node(tmp_path)


def test_the_plugin_can_read_what_is_written(node: Node) -> None:
    """Server, authority and token; for root alone, and for good until something changes."""
    assert len(node.look()) == 2
    found = load_kubeconfig(str(node.kubeconfig))
    assert (found.server, found.token) == (SERVER, "token-1")
    assert found.ca_data.strip() == authority().certificate.strip()
    assert node.kubeconfig.stat().st_mode & 0o777 == 0o600
    before = node.kubeconfig.stat().st_ino
    assert node.look(1799) == []
    assert node.kubeconfig.stat().st_ino == before


def test_the_token_is_renewed_at_half_its_life(node: Node) -> None:
    """From when it was asked for."""
    node.look()
    assert node.look(1799) == []
    assert node.look(1)
    assert node.token() == "token-2"
    assert node.look(1799) == []


def test_a_start_does_not_trust_the_token_that_it_finds(node: Node) -> None:
    """How long that one is still good for is not known."""
    node.look()
    node.credentials = node.start()
    assert node.look()
    assert node.token() == "token-2"


def test_a_removed_kubeconfig_comes_back(node: Node) -> None:
    """Without a new token."""
    node.look()
    node.kubeconfig.unlink()
    assert len(node.look(1)) == 1
    assert node.server.minted == 1
    assert list(node.credentials.remove()) == [f'"{node.kubeconfig}" removed']
    assert list(node.credentials.remove()) == []


def test_another_authority_is_written_at_once(node: Node) -> None:
    """It rotates while tokens stay good."""
    node.look()
    node.ca.write_text(f"{authority().certificate}\n{authority().certificate}")
    assert len(node.look(1)) == 1
    assert load_kubeconfig(str(node.kubeconfig)).ca_data.count("BEGIN CERTIFICATE") == 2


def test_trouble_is_tried_again_less_and_less_often(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """1, 2, 4 … 30 s, each time told of; the reason is what is missing."""
    caplog.set_level(logging.WARNING)
    node.server.failure = KubeconfigUnusable("HTTP 403")
    at = []
    for second in range(100):
        node.now = float(second)
        asked = node.server.asked
        with pytest.raises(KubeconfigUnusable, match="403"):
            list(node.credentials.install())
        if node.server.asked > asked:
            at.append(second)
    assert at == [0, 1, 3, 7, 15, 31, 61, 91]
    assert len(caplog.records) == len(at)


def test_what_works_stays_while_the_server_is_away(node: Node) -> None:
    """For the second half of the token's life, and no longer."""
    node.look()
    before = node.kubeconfig.read_bytes()
    node.server.failure = TryAgainLater("no connection")
    assert node.look(1800) == []
    assert node.look(1799) == []
    with pytest.raises(TryAgainLater, match="no connection"):
        node.look(1)
    assert node.kubeconfig.read_bytes() == before
    node.server.failure = None
    node.look(30)
    assert node.token() == "token-2"


def test_a_server_that_does_not_answer_holds_up_nobody(node: Node) -> None:
    """A look ends at once while there is a token; the question is given up after a while."""
    node.look()
    answer = threading.Event()
    node.server.before = answer.wait
    node.now = 1800.0
    assert list(node.credentials.install()) == []
    assert list(node.credentials.install()) == []
    assert node.server.asked == 2
    node.now += 30.0
    assert list(node.credentials.install()) == []  # given up
    node.now += 1.0
    assert list(node.credentials.install()) == []  # asked again
    assert node.server.asked == 3
    answer.set()


def test_a_fault_of_ours_does_not_end_the_asking(node: Node) -> None:
    """It is named and tried again."""
    node.server.failure = ZeroDivisionError("oops")
    with pytest.raises(Exception, match="internal error: ZeroDivisionError"):
        node.look()
    node.server.failure = None
    assert node.look(1)


@pytest.mark.parametrize("content", ["", "no PEM"])
def test_an_authority_without_certificate_is_refused(node: Node, content: str) -> None:
    """The kubeconfig that is there stays."""
    node.look()
    node.ca.write_text(content)
    with pytest.raises(IOFailure, match=r"no certificate of an authority in .*ca\.crt"):
        node.look(1)
    assert load_kubeconfig(str(node.kubeconfig)).ca_data


def test_verification_can_be_switched_off(node: Node) -> None:
    """Then no authority is read; the mode is as asked for, whatever the umask."""
    node.ca.unlink()
    node.target = node.target._replace(ca_file="", mode=0o660)
    node.credentials = node.start()
    node.look()
    assert load_kubeconfig(str(node.kubeconfig)).insecure
    assert node.kubeconfig.stat().st_mode & 0o777 == 0o660


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.96.0.1", "https://10.96.0.1:443"),
        ("fd00::1", "https://[fd00::1]:443"),
        ("[fd00::1]", "https://[fd00::1]:443"),
        ("api.example", "https://api.example:443"),
    ],
)
def test_an_ipv6_server_is_bracketed_once(host: str, url: str) -> None:
    """As a URL needs it."""
    assert plan.server_url("https", host, "443") == url
