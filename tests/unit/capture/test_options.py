"""Command line and environment of `istio-iptables`: names, defaults, precedence, refusals."""

from __future__ import annotations

import json
import os

import pytest

from cases import CASES
from istio_cni.capture.flags import ACTIONS, build_parser
from istio_cni.capture.options import Options, read_options
from istio_cni.capture.settings import SETTINGS, read_settings, to_settings
from istio_cni.errors import InvalidParameter
from istio_cni.rules.config import CaptureConfig
from istio_cni.rules.model import PortRange


def read(*arguments: str, **environ: str) -> Options:
    """Read a command line in an environment."""
    return read_options(arguments, environ)


def refusal(*arguments: str, **environ: str) -> str:
    """Return the message with which a command line is refused."""
    with pytest.raises(InvalidParameter) as caught:
        read_options(arguments, environ)
    assert str(caught.value).isprintable()
    return str(caught.value)


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line of a usage error, whose exit status is 2."""
    with pytest.raises(SystemExit) as caught:
        read_options(arguments, {})
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.rstrip("\n")


FLAGS = [
    # flag, short, variables, value, field, meant
    ("envoy-port", "p", (), "16001", "outbound_port", 16001),
    ("inbound-capture-port", "z", ("INBOUND_CAPTURE_PORT",), "16006", "inbound_port", 16006),
    ("inbound-tunnel-port", "e", ("INBOUND_TUNNEL_PORT",), "16008", "tunnel_port", 16008),
    ("proxy-uid", "u", ("PROXY_UID",), "7,8", "proxy_uids", ("7", "8")),
    ("proxy-gid", "g", ("PROXY_GID",), "7,8", "proxy_gids", ("7", "8")),
    (
        *("istio-inbound-interception-mode", "m", ("ISTIO_INBOUND_INTERCEPTION_MODE",)),
        *("TPROXY", "mode", "TPROXY"),
    ),
    ("istio-inbound-ports", "b", ("ISTIO_INBOUND_PORTS",), "*", "inbound_ports", "*"),
    (
        *("istio-local-exclude-ports", "d", ("ISTIO_LOCAL_EXCLUDE_PORTS",)),
        *("80:90", "inbound_ports_excluded", (PortRange(80, 90),)),
    ),
    (
        *("istio-exclude-interfaces", "c", ("ISTIO_EXCLUDE_INTERFACES",)),
        *("net1,net2", "excluded_interfaces", ("net1", "net2")),
    ),
    ("istio-service-cidr", "i", ("ISTIO_SERVICE_CIDR",), "*", "outbound_ranges", "*"),
    (
        *("istio-service-exclude-cidr", "x", ("ISTIO_SERVICE_EXCLUDE_CIDR",)),
        *("10.0.0.0/8", "outbound_ranges_excluded", ("10.0.0.0/8",)),
    ),
    (
        *("istio-outbound-ports", "q", ("ISTIO_OUTBOUND_PORTS",)),
        *("443", "outbound_ports", (PortRange(443, 443),)),
    ),
    (
        *("istio-local-outbound-ports-exclude", "o", ("ISTIO_LOCAL_OUTBOUND_PORTS_EXCLUDE",)),
        *("22", "outbound_ports_excluded", (PortRange(22, 22),)),
    ),
    (
        *("kube-virt-interfaces", "k", ("KUBE_VIRT_INTERFACES",)),
        *("tap0", "reroute_interfaces", ("tap0",)),
    ),
    (
        *("istio-inbound-tproxy-mark", "t", ("ISTIO_INBOUND_TPROXY_MARK",)),
        *("1400", "tproxy_mark", 1400),
    ),
    (
        *("istio-inbound-tproxy-route-table", "r", ("ISTIO_INBOUND_TPROXY_ROUTE_TABLE",)),
        *("140", "tproxy_table", 140),
    ),
    ("backend", "", (), "iptables", "backend", "iptables"),
    ("force-iptables-binary", "", ("FORCE_IPTABLES_BINARY",), "nft", "iptables_variant", "nft"),
]
BOOLEANS = [
    # flag, variables, where it arrives
    ("redirect-dns", ("REDIRECT_DNS", "ISTIO_META_DNS_CAPTURE"), "config.redirect_dns"),
    ("capture-all-dns", ("CAPTURE_ALL_DNS",), "config.capture_all_dns"),
    ("drop-invalid", ("DROP_INVALID", "INVALID_DROP"), "config.drop_invalid"),
    ("dual-stack", ("DUAL_STACK", "ISTIO_DUAL_STACK"), "config.dual_stack"),
    ("dry-run", ("DRY_RUN",), "dry_run"),
    ("skip-rule-apply", ("SKIP_RULE_APPLY",), "skip_rule_apply"),
    ("run-validation", ("RUN_VALIDATION",), "run_validation"),
    ("cni-mode", ("CNI_MODE",), "cni_mode"),
    ("reconcile", ("RECONCILE",), "reconcile"),
    ("cleanup-only", ("CLEANUP_ONLY",), "cleanup_only"),
    ("force-apply", ("FORCE_APPLY",), "force_apply"),
]
VALUED = [*((flag, env) for flag, _, env, *_ in FLAGS), *((flag, env) for flag, env, _ in BOOLEANS)]


def found(options: Options, path: str) -> object:
    """Follow a dotted path of fields."""
    value: object = options
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_a_form_to_print_is_for_a_dry_run() -> None:
    """Who asks for something to read must not find the namespace captured."""
    with pytest.raises(InvalidParameter, match=r"--output=netlink is for --dry-run; add that"):
        read("--backend", "nftables", "--output", "netlink")


def test_defaults() -> None:
    """Nothing given: nothing captured, everything still to be found out here."""
    options = read()
    assert options.config == CaptureConfig()
    assert options == Options(
        config=CaptureConfig(),
        detect=True,
        uid_given=False,
        gid_given=False,
        proxy_user="istio-proxy",
        dry_run=False,
        output="text",
        transcript="",
        reconcile=False,
        cleanup_only=False,
        force_apply=False,
        skip_rule_apply=False,
        run_validation=False,
        probe_port=15002,
        probe_timeout_s=5.0,
        network_namespace="",
        cni_mode=False,
        log_level="info",
        log_json=False,
        warnings=(),
    )


@pytest.mark.parametrize(("flag", "short", "variables", "value", "field", "meant"), FLAGS)
def test_a_flag(
    flag: str, short: str, variables: tuple[str, ...], value: str, field: str, meant: object
) -> None:
    """Long, short, with a blank or an equals sign, or as a variable: the same meaning."""
    ways = [[f"--{flag}", value], [f"--{flag}={value}"]]
    ways += [[f"-{short}", value], [f"-{short}{value}"], [f"-{short}={value}"]] if short else []
    for way in ways:
        assert getattr(read(*way).config, field) == meant
    for variable in variables:
        assert getattr(read(**{variable: value}).config, field) == meant


@pytest.mark.parametrize(("flag", "variables", "path"), BOOLEANS)
def test_a_boolean_flag(flag: str, variables: tuple[str, ...], path: str) -> None:
    """By itself, with a value after an equals sign, or as a variable in Go's spellings."""
    assert found(read(f"--{flag}"), path) is True
    for text, meant in (("true", True), ("1", True), ("T", True), ("false", False), ("0", False)):
        assert found(read(f"--{flag}={text}"), path) is meant
        for variable in variables:
            assert found(read(**{variable: text}), path) is meant
    message = refusal(f"--{flag}=yes")
    assert message == f'--{flag}: "yes" is not allowed; allowed: true or false'
    assert refusal(f"--{flag}=").startswith(f'--{flag}: "" is not allowed')


