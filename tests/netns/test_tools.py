"""Which iptables is used: the variant that holds our rules, else the first that really works."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from istio_cni.capture.apply import REFUSE
from istio_cni.errors import NoUsableBackend, ProgrammingFailed
from istio_cni.rules.iptables import render
from istio_cni.rules.model import Family
from istio_cni.rules.sidecar import generate
from namespaces import inside
from netns.programming import (
    ALL_DNS,
    TPROXY,
    VARIANTS,
    clean_up,
    config,
    holders,
    program,
    restore,
    rules,
    state,
    wrap,
)

pytestmark = pytest.mark.netns

variants = pytest.mark.parametrize("variant", VARIANTS)
PROGRAMS = ("iptables", "ip6tables")
PARTS = ("", "-save", "-restore")
FOREIGN = "*filter\n-A INPUT -s 192.0.2.0/24 -j DROP\nCOMMIT\n"
ONE_SET = {"nft": {"iptables": "nft", "ip6tables": "nft"}}
ONE_SET["legacy"] = {"iptables": "legacy", "ip6tables": "legacy"}
NO_NFT = (
    'echo "iptables v1.8.9 (nf_tables): Could not fetch rule set generation id: '
    'Invalid argument" >&2; exit 4'
)
NO_NAT = (
    "echo \"iptables v1.8.9 (legacy): can't initialize iptables table \\`nat': Table does not "
    'exist (do you need to insmod?)" >&2; exit 3'
)


def policy_rules(path: str) -> list[int]:
    """Count the policy rules that look up our table, by family."""
    listed = [inside(path, ["ip", family, "rule"]) for family in ("-4", "-6")]
    return [text.count("lookup 133") for text in listed]


def programs(directory: Path, names: dict[str, str]) -> Path:
    """Fill a directory with programs for both families: name and the real one it leads to."""
    for name, real in names.items():
        for base in PROGRAMS:
            for part in PARTS:
                target = shutil.which(f"{base}{real}{part}")
                assert target is not None
                (directory / f"{base}{name}{part}").symlink_to(target)
    return directory


def break_both(directory: Path, name: str, script: str, parts: tuple[str, ...] = PARTS) -> None:
    """Put failing wrappers of both families' programs into a directory."""
    for base in PROGRAMS:
        for part in parts:
            wrap(directory, f"{base}{name}{part}", script)


@variants
@pytest.mark.parametrize("mode", [{}, TPROXY], ids=["REDIRECT", "TPROXY"])
def test_repeating_changes_nothing(netns: str, variant: str, mode: dict[str, object]) -> None:
    """Three equal runs leave one rule set in one variant and one policy rule a family."""
    program(netns, config(variant, **mode, **ALL_DNS))
    first = state(netns)
    for _ in range(2):
        assert program(netns, config("", **mode, **ALL_DNS)).changed == []
        assert state(netns) == first
    assert holders(netns) == ONE_SET[variant]
    assert policy_rules(netns) == ([1, 1] if mode else [0, 0])


def test_first_run_takes_nft(netns: str) -> None:
    """With both variants in working order and nothing there, the newer one is used."""
    assert program(netns, config()).variants == ONE_SET["nft"]


def test_double_capture_is_mended(netns: str) -> None:
    """Rules of ours in both variants, as the reference's second run leaves them: one set stays."""
    ruleset = generate(config())
    for base, family in zip(PROGRAMS, Family, strict=True):
        for variant in VARIANTS:
            restore(netns, f"{base}-{variant}", render(ruleset, family))
    program(netns, config())
    assert holders(netns) in ONE_SET.values()
    assert program(netns, config()).changed == []


def test_policy_rule_of_the_reference_is_replaced(netns: str) -> None:
    """It was made without a priority, once a run; one of ours is left."""
    for family in ("-4", "-6"):
        for priority in ("100", "101"):
            rule = ["rule", "add", "priority", priority, "fwmark", "1337", "lookup", "133"]
            inside(netns, ["ip", family, *rule])
    program(netns, config("", **TPROXY))
    assert policy_rules(netns) == [1, 1]
    assert "31337:\tfrom all fwmark 0x539 lookup 133" in inside(netns, ["ip", "rule"])


def test_legacy_with_foreign_rules_is_joined(netns: str) -> None:
    """A variant that somebody uses here already is used, and what is there stays."""
    for base in PROGRAMS:
        foreign = (
            FOREIGN if base == "iptables" else FOREIGN.replace("192.0.2.0/24", "2001:db8::/32")
        )
        restore(netns, f"{base}-legacy", foreign)
    assert program(netns, config()).variants == ONE_SET["legacy"]
    assert rules(netns).count("-j DROP") == 2


def test_variant_with_our_rules_is_kept(netns: str) -> None:
    """Foreign rules in the other variant do not move ours there."""
    program(netns, config("nft"))
    restore(netns, "iptables-legacy", FOREIGN)
    assert program(netns, config()).variants == ONE_SET["nft"]
    assert program(netns, config("", **TPROXY)).variants == ONE_SET["nft"]
    assert holders(netns) == ONE_SET["nft"]


