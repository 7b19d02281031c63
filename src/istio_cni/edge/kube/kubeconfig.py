"""A kubeconfig: where the API server is, how it proves itself, and who we are.

The file may be the installer's or an administrator's, so the usual keys are understood the way
kubectl understands them: current-context leads to one cluster and one user, `-data` keys win over
files, relative names start at the kubeconfig's directory. Keys that would change where the request
goes or what it proves (proxy-url, exec, auth-provider) are refused rather than ignored. Files are
read here and values checked here, so that an unusable kubeconfig is told from an unreachable
server. Its secrets stay out of every message.
"""

from __future__ import annotations

import os
import stat

from istio_cni.errors import KubeconfigUnusable, quoted

FILE_MAX_BYTES = 1024 * 1024  # of the kubeconfig and of each file that it names
DEFAULT_PORTS = {"https": 443, "http": 80}
UNSUPPORTED_CREDENTIALS = ("exec", "auth-provider", "username", "password")
YAML_LEAKS = (ValueError, LookupError, AttributeError, TypeError, RecursionError)  # odd scalars
WRITER = "where the istio-cni-node agent writes this file, see that it runs on this node"


class Kubeconfig:
    """One cluster and one user of the kubeconfig at `path`; certificates and keys are PEM text.

    `server` is the URL for messages; `host`, `port` and `base_path` are what it consists of.
    `token_file` and `ca_file` are the files that `token` and `ca_data` were read from, or "".
    """

    __slots__ = (
        "base_path",
        "ca_data",
        "ca_file",
        "client_certificate",
        "client_key",
        "host",
        "insecure",
        "path",
        "port",
        "server",
        "server_name",
        "tls",
        "token",
        "token_file",
    )

    def __init__(self, path: str, server: str, cluster: _Section, user: _Section) -> None:
        self.path = path
        self.server = server
        self.tls, self.host, self.port, self.base_path = _parse_server(cluster, server)
        self.insecure = cluster.flag("insecure-skip-tls-verify")
        self.server_name = cluster.text("tls-server-name")
        self.ca_data, self.ca_file = cluster.pem("certificate-authority", "CERTIFICATE")
        self.token, self.token_file = user.secret("token", "tokenFile")
        self.client_certificate, _ = user.pem("client-certificate", "CERTIFICATE")
        self.client_key, _ = user.pem("client-key", "PRIVATE KEY")

    def __repr__(self) -> str:
        return f"Kubeconfig({self.path!r}, server={self.server!r})"  # never its secrets


def load_kubeconfig(path: str) -> Kubeconfig:
    """Read the kubeconfig's current context.

    JSON is tried first: that is what the exec path can afford; other text is YAML.
    Raises KubeconfigUnusable, which names the file, what is wrong and what is expected.
    """
    root = _Section(path, "", _decode(path, _read(path, path)))
    context = root.named("contexts", "context", root.text("current-context"), "current-context")
    cluster = root.named("clusters", "cluster", context.text("cluster"), "the context's cluster")
    user = root.named("users", "user", context.text("user"), "the context's user")
    kubeconfig = Kubeconfig(path, cluster.text("server"), cluster, user)
    _require_trust(cluster, kubeconfig)
    _require_credentials(user, kubeconfig)
    return kubeconfig


class _Section:
    """A mapping of the kubeconfig; `where` is its place in the file, for messages."""

    __slots__ = ("mapping", "path", "where")

    def __init__(self, path: str, where: str, mapping: object) -> None:
        self.path = path
        self.where = where
        if not isinstance(mapping, dict):
            raise unusable(path, f"{where or 'the file'} is not a mapping", "a kubeconfig")
        self.mapping: dict[str, object] = mapping

    def refuse(self, key: str, problem: str, expected: str) -> KubeconfigUnusable:
        """Make the error for a key of this section."""
        place = f"{self.where}: {key}" if self.where else key
        return unusable(self.path, f"{place} {problem}", expected)

    def named(self, plural: str, singular: str, name: str, pointer: str) -> _Section:
        """Find the entry called `name` in one of the three named lists."""
        entries = self.mapping.get(plural)
        if not name:
            raise unusable(self.path, f"{pointer} is missing", f"the name of one of its {plural}")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("name") == name:
                return _Section(self.path, f"{singular} {quoted(name)}", entry.get(singular))
        raise unusable(
            self.path, f"{plural} has no {quoted(name)}", f"the entry that {pointer} names"
        )

    def text(self, key: str) -> str:
        """Return the trimmed string under `key`; "" where it is missing or null."""
        value = self.mapping.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.refuse(key, f"is of type {type(value).__name__}", "a string")
        return value.strip()

    def flag(self, key: str) -> bool:
        """Return the boolean under `key`; false where it is missing or null."""
        value = self.mapping.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, f"is of type {type(value).__name__}", "true or false")
        return bool(value)

    def secret(self, key: str, file_key: str) -> tuple[str, str]:
        """Return a token and its file; the file wins, since it is what gets renewed."""
        name = self.text(file_key)
        value, where = self.text(key), key
        if name:
            name = os.path.join(os.path.dirname(self.path), name)
            value, where = _read(self.path, name).decode("utf-8", "replace").strip(), file_key
        if (name or self.mapping.get(key) is not None) and not value:
            raise self.refuse(where, "is empty", "a bearer token")
        if not _is_plain(value):  # it must not end a line of the request
            raise self.refuse(where, "has blanks, control or non-ASCII characters", "one token")
        return value, name

    def pem(self, key: str, block: str) -> tuple[str, str]:
        """Return the PEM text of `key`-data or of the file under `key`, and that file's name."""
        name, encoded = "", self.text(f"{key}-data")
        if encoded:
            data, key = self._from_base64(f"{key}-data", encoded), f"{key}-data"
        elif file_name := self.text(key):
            name = os.path.join(os.path.dirname(self.path), file_name)
            data = _read(self.path, name)
        elif any(self.mapping.get(name) is not None for name in (key, f"{key}-data")):
            raise self.refuse(key, "is empty", f"a PEM block {block}, or no such key")
        else:
            return "", ""
        text = data.decode("ascii", "ignore").strip()  # comments between blocks may be anything
        if f"{block}-----" not in text:
            raise self.refuse(key, f"holds no PEM block {block}", "PEM text")
        return text, name

    def _from_base64(self, key: str, encoded: str) -> bytes:
        import binascii  # a C module; base64 would load re

        try:
            return binascii.a2b_base64("".join(encoded.split()), strict_mode=True)
        except ValueError as error:
            raise self.refuse(key, "is not base64", "base64 of PEM text") from error


