"""`istio-iptables` as a whole, as far as it needs no namespace: dry runs, refusals, logs."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping

import pytest

import istio_cni
from cases import CASES, CNI, DUAL
from istio_cni.capture import apply, main, validation
from istio_cni.capture.main import run
from istio_cni.capture.settings import Value, to_settings
from istio_cni.errors import InvalidParameter, ProgrammingFailed
from istio_cni.rules.iptables import render
from istio_cni.rules.model import Family
from istio_cni.rules.sidecar import generate

NOBODY = 65534
SOURCES = os.path.dirname(os.path.dirname(istio_cni.__file__))


@pytest.fixture
def program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the program on a configuration; return its status, its output and its log."""

    def run_it(
        settings: Mapping[str, Value], *arguments: str, **environ: str
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(settings)))
        status = run(["--config", "-", *arguments], environ)
        return status, *capsys.readouterr()

    return run_it


Program = Callable[..., tuple[int, str, str]]


def test_a_dry_run_prints_only_the_documents(program: Program) -> None:
    """Under a header each; the log is empty where there is nothing to say."""
    status, out, log = program({**CNI, **DUAL}, "--dry-run")
    assert (status, log) == (0, "")
    v4, v6 = (render(generate(CASES["cni-defaults-dual-stack"].config), f) for f in Family)
    assert out == f"# iptables-restore --noflush\n{v4}# ip6tables-restore --noflush\n{v6}"


def test_a_dry_run_can_be_asked_for_by_the_environment(program: Program) -> None:
    """As every action can."""
    assert program(CNI, DRY_RUN="true") == program(CNI, "--dry-run")


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("cni-defaults", "iptables-save\nip6tables-save\n{v4}iptables-save\n"),
        (
            "cni-defaults-dual-stack",
            "iptables-save\nip6tables-save\n{v4}{v6}iptables-save\nip6tables-save\n",
        ),
    ],
)
def test_a_dry_run_leaves_a_transcript_where_it_is_asked_for(
    name: str, commands: str, program: Program, tmp_path: os.PathLike[str]
) -> None:
    """The commands of a run in order, what is loaded, and nothing of a longer former one."""
    path = os.path.join(tmp_path, "transcript")
    with open(path, "w", encoding="utf-8") as file:
        file.write("x" * 100_000)
    config = CASES[name].config
    settings = to_settings(config)
    status, out, _ = program(settings, "--dry-run", DRY_RUN_FILE_PATH=path)
    assert status == 0
    assert out == program(settings, "--dry-run")[1]
    v4, v6 = (render(generate(config), family) for family in Family)
    with open(path, encoding="utf-8") as file:
        assert file.read() == commands.format(v4=v4, v6=v6)


def test_a_transcript_that_cannot_be_written(program: Program, tmp_path: os.PathLike[str]) -> None:
    """Fails the run, by name."""
    path = os.path.join(tmp_path, "missing", "transcript")
    status, _, log = program(CNI, "--dry-run", DRY_RUN_FILE_PATH=path)
    assert status == 1
    assert log == f"istio-iptables: cannot write {json.dumps(path)}: No such file or directory\n"


def test_a_dry_run_of_a_clean_up_prints_no_rules(program: Program) -> None:
    """It would add none; what it removes depends on what is there."""
    status, out, log = program(CNI, "--dry-run", "--cleanup-only")
    assert (status, out) == (0, "")
    assert log == "INFO: nothing to print: a clean-up removes what it finds\n"


def test_nothing_to_do_touches_nothing(program: Program) -> None:
    """Rules that are not to be applied are not even looked for."""
    assert program(CNI, "--skip-rule-apply") == (0, "", "")