@variants
def test_other_variant_can_be_forced(netns: str, variant: str) -> None:
    """Rules then move over, in one run; the variant they left holds nothing."""
    other = VARIANTS[1 - VARIANTS.index(variant)]
    program(netns, config(other, **TPROXY))
    program(netns, config(variant))
    assert holders(netns) == ONE_SET[variant]
    assert other == "legacy" or "table" not in inside(netns, ["nft", "list", "tables"])


def test_nft_without_kernel_support_is_passed_over(netns: str, tmp_path: Path) -> None:
    """A kernel without nf_tables shows in the generation id that cannot be read."""
    break_both(tmp_path, "-nft", NO_NFT)
    break_both(tmp_path, "", NO_NFT)
    assert program(netns, config(), wrappers=tmp_path).variants == ONE_SET["legacy"]


def test_legacy_without_nat_table_is_passed_over(netns: str, tmp_path: Path) -> None:
    """Foreign rules in its filter table do not make a variant usable that has no nat table."""
    restore(netns, "iptables-legacy", FOREIGN)
    script = f'text=$(cat); case $text in *nat*) {NO_NAT};; esac; echo "$text" | $REAL "$@"'
    break_both(tmp_path, "-legacy", script, parts=("-restore",))
    assert program(netns, config(), wrappers=tmp_path).variants == ONE_SET["nft"]


def test_variant_that_gets_half_way_is_passed_over_clean(netns: str, tmp_path: Path) -> None:
    """It has mangle tables and no nat table: what it loaded is taken back, the next one is used."""
    first = 'echo "${text%%COMMIT*}COMMIT" | $REAL "$@"'
    script = (
        f'text=$(cat); case $text in *nat*) {first}; {NO_NAT};; esac; echo "$text" | $REAL "$@"'
    )
    break_both(tmp_path, "-nft", script, parts=("-restore",))
    break_both(tmp_path, "", NO_NFT)
    assert program(netns, config("", **TPROXY), wrappers=tmp_path).variants == ONE_SET["legacy"]
    assert holders(netns) == ONE_SET["legacy"]
    assert inside(netns, ["nft", "list", "tables"]) == ""


@variants
@pytest.mark.parametrize("leftover", ["other configuration", "family not captured any more"])
def test_other_configuration_is_refused_unless_replaced(
    netns: str, variant: str, leftover: str
) -> None:
    """Its first difference is named and nothing is touched; what is wanted already passes."""
    program(netns, config(variant, **ALL_DNS))
    change = {"REDIRECT_DNS": False} if leftover[0] == "o" else {"ENABLE_INBOUND_IPV6": False}
    other, before = config("", **{**ALL_DNS, **change}), state(netns)
    with pytest.raises(ProgrammingFailed, match=r"other rules of ours .* --reconcile$"):
        program(netns, other, existing=REFUSE)
    assert state(netns) == before
    program(netns, other)
    program(netns, other, existing=REFUSE)


def test_clean_up_says_what_it_cannot_read(netns: str, tmp_path: Path) -> None:
    """It does not claim that everything is gone while rules of ours may be left."""
    program(netns, config("legacy"))
    before = state(netns)
    wrap(tmp_path, "iptables-legacy-save", "echo 'no such library' >&2; exit 1")
    with pytest.raises(ProgrammingFailed, match=r"cannot be read.*no such library"):
        clean_up(netns, wrappers=tmp_path)
    assert state(netns) == before


@pytest.mark.parametrize(("real", "variant"), [("-nft", "nft"), ("-legacy", "legacy")])
def test_plain_name_suffices(netns: str, tmp_path: Path, real: str, variant: str) -> None:
    """Distributions with one variant have only `iptables`; its version text tells which it is."""
    only = programs(tmp_path, {"": real})
    assert program(netns, config(), only=only).variants == ONE_SET[variant]
    assert program(netns, config(), only=only).changed == []
    clean_up(netns, only=only)
    assert holders(netns) == {}


@pytest.mark.parametrize("fault", ["exit 127", "not executable", "wrong format", "no interpreter"])
def test_program_that_cannot_run_is_passed_over(netns: str, tmp_path: Path, fault: str) -> None:
    """It is there and yet of no use: a library is missing, it is another machine's, a rest."""
    break_both(tmp_path, "-nft", "exit 127")
    for path in tmp_path.iterdir():
        if fault == "not executable":
            path.chmod(0o644)
        elif fault == "wrong format":
            path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(57))
        elif fault == "no interpreter":
            path.write_text("#!/nonexistent/sh\n")
    only = programs(tmp_path, {"-legacy": "-legacy"})
    assert program(netns, config(), only=only).variants == ONE_SET["legacy"]


def test_very_old_legacy_gets_no_wait_option(netns: str, tmp_path: Path) -> None:
    """A program that cannot tell its version complains, prints all the same, and exits with 0."""
    rest = 'echo "unrecognized option" >&2; echo "# a rule named nf_tables v1.9.9"'
    for base in PROGRAMS:
        script = f'case $1 in --version) {rest};; *) exec $REAL "$@";; esac'
        wrap(tmp_path, f"{base}-save", script, real=f"{base}-legacy-save")
        script = 'echo "$@" >> $HERE/arguments; exec $REAL "$@"'
        wrap(tmp_path, f"{base}-restore", script, real=f"{base}-legacy-restore")
    assert program(netns, config(), only=tmp_path).variants == ONE_SET["legacy"]
    assert set((tmp_path / "arguments").read_text().splitlines()) == {"--noflush"}