def test_dry_run_has_a_short_form() -> None:
    """With or without a value."""
    assert read("-n").dry_run
    assert read("-n=true").dry_run
    assert not read("-n=false").dry_run
    assert '"maybe"' in refusal("-n=maybe")
    assert '""' in refusal("-n=")


@pytest.mark.parametrize(
    ("flag", "variables", "path"), [row for row in BOOLEANS if row[0] != "dry-run"]
)
def test_a_bad_boolean_variable_is_reported_and_counts_as_false(
    flag: str, variables: tuple[str, ...], path: str
) -> None:
    """Set but empty is bad, too; the flag itself would be refused, and so is DRY_RUN."""
    for variable in variables:
        for text in ("yes", "", " true", "\x1b[2J"):
            options = read(**{variable: text})
            assert found(options, path) is False
            assert options.warnings == (
                f"{variable}: {json.dumps(text)} is not a boolean and counts as false",
            )


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [(*variables, path) for _, variables, path in BOOLEANS if len(variables) == 2],
)
def test_the_second_variable_of_a_setting_wins(first: str, second: str, path: str) -> None:
    """Even a bad one: it counts as false."""
    assert found(read(**{first: "false", second: "true"}), path) is True
    assert found(read(**{first: "true", second: "false"}), path) is False
    assert found(read(**{first: "true", second: "bad"}), path) is False
    assert found(read(**{first: "true"}), path) is True


