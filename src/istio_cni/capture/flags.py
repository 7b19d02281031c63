"""The flags of `istio-iptables`, and the page that explains them.

Flags are Go's: `--flag`, `--flag=value`, `-f value`; booleans take a value only with `=`. The page
is laid out for a person: grouped by purpose, each flag with its meaning, default and variables.

Source: istio tools/istio-iptables, pkg/cmd/root.go.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, NoReturn

from istio_cni import constants
from istio_cni.capture.settings import SETTINGS, Setting
from istio_cni.errors import quoted
from istio_cni.rules import config as grammar

LOG_LEVELS = ("none", "error", "fatal", "warn", "info", "debug")
PROBE_TIMEOUT = "5s"
TEXT, COMPLETE, NETLINK = OUTPUTS = ("text", "complete", "netlink")
WIDTH, INDENT = 98, 30


class Action(NamedTuple):
    """A flag that says what to do with the rules; `boolean` ones need no value."""

    flag: str
    help: str
    default: str = ""
    boolean: bool = False
    metavar: str = "TEXT"

    @property
    def env(self) -> str:
        """The variable that sets it, "" for none: the reference has no such flag."""
        return "" if self.flag == "output" else self.flag.upper().replace("-", "_")


ACTIONS = (
    Action(
        "dry-run",
        "print the rules, touch nothing; works without root; the commands of a run also go to the "
        "file that DRY_RUN_FILE_PATH names",
        boolean=True,
    ),
    Action(
        "output",
        f"what a dry run with the back end nftables prints: {TEXT}, the reference's rules for nft; "
        f"{COMPLETE}, all that is programmed; {NETLINK}, the messages that are sent, decoded",
        TEXT,
        metavar="FORM",
    ),
    Action("reconcile", "replace rules of ours that another configuration made", boolean=True),
    Action("cleanup-only", "remove every object of ours, whatever made it", boolean=True),
    Action(
        "force-apply",
        "program everything anew, also what is already right; replaces rules of another "
        "configuration, too",
        boolean=True,
    ),
    Action("skip-rule-apply", "program nothing", boolean=True),
    Action("run-validation", "prove by connections that capture works", boolean=True),
    Action(
        "iptables-probe-port",
        "TCP port that the proof connects to",
        str(constants.PROBE_PORT),
        metavar="PORT",
    ),
    Action(
        "probe-timeout", "how long the proof may take (5s, 1m30s)", PROBE_TIMEOUT, metavar="TIME"
    ),
    Action("cni-mode", "work with a node's files in a pod's namespace", boolean=True),
    Action(
        "network-namespace",
        "path of the present namespace, as lock file with --cni-mode; it is not entered",
        metavar="PATH",
    ),
)


EPILOG = """\
exit status:
  0    done, or already in place
  1    not done: the line on stderr says what was refused; the former state is restored
  2    a flag is unknown or lacks its value, or a word looks like a flag without its dashes
  126  --run-validation: connections are not captured

examples:
  istio-iptables -p 15001 -z 15006 -u 1337 -m REDIRECT -i '*' -b '*' -d 15090,15021
  istio-iptables -i '*' -b '*' --dry-run
  istio-iptables -i '*' -b '*' --dry-run --backend nftables --output netlink
  istio-iptables --config capture.json --reconcile
  istio-iptables --cleanup-only
"""


METAVARS: dict[object, str] = {
    grammar.parse_port: "PORT",
    grammar.parse_owners: "IDS",
    grammar.parse_range_selection: "CIDRS",
    grammar.parse_ranges: "CIDRS",
    grammar.parse_interfaces: "NAMES",
}
"""What a flag's value is, by its parser, where the last word of its name does not say it."""


class _Parser(argparse.ArgumentParser):
    """Refuses in one line instead of a page."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


class _Page(argparse.RawDescriptionHelpFormatter):
    """One line a flag, `-p, --envoy-port PORT`, with its meaning beside it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=INDENT, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(sorted(action.option_strings, key=len))
        if action.nargs == 0:
            return names
        return f"{names}[={action.metavar}]" if action.nargs == "?" else f"{names} {action.metavar}"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; every flag's help names its default and its variables."""
    parser = _Parser(
        "istio-iptables",
        usage="istio-iptables [options]",
        description="Send the traffic of the present network namespace through a sidecar proxy.",
        epilog=EPILOG,
        formatter_class=_Page,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--version", action="version", version=f"istio-iptables {constants.VERSION}"
    )
    _add_actions(parser)
    for title in dict.fromkeys(setting.group for setting in SETTINGS):
        _add_settings(parser.add_argument_group(title), title)
    logs = parser.add_argument_group("logs, on stderr")
    logs.add_argument(
        "--log_output_level",
        metavar="LEVEL",
        help=f"{', '.join(LOG_LEVELS)}, or scope:level pairs [default: info]",
    )
    _add(logs, ["--log_as_json"], "log_as_json", "one JSON object a line", "")
    for name in ("log_target", "log_caller", "log_stacktrace_level", "log_rotate"):
        logs.add_argument(f"--{name}", metavar="TEXT", help=argparse.SUPPRESS)
    return parser


