"""Reading a kubeconfig: what is understood, and what is refused with which words."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest

from certificates import authority
from fake_apiserver import write_kubeconfig
from istio_cni.edge.kube import Kubeconfig, load_kubeconfig
from istio_cni.errors import KubeconfigUnusable

BEARER = "s3cret-t0ken"
SERVER = "https://10.96.0.1:443"
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a kubeconfig with these keys besides the usual ones; None drops a key."""

    def write(
        cluster: dict[str, object] | None = None,
        user: dict[str, object] | None = None,
        *,
        as_yaml: bool = False,
    ) -> str:
        path = tmp_path / "kubeconfig"
        merged = {"server": SERVER, **(cluster or {})}
        who = {"token": BEARER, **(user or {})}
        for keys in (merged, who):
            for key in [key for key, value in keys.items() if value is None]:
                del keys[key]
        write_kubeconfig(path, merged, who, as_yaml=as_yaml)
        return str(path)

    return write


def encoded(text: str) -> str:
    """Encode as the -data keys are."""
    return b64encode(text.encode()).decode()


def refusal(path: str) -> str:
    """Load a file that must be refused, and check what every refusal has."""
    with pytest.raises(KubeconfigUnusable) as caught:
        load_kubeconfig(path)
    message = str(caught.value)
    assert caught.value.code == 101
    assert path in message
    assert "expected" in message
    assert BEARER not in message + caught.value.details
    assert "\n" not in message
    return message


@pytest.mark.parametrize("as_yaml", [False, True], ids=["json", "yaml"])
def test_json_and_yaml_say_the_same(write: Write, as_yaml: bool) -> None:
    """Both spellings lead to the same server, authority and token."""
    ca = authority().certificate
    path = write({"certificate-authority-data": encoded(ca)}, as_yaml=as_yaml)
    kubeconfig = load_kubeconfig(path)
    assert kubeconfig.path == path
    assert kubeconfig.server == SERVER
    assert (kubeconfig.tls, kubeconfig.host, kubeconfig.port) == (True, "10.96.0.1", 443)
    assert kubeconfig.ca_data == ca.strip()
    assert kubeconfig.token == BEARER
    assert not kubeconfig.insecure


def test_the_current_context_decides(tmp_path: Path) -> None:
    """Of several contexts, clusters and users those that current-context leads to are taken."""
    path = tmp_path / "kubeconfig"
    document = {
        "clusters": [
            {"name": "old", "cluster": {"server": "https://old:1"}},
            {"name": "new", "cluster": {"server": "https://new:2"}},
        ],
        "users": [
            {"name": "alice", "user": {"token": "alice-token"}},
            {"name": "bob", "user": {"token": "bob-token"}},
        ],
        "contexts": [
            {"name": "first", "context": {"cluster": "old", "user": "alice"}},
            {"name": "second", "context": {"cluster": "new", "user": "bob"}},
        ],
        "current-context": "second",
    }
    path.write_text(json.dumps(document))
    kubeconfig = load_kubeconfig(str(path))
    assert (kubeconfig.server, kubeconfig.token) == ("https://new:2", "bob-token")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("https://[fd00::1]:6443", (True, "fd00::1", 6443, "")),
        ("https://api.example.com", (True, "api.example.com", 443, "")),
        ("https://rancher/k8s/clusters/c-1/", (True, "rancher", 443, "/k8s/clusters/c-1")),
        ("http://127.0.0.1:8080", (False, "127.0.0.1", 8080, "")),
        ("http://localhost", (False, "localhost", 80, "")),
    ],
)
def test_server_urls(write: Write, url: str, parts: tuple[bool, str, int, str]) -> None:
    """The scheme says whether there is TLS; a path in front of /api is kept."""
    kubeconfig = load_kubeconfig(write({"server": url}))
    found = (kubeconfig.tls, kubeconfig.host, kubeconfig.port, kubeconfig.base_path)
    assert found == parts