@pytest.mark.parametrize(("flag", "short", "variables", "value", "field", "meant"), FLAGS)
def test_the_command_line_wins_over_the_environment(
    flag: str, short: str, variables: tuple[str, ...], value: str, field: str, meant: object
) -> None:
    """A variable is then not even read."""
    foul = dict.fromkeys(variables, "\n")
    assert getattr(read(f"--{flag}={value}", **foul).config, field) == meant


@pytest.mark.parametrize(("flag", "variables", "path"), BOOLEANS)
def test_a_boolean_flag_wins_over_the_environment(
    flag: str, variables: tuple[str, ...], path: str
) -> None:
    """In both directions, and without a warning for a bad variable."""
    for text, flagged in (("true", "false"), ("false", "true"), ("bad", "true")):
        options = read(f"--{flag}={flagged}", **dict.fromkeys(variables, text))
        assert found(options, path) is (flagged == "true")
        assert not any("is not a boolean" in warning for warning in options.warnings)


@pytest.mark.parametrize(
    ("variable", "field", "meant"),
    [
        ("PROXY_UID", "proxy_uids", ("1337",)),
        ("PROXY_GID", "proxy_gids", ("1337",)),
        ("ISTIO_INBOUND_INTERCEPTION_MODE", "mode", "REDIRECT"),
        ("ISTIO_INBOUND_PORTS", "inbound_ports", ()),
        ("ISTIO_OUTBOUND_OWNER_GROUPS", "owner_groups", ()),
        ("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", "owner_groups_excluded", ()),
        ("FORCE_IPTABLES_BINARY", "iptables_variant", ""),
    ],
)
def test_a_variable_that_is_set_but_empty_counts(variable: str, field: str, meant: object) -> None:
    """As the empty text: no ports, no groups, an id still to be found out."""
    assert getattr(read(**{variable: ""}).config, field) == meant


@pytest.mark.parametrize("variable", ["INBOUND_CAPTURE_PORT", "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR"])
def test_an_empty_value_is_refused_where_it_means_nothing(variable: str) -> None:
    """The message names the variable, as no flag was given."""
    assert refusal(**{variable: ""}).startswith(f'{variable}: "" is not allowed; allowed: ')


