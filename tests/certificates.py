"""X.509 certificates made on the spot, so that TLS is tested as it is used.

Certificates in the repository would expire, and their keys would alarm every secret scanner; the
openssl program and the usual packages are more than a few hundred bytes of DER need. ECDSA over
P-256 is a page of integer arithmetic and takes 25 ms a certificate. It is fit for tests and nothing
else: its timing gives the keys away.
"""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import ipaddress
import secrets
from typing import NamedTuple

# -- P-256 (FIPS 186-4, D.1.2.3); None is the point at infinity ---------------------------------
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_Point = tuple[int, int] | None

# -- object identifiers, encoded ----------------------------------------------------------------
_EC_PUBLIC_KEY = bytes.fromhex("06072a8648ce3d0201")
_PRIME256V1 = bytes.fromhex("06082a8648ce3d030107")
_ECDSA_SHA256 = bytes.fromhex("300a06082a8648ce3d040302")
_COMMON_NAME = bytes.fromhex("0603550403")
_BASIC_CONSTRAINTS = bytes.fromhex("0603551d13")
_ALT_NAMES = bytes.fromhex("0603551d11")
_TRUE = bytes.fromhex("0101ff")


class Certificate(NamedTuple):
    """A certificate and its key, as PEM text."""

    certificate: str
    key: str


class Authority:
    """A certificate authority with a name and a key of its own."""

    def __init__(self, name: str = "test authority") -> None:
        self.name = name
        self._secret = secrets.randbelow(_N - 1) + 1
        extensions = _sequence(_BASIC_CONSTRAINTS, _TRUE, _octets(_sequence(_TRUE)))
        self.certificate = self._sign(name, self._secret, extensions, days=1)

    def issue(self, *names: str, days: int = 1) -> Certificate:
        """Certify a new key for names and addresses; with `days` below 0 it has expired."""
        secret = secrets.randbelow(_N - 1) + 1
        alternatives = _sequence(*map(_alternative_name, names))
        extensions = _sequence(_ALT_NAMES, _octets(alternatives))
        return Certificate(self._sign(names[0], secret, extensions, days), _private_key(secret))

    def _sign(self, subject: str, secret: int, extensions: bytes, days: int) -> str:
        now = datetime.datetime.now(datetime.UTC)
        start = now - datetime.timedelta(days=2)
        body = _sequence(
            _tagged(0xA0, _integer(2)),
            _integer(secrets.randbits(120)),
            _ECDSA_SHA256,
            _name(self.name),
            _sequence(_time(start), _time(now + datetime.timedelta(days=days))),
            _name(subject),
            _sequence(_sequence(_EC_PUBLIC_KEY, _PRIME256V1), _bits(_public(secret))),
            _tagged(0xA3, _sequence(extensions)),
        )
        signed = _sequence(body, _ECDSA_SHA256, _bits(_signature(self._secret, body)))
        return _pem("CERTIFICATE", signed)


@functools.cache
def authority() -> Authority:
    """Return the one authority that tests share unless they need a second."""
    return Authority()


def _add(a: _Point, b: _Point) -> _Point:
    if a is None or b is None:
        return a or b
    if a[0] == b[0]:
        if (a[1] + b[1]) % _P == 0:
            return None
        slope = (3 * a[0] * a[0] - 3) * pow(2 * a[1], -1, _P)
    else:
        slope = (b[1] - a[1]) * pow(b[0] - a[0], -1, _P)
    x = (slope * slope - a[0] - b[0]) % _P
    return x, (slope * (a[0] - x) - a[1]) % _P


def _times(factor: int) -> tuple[int, int]:
    """Multiply the generator."""
    total: _Point = None
    power: _Point = _G
    while factor:
        if factor & 1:
            total = _add(total, power)
        power = _add(power, power)
        factor >>= 1
    assert total is not None
    return total


def _public(secret: int) -> bytes:
    x, y = _times(secret)
    return b"\x04" + x.to_bytes(32) + y.to_bytes(32)


def _signature(secret: int, message: bytes) -> bytes:
    digest = int.from_bytes(hashlib.sha256(message).digest())
    nonce = secrets.randbelow(_N - 1) + 1
    r = _times(nonce)[0] % _N
    return _sequence(_integer(r), _integer(pow(nonce, -1, _N) * (digest + r * secret) % _N))


def _private_key(secret: int) -> str:
    """Encode as RFC 5915 says."""
    curve, public = _tagged(0xA0, _PRIME256V1), _tagged(0xA1, _bits(_public(secret)))
    encoded = _sequence(_integer(1), _octets(secret.to_bytes(32)), curve, public)
    return _pem("EC PRIVATE KEY", encoded)


# -- DER ----------------------------------------------------------------------------------------
def _tagged(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 128:
        return bytes([tag, size]) + content
    octets = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(octets)]) + octets + content


def _sequence(*parts: bytes) -> bytes:
    return _tagged(0x30, b"".join(parts))


def _integer(value: int) -> bytes:
    return _tagged(0x02, value.to_bytes(value.bit_length() // 8 + 1))


def _octets(content: bytes) -> bytes:
    return _tagged(0x04, content)


def _bits(content: bytes) -> bytes:
    return _tagged(0x03, b"\0" + content)


def _time(instant: datetime.datetime) -> bytes:
    return _tagged(0x17, instant.strftime("%y%m%d%H%M%SZ").encode())


def _name(common_name: str) -> bytes:
    attribute = _sequence(_COMMON_NAME, _tagged(0x0C, common_name.encode()))
    return _sequence(_tagged(0x31, attribute))


def _alternative_name(name: str) -> bytes:
    try:
        return _tagged(0x87, ipaddress.ip_address(name).packed)
    except ValueError:
        return _tagged(0x82, name.encode())


def _pem(label: str, content: bytes) -> str:
    text = base64.encodebytes(content).decode()
    return f"-----BEGIN {label}-----\n{text}-----END {label}-----\n"