def _add_actions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to do")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="read the whole configuration as one JSON object from FILE, - for standard input; "
        "flags and variables below are then not used and nothing is found out from the machine",
    )
    for action in ACTIONS:
        names = [f"--{action.flag}", *(["-n"] if action.flag == "dry-run" else [])]
        variables = tuple(filter(None, (action.env,)))
        text = _help(action.help, action.default, variables, boolean=action.boolean)
        _add(group, names, action.flag, text, "" if action.boolean else action.metavar)


def _add_settings(group: argparse._ArgumentGroup, title: str) -> None:
    """Add a group's flags; settings known to the environment alone are listed above them."""
    variables = []
    for setting in (setting for setting in SETTINGS if setting.group == title):
        boolean = setting.parse is None
        text = _help(setting.help, setting.default, setting.env, boolean=boolean)
        if setting.flag:
            names = [f"--{setting.flag}", *([f"-{setting.short}"] if setting.short else [])]
            _add(group, names, setting.key, text, "" if boolean else _metavar(setting))
        elif setting.env:
            variables.append(_variable(setting.env[0], setting.help, setting.default))
    if variables:
        group.description = "\n".join(variables)


def _metavar(setting: Setting) -> str:
    return (
        METAVARS.get(setting.parse)
        or setting.key.split("_")[1 if setting.key.endswith("CLUDE") else -1]
    )


def _variable(name: str, text: str, default: str) -> str:
    """Lay out a variable without a flag like the flags around it."""
    import textwrap

    indent = " " * (INDENT - 2)  # argparse indents the description by two
    shown = f"{text} [default: {default or 'none'}; environment only]"
    lines = textwrap.wrap(shown, WIDTH - 2, initial_indent=indent, subsequent_indent=indent)
    return "\n".join((name, *lines))


def _add(
    group: argparse._ArgumentGroup, names: list[str], dest: str, text: str, metavar: str
) -> None:
    """Add a flag; without a metavar it is a boolean."""
    if metavar:
        group.add_argument(*names, dest=dest, metavar=metavar, help=text)
    else:
        group.add_argument(*names, dest=dest, nargs="?", const="true", metavar="BOOL", help=text)


def _help(text: str, default: str, env: Sequence[str], *, boolean: bool) -> str:
    shown = default or ("" if "(default" in text else "false" if boolean else "none")
    notes = [f"default: {shown}"] if shown else []
    if env:
        notes.append(f"env: {', '.join(env)}")
    return f"{text} [{'; '.join(notes)}]".replace("%", "%%")


def parse(arguments: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Return the flags given and a warning for each other word, which the reference ignores too.

    Ends the process with status 2 for a usage error, and where a word shows that something else was
    meant than would be done.
    """
    parser = build_parser()
    known, rest = parser.parse_known_args(_with_explicit_booleans(arguments))
    for word in rest:
        if word.startswith("-") and word not in ("-", "--"):
            parser.error(f"unknown flag {quoted(word)}")
        if word.partition("=")[0] in _names():
            parser.error(f"the argument {quoted(word)} is no flag; did you mean --{word}?")
    for flag, word in pairwise(arguments):
        name = "--dry-run" if flag == "-n" else flag
        if name in _booleans() and grammar.parse_bool(word) is False:
            parser.error(f"{name} does not take the next word as its value; write {name}={word}")
    return vars(known), [f"the argument {quoted(word)} is ignored" for word in rest]


def _names() -> set[str]:
    """Return every flag's name, without its dashes."""
    names = {setting.flag for setting in SETTINGS if setting.flag}
    names |= {action.flag for action in ACTIONS}
    return names | {"config", "help", "version", "log_output_level", "log_as_json"}


def _booleans() -> set[str]:
    """Return the flags that take a value only with an equals sign."""
    booleans = {f"--{setting.flag}" for setting in SETTINGS if setting.parse is None}
    booleans |= {f"--{action.flag}" for action in ACTIONS if action.boolean}
    booleans.discard("--")  # settings without a flag
    return booleans | {"--log_as_json"}


def _with_explicit_booleans(arguments: Sequence[str]) -> list[str]:
    """Write `--flag` as `--flag=true`, so that no boolean takes the next word as its value."""
    booleans = _booleans()
    long = [
        f"--dry-run{word[2:]}" if word == "-n" or word.startswith("-n=") else word
        for word in arguments
    ]
    return [f"{word}=true" if word in booleans else word for word in long]
