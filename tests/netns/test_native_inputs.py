"""The nftables back end: odd input, odd neighbours, run again, printed instead of run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from cases import CASES
from istio_cni.capture import apply, main
from istio_cni.capture.settings import to_settings
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.nftables import TABLES, reference, render
from istio_cni.rules.sidecar import generate
from namespaces import call_inside_as, inside, ip
from netns.programming import (
    ALL_DNS,
    CLI,
    TPROXY,
    VARIANTS,
    check,
    clean_up,
    config,
    program,
    rules,
    state,
    with_binds,
)
from netns.test_faults_foreign import BEFORE, put_others, put_rules
from netns.traffic import (
    APPLICATION,
    FAMILIES,
    INBOUND,
    OUTBOUND,
    OUTSIDE,
    POD,
    PROXY,
    TRANSPARENT_LISTENERS,
    Call,
    Listener,
    Wire,
    reach,
    serving,
    wired,
)

pytestmark = pytest.mark.netns

OURS = tuple(TABLES.values())
SECOND = {4: "10.98.0.1", 6: "fd98::1"}
POD_ON_SECOND = {4: "10.98.0.2", 6: "fd98::2"}
ALIKE = ("inet istio-proxy", "inet istio-proxy-nat-2", "inet istio", "ip istio-proxy-nat")

TWIN = ("from", "192.0.2.0/24", "fwmark", "1337", "lookup", "133")  # ours, but for its source

modes = pytest.mark.parametrize("mode", [{}, TPROXY], ids=["REDIRECT", "TPROXY"])


@pytest.fixture
def wire(new_netns: Callable[[], str]) -> Iterator[Wire]:
    """Set up a pod with an application and a proxy, and an outside."""
    with (
        wired(new_netns, (Listener(8080),), (Listener(80), Listener(53, udp=True))) as wire,
        serving(wire.pod, "proxy", TRANSPARENT_LISTENERS),
    ):
        yield wire


def native(**settings: object) -> CaptureConfig:
    """Return the defaults of a captured pod, for this back end, with some settings changed."""
    return config("", BACKEND="nftables", **settings)


def ends(path: str, uid: int, *calls: Call) -> list[tuple[str, int] | str]:
    """Make connections as a user, and say who took each at which port."""
    return [one if isinstance(one, str) else one[:2] for one in reach(path, uid, *calls)]


def listing(path: str, *options: str) -> str:
    """List all of nf_tables without what was counted; with `-a` handles show what is new."""
    return inside(path, ["nft", "-s", *options, "list", "ruleset"])


# -- interfaces --------------------------------------------------------------------------------


def add_interface(wire: Wire, name: str) -> None:
    """Lay a second wire between pod and outside, under a name of its own in the pod."""
    pod, outside = os.path.basename(wire.pod), os.path.basename(wire.outside)
    ip("link", "add", "name", name, "netns", pod, "type", "veth", "peer", "pod1", "netns", outside)
    for path, link, own in ((wire.pod, name, POD_ON_SECOND), (wire.outside, "pod1", SECOND)):
        lines = [
            f"link set dev {link} up",
            f"addr add {own[4]}/24 dev {link}",
            f"addr add {own[6]}/64 dev {link} nodad",
        ]
        inside(path, ["ip", "-batch", "-"], stdin="\n".join(lines))


@modes
@pytest.mark.parametrize(
    ("excluded", "name", "rest_too"),
    [
        ("ct", "ct", False),
        ("mark", "mark", False),
        ("jump", "jump", False),
        ("3com0", "3com0", False),
        ("eth+", "eth1", True),
        ("net+", "net", False),
        ("a.b-c_d.1234567", "a.b-c_d.1234567", False),
    ],
)
def test_excluded_interface_is_left_alone(
    wire: Wire, excluded: str, name: str, rest_too: bool, mode: dict[str, object]
) -> None:
    """Whatever its name means to nft; the pod's other interface is captured unless it is meant."""
    add_interface(wire, name)
    wanted = native(EXCLUDE_INTERFACES=excluded, **mode)
    program(wire.pod, wanted)
    assert check(wire.pod, wanted, {}) == ""
    direct = [("outside", 80)] * 2
    out = [Call(SECOND[family], 80) for family in FAMILIES]
    into = [Call(POD_ON_SECOND[family], 8080) for family in FAMILIES]
    assert ends(wire.pod, APPLICATION, *out) == direct
    assert ends(wire.outside, APPLICATION, *into) == [("pod", 8080)] * 2
    out = [Call(OUTSIDE[family], 80) for family in FAMILIES]
    into = [Call(POD[family], 8080) for family in FAMILIES]
    captured = direct if rest_too else [("proxy", OUTBOUND)] * 2
    assert ends(wire.pod, APPLICATION, *out) == captured
    captured = [("pod", 8080)] * 2 if rest_too else [("proxy", INBOUND)] * 2
    assert ends(wire.outside, APPLICATION, *into) == captured


