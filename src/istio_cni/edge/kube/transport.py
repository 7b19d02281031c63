"""One HTTPS GET that ends in time, whatever the other side does.

Socket timeouts bound a single wait, so a server that sends a byte now and then would hold a pod's
start for minutes. Here every wait (resolving, connecting, the handshake, each read) gets what is
left until one instant. The connection is ours, because http.client's would resolve names without a
limit and import a codec for international names that no node needs; the answer is read by
`response`.
"""

from __future__ import annotations

import io

from istio_cni.constants import VERSION
from istio_cni.edge.kube.kubeconfig import unusable
from istio_cni.edge.kube.response import Answer, read_answer
from istio_cni.errors import quoted

BODY_MAX_BYTES = 8 * 1024 * 1024  # etcd refuses objects beyond 1.5 MiB
MFD_NOEXEC_SEAL = 8  # linux/memfd.h; Python's os has it from 3.14 on

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from istio_cni.edge.kube.kubeconfig import Kubeconfig

    Remaining: TypeAlias = Callable[[], float]  # seconds left; raises TimeoutError when none are
    Host: TypeAlias = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
    Addresses: TypeAlias = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Host]]


def get(
    kubeconfig: Kubeconfig,
    tls: ssl.SSLContext | None,
    target: str,
    deadline: float,
    clock: Callable[[], float],
) -> Answer:
    """Ask the kubeconfig's server for `target`, an encoded path, on a connection of its own.

    `deadline` is an instant of `clock`, in seconds. Raises OSError for whatever kept the answer
    away; of that, ssl.SSLCertVerificationError means that the server could not prove who it is.
    """

    def remaining() -> float:
        left = deadline - clock()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    sock = _connect(_resolve(kubeconfig.host, kubeconfig.port, remaining), remaining)
    try:
        sock.settimeout(remaining())
        if tls is not None:
            expected = kubeconfig.server_name or kubeconfig.host
            sock = tls.wrap_socket(sock, server_hostname=expected.encode())  # bytes: no idna codec
        sock.sendall(_request(kubeconfig, target))
        return read_answer(io.BufferedReader(_BoundedReader(sock, remaining)), BODY_MAX_BYTES)
    finally:
        sock.close()


def tls_context(kubeconfig: Kubeconfig) -> ssl.SSLContext | None:
    """Set up TLS as the kubeconfig wants it; None for an http:// server.

    Any certificate of the authority is a trust anchor, also an intermediate one, as with kubectl.
    Without an authority the system's are used. Raises KubeconfigUnusable for PEM that is none.
    """
    if not kubeconfig.tls:
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if kubeconfig.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif kubeconfig.ca_data:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(cadata=kubeconfig.ca_data)
        except ssl.SSLError as error:
            problem = f"its certificate authority does not parse: {error.reason}"
            raise unusable(kubeconfig.path, problem, "PEM certificates") from error
    else:
        context.load_default_certs()
    if kubeconfig.client_certificate:
        _load_client_certificate(context, kubeconfig)
    return context


def _load_client_certificate(context: ssl.SSLContext, kubeconfig: Kubeconfig) -> None:
    """Hand the client's key to OpenSSL, which reads files only, without a file on any disk."""
    import os

    try:
        descriptor = os.memfd_create("client", os.MFD_CLOEXEC | MFD_NOEXEC_SEAL)
    except OSError:  # Linux before 6.3 does not know the flag; hardened later ones insist on it
        descriptor = os.memfd_create("client", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "w", encoding="ascii", closefd=False) as file:
            file.write(f"{kubeconfig.client_certificate}\n{kubeconfig.client_key}\n")
        # a password of ours: OpenSSL would ask the terminal for that of an encrypted key
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    except OSError as error:  # ssl.SSLError is one
        problem = f"its client certificate and key do not load: {quoted(error)}"
        raise unusable(kubeconfig.path, problem, "an unencrypted pair") from error
    finally:
        os.close(descriptor)


def _resolve(host: str, port: int, remaining: Remaining) -> Addresses:
    """Find the addresses of `host`.

    A name is resolved on a thread of its own, which is left behind when time is over: getaddrinfo
    knows no limit.
    """
    import socket

    name = host.encode()  # bytes: no idna codec
    try:
        numeric = socket.AI_NUMERICHOST
        return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=numeric)
    except socket.gaierror:
        import threading  # servers that are named; in a cluster it is an address

    found: list[Addresses] = []
    failed: list[OSError] = []

    def resolve() -> None:
        try:
            found.append(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(remaining())
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"resolving {host} timed out")
    return found[0]


def _connect(addresses: Addresses, remaining: Remaining) -> socket.socket:
    """Connect to the first address that answers; each gets its share of the time that is left."""
    import socket

    last: OSError = OSError("no address")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        share_s = remaining() / (len(addresses) - index)
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # a family that this kernel lacks
            last = error
            continue
        try:
            sock.settimeout(share_s)
            sock.connect(address)
        except OSError as error:
            sock.close()
            last = error
        else:
            return sock
    raise last


def _request(kubeconfig: Kubeconfig, target: str) -> bytes:
    """Write the request; its values were checked or encoded before, so none can forge a line."""
    host = f"[{kubeconfig.host}]" if ":" in kubeconfig.host else kubeconfig.host
    lines = [
        f"GET {kubeconfig.base_path}{target} HTTP/1.1",
        f"Host: {host}:{kubeconfig.port}",
        f"User-Agent: istio-cni/{VERSION}",
        "Accept: application/json",
        "Accept-Encoding: identity",
        "Connection: close",
    ]
    if kubeconfig.token:
        lines.append(f"Authorization: Bearer {kubeconfig.token}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


class _BoundedReader(io.RawIOBase):
    """The reading side of a connected socket, each of whose waits ends at the same instant."""

    def __init__(self, sock: socket.socket, remaining: Remaining) -> None:
        super().__init__()
        self._sock = sock
        self._remaining = remaining

    def readable(self) -> bool:
        """Return true, as every reader does."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # all callers pass one
        """Wait for bytes as long as there is time."""
        self._sock.settimeout(self._remaining())
        return self._sock.recv_into(buffer)
