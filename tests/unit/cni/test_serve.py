"""The dispatcher: what is on stdout and stderr, and the exit status, for every kind of call."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest

from istio_cni.cni.request import Request, valid_attachments
from istio_cni.cni.result import convert
from istio_cni.cni.serve import answer_version, serve
from istio_cni.constants import STDIN_MAX_BYTES, SUPPORTED_VERSIONS
from istio_cni.errors import (
    InternalError,
    InvalidNetns,
    IstioCNIError,
    PluginNotAvailable,
    RulesAltered,
    TryAgainLater,
)

JSON = dict[str, object]
ABOUT = "a CNI plugin"
VERBS = ["ADD", "DEL", "CHECK", "GC", "STATUS"]
HEAVY = {
    "json",
    "re",
    "typing",
    "dataclasses",
    "logging",
    "enum",
    "socket",
    "subprocess",
    "ipaddress",
}


class Outcome(NamedTuple):
    """What a runtime sees of a call."""

    status: int
    stdout: str
    stderr: str

    def document(self) -> JSON:
        """Parse the one JSON document on stdout, which has no newline at its end."""
        assert self.stdout == json.dumps(json.loads(self.stdout), indent=4)
        document = json.loads(self.stdout)
        assert isinstance(document, dict)
        return document


def environment(command: str, **changes: str) -> dict[str, str]:
    """Make a complete environment."""
    return {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": "3f4e5d",
        "CNI_NETNS": "/run/netns/cni-1",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
    } | changes


def netconf(version: str = "1.1.0", /, **keys: object) -> bytes:
    """Write a configuration for stdin."""
    return json.dumps({"cniVersion": version, "name": "k8s", "type": "istio-cni", **keys}).encode()


def no_stdin() -> bytes:
    """Fail a test whose call must not wait for stdin."""
    pytest.fail("stdin was read")


def call(
    env: dict[str, str],
    stdin: bytes | Callable[[], bytes] = b"",
    handler: Callable[[Request], JSON | None] | None = None,
    about: str = ABOUT,
) -> Outcome:
    """Run one call; the handler, if any, serves every verb."""
    out, err = io.StringIO(), io.StringIO()
    read = stdin if callable(stdin) else lambda: stdin
    verbs = {} if handler is None else dict.fromkeys([*VERBS, "VERSION"], handler)
    status = serve(env, read, out, err, verbs, log_to(err), about)
    return Outcome(status, out.getvalue(), err.getvalue())


def log_to(stream: TextIO) -> Callable[[str, str, IstioCNIError], None]:
    """Make a log of failures: one line of JSON each."""

    def report(verb: str, container_id: str, error: IstioCNIError) -> None:
        line = {"verb": verb, "container_id": container_id, "code": error.code}
        stream.write(json.dumps(line | {"msg": error.msg, "details": error.details}) + "\n")

    return report


def raising(error: Exception) -> Callable[[Request], JSON | None]:
    """Make a handler that fails."""

    def handler(request: Request) -> JSON | None:
        raise error

    return handler


def passing(request: Request) -> JSON:
    """Hand the previous result on, as ADD does when it has nothing to do."""
    return convert(request.prev_result, request.cni_version)


# -- no verb, VERSION ------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [{}, {"CNI_COMMAND": ""}, {"CNI_CONTAINERID": "a/b"}])
def test_without_command_the_plugin_says_what_it_is(env: dict[str, str]) -> None:
    """On stderr, with the versions; stdout is empty, stdin not read, and it is no error."""
    outcome = call(env, no_stdin)
    assert (outcome.status, outcome.stdout) == (0, "")
    assert outcome.stderr.splitlines()[0] == ABOUT
    assert ", ".join(SUPPORTED_VERSIONS) in outcome.stderr


def test_without_command_and_without_about_it_is_an_error() -> None:
    """Then the missing variable is all there is to say."""
    outcome = call({}, no_stdin, about="")
    assert outcome.status == 1
    assert outcome.document()["code"] == 4


@pytest.mark.parametrize(
    "extra", [{}, {"CNI_CONTAINERID": "a/b", "CNI_IFNAME": ".", "CNI_ARGS": ";"}]
)
def test_version_is_answered_whatever_else_is_set(extra: dict[str, str]) -> None:
    """Seven versions, our newest one, exit 0; neither stdin nor a handler is used."""
    outcome = call({"CNI_COMMAND": "VERSION", **extra}, no_stdin, raising(RuntimeError()))
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout == answer_version()
    assert outcome.document() == {
        "cniVersion": "1.1.0",
        "supportedVersions": ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
    }


# -- success ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_add_prints_the_result_in_the_requested_version(version: str) -> None:
    """One document, equal to the previous plugin's."""
    ip = {"ip": "10.1.0.5/16"}
    prev: JSON = {"cniVersion": version, "vendor": 1.0}
    prev |= {"ip4": ip} if version < "0.3.0" else {"ips": [{"address": ip["ip"], "interface": 0}]}
    outcome = call(environment("ADD"), netconf(version, prevResult=prev), passing)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.document() == prev
    assert '"vendor": 1.0' in outcome.stdout


