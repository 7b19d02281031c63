"""Command line and environment of `istio-iptables`: what to capture, what to do with the rules.

Command line over environment over default, as the reference has it; `--config` replaces both for
all that concerns the rules.

Source: istio tools/istio-iptables, pkg/cmd/root.go.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from istio_cni import constants
from istio_cni.capture.flags import ACTIONS, LOG_LEVELS, OUTPUTS, TEXT, parse
from istio_cni.capture.settings import SETTINGS, read_settings
from istio_cni.errors import InvalidParameter, quoted
from istio_cni.rules.config import CaptureConfig, parse_bool, refuse

CONFIG_MAX = 1024 * 1024  # characters of --config; a whole configuration has a few thousand


class Options(NamedTuple):
    """What to do: the configuration, what of it is still to be found out here, and the actions."""

    config: CaptureConfig
    detect: bool
    uid_given: bool
    gid_given: bool
    proxy_user: str
    dry_run: bool
    output: str
    transcript: str
    reconcile: bool
    cleanup_only: bool
    force_apply: bool
    skip_rule_apply: bool
    run_validation: bool
    probe_port: int
    probe_timeout_s: float
    network_namespace: str
    cni_mode: bool
    log_level: str
    log_json: bool
    warnings: tuple[str, ...]


def read_options(
    arguments: Sequence[str], environ: Mapping[str, str], *, stdin: str | None = None
) -> Options:
    """Read command line and environment. Raises InvalidParameter, or exits 2 for a usage error."""
    given, warnings = parse(arguments)
    actions = _read_actions(given, environ, warnings)
    if "config" in given:
        values = _read_document(str(given["config"]), given, stdin)
        config = read_settings(values)
    else:
        values, names = _read_flags(given, environ, warnings)
        config = read_settings(values, lambda setting: names[setting.key])
    level, as_json = _read_logging(given)
    return Options(
        config=config,
        detect="config" not in given,
        uid_given=bool(values.get("PROXY_UID")),
        gid_given=bool(values.get("PROXY_GID")),
        proxy_user=environ.get("ENVOY_USER", constants.PROXY_USER),
        transcript=environ.get("DRY_RUN_FILE_PATH", ""),
        log_level=level,
        log_json=as_json,
        warnings=(*warnings, *_without_effect(config)),
        **actions,  # type: ignore[arg-type] # the keys and types are those of the fields
    )


def _read_flags(
    given: Mapping[str, object], environ: Mapping[str, str], warnings: list[str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the settings given, and under which flag or variable each was."""
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for setting in SETTINGS:
        if setting.key in given:
            values[setting.key], names[setting.key] = given[setting.key], f"--{setting.flag}"
            continue
        for name in setting.env:
            if name in environ:
                text = _variable(setting.parse is None, name, environ[name], warnings)
                values[setting.key], names[setting.key] = text, name
    return values, names


def _variable(boolean: bool, name: str, text: str, warnings: list[str]) -> str:
    """Take a variable; what is no boolean counts as false, as in the reference, and is reported."""
    if boolean and parse_bool(text) is None:
        warnings.append(f"{name}: {quoted(text)} is not a boolean and counts as false")
        return "false"
    return text


def _read_actions(
    given: Mapping[str, object], environ: Mapping[str, str], warnings: list[str]
) -> dict[str, object]:
    values: dict[str, object] = {}
    for action in ACTIONS:
        text = action.default or ("false" if action.boolean else "")
        where = f"--{action.flag}"
        if action.flag in given:
            text = str(given[action.flag])
        elif action.env and action.env in environ:
            where = action.env
            lenient = action.boolean and action.flag != "dry-run"  # whose false would program
            text = _variable(lenient, action.env, environ[action.env], warnings)
        field = action.flag.replace("-", "_")
        if action.boolean:
            values[field] = _boolean(text, where)
        elif action.flag == "output":
            values[field] = _one_of(text, OUTPUTS, where)
        elif action.flag == "iptables-probe-port":
            values["probe_port"] = _probe_port(text, where)
        elif action.flag == "probe-timeout":
            values["probe_timeout_s"] = _duration(text, where)
        else:
            values[field] = text
    _refuse_output_of_a_run(values)
    return values


