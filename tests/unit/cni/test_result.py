"""Results: handed on untouched within a family of versions, converted between families."""

from __future__ import annotations

import copy
import itertools
import json
from ipaddress import ip_address, ip_interface

import pytest

from istio_cni.cni.document import decode, render
from istio_cni.cni.result import addresses, convert
from istio_cni.constants import SUPPORTED_VERSIONS
from istio_cni.errors import DecodingFailure, InvalidNetconf

JSON = dict[str, object]
FLAT = ("0.1.0", "0.2.0")
CHAINED = ("0.3.0", "0.3.1", "0.4.0")
CURRENT = ("1.0.0", "1.1.0")
FAMILIES = (FLAT, CHAINED, CURRENT)

DNS = {"nameservers": ["10.96.0.10"], "search": ["shop.svc.cluster.local"]}
FLAT_RESULT: JSON = {
    "ip4": {
        "ip": "10.1.0.5/16",
        "gateway": "10.1.0.1",
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}],
    },
    "ip6": {"ip": "fd00::a:5/64", "routes": [{"dst": "::/0", "gw": "fd00::1"}]},
    "dns": DNS,
}
CHAINED_RESULT: JSON = {
    "interfaces": [
        {"name": "eth0", "mac": "02:00:00:00:00:05", "sandbox": "/run/netns/cni-1"},
        {"name": "veth1"},
    ],
    "ips": [
        {"version": "4", "address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 0},
        {"version": "6", "address": "fd00::a:5/64", "interface": 0},
    ],
    "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "::/0", "gw": "fd00::1"}],
    "dns": DNS,
}
CURRENT_RESULT: JSON = {
    **CHAINED_RESULT,
    "ips": [
        {"address": "10.1.0.5/16", "gateway": "10.1.0.1", "interface": 0},
        {"address": "fd00::a:5/64", "interface": 0},
    ],
}


def family(version: str) -> tuple[str, ...]:
    """Name the versions whose results have the same form."""
    return next(versions for versions in FAMILIES if version in versions)


def result(version: str) -> JSON:
    """Make a dual-stack result of a version."""
    form = {FLAT: FLAT_RESULT, CHAINED: CHAINED_RESULT, CURRENT: CURRENT_RESULT}[family(version)]
    return {"cniVersion": version, **copy.deepcopy(form)}


def text(value: JSON) -> str:
    """Print a result with its keys in their order, so that order counts in comparisons."""
    return json.dumps(value)


# -- no conversion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_a_result_of_the_requested_version_is_not_touched(version: str) -> None:
    """The very same document comes out: keys, their order, unknown ones."""
    prev = {"vendor": {"b": 1, "a": [None]}, **result(version)}
    before = text(prev)
    assert text(convert(prev, version)) == before
    assert text(prev) == before


def test_numbers_and_odd_but_valid_values_pass_as_they_were_written() -> None:
    """From stdin to stdout no number is respelled, and no null or empty list vanishes."""
    stdin = b"""{"prevResult": {
        "vendor": [1.50, 1e3, -0, 12345678901234567890123],
        "ips": [{"interface": 0, "address": "10.1.0.5/16", "gateway": null}],
        "routes": null, "interfaces": [], "dns": {}, "cniVersion": "1.0.0"}}"""
    printed = render(convert(decode(stdin)["prevResult"], "1.0.0"))
    assert "".join(printed.split()) == "".join(stdin.decode().split())[len('{"prevResult":') : -1]


@pytest.mark.parametrize(
    ("declared", "requested"),
    [pair for versions in FAMILIES for pair in itertools.permutations(versions, 2)],
)
def test_within_a_family_only_the_version_changes(declared: str, requested: str) -> None:
    """What 1.1.0 added passes on to 1.0.0, too, as in the reference's library."""
    prev = {"x": 1, **result(declared), "y": {}}
    if declared in CURRENT:
        prev["interfaces"] = [{"name": "eth0", "mtu": 1500, "socketPath": "/s", "pciID": "p"}]
    assert text(convert(prev, requested)) == text({**prev, "cniVersion": requested})


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
@pytest.mark.parametrize("declared", [{}, {"cniVersion": ""}, {"cniVersion": None}])
def test_a_result_without_version_has_the_requested_one(version: str, declared: JSON) -> None:
    """The reference fails here; there is only one thing it can mean."""
    prev = result(version)
    del prev["cniVersion"]
    assert convert({**declared, **prev}, version) == result(version)


def test_the_version_is_said_once() -> None:
    """A key in another case is replaced in its place, or a reader that ignores case finds two."""
    prev = {"ips": [], "cniversion": "1.0.0", "vendor": 1}
    assert text(convert(prev, "1.1.0")) == text({"ips": [], "cniVersion": "1.1.0", "vendor": 1})


# -- nothing to hand on ----------------------------------------------------------------------------


@pytest.mark.parametrize("prev", [None, {}])
@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_without_previous_result_only_the_version_is_said(prev: object, version: str) -> None:
    """Up to 0.2.0 that cannot be said, and an error names the version."""
    if version in FLAT:
        with pytest.raises(InvalidNetconf, match=version):
            convert(prev, version)
    elif version in CHAINED:
        assert convert(prev, version) == {"cniVersion": version, "dns": {}}
    else:
        assert convert(prev, version) == {"cniVersion": version}


@pytest.mark.parametrize("declared", SUPPORTED_VERSIONS)
@pytest.mark.parametrize("requested", FLAT)
def test_no_address_cannot_be_said_up_to_0_2_0(declared: str, requested: str) -> None:
    """Whatever version the result has; dns alone does not help."""
    with pytest.raises(InvalidNetconf, match="needs an address"):
        convert({"cniVersion": declared, "dns": {"domain": "x"}}, requested)


# -- conversion ------------------------------------------------------------------------------------


@pytest.mark.parametrize("requested", SUPPORTED_VERSIONS)
@pytest.mark.parametrize("declared", SUPPORTED_VERSIONS)
def test_every_version_converts_into_every_other(declared: str, requested: str) -> None:
    """The output is what a plugin of that version prints; 0.1-0.2 has no interfaces to hand on."""
    expected = result(requested)
    if declared in FLAT and requested not in FLAT:
        del expected["interfaces"]
        ips = expected["ips"]
        assert isinstance(ips, list)
        for ip in ips:
            del ip["interface"]
    prev = result(declared)
    before = copy.deepcopy(prev)
    assert convert(prev, requested) == expected
    assert prev == before


@pytest.mark.parametrize(
    ("there", "back"), [(a, b) for a in SUPPORTED_VERSIONS for b in SUPPORTED_VERSIONS]
)
def test_there_and_back_is_the_same_unless_the_way_leads_through_0_2(there: str, back: str) -> None:
    """Families from 0.3 on carry each other's facts; unknown keys survive on every object."""
    prev = result(back)
    prev["vendor"] = {"deep": [1.5]}
    if back not in FLAT and there not in FLAT:
        for key in ("interfaces", "ips", "routes"):
            items = prev[key]
            assert isinstance(items, list)
            for item in items:
                item["x-vendor"] = {"key": key}
    returned = convert(convert(prev, there), back)
    if there in FLAT and back not in FLAT:
        assert returned == convert(convert(prev, "0.2.0"), back)
        assert returned["vendor"] == prev["vendor"]
        assert addresses(returned) == addresses(prev)
    else:
        assert returned == prev


def test_zero_is_not_absent() -> None:
    """Index, table and scope 0 mean something; host bits of addresses stay."""
    prev: JSON = {
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "eth0"}],
        "ips": [{"address": "2001:db8::a:5/64", "interface": 0}],
        "routes": [
            {"dst": "::/0", "table": 0, "scope": 0, "priority": 0, "mtu": 1400, "advmss": 9}
        ],
    }
    assert convert(prev, "1.1.0") == prev
    older = convert(prev, "0.4.0")
    assert older["ips"] == [{"version": "6", "address": "2001:db8::a:5/64", "interface": 0}]
    assert older["routes"] == prev["routes"]
    assert convert(older, "1.1.0") == prev