def unusable(path: str, problem: str, expected: str) -> KubeconfigUnusable:
    """Say which file is unusable, what is wrong, what belongs there and who writes it."""
    return KubeconfigUnusable(
        f"kubeconfig {quoted(path)}: {problem}; expected {expected}; {WRITER}"
    )


def _read(kubeconfig: str, path: str) -> bytes:
    """Read the kubeconfig, or a file that it names; nothing else than a regular file."""
    shown = "it" if path == kubeconfig else quoted(path)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                problem = f"{shown} is not a regular file"
                raise unusable(kubeconfig, problem, "a file that root can read")
            with open(file, "rb", closefd=False) as stream:
                content = stream.read(FILE_MAX_BYTES + 1)
        finally:
            os.close(file)
    except ValueError as error:  # a name with a NUL, or one that is no text
        raise unusable(kubeconfig, f"{shown} is no file name", "a file's name") from error
    except OSError as error:
        problem = f"{shown} cannot be read: {error.strerror}"
        raise unusable(kubeconfig, problem, "a file that root can read") from error
    if len(content) > FILE_MAX_BYTES:
        raise unusable(kubeconfig, f"{shown} is larger than 1 MiB", "a kubeconfig or PEM file")
    return content


def _decode(path: str, content: bytes) -> object:
    """Decode the file; a complaint tells the line and nothing of its text, maybe a token."""
    import json

    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        import yaml  # kubeconfigs that people or kubectl wrote

    try:
        return yaml.safe_load(content)
    except (yaml.YAMLError, *YAML_LEAKS) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if isinstance(mark, yaml.Mark) else ""
        raise unusable(path, f"it is neither JSON nor YAML{line}", "a kubeconfig") from None


def _parse_server(cluster: _Section, server: str) -> tuple[bool, str, int, str]:
    """Split the server's URL into TLS or not, host, port and path prefix."""
    from urllib.parse import urlsplit

    expected = "https://HOST:PORT (http:// only without TLS)"
    if not server:
        raise cluster.refuse("server", "is missing", expected)
    if any(mark in server for mark in "@?#"):  # not shown: may be a password
        raise cluster.refuse("server", "has a user, a query or a fragment", expected)
    try:
        url = urlsplit(server)
        host, port = url.hostname, url.port
    except ValueError:
        raise cluster.refuse("server", "is not a URL", expected) from None
    if url.scheme not in DEFAULT_PORTS or not _is_host(host) or not _is_plain(server):
        raise cluster.refuse("server", f"is {quoted(server)}", expected)
    port = DEFAULT_PORTS[url.scheme] if port is None else port
    return url.scheme == "https", host or "", port, url.path.rstrip("/")


def _is_plain(text: str) -> bool:
    """Whether `text` can stand in a request: visible ASCII characters only."""
    return text.isascii() and text.isprintable() and " " not in text


def _is_host(text: str | None) -> bool:
    """Whether `text` may be a host's name or address; ssl raises ValueError for others."""
    return bool(text) and text is not None and _is_plain(text) and not text.startswith(".")


def _require_trust(cluster: _Section, kubeconfig: Kubeconfig) -> None:
    """Refuse contradictory or unsupported ways to reach the server."""
    if kubeconfig.insecure and kubeconfig.ca_data:
        problem = "is set beside a certificate authority"
        raise cluster.refuse("insecure-skip-tls-verify", problem, "one of the two")
    if cluster.text("proxy-url"):
        raise cluster.refuse("proxy-url", "is set", "a server that this node reaches directly")
    if kubeconfig.server_name and not _is_host(kubeconfig.server_name):
        problem = f"is {quoted(kubeconfig.server_name)}"
        raise cluster.refuse("tls-server-name", problem, "a host name")


def _require_credentials(user: _Section, kubeconfig: Kubeconfig) -> None:
    """Refuse a user that would be anonymous, or whose client certificate lacks a half."""
    if bool(kubeconfig.client_certificate) != bool(kubeconfig.client_key):
        raise user.refuse("client-certificate", "and client-key are not both given", "both")
    if kubeconfig.token or kubeconfig.client_certificate:
        return
    found = [key for key in UNSUPPORTED_CREDENTIALS if key in user.mapping]
    problem = f"({found[0]} is not supported)" if found else ""
    expected = "token, tokenFile, or client-certificate with client-key"
    raise user.refuse("has no usable credentials", problem, expected)