@pytest.mark.parametrize(
    ("flag", "variable", "value"),
    [
        ("--istio-inbound-ports", "ISTIO_INBOUND_PORTS", "http"),
        ("--proxy-uid", "PROXY_UID", "-1"),
        ("--istio-service-cidr", "ISTIO_SERVICE_CIDR", "10.0.0.0"),
        ("--probe-timeout", "PROBE_TIMEOUT", "5"),
        ("--iptables-probe-port", "IPTABLES_PROBE_PORT", "0"),
    ],
)
def test_a_refusal_names_where_the_value_came_from(flag: str, variable: str, value: str) -> None:
    """Flag or variable, whichever it was."""
    assert refusal(f"{flag}={value}").startswith(f'{flag}: "{value}" is not allowed; allowed: ')
    assert refusal(**{variable: value}).startswith(f'{variable}: "{value}" is not allowed; ')


@pytest.mark.parametrize(
    ("name", "field", "meant"),
    [
        ("ISTIO_OUTBOUND_OWNER_GROUPS", "owner_groups", ("java", "202")),
        ("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", "owner_groups_excluded", ("java", "202")),
    ],
)
def test_owner_groups_are_said_by_the_environment(name: str, field: str, meant: object) -> None:
    """By name or id."""
    assert getattr(read(**{name: "java, 202"}).config, field) == meant


def test_the_loopback_range_is_said_by_the_environment() -> None:
    """It must lie in 127.0.0.0/8."""
    name = "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR"
    assert read(**{name: "127.0.0.0/8"}).config.loopback_v4 == "127.0.0.0/8"
    for text in ("10.0.0.0/8", "127.0.0.0/7", "::1/128", "127.0.0.1"):
        assert refusal(**{name: text}).startswith(f'{name}: "{text}" is not allowed; ')


@pytest.mark.parametrize("name", ["ENVOY_PORT", "INBOUND_INTERCEPTION_MODE", "INBOUND_TPROXY_MARK"])
def test_variables_that_look_like_settings_and_are_none(name: str) -> None:
    """The reference does not read them either."""
    assert read(**{name: "garbage"}) == read()


def test_the_proxys_user_and_the_transcript_are_said_by_the_environment() -> None:
    """Empty is as good as absent for the transcript."""
    assert read(ENVOY_USER="envoy").proxy_user == "envoy"
    assert read(DRY_RUN_FILE_PATH="/tmp/x").transcript == "/tmp/x"
    assert read(DRY_RUN_FILE_PATH="").transcript == ""


def test_whether_ids_are_given() -> None:
    """Empty is not: they are then found out."""
    assert read("-u", "1").uid_given
    assert read(PROXY_GID="1").gid_given
    assert not read("-u", "", PROXY_GID="").uid_given
    assert not read("-u", "", PROXY_GID="").gid_given


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("5s", 5), ("1m30s", 90), ("1.5h", 5400), ("500ms", 0.5), (".5s", 0.5), ("1.s", 1)),
        *(("2us", 2e-6), ("2µs", 2e-6), ("3ns", 3e-9), ("1h1m1s1ms", 3661.001)),
    ],
)
def test_a_probe_timeout(text: str, seconds: float) -> None:
    """Go's durations."""
    assert read("--probe-timeout", text).probe_timeout_s == pytest.approx(seconds)
    assert read(PROBE_TIMEOUT=text).probe_timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["5", "", "0s", "s", "5 s", "5d", "1..5s", ".s", "-5s", "5sx", "1e3s", "5s\n"]
)
def test_a_probe_timeout_needs_a_unit(text: str) -> None:
    """Without, validation would fail at once and look like a broken pod."""
    assert refusal(f"--probe-timeout={text}").startswith("--probe-timeout: ")


@pytest.mark.parametrize(
    ("text", "port"),
    [("15002", 15002), ("0x3a9a", 15002), ("035232", 15002), ("0o35232", 15002), ("0b11", 3)],
)
def test_a_probe_port(text: str, port: int) -> None:
    """In any notation that Go knows."""
    assert read("--iptables-probe-port", text).probe_port == port
    assert read(IPTABLES_PROBE_PORT=text).probe_port == port