def test_what_1_1_0_added_to_interfaces_is_dropped_below_1_0_0() -> None:
    """And only that; extra fields of routes stay."""
    interface = {"name": "eth0", "mtu": 1500, "socketPath": "/s", "PCIID": "p", "vendor": 1}
    prev: JSON = {"cniVersion": "1.1.0", "interfaces": [interface]}
    assert convert(prev, "0.3.1") == {
        "cniVersion": "0.3.1",
        "interfaces": [{"name": "eth0", "vendor": 1}],
        "dns": {},
    }


def test_only_the_first_address_of_each_kind_fits_into_0_2() -> None:
    """Routes go with the address of their kind, dst and gw only, and are dropped without one."""
    prev: JSON = {
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "eth0"}],
        "ips": [
            {"address": "10.1.0.5/16", "interface": 0, "gateway": "10.1.0.1"},
            {"address": "10.2.0.5/16"},
        ],
        "routes": [
            {"dst": "::/0", "gw": "fd00::1"},
            {"dst": "0.0.0.0/0", "table": 0, "x": 1},
            {"dst": "10.9.0.0/16", "gw": "10.1.0.9", "mtu": 1400},
        ],
        "vendor": 1,
    }
    assert convert(prev, "0.2.0") == {
        "cniVersion": "0.2.0",
        "ip4": {
            "ip": "10.1.0.5/16",
            "gateway": "10.1.0.1",
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.1.0.9"}],
        },
        "dns": {},
        "vendor": 1,
    }


