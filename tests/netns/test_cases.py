"""Every case in a kernel, with both variants of iptables: what the texts promise, kept.

A case lives through one story in a fresh namespace, told through the command line as a person would
tell it: programmed, read back, asked rule by rule, programmed again, cleaned up.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

import pytest

from cases import CASES, V4, V6, Case
from istio_cni.capture.main import run
from istio_cni.capture.settings import to_settings
from istio_cni.rules.iptables import check_commands, parse_save, render
from istio_cni.rules.model import Family, Rule, Ruleset, Table
from istio_cni.rules.sidecar import generate
from istio_cni.rules.state import State, wanted
from namespaces import call_inside, call_inside_as, inside
from netns.programming import wait_until

pytestmark = pytest.mark.netns

NOBODY = 65534
VARIANTS = ("legacy", "nft")
BASE = {Family.V4: "iptables", Family.V6: "ip6tables"}
IDS = {"java": "2020", "ftp": "2121", "envoy": "1337", "mesh": "1338"}
"""Ids in the place of names that a test machine need not know."""
DAEMON = str(pwd.getpwnam("daemon").pw_uid)
EXPECTED = os.path.join(os.path.dirname(__file__), "../unit/rules/expected")
Rules = dict[Table, dict[str, list[Rule | None]]]

STORIES = pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name in CASES for variant in VARIANTS]
)


@pytest.fixture
def pod(new_netns: Callable[[], str]) -> Callable[[Sequence[str]], str]:
    """Make a pod's namespace: addresses, all on `lo`, where nothing sends packets by itself."""

    def make(addresses: Sequence[str] = (V4, V6)) -> str:
        path = new_netns()
        lines = "".join(f"addr add {address} dev lo nodad\n" for address in addresses)
        inside(path, ["ip", "-batch", "-"], stdin=lines)
        for address in (address for address in addresses if ":" in address):
            wait_until(lambda own=address: has_route(path, own), "the kernel's own route")
        return path

    return make


def has_route(netns: str, address: str) -> bool:
    """Tell whether an IPv6 address is in use, which the kernel sees to a moment after it is set."""
    routes = ("-6", "route", "show", "table", "local")
    command = ["ip", "-n", os.path.basename(netns), *routes]
    return f"local {address} " in subprocess.check_output(command, text=True, timeout=20)


def output_of(*argv: str) -> str:
    """Run a program here; return what it prints, or fail with what it complains of."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stderr}"
    return done.stdout


def istio_iptables(
    arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run the program in this process; return its status, its output and its log."""
    out, log = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(log):
        status = run(arguments, {"PATH": os.environ["PATH"], **(environ or {})})
    return status, out.getvalue(), log.getvalue()


def with_ids(text: str) -> str:
    """Put ids in the place of names of users and groups."""
    return re.sub("|".join(IDS), lambda found: IDS[found[0]], text)


def command_line(case: Case, variant: str, directory: str) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment that put a case in place with a variant."""
    if case.by_flags:
        arguments = [with_ids(word) for word in case.arguments]
        environ = {name: with_ids(value) for name, value in case.environ.items()}
        return [*arguments, f"--force-iptables-binary={variant}"], environ
    path = os.path.join(directory, "capture.json")
    settings = {**to_settings(case.config), "FORCE_IPTABLES_BINARY": variant}
    with open(path, "w", encoding="utf-8") as file:
        file.write(with_ids(json.dumps(settings)))
    return ["--config", path], {}


def ruleset_of(case: Case) -> Ruleset:
    """Return a case's rules, with ids for names."""
    config = case.config
    groups = config.owner_groups
    return generate(
        config._replace(
            proxy_uids=tuple(map(with_ids, config.proxy_uids)),
            proxy_gids=tuple(map(with_ids, config.proxy_gids)),
            owner_groups=groups if isinstance(groups, str) else tuple(map(with_ids, groups)),
            owner_groups_excluded=tuple(map(with_ids, config.owner_groups_excluded)),
        )
    )


def use_resolv_conf(text: str, directory: str) -> None:
    """Give the present process, a child of the test, a resolv.conf of its own."""
    path = os.path.join(directory, "resolv.conf")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    output_of("mount", "--make-rprivate", "/")
    output_of("mount", "--bind", path, "/etc/resolv.conf")


def everything_here() -> str:
    """Show rules, policy rules, routes and addresses, all that a clean-up must restore.

    A legacy table, once met, stays with its policies: of these only the rules count.
    """
    commands = [f"{base}-nft-save" for base in BASE.values()]
    commands += ["nft list ruleset"]
    routing = "printf 'addr\\nrule\\nroute show table all\\n'"
    commands += [f"{routing} | ip {family} -batch -" for family in ("-4", "-6")]
    legacy = "; ".join(f"{base}-legacy-save" for base in BASE.values())
    commands += [f"{{ {legacy}; }} | grep -v '^[*:#]\\|^COMMIT' || true"]
    return output_of("sh", "-exc", "\n".join(f"echo '== {c[:20]}'; {c}" for c in commands))


