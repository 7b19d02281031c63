"""What addresses, resolv.conf and the user database say of a configuration."""

from __future__ import annotations

import grp
import os
import pwd

import pytest

from cases import CNI, RESOLV_CONF
from istio_cni.capture.detect import (
    default_uid,
    host_address,
    includes_uid,
    parse_resolv_conf,
    read_resolv_conf,
    resolve_owners,
)
from istio_cni.capture.settings import read_settings
from istio_cni.errors import InvalidParameter, IOFailure, ProgrammingFailed
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.iptables import parse_save, render
from istio_cni.rules.model import Family
from istio_cni.rules.sidecar import generate
from istio_cni.rules.state import wanted


@pytest.mark.parametrize(
    ("addresses", "dual_stack", "host", "ipv6"),
    [
        (["10.0.0.2"], False, "10.0.0.2", False),
        (["fd00::2"], False, "fd00::2", True),
        (["10.0.0.2", "fd00::2"], False, "10.0.0.2", False),
        (["10.0.0.2", "fd00::2"], True, "10.0.0.2", True),
        (["fd00::2", "10.0.0.2"], False, "fd00::2", True),
        (["fd00::2", "10.0.0.2"], True, "fd00::2", True),
        (["10.0.0.2", "10.0.0.3"], True, "10.0.0.2", False),
        (["127.0.0.1", "::1", "169.254.1.1", "fe80::1", "10.0.0.2"], False, "10.0.0.2", False),
        (["127.0.0.1", "10.0.0.2", "::1", "fe80::1"], True, "10.0.0.2", False),
        (["::ffff:10.0.0.2"], False, "10.0.0.2", False),
        (["::ffff:127.0.0.1", "fd00::2"], False, "fd00::2", True),
        (["127.0.0.1", "169.254.1.1", "fd00::2"], False, "fd00::2", True),
        (["224.0.0.1", "ff02::1", "192.168.0.1"], False, "192.168.0.1", False),
    ],
)
def test_the_first_address_that_counts_decides(
    addresses: list[str], dual_stack: bool, host: str, ipv6: bool
) -> None:
    """On IPv6; in dual stack any IPv6 address does. Mapped addresses are IPv4 ones."""
    assert host_address(addresses, dual_stack=dual_stack) == (host, ipv6)


@pytest.mark.parametrize("dual_stack", [False, True])
@pytest.mark.parametrize(
    "addresses", [[], ["127.0.0.1", "::1"], ["169.254.1.1", "fe80::1", "::ffff:169.254.1.1"]]
)
def test_without_an_address_that_counts_nothing_is_captured(
    addresses: list[str], dual_stack: bool
) -> None:
    """Loopback and link-local ones do not."""
    with pytest.raises(ProgrammingFailed, match=r"^no valid local address: .*; give the .* first$"):
        host_address(addresses, dual_stack=dual_stack)


@pytest.mark.parametrize(
    ("text", "v4", "v6"),
    [
        ("", (), ()),
        ("search example.com\noptions ndots:5\n", (), ()),
        ("nameserver 10.96.0.10\n", ("10.96.0.10",), ()),
        ("nameserver 10.96.0.10", ("10.96.0.10",), ()),
        ("nameserver FD00:0::53\n", (), ("fd00::53",)),
        ("  nameserver\t10.0.0.1   10.0.0.2\n", ("10.0.0.1",), ()),
        ("nameserver ::ffff:10.0.0.1\n", (), ("::ffff:10.0.0.1",)),
        ("nameserver fe80::1%eth0\n", (), ("fe80::1",)),
        ("nameserver 10.0.0.1%eth0\n", ("10.0.0.1",), ()),
        ("#nameserver 10.0.0.1\n# nameserver 10.0.0.1\n;nameserver 10.0.0.1\n", (), ()),
        ("nameserver\nnameserver x\nnameserver 10.0.0.300\nnameserver 10.0.0.1#53\n", (), ()),
        ("nameservers 10.0.0.1\nNameserver 10.0.0.1\n", (), ()),
        (
            "nameserver 10.0.0.2\nnameserver 10.0.0.1\nnameserver 10.0.0.2\n",
            ("10.0.0.2", "10.0.0.1"),
            (),
        ),
        (RESOLV_CONF, ("10.96.0.10",), ("fe80::53", "::ffff:10.96.0.11", "fd00:9::53")),
    ],
)
def test_servers_of_a_resolv_conf(text: str, v4: tuple[str, ...], v6: tuple[str, ...]) -> None:
    """Any number, in order, each once, canonical; what is no address is left out."""
    assert parse_resolv_conf(text) == (v4, v6)