def test_from_0_2_the_ipv4_address_and_its_routes_come_first() -> None:
    """Whatever the order of the keys was."""
    prev: JSON = {"cniVersion": "0.2.0", "ip6": FLAT_RESULT["ip6"], "ip4": FLAT_RESULT["ip4"]}
    assert convert(prev, "0.3.0") == {
        "cniVersion": "0.3.0",
        "ips": [
            {"version": "4", "address": "10.1.0.5/16", "gateway": "10.1.0.1"},
            {"version": "6", "address": "fd00::a:5/64"},
        ],
        "routes": CHAINED_RESULT["routes"],
        "dns": {},
    }


def test_keys_in_any_case_are_understood_and_written_exactly() -> None:
    """At every level, when converting; the exact spelling wins over another beside it."""
    prev: JSON = {
        "CNIVERSION": "0.4.0",
        "Interfaces": [{"Name": "eth0", "SANDBOX": "/n"}],
        "IPs": [{"Version": "4", "Address": "10.1.0.5/16", "Interface": 0, "Vendor": 1}],
        "Routes": [{"DST": "0.0.0.0/0", "GW": "10.1.0.1", "dst": "10.0.0.0/8"}],
        "DNS": {"NameServers": ["10.96.0.10"]},
        "Vendor": 1,
    }
    assert convert(prev, "1.0.0") == {
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "eth0", "sandbox": "/n"}],
        "ips": [{"address": "10.1.0.5/16", "interface": 0, "Vendor": 1}],
        "routes": [{"dst": "10.0.0.0/8", "gw": "10.1.0.1"}],
        "dns": {"nameservers": ["10.96.0.10"]},
        "Vendor": 1,
    }
    flat: JSON = {"cniversion": "0.2.0", "IP4": {"IP": "10.1.0.5/16", "Routes": [{"Dst": "::/0"}]}}
    assert convert(flat, "1.0.0") == {
        "cniVersion": "1.0.0",
        "ips": [{"address": "10.1.0.5/16"}],
        "routes": [{"dst": "::/0"}],
    }


def test_an_unknown_key_never_becomes_a_known_one() -> None:
    """What meant nothing in the one version must not mean something, unchecked, in the other."""
    prev: JSON = {
        "cniVersion": "0.2.0",
        "ip4": {"ip": "10.1.0.5/16", "address": "x", "Version": 1, "vendor": 1},
        "IPs": "garbage",
        "vendor": 1,
    }
    converted = convert(prev, "1.0.0")
    assert converted == {
        "cniVersion": "1.0.0",
        "ips": [{"address": "10.1.0.5/16", "vendor": 1}],
        "vendor": 1,
    }
    ips = [{"address": "10.1.0.5/16", "ip": "x", "ROUTES": 1, "vendor": 1}]
    assert convert({"cniVersion": "1.0.0", "ips": ips, "IP6": 1, "vendor": 1}, "0.1.0") == {
        "cniVersion": "0.1.0",
        "ip4": {"ip": "10.1.0.5/16", "vendor": 1},
        "dns": {},
        "vendor": 1,
    }


# -- malformed results -----------------------------------------------------------------------------

MALFORMED: list[tuple[object, str]] = [
    ("text", "prevResult"),
    ([], "prevResult"),
    (0, "prevResult"),
    (False, "prevResult"),
    ({"cniVersion": 1}, "prevResult.cniVersion"),
    ({"cniVersion": "9.9.9"}, "prevResult.cniVersion"),
    ({"cniVersion": "1.0"}, "prevResult.cniVersion"),
    ({"ips": {}}, "prevResult.ips"),
    ({"ips": "10.1.0.5/16"}, "prevResult.ips"),
    ({"ips": [None]}, "prevResult.ips[0]"),
    ({"ips": ["10.1.0.5/16"]}, "prevResult.ips[0]"),
    ({"ips": [{}]}, "prevResult.ips[0].address"),
    ({"ips": [{"address": "10.1.0.5"}]}, "prevResult.ips[0].address"),
    ({"ips": [{"address": "10.1.0.5/33"}]}, "prevResult.ips[0].address"),
    ({"ips": [{"address": "fd00::5/64"}, {"address": 5}]}, "prevResult.ips[1].address"),
    ({"ips": [{"address": "fd00::5/64", "interface": "0"}]}, "prevResult.ips[0].interface"),
    ({"ips": [{"address": "fd00::5/64", "interface": True}]}, "prevResult.ips[0].interface"),
    ({"ips": [{"address": "fd00::5/64", "interface": 0.0}]}, "prevResult.ips[0].interface"),
    ({"interfaces": {}}, "prevResult.interfaces"),
    ({"interfaces": ["eth0"]}, "prevResult.interfaces[0]"),
    ({"routes": "x"}, "prevResult.routes"),
    ({"routes": [[]]}, "prevResult.routes[0]"),
    ({"routes": [{"gw": "10.1.0.1"}]}, "prevResult.routes[0].dst"),
    ({"routes": [{"dst": "default"}]}, "prevResult.routes[0].dst"),
    ({"dns": []}, "prevResult.dns"),
    ({"dns": ""}, "prevResult.dns"),
    ({"cniVersion": "0.2.0", "ip4": []}, "prevResult.ip4"),
    ({"cniVersion": "0.2.0", "ip4": {}}, "prevResult.ip4.ip"),
    ({"cniVersion": "0.2.0", "ip6": {"ip": "x"}}, "prevResult.ip6.ip"),
    ({"cniVersion": "0.2.0", "ip4": {"ip": "10.1.0.5/16", "routes": 1}}, "prevResult.ip4.routes"),
    (
        {"cniVersion": "0.2.0", "ip4": {"ip": "10.1.0.5/16", "routes": [{"dst": "\n" * 999}]}},
        "prevResult.ip4.routes[0].dst",
    ),
]