@pytest.mark.parametrize("prev", [{}, {"cniVersion": "0.4.0"}, {"cniVersion": "0.2.0"}])
def test_add_takes_a_result_without_version_or_from_another_family(prev: JSON) -> None:
    """Both are converted; runtimes hand on what the previous plugin printed."""
    outcome = call(environment("ADD"), netconf("1.0.0", prevResult=prev), passing)
    assert (outcome.status, outcome.document()) == (0, {"cniVersion": "1.0.0"})


@pytest.mark.parametrize("command", ["DEL", "CHECK", "GC", "STATUS"])
def test_the_other_verbs_succeed_in_silence(command: str) -> None:
    """Also if their handler returns something."""
    assert call(environment(command), netconf(), lambda _: {"a": 1}) == Outcome(0, "", "")
    assert call(environment(command), netconf(), lambda _: None) == Outcome(0, "", "")


@pytest.mark.parametrize("command", VERBS)
def test_a_verb_without_handler_succeeds(command: str) -> None:
    """Nothing to do, nothing to say."""
    assert call(environment(command), netconf()) == Outcome(0, "", "")


def test_the_handler_gets_the_request() -> None:
    """The checked one, once."""
    seen: list[Request] = []
    call(environment("CHECK"), netconf("0.4.0"), lambda request: seen.append(request))
    assert [(r.command, r.container_id, r.cni_version) for r in seen] == [
        ("CHECK", "3f4e5d", "0.4.0")
    ]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "stdin", "code", "version"),
    [
        (environment("UPDATE"), netconf(), 4, "1.1.0"),
        (environment("UPDATE"), netconf("0.4.0"), 4, "0.4.0"),
        (environment("ADD", CNI_CONTAINERID="", CNI_IFNAME=""), no_stdin, 4, "1.1.0"),
        (environment("DEL", CNI_CONTAINERID="a/b"), no_stdin, 4, "1.1.0"),
        (environment("ADD"), b"", 6, "1.1.0"),
        (environment("ADD"), b'{"cniVersion": "0.3.1"}', 7, "0.3.1"),
        (environment("ADD"), b'{"cniVersion": "0.3.1", "name": "-"}', 7, "0.3.1"),
        (environment("ADD"), netconf("9.9.9"), 1, "1.1.0"),
        (environment("ADD"), netconf("x.y"), 1, "1.1.0"),
        (environment("STATUS"), netconf("x.y"), 6, "1.1.0"),
        (environment("CHECK"), netconf("0.3.1"), 1, "0.3.1"),
        (environment("GC"), netconf("1.0.0"), 1, "1.0.0"),
        (environment("STATUS"), netconf("1.0.0"), 1, "1.0.0"),
        (environment("ADD"), netconf(prevResult=[]), 6, "1.1.0"),
        (environment("GC"), netconf(**{"cni.dev/valid-attachments": 1}), 7, "1.1.0"),
        (environment("DEL"), b"garbage", 6, "1.1.0"),
        (environment("DEL"), b"{}", 7, "0.1.0"),
    ],
)
def test_a_refused_call_prints_one_error_object(
    env: dict[str, str], stdin: bytes | Callable[[], bytes], code: int, version: str
) -> None:
    """Exit 1, the code of the first check that failed, in the request's version if it is known."""
    outcome = call(env, stdin, raising(AssertionError("a refused call reached its handler")))
    document = outcome.document()
    assert (outcome.status, document["code"], document["cniVersion"]) == (1, code, version)
    assert document["msg"]
    assert json.loads(outcome.stderr)["msg"] == document["msg"]


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_add_up_to_0_2_0_without_address_is_an_error_not_a_crash(version: str) -> None:
    """Such a result cannot be said in these versions."""
    empty: JSON = {"cniVersion": version, "dns": {}}
    calls: list[JSON] = [{}, {"prevResult": {}}, {"prevResult": empty}]
    for keys in calls:
        outcome = call(environment("ADD"), netconf(version, **keys), passing)
        assert (outcome.status, outcome.document()["code"]) == (1, 7)


