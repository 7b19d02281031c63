"""What namespace and container themselves say of a configuration: addresses, DNS servers, ids.

Source: istio tools/istio-iptables, pkg/config (FillConfigFromEnvironment) and pkg/capture (host
IP).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from socket import AF_INET, AF_INET6, inet_pton

from istio_cni import constants
from istio_cni.errors import InvalidParameter, IOFailure, ProgrammingFailed, quoted
from istio_cni.rules.config import CaptureConfig, canonical_address, is_id

ADDRESSES_KEPT = 256
RESOLV_CONF = "/etc/resolv.conf"


def host_address(addresses: Iterable[str], *, dual_stack: bool) -> tuple[str, bool]:
    """Return the pod's address and whether IPv6 is to be captured.

    Addresses come in the kernel's order; loopback and link-local ones do not count. The first one
    that is left decides, with `dual_stack` any IPv6 one does. Raises ProgrammingFailed when none is
    left.
    """
    usable = [address for address in map(_usable, addresses) if address]
    if not usable:
        raise ProgrammingFailed(
            "no valid local address: there are only loopback and link-local ones here; "
            "give the namespace an address first"
        )
    considered = usable if dual_stack else usable[:1]
    return usable[0], any(":" in address for address in considered)


@lru_cache(maxsize=ADDRESSES_KEPT)
def _usable(text: str) -> str:
    """Return an address that counts, "" for one that does not; every pod has some of the same."""
    address = _unmapped(text)
    return str(address) if _counts(address) else ""


def _unmapped(text: str) -> IPv4Address | IPv6Address:
    if ":" not in text:
        return IPv4Address(inet_pton(AF_INET, text))
    address = IPv6Address(inet_pton(AF_INET6, text))  # reading the text itself takes much longer
    return address.ipv4_mapped or address


def _counts(address: IPv4Address | IPv6Address) -> bool:
    return not (address.is_loopback or address.is_link_local or address.is_multicast)


def read_resolv_conf(path: str = RESOLV_CONF) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the IPv4 and the IPv6 DNS servers of a resolv.conf, in order."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return parse_resolv_conf(file.read())
    except OSError as error:
        raise IOFailure(f"cannot read the DNS servers from {path}: {error.strerror}") from error


def parse_resolv_conf(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the servers of a resolv.conf by family, without zones; skip what is no address."""
    v4: dict[str, None] = {}
    v6: dict[str, None] = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 2 or fields[0] != "nameserver":
            continue
        try:
            server = canonical_address(fields[1].partition("%")[0])
        except ValueError:
            continue
        (v6 if ":" in server else v4)[server] = None
    return tuple(v4), tuple(v6)


def default_uid(user: str) -> str:
    """Return the uid of the proxy's user, or the usual one where there is no such user."""
    import pwd  # the command line only: the plugin never asks a name service

    try:
        return str(pwd.getpwnam(user).pw_uid)
    except KeyError:
        return constants.PROXY_ID


def resolve_owners(config: CaptureConfig) -> CaptureConfig:
    """Replace names of users and groups by their ids; an unknown one is refused before any rule."""
    groups = config.owner_groups
    return config._replace(
        proxy_uids=tuple(_uid(name) for name in config.proxy_uids),
        proxy_gids=tuple(_gid(name) for name in config.proxy_gids),
        owner_groups=groups if isinstance(groups, str) else tuple(_gid(name) for name in groups),
        owner_groups_excluded=tuple(_gid(name) for name in config.owner_groups_excluded),
    )


def _uid(name: str) -> str:
    if is_id(name):
        return name
    import pwd  # a name was given

    try:
        return str(pwd.getpwnam(name).pw_uid)
    except KeyError:
        raise InvalidParameter(f"unknown user {quoted(name)}; give its id instead") from None


def includes_uid(owners: Iterable[str], uid: int) -> bool:
    """Tell whether ids, ranges and names of users include an id; unknown names include nobody."""
    for owner in owners:
        with suppress(InvalidParameter):
            low, _, high = _uid(owner).partition("-")
            if int(low) <= uid <= int(high or low):
                return True
    return False


def _gid(name: str) -> str:
    if is_id(name):
        return name
    import grp  # a name was given

    try:
        return str(grp.getgrnam(name).gr_gid)
    except KeyError:
        raise InvalidParameter(f"unknown group {quoted(name)}; give its id instead") from None