@pytest.mark.parametrize("version", ["0.2.0", "0.4.0", "1.1.0"])
@pytest.mark.parametrize(("prev", "where"), MALFORMED)
def test_a_malformed_result_is_refused_by_key_and_value(
    prev: object, where: str, version: str
) -> None:
    """Code 6, whether converted or not, one line that names the place; addresses() shrugs."""
    if version == "0.2.0" and isinstance(prev, dict) and "cniVersion" not in prev:
        prev = {"cniVersion": "1.0.0", **prev}  # else its keys would be unknown ones
    with pytest.raises(DecodingFailure) as caught:
        convert(prev, version)
    assert caught.value.msg.startswith(f"{where} is ")
    assert caught.value.msg.isprintable()
    assert len(caught.value.msg) < 500
    assert all(ip_address(address) for address in addresses(prev))


def texts() -> list[str]:
    """Make texts that are addresses, nearly addresses, or neither."""
    pieces = [
        "",
        ":",
        "::",
        "0",
        "1",
        "ffff",
        "10000",
        "g",
        "1.2.3.4",
        "01.2.3.4",
        "1.2.3",
        ".",
        "%1",
    ]
    found = {
        "".join(parts) for size in range(4) for parts in itertools.product(pieces, repeat=size)
    }
    found |= {":".join(["a"] * count) for count in range(10)}
    found |= {":".join(["a"] * count) + "::" for count in range(10)}
    found |= {":".join(["a"] * count) + ":1.2.3.4" for count in range(9)}
    found |= {"::" + ":".join(["a"] * count) + ":1.2.3.4" for count in range(9)}
    found |= {
        "256.1.1.1",
        "1.1.1.1.1",
        "1.2.3.4::",
        "¹.1.1.1",
        "1.2.3.4 ",
        "A:b::C",
        "a::b::c",
        "+1::",
    }
    return sorted(found)


def test_addresses_are_told_from_other_texts_as_the_standard_library_does() -> None:
    """Our own check exists for speed alone; zones have no place in a result."""
    for host in texts():
        for prefix in ("", "/0", "/32", "/33", "/128", "/129", "/x", "/", "/-1", "/8/8", "/²"):
            cidr = host + prefix
            try:
                ip_interface(cidr)
                valid = "/" in cidr and "%" not in cidr
            except ValueError:
                valid = False
            prev: JSON = {"ips": [{"address": cidr}]}
            if valid:
                assert convert(prev, "1.0.0")["ips"] == prev["ips"], cidr
            else:
                with pytest.raises(DecodingFailure):
                    convert(prev, "1.0.0")


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_the_addresses_of_any_version_are_found(version: str) -> None:
    """IPv4 and IPv6, without the prefix length."""
    assert addresses(result(version)) == ["10.1.0.5", "fd00::a:5"]


@pytest.mark.parametrize(
    ("prev", "found"),
    [
        (None, []),
        ({}, []),
        ("text", []),
        ([{"address": "10.1.0.5/16"}], []),
        ({"ips": None}, []),
        ({"ips": {"address": "10.1.0.5/16"}}, []),
        (
            {"ips": [None, {}, {"address": 1}, {"address": "x/8"}, {"address": "10.1.0.5/16"}]},
            ["10.1.0.5"],
        ),
        ({"IPS": [{"Address": "10.1.0.5"}], "Ip6": {"IP": "fd00::5/64"}}, ["10.1.0.5", "fd00::5"]),
        ({"ip4": "10.1.0.5/16"}, []),
    ],
)
def test_addresses_are_found_where_possible(prev: object, found: list[str]) -> None:
    """Nothing is an error; what is no address is skipped."""
    assert addresses(prev) == found