def test_dns_without_servers_is_reported(program: Program) -> None:
    """It would look like a fault of the proxy otherwise."""
    status, out, log = program({**CNI, "REDIRECT_DNS": True}, "--dry-run")
    assert (status, out) == program(CNI, "--dry-run")[:2]
    assert log == "WARNING: DNS is not captured: the configuration names no server\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PROXY_PROT": "1"}, 'unknown setting "PROXY_PROT"; did you mean PROXY_PORT?'),
        (
            {"OUTBOUND_IPRANGES_EXCLUDE": "*"},
            'OUTBOUND_IPRANGES_EXCLUDE: "*" is not allowed; allowed: ',
        ),
        ({"EXCLUDE_INTERFACES": "eth1 -j ACCEPT"}, 'EXCLUDE_INTERFACES: "eth1 -j ACCEPT" is not '),
        ({"EXCLUDE_INTERFACES": "eth1\nx"}, 'EXCLUDE_INTERFACES: "eth1\\nx" is not allowed; '),
        (
            {"OUTBOUND_OWNER_GROUPS_INCLUDE": ",".join(map(str, range(50)))},
            "50 included owner groups: iptables takes at most 49 in one rule; "
            "the back end nftables has no limit",
        ),
    ],
)
def test_a_refusal_is_one_line(
    settings: Mapping[str, Value], message: str, program: Program
) -> None:
    """On stderr, with status 1 and no rules."""
    status, out, log = program(settings, "--dry-run")
    assert (status, out) == (1, "")
    assert log.startswith(f"istio-iptables: {message}")
    assert log.count("\n") == 1


def test_warnings_go_to_the_log(program: Program) -> None:
    """Of the level asked for; as JSON, if asked for."""
    settings = {**CNI, "INBOUND_PORTS_INCLUDE": "8080"}
    text = "excluded inbound ports have no effect: only listed ports are captured"
    assert program(settings, "--dry-run")[2] == f"WARNING: {text}\n"
    assert program(settings, "--dry-run", "--log_output_level=error")[2] == ""
    assert program(settings, "--dry-run", "--log_output_level=none")[2] == ""
    (line,) = program(settings, "--dry-run", "--log_as_json")[2].splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["scope"], entry["msg"]) == ("warn", "istio-iptables", text)
    assert entry["time"].endswith("Z")


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand for the addresses of the namespace."""
    there: list[str] = []
    monkeypatch.setattr(main, "_addresses", lambda: there)
    return there


@pytest.mark.parametrize(
    ("there", "arguments", "warned"),
    [
        (["127.0.0.1", "10.0.0.2", "fd00::2"], (), True),
        (["127.0.0.1", "10.0.0.2", "::1", "fe80::2"], (), False),
        (["10.0.0.2", "fd00::2"], ("--dual-stack",), False),
        (["fd00::2", "10.0.0.2"], (), False),
    ],
)
def test_ipv6_that_is_not_captured_is_warned_of(
    there: list[str],
    arguments: tuple[str, ...],
    warned: bool,
    addresses: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It goes past the proxy, and nobody would notice."""
    addresses.extend(there)
    assert run(["-i", "*", "--dry-run", *arguments], {}) == 0
    text = "IPv6 is not captured: the first address here is IPv4; --dual-stack captures both"
    assert capsys.readouterr().err == (f"WARNING: {text}\n" if warned else "")