def test_files_are_found_beside_the_kubeconfig(write: Write, tmp_path: Path) -> None:
    """Relative names start at the kubeconfig's directory; a token file wins over a token."""
    pair = authority().issue("client")
    (tmp_path / "ca.pem").write_text("Größe\n" + authority().certificate + "\n")
    (tmp_path / "client.pem").write_text(pair.certificate)
    (tmp_path / "client.key").write_text(pair.key)
    (tmp_path / "token").write_text("  fresh-token\n")
    user = {
        "tokenFile": "token",
        "client-certificate": "client.pem",
        "client-key": str(tmp_path / "client.key"),
    }
    kubeconfig = load_kubeconfig(write({"certificate-authority": "ca.pem"}, user))
    assert kubeconfig.ca_data.endswith(authority().certificate.strip())
    assert kubeconfig.ca_file == str(tmp_path / "ca.pem")
    assert kubeconfig.token == (tmp_path / "token").read_text().strip()
    assert kubeconfig.token_file == str(tmp_path / "token")
    assert kubeconfig.client_certificate == pair.certificate.strip()
    assert kubeconfig.client_key == pair.key.strip()


def test_inline_data_wins_over_files(write: Write) -> None:
    """The -data keys need no file, even if one is named too."""
    data = {"certificate-authority-data": encoded(authority().certificate)}
    kubeconfig = load_kubeconfig(write({**data, "certificate-authority": "/nowhere"}))
    assert kubeconfig.ca_data == authority().certificate.strip()
    assert kubeconfig.ca_file == ""


def test_values_are_trimmed(write: Write) -> None:
    """Blanks and line ends around values, usual in copied secrets, do not count."""
    wrapped = "\n".join(encoded(authority().certificate).partition("L")) + "\n"
    cluster = {"certificate-authority-data": wrapped, "tls-server-name": " kubernetes "}
    kubeconfig = load_kubeconfig(write(cluster, {"token": f"{BEARER}\n"}))
    assert kubeconfig.ca_data == authority().certificate.strip()
    assert kubeconfig.server_name == "kubernetes"
    assert kubeconfig.token == BEARER


def test_the_representation_keeps_secrets(write: Write) -> None:
    """A kubeconfig in a log line or a traceback shows path and server only."""
    kubeconfig = load_kubeconfig(write())
    assert isinstance(kubeconfig, Kubeconfig)
    assert BEARER not in repr(kubeconfig) + str(kubeconfig)
    assert SERVER in repr(kubeconfig)


def test_missing_file(tmp_path: Path) -> None:
    """The message names the file, the reason and who writes it."""
    message = refusal(str(tmp_path / "nowhere"))
    assert "cannot be read: No such file or directory" in message
    assert "istio-cni-node" in message