def test_newer_legacy_waits_for_the_lock(netns: str, tmp_path: Path) -> None:
    """Since 1.6.2 restore programs take a lock, and are told how long to wait for it."""
    script = 'echo "$@" >> $HERE/arguments; exec $REAL "$@"'
    break_both(tmp_path, "-legacy", script, parts=("-restore",))
    program(netns, config("legacy"), wrappers=tmp_path)
    assert set((tmp_path / "arguments").read_text().splitlines()) == {"--noflush --wait=30"}


def test_each_candidate_is_named_when_none_works(netns: str, tmp_path: Path) -> None:
    """The error says of each what is wrong, and which kernel modules to look for."""
    before = state(netns)
    break_both(tmp_path, "-nft", NO_NFT)
    break_both(tmp_path, "-legacy", NO_NAT)
    with pytest.raises(NoUsableBackend) as failure:
        program(netns, config(BACKEND="iptables"), only=tmp_path)
    message = failure.value.msg
    assert message.startswith("no usable iptables (iptables-nft: iptables-nft-restore failed")
    assert "Could not fetch rule set generation id: Invalid argument" in message
    assert 'iptables: iptables-save failed (could not be started): "not found"' in message
    assert "iptables-legacy: " in message
    assert "IPv4 needs the kernel modules nf_tables, nft_compat, nft_chain_nat" in message
    assert "\n" not in message
    assert state(netns) == before


def test_missing_programs_are_to_be_installed(netns: str, tmp_path: Path) -> None:
    """Where there is no iptables at all, kernel modules are not the thing to look for."""
    with pytest.raises(NoUsableBackend, match=r"install iptables where this runs$"):
        program(netns, config(BACKEND="iptables"), only=tmp_path)


@variants
def test_needed_ipv6_that_fails_fails_the_pod(netns: str, tmp_path: Path, variant: str) -> None:
    """A pod with IPv6 is not half captured: nothing is left, the modules are named."""
    for name in ("-nft", "-legacy", ""):
        for part in PARTS:
            script = "echo 'can not load ip6_tables' >&2; exit 3"
            wrap(tmp_path, f"ip6tables{name}{part}", script)
    before = state(netns)
    with pytest.raises(ProgrammingFailed) as failure:
        program(netns, config(variant), wrappers=tmp_path)
    assert "no usable ip6tables" in failure.value.msg
    modules = {"nft": r"nf_tables, .*nf_nat \(IPv6\)", "legacy": "ip6_tables, ip6table_nat, "}
    assert re.search(f"IPv6 needs the kernel modules {modules[variant]}", failure.value.msg)
    assert holders(netns) == {}
    if variant == "nft":
        assert state(netns) == before


def test_unneeded_ipv6_that_fails_costs_one_warning(netns: str, tmp_path: Path) -> None:
    """A pod without IPv6 starts, and the log says what is wrong with it."""
    for name in ("-nft", "-legacy", ""):
        for part in PARTS:
            wrap(tmp_path, f"ip6tables{name}{part}", "echo 'no ip6_tables' >&2; exit 3")
    outcome = program(netns, config(ENABLE_INBOUND_IPV6=False), wrappers=tmp_path)
    assert outcome.variants == {"iptables": "nft"}
    (warning,) = outcome.warnings
    assert warning.startswith("IPv6 could not be captured here, nor is it asked for: ")
    assert "no ip6_tables" in warning


def test_unneeded_ipv6_that_hangs_costs_one_warning(netns: str, tmp_path: Path) -> None:
    """It may take the time that is left, not the pod."""
    wrap(tmp_path, "ip6tables-nft-save", "sleep 60")
    wanted = config(ENABLE_INBOUND_IPV6=False)
    outcome = program(netns, wanted, wrappers=tmp_path, seconds=0.7)
    (warning,) = outcome.warnings
    assert "ip6tables-nft-save did not end within" in warning
    assert holders(netns) == {"iptables": "nft"}


def test_unneeded_ipv6_in_working_order_leaves_no_trace(netns: str) -> None:
    """The question whether it works makes no table."""
    outcome = program(netns, config(ENABLE_INBOUND_IPV6=False))
    assert outcome.warnings == []
    assert inside(netns, ["nft", "list", "tables"]) == "table ip nat\n"


def test_unreadable_tables_are_reported(netns: str, tmp_path: Path) -> None:
    """Rules of ours may be in a variant that cannot be read: the log says so, the pod starts."""
    restore(netns, "iptables-legacy", FOREIGN)
    wrap(tmp_path, "iptables-legacy-save", "echo 'no such library' >&2; exit 1")
    outcome = program(netns, config(), wrappers=tmp_path)
    assert outcome.variants == ONE_SET["nft"]
    (warning,) = outcome.warnings
    assert "cannot be read" in warning
    assert "no such library" in warning