@pytest.mark.parametrize("name", ["ct", "mark", "jump", "3com0"])
def test_nft_takes_no_such_name_from_the_reference(netns: str, name: str) -> None:
    """Its text has names bare; the same rules over netlink are no problem."""
    wanted = native(EXCLUDE_INTERFACES=name)
    with pytest.raises(AssertionError, match="syntax error"):
        inside(netns, ["nft", "-f", "-"], stdin=render(reference(generate(wanted))))
    program(netns, wanted)


def test_tproxy_without_inbound_ports_captures_outbound_only(wire: Wire) -> None:
    """Nothing that arrives is touched, and no policy rule is needed."""
    wanted = native(INBOUND_PORTS_INCLUDE="", **TPROXY, **ALL_DNS)
    before = inside(wire.pod, ["ip", "rule"])
    program(wire.pod, wanted)
    assert check(wire.pod, wanted, {}) == ""
    into = [Call(POD[family], 8080) for family in FAMILIES]
    assert ends(wire.outside, APPLICATION, *into) == [("pod", 8080)] * 2
    out = [Call(OUTSIDE[family], 80) for family in FAMILIES]
    assert ends(wire.pod, APPLICATION, *out) == [("proxy", OUTBOUND)] * 2
    assert ends(wire.pod, PROXY, *out) == [("outside", 80)] * 2
    assert inside(wire.pod, ["ip", "rule"]) == before


# -- neighbours --------------------------------------------------------------------------------


def put_alike(path: str) -> None:
    """Make tables of somebody else whose names are close to ours, with rules and chains in them."""
    lines: list[str] = []
    for table in ALIKE:
        lines += (
            f"add table {table}",
            f"add chain {table} output {{ type filter hook output priority 0; policy accept; }}",
            f"add chain {table} istio-output",
            f"add rule {table} output tcp dport 4000 counter jump istio-output",
            f"add set {table} peers {{ type ipv4_addr; elements = {{ 192.0.2.1 }}; }}",
        )
    inside(path, ["nft", "-f", "-"], stdin="\n".join(lines))


def theirs(path: str) -> str:
    """List what is not ours: nf_tables with its handles, iptables, policy rules and routes."""
    listed = listing(path, "-a")
    tables = re.split(r"^(?=table )", listed, flags=re.MULTILINE)
    foreign = [
        table
        for table in tables
        if not table.startswith(tuple(f"table inet {name} " for name in OURS))
    ]
    lines = [line for line in state(path).splitlines() if "::6/128" not in line]
    own = ("from all fwmark 0x539 lookup 133", "local default dev lo")
    routes = [line for line in lines if not any(text in line for text in own)]
    return "".join(foreign) + "\n".join(routes) + rules(path)


@pytest.mark.parametrize("variant", ["", *VARIANTS])
def test_foreign_rules_are_not_touched(netns: str, variant: str) -> None:
    """Not one handle of theirs changes: by ADD, re-run, another configuration, clean-up."""
    put_alike(netns)
    put_others(netns)
    inside(netns, ["ip", "rule", "del", "priority", "31337", *TWIN])
    if variant:
        put_rules(netns, variant, BEFORE)
    before = theirs(netns)
    for wanted in (native(**TPROXY, **ALL_DNS), native()):
        assert "nf_tables" in program(netns, wanted).changed
        assert theirs(netns) == before
        assert check(netns, wanted, {}) == ""
        assert program(netns, wanted).changed == []
        program(netns, wanted, existing=apply.REWRITE)
        assert theirs(netns) == before
    assert "nf_tables" in clean_up(netns).changed
    assert theirs(netns) == before
    assert not any(
        f"table inet {name}\n" in inside(netns, ["nft", "list", "tables"]) for name in OURS
    )
    assert clean_up(netns).changed == []


def test_tables_left_by_nobody_do_not_count(netns: str) -> None:
    """Clean-up of a namespace that has only tables with names like ours finds nothing to do."""
    put_alike(netns)
    before = theirs(netns)
    assert clean_up(netns).changed == []
    assert theirs(netns) == before