def test_pipes_are_not_waited_for(write: Write, tmp_path: Path) -> None:
    """Neither as kubeconfig, through a link too, nor where it names a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    assert "it is not a regular file" in refusal(str(pipe))
    assert "it is not a regular file" in refusal(str(tmp_path / "link"))
    for cluster, user in (({"certificate-authority": "link"}, None), (None, {"tokenFile": "pipe"})):
        assert '" is not a regular file' in refusal(write(cluster, user))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is not a mapping"),
        ("[]", "the file is not a mapping"),
        (f"a: b\ntoken: {BEARER}: x\n", "neither JSON nor YAML (line 2)"),
        (f'{{"token": "{BEARER}', "neither JSON nor YAML"),
        ("\x00", "neither JSON nor YAML"),
        ("a: !!bool maybe", "neither JSON nor YAML"),
        ("x" * (1024 * 1024 + 1), "larger than 1 MiB"),
        ("clusters: []", "current-context is missing"),
        ("current-context: here", 'contexts has no "here"'),
        (
            "current-context: here\ncontexts: [{name: here, context: {}}]",
            "the context's cluster is missing",
        ),
        (
            "current-context: a\ncontexts: [{name: a, context: {cluster: b, user: c}}]\n"
            "clusters: [{name: b}]",
            'cluster "b" is not a mapping',
        ),
        (
            "current-context: a\ncontexts: [{name: a, context: {cluster: b, user: c}}]\n"
            "clusters: [{name: b, cluster: {}}]",
            'users has no "c"',
        ),
    ],
)
def test_files_that_are_no_kubeconfig(tmp_path: Path, text: str, said: str) -> None:
    """Each defect of the file's frame is told by its name, and nothing of the text is shown."""
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    assert said in refusal(str(path))


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"server": None}, "server is missing"),
        ({"server": 6443}, "server is of type int"),
        ({"server": "10.96.0.1:443"}, 'server is "10.96.0.1:443"'),
        ({"server": "ftp://host"}, 'server is "ftp://host"'),
        ({"server": "unix:///run/x"}, 'server is "unix:///run/x"'),
        ({"server": "https://"}, 'server is "https://"'),
        ({"server": "https://ho st"}, 'server is "https://ho st"'),
        ({"server": "https://ho\r\nst"}, 'server is "https://ho\\r\\nst"'),
        ({"server": "https://[::1"}, "server is not a URL"),
        ({"server": "https://host:99999"}, "server is not a URL"),
        ({"server": f"https://me:{BEARER}@host"}, "has a user"),
        ({"server": f"me:{BEARER}@host"}, "has a user"),
        ({"server": f"https://me:{BEARER}"}, "server is not a URL"),
        ({"server": "https://.host"}, 'server is "https://.host"'),
        ({"tls-server-name": "größe"}, 'tls-server-name is "gr'),
        ({"tls-server-name": ".host"}, 'tls-server-name is ".host"'),
        ({"server": f"https://host?token={BEARER}"}, "a query"),
        ({"insecure-skip-tls-verify": "yes"}, "insecure-skip-tls-verify is of type str"),
        ({"certificate-authority-data": "@@@"}, "certificate-authority-data is not base64"),
        ({"certificate-authority-data": "bm9uZQ=="}, "holds no PEM block CERTIFICATE"),
        ({"certificate-authority-data": ""}, "certificate-authority is empty"),
        ({"certificate-authority": "/nowhere.pem"}, '"/nowhere.pem" cannot be read'),
        ({"proxy-url": "http://proxy"}, "proxy-url is set"),
        (
            {
                "insecure-skip-tls-verify": True,
                "certificate-authority-data": encoded(authority().certificate),
            },
            "insecure-skip-tls-verify is set beside a certificate authority",
        ),
    ],
)
def test_clusters_that_cannot_be_used(write: Write, cluster: dict[str, object], said: str) -> None:
    """A server or authority that does not work is refused before anything is asked."""
    message = refusal(write(cluster))
    assert said in message
    assert 'cluster "local": ' in message or "cannot be read" in message


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({"token": None}, "has no usable credentials"),
        ({"token": None, "exec": {"command": "aws"}}, "(exec is not supported)"),
        ({"token": None, "username": "me", "password": BEARER}, "(username is not supported)"),
        ({"token": "  \n"}, "token is empty"),
        ({"token": 12345}, "token is of type int"),
        ({"token": f"{BEARER}\r\nX-Forged: 1"}, "token has blanks, control"),
        ({"token": f"{BEARER} {BEARER}"}, "token has blanks, control"),
        ({"token": f"{BEARER}é"}, "token has blanks, control or non-ASCII"),
        ({"tokenFile": "/nowhere/token"}, '"/nowhere/token" cannot be read'),
        ({"tokenFile": "/dev/null"}, '"/dev/null" is not a regular file'),
        ({"tokenFile": "/dev/zero"}, '"/dev/zero" is not a regular file'),
        ({"tokenFile": "a\0b"}, "is no file name"),
        (
            {"client-certificate-data": encoded(authority().certificate)},
            "client-certificate and client-key are not both given",
        ),
        ({"client-key-data": encoded("hello")}, "holds no PEM block PRIVATE KEY"),
    ],
)
def test_users_that_cannot_be_used(write: Write, user: dict[str, object], said: str) -> None:
    """A user without credentials would be anonymous: the kubeconfig is refused instead."""
    assert said in refusal(write(None, user))