@pytest.mark.parametrize("text", ["0", "65536", "http", "", "089", "1.5", "-1"])
def test_a_probe_port_is_a_port(text: str) -> None:
    """Nothing else."""
    assert refusal(f"--iptables-probe-port={text}") == (
        f'--iptables-probe-port: "{text}" is not allowed; allowed: a port 1-65535'
    )


def test_the_network_namespace_is_a_path() -> None:
    """Flag or variable."""
    assert read("--network-namespace", "/run/netns/x").network_namespace == "/run/netns/x"
    assert read(NETWORK_NAMESPACE="/run/netns/x").network_namespace == "/run/netns/x"


# -- usage ---------------------------------------------------------------------------------------


def test_an_option_without_a_value_does_not_swallow_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line names the option that lacks its value."""
    line = usage_error(capsys, "-b", "-d", "15090")
    assert line.startswith(
        "istio-iptables: argument --istio-inbound-ports/-b: expected one argument"
    )


@pytest.mark.parametrize("following", ["--dry-run", "--dry-run=true", "-n", "--no-such", "-d"])
@pytest.mark.parametrize("flag", [flag for flag, *_ in FLAGS])
def test_no_flag_takes_a_flag_for_its_value(
    flag: str, following: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever follows."""
    assert f"--{flag}" in usage_error(capsys, f"--{flag}", following)


def test_an_option_without_a_value_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """It lacks one, too."""
    assert "-p: expected one argument" in usage_error(capsys, "-u", "1", "-p")