def test_policy_rule_of_others_is_not_taken_for_ours(netns: str) -> None:
    """To the kernel a rule with a source is there already when the same without one is added."""
    inside(netns, ["ip", "rule", "add", "priority", "31337", *TWIN])
    wanted = native(**TPROXY)
    program(netns, wanted)
    assert check(netns, wanted, {}) == ""


# -- run again ---------------------------------------------------------------------------------


def events(path: str, action: Callable[[], object]) -> list[str]:
    """Return what `nft monitor` tells while something is done."""
    command = ["ip", "netns", "exec", os.path.basename(path), "stdbuf", "-oL", "nft", "monitor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as monitor:
        assert monitor.stdout is not None
        output, seen = monitor.stdout.fileno(), ""
        os.set_blocking(output, False)
        try:
            for mark in ("begin", "end"):
                if mark == "end":
                    action()
                for number in range(200):  # until it listens, and until it has told all
                    if f"table inet {mark}-" in seen:
                        break
                    inside(path, ["nft", "add", "table", "inet", f"{mark}-{number}"])
                    with contextlib.suppress(BlockingIOError):
                        seen += os.read(output, 1 << 16).decode()
        finally:
            monitor.kill()
    told = [line for line in seen.splitlines() if line.startswith(("add", "delete", "flush"))]
    assert "end-" in told[-1]
    return [line for line in told if "table inet begin-" not in line and "inet end-" not in line]


@modes
def test_equal_run_sends_nothing(wire: Wire, mode: dict[str, object]) -> None:
    """The kernel tells of no change, and what was counted stays counted."""
    wanted = native(**mode, **ALL_DNS)
    program(wire.pod, wanted)
    reach(wire.pod, APPLICATION, *(Call(OUTSIDE[family], 80) for family in FAMILIES))
    reach(wire.outside, APPLICATION, *(Call(POD[family], 8080) for family in FAMILIES))
    before = inside(wire.pod, ["nft", "-a", "list", "table", "inet", OURS[0]])
    assert len(re.findall(r"packets [1-9]", before)) >= 3

    def again() -> None:
        for existing in (apply.REPLACE, apply.REFUSE):
            assert program(wire.pod, wanted, existing=existing).changed == []
        assert check(wire.pod, wanted, {}) == ""

    assert events(wire.pod, again) == []
    assert inside(wire.pod, ["nft", "-a", "list", "table", "inet", OURS[0]]) == before


def test_other_run_is_told(netns: str) -> None:
    """So the silence above means something."""
    program(netns, native())
    told = events(netns, lambda: program(netns, native(), existing=apply.REWRITE))
    assert any(line.startswith("delete table inet istio-proxy-nat") for line in told)
    assert any(line.startswith("add rule inet istio-proxy-nat") for line in told)


# -- printed -----------------------------------------------------------------------------------


def dry_run(settings: Mapping[str, object], *arguments: str) -> str:
    """Print a configuration's rules on a machine on which no program can be found."""
    return subprocess.run(
        [CLI, "--config", "-", "--dry-run", *arguments],
        input=json.dumps(settings),
        env={"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def settings_of(name: str) -> dict[str, object]:
    """Return what `--config` takes for a case, for this back end."""
    wanted = CASES[name].config._replace(backend="nftables", iptables_variant="")
    return {**to_settings(wanted)}


LONG = {
    "OUTBOUND_OWNER_GROUPS_INCLUDE": ",".join(str(3000 + 2 * n) for n in range(100)),
    "OUTBOUND_IPRANGES_EXCLUDE": ",".join(
        f"10.{n}.0.0/17,10.{n}.128.0/18,fd00:{n:x}::/33,fd00:{n:x}:8000::/34" for n in range(60)
    ),
    "INBOUND_PORTS_EXCLUDE": ",".join(f"{n}-{n + 3}" for n in range(2000, 2200, 5)),
    "EXCLUDE_INTERFACES": "ct,jump,3com0,eth+",
}


ADJACENT: dict[str, object] = {
    "OUTBOUND_IPRANGES_INCLUDE": ",".join(f"10.{n}.0.0/16" for n in range(1, 18))
}
"""Prefixes that are one interval together, but no prefix."""
LISTS: dict[str, dict[str, object]] = {"long lists": {**TPROXY, **LONG}, "one interval": ADJACENT}


@pytest.mark.parametrize("name", ["cni-defaults", "everything", "tproxy-dual-stack", *LISTS])
def test_complete_text_makes_what_programming_makes(
    netns: str, new_netns: Callable[[], str], name: str
) -> None:
    """`nft -f -` of it and a run are the same to nft, and to us: a run then changes nothing."""
    settings = to_settings(native(**LISTS[name])) if name in LISTS else settings_of(name)
    wanted = config("", **{**settings, "BACKEND": "nftables"})
    text = dry_run(settings, "--output", "complete")
    assert text.startswith("# nft -f -\n")
    inside(netns, ["nft", "-f", "-"], stdin=text)
    programmed = new_netns()
    program(programmed, wanted)
    assert listing(netns) == listing(programmed) != ""
    before = listing(netns, "-a")
    assert "nf_tables" not in program(netns, wanted).changed
    assert listing(netns, "-a") == before
    assert check(netns, wanted, {}) == ""
    inside(programmed, ["nft", "-f", "-"], stdin=text)
    assert listing(netns) == listing(programmed)
    assert program(programmed, wanted).changed == []


@pytest.mark.parametrize("output", ["", "text", "complete", "netlink"])
def test_dry_run_needs_neither_root_nor_programs(netns: str, output: str) -> None:
    """Addresses are found out all the same, and the warnings go to stderr."""
    inside(netns, ["ip", "addr", "add", "10.9.0.1/24", "dev", "lo"])
    arguments = ["-u", "1337", "-g", "1337", "-i", "*", "-b", "*", "--dry-run"]
    arguments += ["--backend", "nftables", *(["--output", output] if output else [])]

    def work() -> tuple[int, str]:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            return main.run(arguments, {"PATH": "/nonexistent"}), printed.getvalue()

    status, printed = call_inside_as(APPLICATION, netns, work)
    assert status == 0
    title, _, body = printed.partition("\n")
    assert title.startswith("# nf_tables netlink: " if output == "netlink" else "# nft -f -")
    assert "istio-proxy-nat" in body
    assert ("meta nfproto ipv6 counter return" in body) == (output == "complete")
    assert listing(netns) == ""


@pytest.mark.parametrize(
    ("backend", "output", "words"),
    [
        ("nftables", "yaml", '--output: "yaml" is not allowed; allowed: text, complete, netlink'),
        ("iptables", "netlink", "--output=netlink: only the back end nftables has it"),
        ("iptables", "complete", "--output=complete: only the back end nftables has it"),
        ("nft", "text", 'BACKEND: "nft" is not allowed; allowed: auto, iptables'),
    ],
)
def test_wrong_words_are_refused_in_one_line(backend: str, output: str, words: str) -> None:
    """Nothing is printed but the reason."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        dry_run({"BACKEND": backend}, "--output", output)
    assert refused.value.stdout == ""
    assert refused.value.stderr.startswith("istio-iptables: ")
    assert words in refused.value.stderr
    assert refused.value.stderr.count("\n") == 1


def test_command_line_programs_and_cleans_up(wire: Wire, tmp_path: Path) -> None:
    """Without any iptables on the node; `auto` finds that out, and the log says so."""
    hidden = dict.fromkeys(programs_of_iptables(), "/dev/null")
    run = [*with_binds(hidden), str(CLI), "-u", "1337", "-i", "*", "-b", "*", "--dual-stack"]
    out = [Call(OUTSIDE[family], 80) for family in FAMILIES]
    said = tmp_path / "log"
    logged = ["sh", "-c", f'exec "$@" 2>> {said}', "sh"]
    for arguments in ([], ["--backend", "nftables"]):
        inside(wire.pod, [*logged, *run, *arguments])
        assert ends(wire.pod, APPLICATION, *out) == [("proxy", OUTBOUND)] * 2
    assert said.read_text().count("back end nftables") == 2
    assert "nothing: all is in place" in said.read_text().splitlines()[-1]
    inside(wire.pod, [*logged, *run, "--cleanup-only"])
    assert ends(wire.pod, APPLICATION, *out) == [("outside", 80)] * 2
    assert listing(wire.pod) == ""


def programs_of_iptables() -> list[str]:
    """Name the files of this machine's iptables programs."""
    found: set[str] = set()
    for directory in ("/usr/sbin", "/sbin", "/usr/bin", "/usr/local/sbin"):
        found |= {os.path.realpath(path) for path in Path(directory).glob("*tables*-multi")}
    assert found, sys.platform
    return sorted(found)
