"""TokenRequest through the official client, against a server of the real protocol over TLS."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from certificates import Authority, authority
from fake_apiserver import FakeApiServer, Reply
from istio_cni.edge.kube import tokens
from istio_cni.edge.kube.tokens import Token
from istio_cni.errors import KubeconfigUnusable, TryAgainLater

OWN = "token-1"
Mint = Callable[[], Token]


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    """Serve tokens of one account."""
    with FakeApiServer() as server:
        server.accounts.add(("mesh", "plugin"))
        yield server


@pytest.fixture
def account_dir(tmp_path: Path) -> Path:
    """Make a pod's own credentials."""
    (tmp_path / "token").write_text(OWN)
    (tmp_path / "ca.crt").write_text(authority().certificate)
    return tmp_path


@pytest.fixture
def mint(server: FakeApiServer, account_dir: Path) -> Mint:
    """Ask this server, with these credentials."""
    env = {
        "KUBERNETES_SERVICE_HOST": server.host,
        "KUBERNETES_SERVICE_PORT": str(server.port),
    }
    return lambda: tokens.mint(str(account_dir), env, "mesh", "plugin")


def test_a_token_is_asked_for_an_hour(server: FakeApiServer, mint: Mint) -> None:
    """With the agent's own token, which the answer replaces on the node."""
    token = mint()
    assert token.text in server.tokens - {OWN}
    assert 3590 < token.life_s <= 3600
    (request,) = server.requests
    assert request.path == "/api/v1/namespaces/mesh/serviceaccounts/plugin/token"
    assert json.loads(request.body)["spec"]["expirationSeconds"] == 3600
    assert OWN not in repr(token)


def test_a_shorter_life_is_respected(server: FakeApiServer, mint: Mint) -> None:
    """The server may grant less."""
    server.token_max_s = 600
    assert 590 < mint().life_s <= 600


@pytest.mark.parametrize(
    ("end", "life_s"), [("2001-01-01T00:00:00Z", 900), ("2999-01-01T00:00:00Z", 900)]
)
def test_a_clock_that_is_wrong_does_not_make_a_token_useless(
    server: FakeApiServer, mint: Mint, end: str, life_s: int
) -> None:
    """What was granted counts, not where this node's clock believes the end to be."""
    status = {"token": "other", "expirationTimestamp": end}
    spec = {"audiences": ["api"], "expirationSeconds": 900}
    server.always = Reply(201, body=json.dumps({"spec": spec, "status": status}).encode())
    assert mint() == Token("other", life_s)


def test_the_own_token_is_read_anew_each_time(
    server: FakeApiServer, mint: Mint, account_dir: Path
) -> None:
    """The kubelet rotates it."""
    mint()
    server.tokens = {"token-9"}
    (account_dir / "token").write_text("token-9")
    assert mint().text.startswith("plugin-")


def test_proxies_of_the_environment_are_not_used(
    mint: Mint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for what is outside the cluster."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    assert mint().text


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        (Reply(403, "no"), KubeconfigUnusable, "HTTP 403"),
        (Reply(401, "no"), KubeconfigUnusable, "HTTP 401"),
        (Reply(404, "no"), KubeconfigUnusable, "HTTP 404"),
        (Reply(429, "later"), TryAgainLater, "HTTP 429"),
        (Reply(503, "later"), TryAgainLater, "HTTP 503"),
        (Reply(fault="reset"), TryAgainLater, "not to be had"),
        (Reply(fault="hang"), TryAgainLater, "not to be had"),
        (Reply(fault="cut"), TryAgainLater, "not to be had"),
        (Reply(201, body=b"{"), TryAgainLater, "without one|not to be had"),
        (Reply(201, body=b"{}"), TryAgainLater, "without one|not to be had"),
    ],
)
def test_every_failure_has_a_name(
    server: FakeApiServer,
    mint: Mint,
    monkeypatch: pytest.MonkeyPatch,
    reply: Reply,
    error: type[Exception],
    said: str,
) -> None:
    """One line, which names the account and no token; it takes no longer than its bound."""
    monkeypatch.setattr(tokens, "TIMEOUT_S", 0.2)
    server.always = reply
    with pytest.raises(error, match=said) as caught:
        mint()
    message = str(caught.value)
    assert '"mesh/plugin"' in message
    assert OWN not in message
    assert "\n" not in message
    assert len(server.requests) == 1  # who comes back, and when, is decided elsewhere


def test_a_server_of_another_authority_is_not_trusted(
    server: FakeApiServer, mint: Mint, account_dir: Path
) -> None:
    """It gets no token to see."""
    (account_dir / "ca.crt").write_text(Authority("another").certificate)
    with pytest.raises(TryAgainLater, match="certificate"):
        mint()
    assert server.requests == []


@pytest.mark.parametrize("name", ["token", "ca.crt"])
def test_missing_credentials_are_named(mint: Mint, account_dir: Path, name: str) -> None:
    """They may come: the next try reads them again."""
    content = (account_dir / name).read_text()
    (account_dir / name).unlink()
    with pytest.raises(KubeconfigUnusable, match="this pod's credentials"):
        mint()
    (account_dir / name).write_text(content)
    assert mint().text


@pytest.mark.parametrize("own", ["SECRET\n", "SEC\nRET", "SECRET\x7f", "SECRÉT"])
def test_a_strange_token_of_our_own_is_never_shown(mint: Mint, account_dir: Path, own: str) -> None:
    """A line end behind it does not matter, but to the server; others make it none."""
    (account_dir / "token").write_text(own)
    with pytest.raises((KubeconfigUnusable, TryAgainLater)) as failure:
        mint()
    shown = f"{failure.value.msg}{failure.value.details}{failure.value.__cause__}"
    assert "SEC" not in shown


@pytest.mark.parametrize(
    "status",
    [[{"token": "SECRET"}], {"token": {"value": "SECRET"}}, {"token": "SECRET"}, "SECRET", None],
)
def test_an_answer_of_another_shape_is_never_shown(
    server: FakeApiServer, mint: Mint, status: object
) -> None:
    """It may hold a token all the same."""
    body = json.dumps({"kind": "TokenRequest", "spec": {"audiences": []}, "status": status})
    server.always = Reply(201, body=body.encode())
    with pytest.raises(TryAgainLater) as failure:
        mint()
    assert "SECRET" not in f"{failure.value.msg}{failure.value.__cause__}"