def rules_of(state: State) -> Rules:
    """Return the rules of a state without their texts, which tools write as they like."""
    return {
        table: {chain: [saved.rule for saved in rules] for chain, rules in chains.items()}
        for table, chains in state.items()
    }


def counters(variant: str) -> list[str]:
    """Return each rule with its packet and byte counters."""
    return [
        line
        for base in BASE.values()
        for line in output_of(f"{base}-{variant}-save", "-c").splitlines()
        if line.startswith("[")
    ]


def send_packets() -> None:
    """Let an application talk to itself and to nobody, so that rules count packets."""
    for family, own, other in (
        (socket.AF_INET, V4, "203.0.113.1"),
        (socket.AF_INET6, V6, "2001:db8:ffff::1"),
    ):
        for address in (own, other):
            for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                with socket.socket(family, kind) as sender, contextlib.suppress(OSError):
                    sender.settimeout(0.01)
                    sender.connect((address, 53))
                    sender.send(b"?")


def missing(ruleset: Ruleset, variant: str) -> str:
    """Ask for each rule by itself; return what is said of the first that was not found.

    Restore takes these questions, too, in one process.
    """
    said = ""
    for family in ruleset.families:
        lines = []
        for option, table, *question in check_commands(ruleset, family):
            assert option == "-t"
            lines += [f"*{table}", " ".join(question), "COMMIT"]
        program = [f"{BASE[family]}-{variant}-restore", "--noflush"]
        text = "\n".join([*lines, ""])
        done = subprocess.run(program, input=text, capture_output=True, text=True, check=False)
        said += f"{done.stderr}\n{text}" if done.returncode else done.stdout + done.stderr
    return said


@STORIES
def test_story(
    name: str, variant: str, pod: Callable[[Sequence[str]], str], tmp_path: os.PathLike[str]
) -> None:
    """The kernel holds the rules wanted, and nothing once they are cleaned up.

    Programming again is no work: counters run on. The clean-up is told nothing of the
    configuration.
    """
    case = CASES[name]
    ruleset = ruleset_of(case)
    arguments, environ = command_line(case, variant, os.fspath(tmp_path))

    def story() -> None:
        if case.resolv_conf:
            use_resolv_conf(case.resolv_conf, os.fspath(tmp_path))
        before = everything_here()

        status, out, log = istio_iptables(arguments, environ)
        assert (status, out) == (0, ""), log
        assert f"iptables: {variant}" in log

        for family in Family:
            text = output_of(f"{BASE[family]}-{variant}-save")
            assert rules_of(parse_save(text)) == rules_of(wanted(ruleset, family))
        assert missing(ruleset, variant) == ""

        send_packets()
        counted = counters(variant)
        assert any(not line.startswith("[0:0]") for line in counted)
        status, _, log = istio_iptables(arguments, environ)
        assert status == 0, log
        assert "changed nothing: all is in place" in log
        assert counters(variant) == counted

        status, out, log = istio_iptables(["--cleanup-only"])
        assert (status, out) == (0, ""), log
        assert everything_here() == before

    call_inside(pod(case.addresses), story)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.by_flags])
def test_flags_are_completed_by_what_the_pod_has(
    name: str, pod: Callable[[Sequence[str]], str], tmp_path: os.PathLike[str]
) -> None:
    """Addresses decide on IPv6, resolv.conf on DNS; a dry run then prints the expected text."""
    case = CASES[name]

    def dry_run() -> tuple[int, str, str]:
        if case.resolv_conf:
            use_resolv_conf(case.resolv_conf, os.fspath(tmp_path))
        return istio_iptables([*case.arguments, "--dry-run"], case.environ)

    status, out, log = call_inside(pod(case.addresses), dry_run)
    assert status == 0, log
    with open(os.path.join(EXPECTED, f"{name}.iptables"), encoding="utf-8") as file:
        assert out == file.read()


def test_a_dry_run_by_flags_needs_no_privileges(pod: Callable[[Sequence[str]], str]) -> None:
    """Looking at addresses is open to everybody."""
    case = CASES["appendix-b"]
    path = pod(case.addresses)
    arguments = [*case.arguments, "--dry-run"]
    as_root = call_inside(path, istio_iptables, arguments)
    assert call_inside_as(NOBODY, path, istio_iptables, arguments) == as_root
    assert as_root[0] == 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("letter", "abcd")