@pytest.mark.parametrize("error", [OSError("broken"), ValueError("closed file"), TimeoutError()])
@pytest.mark.parametrize("command", VERBS)
def test_unreadable_stdin_is_an_io_failure(command: str, error: Exception) -> None:
    """Code 5 for every verb that needs it."""

    def read() -> bytes:
        raise error

    outcome = call(environment(command), read)
    assert (outcome.status, outcome.document()["code"]) == (1, 5)


def test_stdin_has_a_limit() -> None:
    """Code 5 above it; the limit itself is fine."""
    body = netconf()
    padded = body + b" " * (STDIN_MAX_BYTES - len(body))
    assert call(environment("DEL"), padded).status == 0
    outcome = call(environment("DEL"), padded + b" ")
    assert (outcome.status, outcome.document()["code"]) == (1, 5)


# -- failing handlers ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ADD", "CHECK", "STATUS"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TryAgainLater("API server: connection refused"), 11),
        (InvalidNetns("CNI_NETNS is the host's"), 8),
        (RulesAltered("nat ISTIO_OUTPUT: rule 3 differs"), 107),
        (PluginNotAvailable("no kubeconfig"), 50),
    ],
)
def test_a_typed_error_goes_to_the_runtime_as_it_is(
    command: str, error: Exception, code: int
) -> None:
    """Code and message, no details where there are none; the log gets the same."""
    outcome = call(environment(command), netconf("1.1.0"), raising(error))
    assert outcome.document() == {"cniVersion": "1.1.0", "code": code, "msg": str(error)}
    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    logged = {"verb": command, "container_id": "3f4e5d", "code": code, "msg": str(error)}
    assert json.loads(line) == logged | {"details": ""}


def test_details_of_a_typed_error_are_printed() -> None:
    """They are written for the runtime's user."""
    outcome = call(environment("ADD"), netconf("0.4.0"), raising(TryAgainLater("a", "b\nc")))
    assert outcome.document() == {"cniVersion": "0.4.0", "code": 11, "msg": "a", "details": "b\nc"}


@pytest.mark.parametrize("command", ["ADD", "CHECK", "STATUS"])
@pytest.mark.parametrize(
    "error", [KeyError("pod"), RecursionError(), InternalError("oops", "Traceback…")]
)
def test_any_other_exception_is_an_internal_error(command: str, error: Exception) -> None:
    """Code 999; the traceback goes to the log, and to the runtime only where it was."""
    outcome = call(environment(command), netconf(), raising(error))
    document = outcome.document()
    assert (outcome.status, document["code"]) == (1, 999)
    details = document["details"]
    assert isinstance(details, str)
    assert details.startswith("test_serve.py:")
    assert details.endswith(" in raising.<locals>.handler")
    assert "Traceback" not in outcome.stdout
    (line,) = outcome.stderr.splitlines()
    logged = json.loads(line)
    assert (logged["verb"], logged["container_id"], logged["code"]) == (command, "3f4e5d", 999)
    assert "Traceback" in logged["details"]


def test_a_child_s_fault_is_told_from_where_the_child_had_it() -> None:
    """Not from where its message was received."""

    def child() -> None:
        raise KeyError("pod")

    try:
        child()
    except KeyError as error:
        fault = InternalError.of(error)
    document = call(environment("ADD"), netconf(), raising(fault)).document()
    assert re.fullmatch(r"test_serve\.py:\d+ in child", str(document["details"]))


@pytest.mark.parametrize("command", ["DEL", "GC"])
@pytest.mark.parametrize(
    "error", [TryAgainLater("API down", "refused"), KeyError("pod"), OSError(5, "x")]
)
def test_del_and_gc_never_fail_once_understood(command: str, error: Exception) -> None:
    """Exit 0 and an empty stdout; one line in the log says what went wrong."""
    outcome = call(environment(command), netconf(), raising(error))
    assert (outcome.status, outcome.stdout) == (0, "")
    (line,) = outcome.stderr.splitlines()
    assert json.loads(line)["verb"] == command


