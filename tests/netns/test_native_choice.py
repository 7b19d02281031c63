"""Which back end is chosen, by what the namespace holds and the node has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from istio_cni.capture.backend import (
    IPTABLES,
    NFTABLES,
    Choice,
    choose,
    may_hold_iptables,
    ours_native,
)
from istio_cni.edge.netfilter import Netfilter
from istio_cni.edge.netlink import nft_tables
from istio_cni.rules.config import CaptureConfig
from namespaces import call_inside, inside

pytestmark = pytest.mark.netns

PROGRAMS = ("iptables-nft-restore", "iptables-restore", "iptables-legacy-restore")
"""In the order in which they are looked for."""
OURS = Choice(NFTABLES, "rules of ours are in nf_tables here already")
FOREIGN = Choice(NFTABLES, "the network namespace belongs to another user namespace")


def chosen(
    netns: str, search_path: object, *, foreign: bool = False, config: CaptureConfig | None = None
) -> Choice:
    """Choose in a namespace, with what is on a search path."""

    def work() -> Choice:
        net = Netfilter(deadline=0, search_path=str(search_path))
        return choose(net, config or CaptureConfig(), foreign=foreign)

    return call_inside(netns, work)


def install(directory: Path, *programs: str) -> None:
    """Put programs into a directory that leave a trace when they are started."""
    for program in programs:
        (directory / program).write_text(f"#!/bin/sh\ntouch {directory}/started\n")
        (directory / program).chmod(0o755)


def test_iptables_is_taken_where_it_is(netns: str, tmp_path: Path) -> None:
    """By the program found first; it is not started, so another back end may have to follow."""
    for program in reversed(PROGRAMS):
        install(tmp_path, program)
        assert chosen(netns, tmp_path) == Choice(
            IPTABLES, f"{tmp_path}/{program} is there", sure=False
        )
    assert not (tmp_path / "started").exists()


def test_without_iptables_nf_tables_is_programmed(netns: str, tmp_path: Path) -> None:
    """The reason says where it was looked for; what cannot be started does not count."""
    path = f"/nowhere:{tmp_path}"
    wanted = Choice(NFTABLES, f"no iptables-restore in {path}")
    assert chosen(netns, path) == wanted
    install(tmp_path, *PROGRAMS)
    for program in PROGRAMS:
        os.chmod(tmp_path / program, 0o644)
    assert chosen(netns, path) == wanted


def test_a_foreign_namespace_is_programmed_through_nf_tables(netns: str, tmp_path: Path) -> None:
    """Whether iptables is there or not: it could not load all of its matches."""
    assert chosen(netns, tmp_path, foreign=True) == FOREIGN
    install(tmp_path, *PROGRAMS)
    assert chosen(netns, tmp_path, foreign=True) == FOREIGN


@pytest.mark.parametrize("table", ["nat", "mangle", "raw"])
def test_rules_of_ours_stay_where_they_are(netns: str, tmp_path: Path, table: str) -> None:
    """Any of our tables decides, before anything else that is not asked for by name."""
    install(tmp_path, *PROGRAMS)
    inside(netns, ["nft", "add", "table", "inet", f"istio-proxy-{table}"])
    assert chosen(netns, tmp_path) == OURS
    assert chosen(netns, tmp_path, foreign=True) == OURS
    by_name = CaptureConfig(backend=IPTABLES)
    assert chosen(netns, tmp_path, config=by_name) == Choice(IPTABLES, "asked for by name")
    variant = CaptureConfig(iptables_variant="nft")
    assert chosen(netns, tmp_path, config=variant) == Choice(
        IPTABLES, "the variant nft is asked for by name", variant="nft"
    )


def test_tables_of_others_decide_nothing(netns: str, tmp_path: Path) -> None:
    """Neither those of other families that have our names, nor what iptables has made."""
    install(tmp_path, "iptables-restore")
    inside(netns, ["nft", "add", "table", "ip", "istio-proxy-nat"])
    inside(netns, ["nft", "add", "table", "inet", "istio-proxy-ambient"])
    inside(netns, ["iptables-nft", "-t", "nat", "-N", "ISTIO_OUTPUT"])
    assert chosen(netns, tmp_path).name == IPTABLES
    assert chosen(netns, tmp_path, foreign=True) == FOREIGN


def test_comments_of_our_tables_are_read(netns: str) -> None:
    """A table may have none."""
    inside(
        netns,
        ["nft", "-f", "-"],
        stdin='add table inet istio-proxy-nat { comment "istio-cni 12" ; }\n'
        "add table inet istio-proxy-raw\nadd table inet x\n",
    )
    found = call_inside(netns, lambda: ours_native(nft_tables()))
    assert found == {"istio-proxy-nat": "istio-cni 12", "istio-proxy-raw": ""}


@pytest.mark.parametrize(
    ("command", "may"),
    [
        ("nft add table inet nat", False),
        ("nft add table ip security", False),
        ("nft add table ip6 raw", True),
        ("iptables-nft -t nat -N X", True),
        ("ip6tables-nft -t filter -N X", True),
        ("iptables-legacy -t mangle -S", True),
        ("ip6tables-legacy -t raw -S", True),
    ],
)
def test_what_may_hold_rules_of_iptables(netns: str, command: str, may: bool) -> None:
    """Its tables in either variant; only then are its programs started to look."""

    def look() -> bool:
        return may_hold_iptables(nft_tables())

    assert call_inside(netns, look) is False
    inside(netns, command.split())
    assert call_inside(netns, look) is may