def test_worked_examples_load_as_they_stand(letter: str, variant: str, netns: str) -> None:
    """The expected texts themselves, comment lines and all, are what the tools take."""
    with open(os.path.join(EXPECTED, f"appendix-{letter}.iptables"), encoding="utf-8") as file:
        v4, _, v6 = with_ids(file.read()).partition("# ip6tables-restore --noflush\n")
    ruleset = ruleset_of(CASES[f"appendix-{letter}"])
    assert v6 == with_ids(render(ruleset, Family.V6))

    def load() -> None:
        for family, text in ((Family.V4, v4), (Family.V6, v6)):
            program = f"{BASE[family]}-{variant}"
            done = subprocess.run(
                [f"{program}-restore", "--noflush"],
                input=text,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            state = parse_save(output_of(f"{program}-save"))
            assert rules_of(state) == rules_of(wanted(ruleset, family))

    call_inside(netns, load)


@pytest.mark.parametrize("variant", VARIANTS)
def test_dns_asked_for_twice_and_applied_three_times_is_one_copy(
    variant: str, pod: Callable[[Sequence[str]], str]
) -> None:
    """However often, and under whichever names."""
    arguments = ["-u", "1337", "-i", "*", "--capture-all-dns", f"--force-iptables-binary={variant}"]
    environ = {"REDIRECT_DNS": "true", "ISTIO_META_DNS_CAPTURE": "true"}

    def apply_thrice() -> str:
        for _ in range(3):
            status, _, log = istio_iptables(arguments, environ)
            assert status == 0, log
        return output_of(f"iptables-{variant}-save")

    tables = parse_save(call_inside(pod((V4,)), apply_thrice))
    for chains in tables.values():
        for rules in chains.values():
            texts = [saved.text for saved in rules]
            assert len(texts) == len(set(texts))
    assert len(tables[Table.NAT]["ISTIO_OUTPUT_DNS"]) == 2
    assert len(tables[Table.RAW]["ISTIO_OUTPUT_DNS"]) == 5


@pytest.fixture
def refused(pod: Callable[[Sequence[str]], str]) -> Callable[..., str]:
    """Run a command line that must fail and leave everything as it was; return its one line."""

    def run_it(
        *arguments: str, environ: Mapping[str, str] | None = None, addresses: Sequence[str] = (V4,)
    ) -> str:
        def attempt() -> tuple[int, str, str, bool]:
            before = everything_here()
            status, out, log = istio_iptables(arguments, environ)
            return status, out, log, everything_here() == before

        status, out, log, untouched = call_inside(pod(addresses), attempt)
        assert (status, out, untouched) == (1, "", True)
        assert log.startswith("istio-iptables: ")
        assert log.count("\n") == 1
        return log.removeprefix("istio-iptables: ").rstrip("\n")

    return run_it


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ((), {"ISTIO_OUTBOUND_OWNER_GROUPS": "no-such"}, 'unknown group "no-such"; give its id'),
        ((), {"ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE": "no-such"}, 'unknown group "no-such"'),
        (("-g", "no-such"), {}, 'unknown group "no-such"'),
        (("-u", "no-such"), {}, 'unknown user "no-such"'),
        (
            (),
            {"ISTIO_OUTBOUND_OWNER_GROUPS": ",".join(map(str, range(50)))},
            "50 included owner groups: iptables takes at most 49 in one rule; "
            "the back end nftables has no limit",
        ),
        (("-c", "eth0;reboot"), {}, '--istio-exclude-interfaces: "eth0;reboot" is not allowed'),
    ],
)
def test_what_is_refused_is_refused_before_any_rule(
    arguments: tuple[str, ...],
    environ: Mapping[str, str],
    message: str,
    refused: Callable[..., str],
) -> None:
    """Nothing is written, one line says why."""
    assert refused("-i", "*", "-b", "*", *arguments, environ=environ).startswith(message)


@pytest.mark.parametrize("addresses", [(), ("169.254.7.7",), ("fe80::7",)])
def test_a_pod_without_an_address_is_refused(
    addresses: tuple[str, ...], refused: Callable[..., str]
) -> None:
    """Loopback and link-local ones do not count: nobody knows which families to capture."""
    assert refused("-i", "*", addresses=addresses).startswith("no valid local address: ")


@pytest.mark.parametrize(
    ("addresses", "arguments", "families"),
    [
        ((V4,), (), 1),
        ((V6,), (), 2),
        ((V4, V6), (), 1),
        ((V4, V6), ("--dual-stack",), 2),
        ((V4,), ("--dual-stack",), 1),
        (("169.254.7.7", V6), (), 2),
    ],
)
def test_addresses_decide_on_ipv6(
    addresses: tuple[str, ...],
    arguments: tuple[str, ...],
    families: int,
    pod: Callable[[Sequence[str]], str],
) -> None:
    """IPv4 rules are made always."""
    status, out, log = call_inside(pod(addresses), istio_iptables, [*arguments, "--dry-run"])
    assert status == 0, log
    assert out.count("-restore --noflush\n") == families


