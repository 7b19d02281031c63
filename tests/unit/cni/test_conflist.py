"""Which configuration is chained into, and what becomes of it, as values."""

from __future__ import annotations

import json

import pytest

from istio_cni.cni import conflist
from istio_cni.errors import DecodingFailure

ENTRY: dict[str, object] = {"type": "istio-cni", "name": "istio-cni", "ambient_enabled": False}
BRIDGE = {"type": "bridge", "ipam": {"type": "host-local"}}


def encoded(**keys: object) -> bytes:
    """Make a list of plugins."""
    document = {"cniVersion": "1.0.0", "name": "pods", "plugins": [BRIDGE], **keys}
    return json.dumps(document).encode()


LIST = encoded()
SINGLE = json.dumps({"cniVersion": "1.0.0", "name": "pods", **BRIDGE}).encode()


def test_the_first_valid_file_by_bytes_is_chosen() -> None:
    """As runtimes do: capitals before small letters, files of other endings never."""
    files = {"a.conflist": LIST, "B.conf": SINGLE, "0.json": LIST, "1.conflist.bak": LIST}
    assert conflist.choose(files) == "B.conf"
    assert conflist.choose({"b.conflist": LIST, "a.conflist": LIST}) == "a.conflist"
    assert conflist.choose({}) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("0.conflist", b""),
        ("0.conflist", b"{"),
        ("0.conflist", b"[]"),
        ("0.conflist", b"{}"),
        ("0.conflist", encoded(name=None)),
        ("0.conflist", encoded(name="")),
        ("0.conflist", encoded(plugins=[])),
        ("0.conflist", encoded(plugins=None)),
        ("0.conflist", encoded(plugins=[{}])),
        ("0.conflist", encoded(plugins=["bridge"])),
        ("0.conflist", encoded(cniVersion=1)),
        ("0.conflist", encoded(cniVersions="1.0.0")),
        ("0.conflist", encoded(disableCheck="maybe")),
        ("0.conflist", SINGLE),
        ("0.conflist", encoded(plugins=[ENTRY])),
        ("0.conf", LIST),
        ("0.conf", b'{"name": "pods"}'),
        ("0.conf", b'{"type": ""}'),
        ("0.conf", json.dumps(ENTRY).encode()),
    ],
)
def test_a_file_that_makes_no_network_is_passed_over(name: str, text: bytes) -> None:
    """Invalid ones, and those with nothing but our entry."""
    assert conflist.choose({name: text, "1.conflist": LIST}) == "1.conflist"


def test_the_operators_choice_counts_under_either_ending() -> None:
    """And whatever else is there, or what the file holds."""
    files = {"00.conflist": LIST, "10.conflist": b"{", "undetectable.file": LIST}
    assert conflist.choose(files, "10.conf") == "10.conflist"
    assert conflist.choose(files, "10.conflist") == "10.conflist"
    assert conflist.choose({"10.conf": SINGLE}, "10.conflist") == "10.conf"
    assert conflist.choose(files, "undetectable.file") == "undetectable.file"
    assert conflist.choose(files, "20.conflist") == ""


def test_our_entry_comes_last_and_once() -> None:
    """All former ones go, also several."""
    document = conflist.read("x", encoded(plugins=[ENTRY, BRIDGE, {"type": "istio-cni"}]))
    assert conflist.has_own_entry(document)
    assert conflist.chained(document, ENTRY)["plugins"] == [BRIDGE, ENTRY]
    assert conflist.unchained(document)["plugins"] == [BRIDGE]
    assert not conflist.has_own_entry(conflist.unchained(document))


def test_what_others_wrote_keeps_its_order_and_spelling() -> None:
    """Chained and unchained again, the text is the former one but for white space."""
    text = (
        '{"z": 1.50, "name": "p", "a": {"y": 1e3, "x": -0}, "plugins": [{"type": "b", "mtu": 1}]}'
    )
    document = conflist.read("x", text.encode())
    back = conflist.write(conflist.unchained(conflist.chained(document, ENTRY)))
    assert "".join(back.decode().split()) == "".join(text.split())
    assert back.endswith(b"}\n")


def test_a_single_configuration_becomes_a_list_of_the_same_network() -> None:
    """It keeps name and version, unlike with the reference; without any it gets defaults."""
    found = conflist.read("a.conf", SINGLE)
    assert found == {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [{"name": "pods", **BRIDGE}],
    }
    found = conflist.read("a.conf", json.dumps(BRIDGE).encode())
    assert (found["name"], found["cniVersion"]) == ("k8s-pod-network", "0.3.1")


def test_a_file_that_nobody_can_use_is_refused_by_name() -> None:
    """The message names the file and what it lacks."""
    with pytest.raises(DecodingFailure, match=r'"x.conflist" has no name'):
        conflist.read("x.conflist", b'{"plugins": []}')


@pytest.mark.parametrize(
    ("present", "may"),
    [
        (encoded(name="other", plugins=[BRIDGE, ENTRY]), True),
        (encoded(plugins=[{"type": "older"}]), True),
        (encoded(name="other"), False),
    ],
)
def test_a_conversion_replaces_its_own_and_the_same_network_only(present: bytes, may: bool) -> None:
    """Another network under the name that the list would get is somebody else's."""
    successor = conflist.chained(conflist.read("a.conf", SINGLE), ENTRY)
    assert conflist.is_replaceable(conflist.read("a.conflist", present), successor) is may