@pytest.mark.parametrize(
    "text",
    [
        "nameserver 10.96.0.10\n",
        "nameserver fd00::53\n",
        "nameserver fe80::53%eth0\n",
        "nameserver ::ffff:10.0.0.1\n",
        RESOLV_CONF,
    ],
)
@pytest.mark.parametrize("ipv6", [False, True])
def test_any_resolv_conf_gives_valid_rules(text: str, ipv6: bool) -> None:
    """In both families, whichever the servers are of."""
    v4, v6 = parse_resolv_conf(text)
    settings = {**CNI, "REDIRECT_DNS": True, "ENABLE_INBOUND_IPV6": ipv6}
    config = read_settings({**settings, "DNS_SERVERS_V4": [*v4], "DNS_SERVERS_V6": [*v6]})
    assert config.dns
    ruleset = generate(config)
    for family in Family:
        written = render(ruleset, family)
        assert parse_save(written) == wanted(ruleset, family)
        assert "%" not in written


def test_resolv_conf_is_a_file(tmp_path: os.PathLike[str]) -> None:
    """Bytes that are no text do not matter; no file at all does."""
    path = os.path.join(tmp_path, "resolv.conf")
    with open(path, "wb") as file:
        file.write(b"# \xff\xfe\nnameserver 10.0.0.1\n")
    assert read_resolv_conf(path) == (("10.0.0.1",), ())
    with pytest.raises(IOFailure, match=r"cannot read the DNS servers from .*: No such file"):
        read_resolv_conf(os.path.join(tmp_path, "missing"))


def test_the_default_user() -> None:
    """The one that exists, else the usual id."""
    me = pwd.getpwuid(os.getuid())
    assert default_uid(me.pw_name) == str(me.pw_uid)
    assert default_uid("no-such-user") == default_uid("") == "1337"


def test_names_become_ids_before_any_rule() -> None:
    """Ids and ranges stay as they are, and so does the star."""
    user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(os.getgid())
    config = CaptureConfig(
        proxy_uids=(user.pw_name, "1000-1999"),
        proxy_gids=(group.gr_name, "7"),
        owner_groups=(group.gr_name, "8"),
        owner_groups_excluded=(group.gr_name,),
    )
    uid, gid = str(user.pw_uid), str(group.gr_gid)
    assert resolve_owners(config) == config._replace(
        proxy_uids=(uid, "1000-1999"),
        proxy_gids=(gid, "7"),
        owner_groups=(gid, "8"),
        owner_groups_excluded=(gid,),
    )
    assert resolve_owners(CaptureConfig()) == CaptureConfig()


def test_whether_an_id_is_among_owners() -> None:
    """By id, range or name; an unknown name is nobody."""
    user = pwd.getpwuid(os.getuid())
    assert includes_uid([user.pw_name], user.pw_uid)
    assert includes_uid(["no-such", "7", "1000-1999"], 1999)
    assert not includes_uid(["no-such", "7", "1000-1999"], 2000)
    assert not includes_uid([], 0)


@pytest.mark.parametrize("field", ["proxy_gids", "owner_groups", "owner_groups_excluded"])
def test_an_unknown_group_is_refused(field: str) -> None:
    """Wherever it is named."""
    with pytest.raises(InvalidParameter) as caught:
        resolve_owners(CaptureConfig()._replace(**{field: ("1", "no-such")}))  # type: ignore[arg-type] # a field of owners
    assert str(caught.value) == 'unknown group "no-such"; give its id instead'


def test_an_unknown_user_is_refused() -> None:
    """Likewise."""
    with pytest.raises(InvalidParameter, match=r'^unknown user "no-such"; give its id instead$'):
        resolve_owners(CaptureConfig(proxy_uids=("no-such",)))