@pytest.mark.parametrize(
    ("arguments", "environ", "uids", "gids"),
    [
        ((), {"ENVOY_USER": "daemon"}, DAEMON, DAEMON),
        ((), {"ENVOY_USER": "no-such-user"}, "1337", "1337"),
        ((), {"ENVOY_USER": "daemon", "PROXY_GID": "1337"}, DAEMON, "1337"),
        (("-u", "5,6"), {"ENVOY_USER": "daemon"}, "5,6", "5,6"),
        (("-u", "", "-g", "7"), {"ENVOY_USER": "daemon", "PROXY_UID": "5"}, DAEMON, "7"),
    ],
)
def test_the_proxys_ids_are_looked_up(
    arguments: tuple[str, ...],
    environ: Mapping[str, str],
    uids: str,
    gids: str,
    pod: Callable[[Sequence[str]], str],
) -> None:
    """The user's where none is given; the group is a copy of it unless given."""
    status, out, log = call_inside(pod((V4,)), istio_iptables, [*arguments, "--dry-run"], environ)
    assert status == 0, log
    for kind, ids in (("uid", uids), ("gid", gids)):
        found = re.findall(rf"^-A ISTIO_OUTPUT -m owner --{kind}-owner (\S+) -j RETURN$", out, re.M)
        assert ",".join(found) == ids


def test_a_resolv_conf_without_servers_captures_no_dns(
    pod: Callable[[Sequence[str]], str], tmp_path: os.PathLike[str]
) -> None:
    """A warning says so; the rules are those without DNS."""

    def dry_run() -> tuple[str, str, str]:
        use_resolv_conf("search example.com\n", os.fspath(tmp_path))
        _, plain, _ = istio_iptables(["-i", "*", "--dry-run"])
        _, out, log = istio_iptables(["-i", "*", "--redirect-dns", "--dry-run"])
        return plain, out, log

    plain, out, log = call_inside(pod((V4,)), dry_run)
    assert out == plain
    assert log == "WARNING: DNS is not captured: /etc/resolv.conf names no server\n"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_clean_up_needs_no_address_and_no_resolver(variant: str, pod: Callable[..., str]) -> None:
    """A pod that has lost its addresses can still be cleaned up, whatever flags are left over."""
    path = pod((V4,))

    def story() -> None:
        before = everything_here()
        arguments = ["-i", "*", "-b", "*", f"--force-iptables-binary={variant}"]
        assert istio_iptables(arguments)[0] == 0
        output_of("ip", "addr", "del", f"{V4}/32", "dev", "lo")
        status, _, log = istio_iptables(
            ["--cleanup-only", "--redirect-dns", "--run-validation=false"]
        )
        assert status == 0, log
        output_of("ip", "addr", "add", V4, "dev", "lo")
        assert everything_here() == before

    call_inside(path, story)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_clean_up_takes_every_jump_to_our_chains_and_nothing_else(
    variant: str, pod: Callable[[Sequence[str]], str]
) -> None:
    """Also jumps that somebody put into chains of his own; his other rules stay."""
    program = f"iptables-{variant}"
    theirs = [
        ("-t", "nat", "-N", "THEIRS"),
        ("-t", "nat", "-A", "POSTROUTING", "-o", "eth9", "-j", "RETURN"),
        ("-t", "nat", "-A", "THEIRS", "-p", "udp", "-j", "ACCEPT"),
        ("-t", "mangle", "-A", "PREROUTING", "-p", "icmp", "-j", "ACCEPT"),
    ]
    jumps = [
        ("-t", "nat", "-I", "THEIRS", "1", "-p", "tcp", "-j", "ISTIO_OUTPUT"),
        ("-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-g", "ISTIO_REDIRECT"),
        ("-t", "mangle", "-A", "INPUT", "-m", "comment", "--comment", "x y", "-j", "ISTIO_DIVERT"),
    ]

    def story() -> None:
        for rule in theirs:
            output_of(program, *rule)
        before = parse_save(output_of(f"{program}-save"))
        arguments = ["-i", "*", "-b", "*", "-m", "TPROXY", f"--force-iptables-binary={variant}"]
        status, _, log = istio_iptables(arguments)
        assert status == 0, log
        for rule in jumps:
            output_of(program, *rule)
        assert istio_iptables(arguments)[0] == 1
        status, _, log = istio_iptables(["--cleanup-only"])
        assert status == 0, log
        assert parse_save(output_of(f"{program}-save")) == before
        assert "ISTIO" not in everything_here()

    call_inside(pod((V4,)), story)
