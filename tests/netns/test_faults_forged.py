"""What others write beside our rules is never taken for ours, nor ours for theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from istio_cni.errors import ProgrammingFailed
from namespaces import inside
from netns.programming import VARIANTS, check, clean_up, config, program, rules, state, wrap

pytestmark = pytest.mark.netns

variants = pytest.mark.parametrize("variant", VARIANTS)
LINE_ENDS = {
    "vertical tab": "\v",
    "carriage return": "\r",
    "file separator": "\x1c",
    "U+2028": "\u2028",
}


def iptables(path: str, variant: str, *arguments: str) -> str:
    """Do something to the nat table as somebody else."""
    return inside(path, [f"iptables-{variant}", "-t", "nat", *arguments])


@variants
@pytest.mark.parametrize("end", LINE_ENDS.values(), ids=LINE_ENDS)
def test_a_comment_cannot_forge_a_rule(netns: str, variant: str, end: str) -> None:
    """A line end of any kind in it ends no rule: what is missing is noticed and put back."""
    done = program(netns, config(variant))
    iptables(netns, variant, "-D", "OUTPUT", "-j", "ISTIO_OUTPUT")
    comment = f"x{end}-A OUTPUT -j ISTIO_OUTPUT{end}-A X -j Y"
    foreign = ["-p", "tcp", "--dport", "1", "-m", "comment", "--comment", comment, "-j", "ACCEPT"]
    iptables(netns, variant, "-A", "OUTPUT", *foreign)
    assert "nat OUTPUT rule 1: missing" in check(netns, config(variant), done.variants)
    program(netns, config(variant))
    assert check(netns, config(variant), done.variants) == ""
    iptables(netns, variant, "-C", "OUTPUT", "-j", "ISTIO_OUTPUT")


@variants
@pytest.mark.parametrize(
    "comment",
    [
        "see -j ISTIO_OUTPUT for more",
        'a b " -j ISTIO_',
        "it's -g ISTIO_X y",
        "caf\udce9 -j ISTIO_X",
    ],
)
def test_a_comment_about_our_chains_makes_no_rule_ours(
    netns: str, variant: str, comment: str
) -> None:
    """It counts neither as a difference nor as something to remove."""
    iptables(netns, variant, "-N", "FOREIGN")
    for chain in ("OUTPUT", "FOREIGN"):
        foreign = ["-p", "tcp", "-m", "comment", "--comment", comment, "-j", "RETURN"]
        iptables(netns, variant, "-A", chain, *foreign)
    before = rules(netns)
    done = program(netns, config(variant))
    assert check(netns, config(variant), done.variants) == ""
    clean_up(netns)
    assert rules(netns).count("RETURN") == before.count("RETURN") == 2


@variants
def test_a_restore_that_only_claims_success_is_found_out(
    netns: str, tmp_path: Path, variant: str
) -> None:
    """What was loaded is read back before anybody is told that the pod is captured."""
    before = state(netns)
    wrap(tmp_path, f"iptables-{variant}-restore", "cat > /dev/null; exit 0")
    with pytest.raises(
        ProgrammingFailed, match="it succeeded, but nat ISTIO_INBOUND: the chain is"
    ):
        program(netns, config(variant), wrappers=tmp_path)
    if variant == "nft":
        assert state(netns) == before


@variants
def test_a_rule_in_front_of_ours_is_pointed_out(netns: str, variant: str) -> None:
    """It may let traffic past the proxy; it is somebody's wish, so the pod starts."""
    iptables(netns, variant, "-A", "OUTPUT", "-p", "tcp", "-j", "ACCEPT")
    (warning,) = program(netns, config(variant, ENABLE_INBOUND_IPV6=False)).warnings
    assert "in front of ours: iptables nat OUTPUT rule 1: `-p tcp -j ACCEPT`" in warning