@pytest.mark.parametrize(
    "flag", ["--no-such-flag", "-y", "--dry", "--iptables-trace-logging", "-\x1b"]
)
def test_an_unknown_flag_is_a_usage_error(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Abbreviations are unknown, too; the line is safe to print."""
    line = usage_error(capsys, flag, "x")
    assert line == f"istio-iptables: unknown flag {json.dumps(flag)}; see --help"


def test_a_word_after_a_boolean_is_no_value() -> None:
    """It is left over, and ignored with a warning, wherever it stands."""
    options = read("--dry-run", "true", "-p", "16001", "false", "--reconcile", "x\x1b")
    assert options.dry_run
    assert options.reconcile
    assert options.config.outbound_port == 16001
    assert options.warnings == (
        'the argument "true" is ignored',
        'the argument "false" is ignored',
        'the argument "x\\u001b" is ignored',
    )


@pytest.mark.parametrize("word", ["0", "f", "F", "FALSE", "false", "False"])
@pytest.mark.parametrize("flag", ["cleanup-only", "dry-run", "redirect-dns", "log_as_json"])
def test_false_behind_a_boolean_is_a_usage_error(
    flag: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The opposite would be done otherwise."""
    line = usage_error(capsys, "-p", "16001", f"--{flag}", word, "-i", "*")
    assert f"write --{flag}={word}; " in line
    if flag == "dry-run":
        assert f"write --{flag}={word}; " in usage_error(capsys, "-n", word)


@pytest.mark.parametrize(
    "word", ["dry-run", "cleanup-only", "istio-inbound-ports", "config", "help", "dry-run=true"]
)
def test_a_flag_without_its_dashes_is_a_usage_error(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rules would be programmed that were only to be looked at."""
    line = usage_error(capsys, "-i", "*", word)
    assert line == (
        f'istio-iptables: the argument "{word}" is no flag; did you mean --{word}?; see --help'
    )


@pytest.mark.parametrize("text", ["yes", "", "2", " true"])
def test_a_dry_run_that_is_no_boolean_is_refused(text: str) -> None:
    """As false it would program."""
    message = f"DRY_RUN: {json.dumps(text)} is not allowed; allowed: true or false"
    assert refusal(DRY_RUN=text) == message


def test_a_configuration_is_at_most_a_mebibyte(tmp_path: os.PathLike[str]) -> None:
    """More is not even read; blanks count."""
    path = os.path.join(tmp_path, "capture.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write("{}" + " " * (1024 * 1024 - 2))
    assert read("--config", path).config == read_settings({})
    for big in (path, "/dev/zero"):
        if big == path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(" ")
        assert refusal("--config", big) == f"--config: {json.dumps(big)} holds more than 1 MiB"


def test_the_last_of_two_wins() -> None:
    """As with Go's flags."""
    assert read("-p", "1", "-p", "2").config.outbound_port == 2
    assert not read("--dry-run", "--dry-run=false").dry_run


def test_an_empty_value_is_a_value() -> None:
    """The injector writes `-x ''`."""
    assert read("-x", "", "-b", "", "-i", "*").config.outbound_ranges == "*"


def test_logging_flags_are_taken() -> None:
    """Those that mean nothing here as well: injected containers carry them."""
    options = read(
        *("--log_output_level=default:debug", "--log_as_json", "--log_target=stdout"),
        *("--log_caller=all", "--log_stacktrace_level=none", "--log_rotate=x"),
    )
    assert (options.log_level, options.log_json) == ("debug", True)
    assert not read("--log_as_json=false").log_json
    assert refusal("--log_as_json=x").startswith('--log_as_json: "x" is not allowed')


@pytest.mark.parametrize(
    ("text", "level"),
    [
        *(("none", "none"), ("error", "error"), ("fatal", "fatal"), ("warn", "warn")),
        *(("info", "info"), ("debug", "debug"), ("all:debug", "debug"), ("cni:debug", "info")),
        ("default:error,ambient:debug", "error"),
    ],
)
def test_log_levels(text: str, level: str) -> None:
    """Of our own scope: other scopes' levels do not matter."""
    assert read("--log_output_level", text).log_level == level


@pytest.mark.parametrize("text", ["verbose", "", "default:loud", "INFO", "info,", "debug\n"])
def test_an_unknown_log_level_is_refused(text: str) -> None:
    """Rather than switching the log off."""
    item = text.rpartition(",")[2]
    assert refusal(f"--log_output_level={text}") == (
        f"--log_output_level: {json.dumps(item)} is not allowed; "
        "allowed: none, error, fatal, warn, info, debug, or scope:level pairs"
    )


# -- settings without effect ---------------------------------------------------------------------


def test_a_list_of_included_ports_makes_excluded_ones_void() -> None:
    """The list wins, and that is said."""
    options = read("-b", "8080", "-d", "15090")
    assert options.config.inbound_ports == (PortRange(8080, 8080),)
    assert options.warnings == (
        "excluded inbound ports have no effect: only listed ports are captured",
    )
    assert read("-b", "*", "-d", "15090").warnings == ()


def test_a_list_of_included_groups_makes_excluded_ones_void() -> None:
    """Likewise."""
    groups = {"ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE": "202"}
    assert read(**groups).warnings == ()
    assert read(ISTIO_OUTBOUND_OWNER_GROUPS="203", **groups).warnings == (
        "excluded owner groups have no effect: only listed groups are captured",
    )


def test_all_dns_needs_dns() -> None:
    """By itself it changes nothing, and that is said."""
    assert read("--capture-all-dns", "--redirect-dns").warnings == ()
    assert read("--capture-all-dns").warnings == (
        "capturing DNS to all servers has no effect: DNS is not redirected",
    )


# -- a whole configuration -----------------------------------------------------------------------


def from_text(text: str, *arguments: str, **environ: str) -> Options:
    """Read a configuration from standard input."""
    return read_options(["--config", "-", *arguments], environ, stdin=text)


@pytest.mark.parametrize("name", CASES)
def test_a_whole_configuration(name: str, tmp_path: os.PathLike[str]) -> None:
    """From standard input or a file; nothing of it is found out from the machine."""
    settings = to_settings(CASES[name].config)
    path = os.path.join(tmp_path, "capture.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(settings, file)
    for options in (from_text(json.dumps(settings)), read("--config", path)):
        assert options.config == CASES[name].config
        assert not options.detect


def test_a_configuration_is_not_completed_by_variables() -> None:
    """What it leaves out takes the default."""
    options = from_text("{}", PROXY_UID="5", ISTIO_INBOUND_PORTS="*", DRY_RUN="true")
    assert options.config == read_settings({})
    assert options.dry_run


@pytest.mark.parametrize(
    "arguments", [("-p", "15001"), ("--redirect-dns",), ("--backend=iptables",), ("-x", "")]
)
def test_flags_beside_a_configuration_are_refused(arguments: tuple[str, ...]) -> None:
    """It would not be the whole one; the message says what to write instead."""
    with pytest.raises(InvalidParameter) as caught:
        from_text("{}", *arguments)
    assert ": --config is the whole configuration; write " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--config: standard input is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("{", "--config: standard input is not JSON: Expecting property name"),
        ("[]", "--config: standard input must hold one JSON object"),
        ('"x"', "--config: standard input must hold one JSON object"),
        ("{} {}", "--config: standard input is not JSON: Extra data"),
        ('{"PROXY_UID": "1", "PROXY_UID": "2"}', 'the key "PROXY_UID" stands twice'),
        ("[" * 100_000, "--config: standard input is not JSON: "),
        ('{"PROXY_PROT": "1"}', 'unknown setting "PROXY_PROT"; did you mean PROXY_PORT?'),
        ('{"PROXY_PORT": 1}', "PROXY_PORT: a number is not allowed; allowed: a string"),
        ('{"dry-run": true}', 'unknown setting "dry-run"; allowed: BACKEND, '),
    ],
)
def test_a_configuration_that_is_none(text: str, message: str) -> None:
    """One line says what is wrong with it."""
    with pytest.raises(InvalidParameter) as caught:
        from_text(text)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_configuration_file_that_cannot_be_read(tmp_path: os.PathLike[str]) -> None:
    """Missing, a directory, or no text."""
    missing = os.path.join(tmp_path, "missing\x1b.json")
    assert refusal("--config", missing) == (
        f"--config: cannot read {json.dumps(missing)}: No such file or directory"
    )
    assert refusal("--config", os.fspath(tmp_path)).endswith(": Is a directory")
    path = os.path.join(tmp_path, "binary.json")
    with open(path, "wb") as file:
        file.write(b"\xff\xfe{}")
    assert refusal("--config", path).startswith(f"--config: {json.dumps(path)} is not JSON: ")


# -- help ----------------------------------------------------------------------------------------


def test_help_mentions_every_flag_and_variable() -> None:
    """With the default of each."""
    text = " ".join(build_parser().format_help().split()).replace("- ", "-")
    names = {f"--{setting.flag}" for setting in SETTINGS if setting.flag}
    names |= {f"-{setting.short}" for setting in SETTINGS if setting.short}
    names |= {name for setting in SETTINGS for name in setting.env}
    names |= {f"--{action.flag}" for action in ACTIONS} | {action.env for action in ACTIONS}
    names |= {name for _, variables in VALUED for name in variables}
    names |= {f"--{flag}" for flag, _ in VALUED}
    names |= {"ENVOY_USER", "DRY_RUN_FILE_PATH", "--config", "--version", "--log_output_level"}
    names |= {"--native-nftables", "NATIVE_NFTABLES", "--log_as_json"}
    assert [name for name in sorted(names) if name not in text] == []
    for default in ("15001", "15006", "15008", "1337", "133", "15002", "5s", "127.0.0.1/32"):
        assert f"[default: {default}" in text


@pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
def test_help_and_version_end_well(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output, whatever else is given."""
    with pytest.raises(SystemExit) as caught:
        read(flag)
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(("usage: istio-iptables", "istio-iptables "))