def _report(monkeypatch: pytest.MonkeyPatch, name: str, answer: object) -> None:
    """Let a function of `apply` report, or raise, without any namespace."""

    def stand_in(*_: object, **__: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(apply, name, stand_in)


@pytest.mark.parametrize(
    ("changed", "line"),
    [(["iptables nat", "routes"], "removed iptables nat, routes"), ([], "nothing to remove")],
)
def test_a_clean_up_says_what_it_removed(
    changed: list[str], line: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or that there was nothing."""
    _report(monkeypatch, "clean_up", apply.Report({}, changed))
    assert program(CNI, "--cleanup-only") == (0, "", f"INFO: {line}\n")


@pytest.mark.parametrize(("uid", "end"), [(0, ""), (1000, "; root is needed")])
def test_who_is_not_root_is_told_when_programming_fails(
    uid: int, end: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the one line; a configuration that is refused has nothing to do with it."""
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    _report(monkeypatch, "program", ProgrammingFailed("no"))
    assert program(CNI) == (1, "", f"istio-iptables: no{end}\n")
    _report(monkeypatch, "program", InvalidParameter("no"))
    assert program(CNI) == (1, "", "istio-iptables: no\n")


@pytest.mark.parametrize(
    ("uid", "owners", "warned"),
    [(0, "1337", True), (1337, "1337", False), (1500, "7,1000-1999", False), (8, "7,9", True)],
)
def test_a_validation_as_another_user_is_warned_of(
    uid: int,
    owners: str,
    warned: bool,
    addresses: list[str],
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot pass, whatever the rules are."""
    addresses.append("10.0.0.2")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(validation, "validate", lambda *_: None)
    settings = {**CNI, "PROXY_UID": owners}
    status, _, log = program(settings, "--skip-rule-apply", "--run-validation")
    assert status == 0
    shown = owners.replace(",", ", ")
    text = f"validation runs as uid {uid}, but only traffic of uid {shown} is redirected"
    assert (f"WARNING: {text}\n" in log) == warned


def test_standard_output_that_is_full_is_named() -> None:
    """In one line; nothing more comes at the end of the process."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "istio_cni.capture.main", "--config", "-", "--dry-run"],
            input=json.dumps(CNI),
            env={"PYTHONPATH": SOURCES},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "istio-iptables: cannot write to standard output: No space left on device\n"
    )


def test_a_left_over_word_is_ignored_with_a_warning(program: Program) -> None:
    """Whatever it holds."""
    status, out, log = program(CNI, "--dry-run", "true\x1b[2J\n")
    assert status == 0
    assert out == program(CNI, "--dry-run")[1]
    assert log == 'WARNING: the argument "true\\u001b[2J\\n" is ignored\n'


def test_a_bad_boolean_variable_is_warned_of(program: Program) -> None:
    """And counts as false."""
    status, _, log = program(CNI, "--dry-run", CNI_MODE="yes")
    assert status == 0
    assert log == 'WARNING: CNI_MODE: "yes" is not a boolean and counts as false\n'


def test_a_usage_error_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    """2, and one line."""
    with pytest.raises(SystemExit) as caught:
        run(["-b", "-d", "15090"], {})
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("istio-iptables: argument --istio-inbound-ports/-b: ")


@pytest.fixture
def readable() -> Iterator[tuple[str, str]]:
    """Make a Python and our sources that any user may read."""
    for python in (sys.executable, "/usr/bin/python3"):
        probe = [python, "-c", "import sys; assert sys.version_info >= (3, 11)"]
        try:
            subprocess.run(probe, user=_nobody(), check=True, capture_output=True)
            break
        except (OSError, subprocess.CalledProcessError):
            continue
    else:
        pytest.skip("needs a Python of at least 3.11 that every user may run")
    directory = tempfile.mkdtemp()
    os.chmod(directory, 0o755)
    try:
        shutil.copytree(SOURCES, directory, dirs_exist_ok=True)
        yield python, directory
    finally:
        shutil.rmtree(directory)


def _nobody() -> int | None:
    """Return a user without privileges to become, None if we are one already."""
    return NOBODY if os.geteuid() == 0 else None


def test_a_dry_run_needs_no_privileges(readable: tuple[str, str]) -> None:
    """Nor any package but ours."""
    python, sources = readable
    done = subprocess.run(
        [python, "-B", "-m", "istio_cni.capture.main", "--config", "-", "--dry-run"],
        input=json.dumps(to_settings(CASES["everything"].config)),
        env={"PYTHONPATH": sources},
        user=_nobody(),
        group=_nobody(),
        extra_groups=[] if _nobody() else None,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    v4, v6 = (render(generate(CASES["everything"].config), family) for family in Family)
    assert done.stdout == f"# iptables-restore --noflush\n{v4}# ip6tables-restore --noflush\n{v6}"