@pytest.mark.parametrize("garbage", [None, "text", 5, [], {"ips": "x"}, {"cniVersion": []}])
@pytest.mark.parametrize("netns", ["", "/run/netns/gone"])
def test_del_succeeds_whatever_the_previous_result_is(garbage: object, netns: str) -> None:
    """With and without namespace, in every version."""
    for version in SUPPORTED_VERSIONS:
        env, stdin = environment("DEL", CNI_NETNS=netns), netconf(version, prevResult=garbage)
        assert call(env, stdin, lambda _: None) == Outcome(0, "", "")
    assert call(environment("DEL", CNI_NETNS=netns), netconf(), lambda _: None).status == 0


@pytest.mark.parametrize("key", ["cni.dev/valid-attachments", "cni.dev/attachments"])
def test_gc_hands_the_list_of_either_key_to_its_handler(key: str) -> None:
    """Absent, empty and populated lists are three different things."""
    seen: list[frozenset[tuple[str, str]] | None] = []
    one = {"containerID": "a", "ifname": "eth0"}
    calls: list[JSON] = [{}, {key: []}, {key: [one]}]
    for keys in calls:
        outcome = call(
            environment("GC"),
            netconf(**keys),
            lambda request: seen.append(valid_attachments(request)),
        )
        assert outcome == Outcome(0, "", "")
    assert seen == [None, frozenset(), frozenset({("a", "eth0")})]


def test_a_result_that_cannot_be_printed_is_an_internal_error() -> None:
    """Never half a document."""
    outcome = call(environment("ADD"), netconf(), lambda _: {"a": [1, object()]})
    assert outcome.document()["code"] == 999


@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_a_log_that_fails_changes_nothing(command: str) -> None:
    """It is worth less than the answer."""
    out, err = io.StringIO(), io.StringIO()
    err.close()
    handlers = dict.fromkeys(VERBS, raising(KeyError("pod")))
    status = serve(environment(command), netconf, out, err, handlers, log_to(err), ABOUT)
    assert (status, bool(out.getvalue())) == ((1, True) if command == "ADD" else (0, False))


# -- as a process ----------------------------------------------------------------------------------

PROGRAM = """
import sys
from istio_cni.cni.serve import serve
env = dict(pair.split("=", 1) for pair in sys.argv[1:])
verbs = {"ADD": lambda request: {"cniVersion": request.cni_version}}
def report(verb, container_id, error):
    pass
status = serve(env, sys.stdin.buffer.read, sys.stdout, sys.stderr, verbs, report, "about")
print("loaded:", *sys.modules, file=sys.stderr)
sys.exit(status)
"""


def start(env: dict[str, str], stdin: bytes, stdout: int) -> subprocess.CompletedProcess[bytes]:
    """Run the dispatcher in an interpreter of its own."""
    arguments = [f"{name}={value}" for name, value in env.items()]
    return subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, *arguments],
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
        timeout=30,
    )


def test_importing_the_dispatcher_loads_nothing_heavy() -> None:
    """Every pod would pay for it."""
    code = "import sys, istio_cni.cni.serve, istio_cni.cni.result; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-I", "-c", code], text=True).split()
    assert "istio_cni.cni.request" in loaded
    assert not HEAVY & {name.partition(".")[0] for name in loaded}


def test_answering_version_loads_nothing_heavy() -> None:
    """Not even json."""
    done = start({"CNI_COMMAND": "VERSION"}, b"", subprocess.PIPE)
    assert json.loads(done.stdout) == json.loads(answer_version())
    loaded = done.stderr.decode().split("loaded:")[1].split()
    assert not HEAVY & {name.partition(".")[0] for name in loaded}


@pytest.mark.parametrize(
    "env", [{"CNI_COMMAND": "VERSION"}, environment("ADD"), environment("UPDATE")]
)
def test_a_closed_pipe_ends_the_call_without_a_traceback(
    env: dict[str, str], tmp_path: Path
) -> None:
    """Exit 1: nobody got the answer, so the runtime must not think it did."""
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    assert reader.stdin is not None
    done = start(env, netconf(), reader.stdin.fileno())
    reader.stdin.close()
    assert done.returncode == 1
    assert done.stderr.startswith(b"loaded:")
    assert done.stderr.count(b"\n") == 1
    full = Path("/dev/full")
    if full.exists():
        with full.open("wb") as target:
            done = start(env, netconf(), target.fileno())
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