def _refuse_output_of_a_run(values: Mapping[str, object]) -> None:
    """Refuse to program where somebody asks for something to read."""
    if values["output"] != TEXT and not values["dry_run"]:
        raise InvalidParameter(f"--output={values['output']} is for --dry-run; add that")


def _boolean(text: str, where: str) -> bool:
    value = parse_bool(text)
    if value is None:
        raise refuse(where, text, "true or false")
    return value


def _one_of(text: str, allowed: tuple[str, ...], where: str) -> str:
    if text not in allowed:
        raise refuse(where, text, ", ".join(allowed))
    return text


def _probe_port(text: str, where: str) -> int:
    """Read a port as Go reads a number: decimal, 0x…, 0o… or 0…, 0b…."""
    octal = text.isdigit() and text.startswith("0")  # C's spelling, which Python has given up
    try:
        port = int(text, 8 if octal else 0)
    except ValueError:
        port = 0
    if not 1 <= port <= 65535:
        raise refuse(where, text, "a port 1-65535")
    return port


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h)")


def _duration(text: str, where: str) -> float:
    """Read a Go duration such as 5s, 1m30s or 500ms, in seconds; it must be positive."""
    total, end = 0.0, 0
    while part := _DURATION_PART.match(text, end):
        total += float(part[1]) * _UNITS_S[part[2]]
        end = part.end()
    if end != len(text) or total <= 0:
        raise refuse(where, text, "a positive time with its unit, such as 5s or 1m30s")
    return total


def _read_document(path: str, given: Mapping[str, object], stdin: str | None) -> dict[str, object]:
    """Read the JSON object of `--config`; flags for rules beside it are refused."""
    for setting in SETTINGS:
        if setting.key in given:
            raise InvalidParameter(
                f"--{setting.flag}: --config is the whole configuration; write {setting.key} there"
            )
    shown = "standard input" if path == "-" else quoted(path)
    try:
        if path == "-":
            text = sys.stdin.read(CONFIG_MAX + 1) if stdin is None else stdin
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read(CONFIG_MAX + 1)
        if len(text) > CONFIG_MAX:
            raise InvalidParameter(f"--config: {shown} holds more than 1 MiB")
        document = json.loads(text, object_pairs_hook=_unique)
    except OSError as error:
        raise InvalidParameter(f"--config: cannot read {shown}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"--config: {shown} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidParameter(f"--config: {shown} must hold one JSON object")
    return document


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {quoted(twice)} stands twice")
    return found


def _read_logging(given: Mapping[str, object]) -> tuple[str, bool]:
    """Return the log level and whether lines are JSON; an unknown level is refused."""
    level = "info"
    for part in str(given.get("log_output_level", level)).split(","):
        scope, colon, word = part.rpartition(":")
        if word not in LOG_LEVELS:
            allowed = f"{', '.join(LOG_LEVELS)}, or scope:level pairs"
            raise refuse("--log_output_level", part, allowed)
        if not colon or scope in ("default", "all", "iptables", "capture"):
            level = word
    return level, _boolean(str(given.get("log_as_json", "false")), "--log_as_json")


def _without_effect(config: CaptureConfig) -> tuple[str, ...]:
    """Name settings that another one makes void."""
    found = []
    if config.inbound_ports != "*" and config.inbound_ports_excluded:
        found.append("excluded inbound ports have no effect: only listed ports are captured")
    if config.owner_groups != "*" and config.owner_groups_excluded:
        found.append("excluded owner groups have no effect: only listed groups are captured")
    if config.backend == "nftables" and config.iptables_variant:
        found.append("the variant of iptables has no effect: the back end is nftables")
    if config.capture_all_dns and not config.redirect_dns:
        found.append("capturing DNS to all servers has no effect: DNS is not redirected")
    return tuple(found)
