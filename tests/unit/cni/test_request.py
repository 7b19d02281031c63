"""Environment and stdin to a request: which call is taken, and which code refuses the others."""

from __future__ import annotations

import json

import pytest

from istio_cni.cni.request import (
    Request,
    complete,
    lookup,
    parse_args,
    parse_environment,
    request_version,
    valid_attachments,
)
from istio_cni.constants import SUPPORTED_VERSIONS
from istio_cni.errors import (
    DecodingFailure,
    IncompatibleVersion,
    InvalidEnvironment,
    InvalidNetconf,
    IstioCNIError,
)

JSON = dict[str, object]
KEY = "cni.dev/valid-attachments"
OLD_KEY = "cni.dev/attachments"


def environment(command: str, **changes: str | None) -> dict[str, str]:
    """Make a complete environment; `None` takes a variable away."""
    complete: dict[str, str | None] = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": "3f4e5d",
        "CNI_NETNS": "/run/netns/cni-1",
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0;K8S_POD_UID=u-1",
    }
    return {name: value for name, value in (complete | changes).items() if value is not None}


def netconf(**keys: object) -> bytes:
    """Write a configuration for stdin."""
    return json.dumps({"cniVersion": "1.1.0", "name": "k8s-pod-network", **keys}).encode()


def parse_request(env: dict[str, str], stdin: bytes) -> Request:
    """Read a whole call."""
    return complete(parse_environment(env), stdin)


def refused(env: dict[str, str], stdin: bytes) -> IstioCNIError:
    """Return the error that a call is refused with."""
    with pytest.raises(IstioCNIError) as caught:
        parse_request(env, stdin)
    return caught.value


# -- the whole -------------------------------------------------------------------------------------


def test_a_complete_add_becomes_a_request() -> None:
    """Every field is filled from where the protocol says."""
    prev = {"cniVersion": "1.1.0", "ips": [{"address": "10.1.0.5/16"}]}
    stdin = netconf(type="istio-cni", prevResult=prev, runtimeConfig={"a": {"b": "c"}})
    request = parse_request(environment("ADD"), stdin)
    assert (request.command, request.container_id, request.ifname) == ("ADD", "3f4e5d", "eth0")
    assert request.netns == "/run/netns/cni-1"
    assert (request.cni_version, request.name) == ("1.1.0", "k8s-pod-network")
    assert request.config == json.loads(stdin)
    assert request.prev_result == prev
    assert request.runtime_config == {"a": {"b": "c"}}
    assert (request.pod_namespace, request.pod_name, request.pod_uid) == ("shop", "cart-0", "u-1")


def test_what_is_absent_is_empty() -> None:
    """No arguments, no runtimeConfig and no prevResult: empty values, and no pod."""
    request = parse_request(environment("ADD", CNI_ARGS=None), netconf())
    assert (request.args, request.runtime_config, request.prev_result) == ({}, {}, None)
    assert (request.pod_namespace, request.pod_name, request.pod_uid) == ("", "", "")


@pytest.mark.parametrize("key", ["prevResult", "runtimeConfig"])
def test_null_is_as_good_as_absent(key: str) -> None:
    """Go writes null for an empty pointer or map."""
    request = parse_request(environment("ADD"), netconf(**{key: None}))
    assert (request.runtime_config, request.prev_result) == ({}, None)


# -- environment -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "absent", "named"),
    [
        ("", (), "CNI_COMMAND"),
        (
            "ADD",
            ("CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS"),
            "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME",
        ),
        ("ADD", ("CNI_IFNAME",), "CNI_IFNAME"),
        ("CHECK", ("CNI_NETNS",), "CNI_NETNS"),
        ("CHECK", ("CNI_IFNAME", "CNI_CONTAINERID"), "CNI_CONTAINERID,CNI_IFNAME"),
        ("DEL", ("CNI_NETNS", "CNI_IFNAME", "CNI_CONTAINERID"), "CNI_CONTAINERID,CNI_IFNAME"),
    ],
)
@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_all_missing_variables_are_named_at_once(
    command: str, absent: tuple[str, ...], named: str, value: str | None
) -> None:
    """One error of code 4, the names in a fixed order, whether unset or empty."""
    error = refused(environment(command, **dict.fromkeys(absent, value)), b"not read")
    assert isinstance(error, InvalidEnvironment)
    assert error.code == 4
    assert error.msg.endswith(f": {named}")


def test_missing_variables_come_before_malformed_ones() -> None:
    """What is missing is reported first, as it may explain the rest."""
    error = refused(environment("ADD", CNI_CONTAINERID="a/b", CNI_IFNAME=None), b"")
    assert "CNI_IFNAME" in error.msg
    assert "CNI_CONTAINERID" not in error.msg


@pytest.mark.parametrize("value", ["-a", ".a", "_a", "a/b", "a b", "a\n", "ä", "a\x00", "²"])
@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK"])
def test_a_malformed_container_id_is_refused(command: str, value: str) -> None:
    """Code 4; the value becomes part of file names."""
    error = refused(environment(command, CNI_CONTAINERID=value), netconf())
    assert isinstance(error, InvalidEnvironment)
    assert error.msg.startswith("CNI_CONTAINERID is ")


@pytest.mark.parametrize(
    "value", [".", "..", "a/b", "a b", "a:b", "a\tb", "a\u2028b", "a" * 16, "ä" * 8, "a\x00"]
)
@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK"])
def test_a_malformed_interface_name_is_refused(command: str, value: str) -> None:
    """Code 4; the length is counted in bytes."""
    error = refused(environment(command, CNI_IFNAME=value), netconf())
    assert isinstance(error, InvalidEnvironment)
    assert error.msg.startswith("CNI_IFNAME is ")


@pytest.mark.parametrize(
    "value", ["a", "eth0.100", "...", "a" * 15, "ä" * 7, "veth-1_2", "\udcff" * 15]
)
def test_what_the_kernel_takes_as_interface_name_is_taken(value: str) -> None:
    """Also bytes that are no UTF-8."""
    assert parse_environment(environment("ADD", CNI_IFNAME=value)).ifname == value


@pytest.mark.parametrize("value", ["a", "0", "A-._9", "3" * 64])
def test_a_wellformed_container_id_is_taken(value: str) -> None:
    """Any length, as the specification has none."""
    assert parse_environment(environment("DEL", CNI_CONTAINERID=value)).container_id == value


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
def test_the_plugin_path_is_not_needed(command: str) -> None:
    """We start no other plugin, so CNI_PATH may be missing."""
    assert parse_request(environment(command, CNI_PATH=None), netconf()).command == command


@pytest.mark.parametrize("netns", ["", None, "/run/netns/gone"])
def test_del_needs_no_namespace(netns: str | None) -> None:
    """It may be gone, and the runtime may not know it any more."""
    assert parse_request(environment("DEL", CNI_NETNS=netns), netconf()).netns == (netns or "")


@pytest.mark.parametrize("command", ["GC", "STATUS"])
def test_verbs_without_attachment_ignore_its_variables(command: str) -> None:
    """Runtimes may set dummies; nothing unchecked gets into the request."""
    env = environment(command, CNI_CONTAINERID="../x", CNI_IFNAME="a/b", CNI_NETNS="dummy")
    request = parse_request(env, netconf())
    assert (request.container_id, request.ifname, request.netns) == ("", "", "")


@pytest.mark.parametrize("command", ["add", "UPDATE", " ADD", "ADD\n"])
def test_an_unknown_verb_is_refused_after_the_configuration(command: str) -> None:
    """Code 4, but stdin that is no configuration is reported before it."""
    assert isinstance(refused(environment(command), netconf()), InvalidEnvironment)
    assert isinstance(refused(environment(command), b"{"), DecodingFailure)
    assert isinstance(refused(environment(command), b"{}"), InvalidNetconf)
    assert isinstance(
        refused(environment(command), netconf(cniVersion="9.9.9")), InvalidEnvironment
    )


# -- CNI_ARGS --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("", {}),
        (";", {}),
        ("K8S_POD_NAME=a", {"K8S_POD_NAME": "a"}),
        ("K8S_POD_NAME=a;", {"K8S_POD_NAME": "a"}),
        (";;K8S_POD_NAME=a;;IgnoreUnknown=0", {"K8S_POD_NAME": "a", "IgnoreUnknown": "0"}),
        ("K8S_POD_NAME=a=b==", {"K8S_POD_NAME": "a=b=="}),
        ("Other=1;K8S_POD_NAME=a", {"Other": "1", "K8S_POD_NAME": "a"}),
        ("IgnoreUnknown=1;Other=1", {"IgnoreUnknown": "1", "Other": "1"}),
        ("no pair;K8S_POD_NAME=a", {"K8S_POD_NAME": "a"}),
        ("=value;K8S_POD_NAME=a", {"K8S_POD_NAME": "a"}),
        ("K8S_POD_NAME=", {"K8S_POD_NAME": ""}),
        ("K8S_POD_NAME=a;K8S_POD_NAME=b", {"K8S_POD_NAME": "b"}),
        ("k8s_pod_name=a", {"k8s_pod_name": "a"}),
    ],
)
def test_arguments_are_read_liberally(text: str, args: dict[str, str]) -> None:
    """`=` in values, empty pairs and unknown keys do not fail a pod; case is kept."""
    assert parse_args(text) == args


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
@pytest.mark.parametrize(
    ("stdin", "kind"),
    [
        (b"", DecodingFailure),
        (b"no JSON", DecodingFailure),
        (b"[1]", DecodingFailure),
        (b"null", DecodingFailure),
        (b"{}", InvalidNetconf),
        (b'{"name": null}', InvalidNetconf),
        (b'{"name": ""}', InvalidNetconf),
        (b'{"name": 5}', InvalidNetconf),
        (b'{"name": "-a"}', InvalidNetconf),
        (b'{"name": "a b"}', InvalidNetconf),
        (b'{"name": "a\\n"}', InvalidNetconf),
        (b'{"name": "a", "cniVersion": 5}', DecodingFailure),
    ],
)
def test_every_verb_needs_a_configuration_with_a_name(
    command: str, stdin: bytes, kind: type[IstioCNIError]
) -> None:
    """Code 6 for what is not JSON, code 7 for the name; DEL is no exception."""
    assert type(refused(environment(command), stdin)) is kind


def test_keys_are_found_in_any_case() -> None:
    """The decoders of the field ignore case; some plugins rely on it."""
    stdin = (
        b'{"CNIversion": "0.4.0", "NAME": "a", "prevresult": {"x": 1}, "RuntimeConfig": {"y": 2}}'
    )
    request = parse_request(environment("ADD"), stdin)
    assert (request.cni_version, request.name) == ("0.4.0", "a")
    assert (request.prev_result, request.runtime_config) == ({"x": 1}, {"y": 2})
    assert list(request.config) == ["CNIversion", "NAME", "prevresult", "RuntimeConfig"]


@pytest.mark.parametrize(
    ("mapping", "found"),
    [
        ({}, "default"),
        ({"logLevel": 1, "loglevel": 2}, 1),
        ({"loglevel": 2, "logLevel": 1}, 1),
        ({"LOGLEVEL": 1, "loglevel": 2}, 2),
        ({"loglevel": None}, None),
        ({"log_level": 1}, "default"),
    ],
)
def test_the_exact_spelling_wins(mapping: JSON, found: object) -> None:
    """Then any other, of which the last one counts."""
    assert lookup(mapping, "logLevel", "default") == found


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_add_and_del_exist_in_every_version(command: str, version: str) -> None:
    """All seven versions are spoken."""
    assert parse_request(environment(command), netconf(cniVersion=version)).cni_version == version


@pytest.mark.parametrize("stdin", [b'{"name": "a"}', b'{"name": "a", "cniVersion": ""}'])
def test_no_version_means_the_oldest(stdin: bytes) -> None:
    """A configuration without cniVersion is one of 0.1.0."""
    assert parse_request(environment("ADD"), stdin).cni_version == "0.1.0"


@pytest.mark.parametrize(
    ("command", "oldest"), [("CHECK", "0.4.0"), ("GC", "1.1.0"), ("STATUS", "1.1.0")]
)
def test_later_verbs_need_a_later_version(command: str, oldest: str) -> None:
    """Code 1 below the version that brought the verb."""
    for version in SUPPORTED_VERSIONS:
        stdin = netconf(cniVersion=version)
        if version < oldest:
            error = refused(environment(command), stdin)
            assert error.code == 1
            assert command in error.msg
        else:
            assert parse_request(environment(command), stdin).cni_version == version
    assert isinstance(refused(environment(command), b'{"name": "a"}'), IncompatibleVersion)


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
@pytest.mark.parametrize("version", ["9.9.9", "1.1", "1.1.1", "01.1.0", "1.01.0"])
def test_a_version_must_be_literally_ours(command: str, version: str) -> None:
    """Code 1; the details give the configuration's version and ours."""
    error = refused(environment(command), netconf(cniVersion=version))
    assert isinstance(error, IncompatibleVersion)
    assert version in error.details
    assert ", ".join(SUPPORTED_VERSIONS) in error.details


@pytest.mark.parametrize(
    "version", ["x", "1.x", "1.1.0.0", "1..0", "-1.0.0", "1.1.0 ", "1.1.²", "1." + "1" * 5000, "."]
)
@pytest.mark.parametrize(
    ("command", "code"), [("ADD", 1), ("DEL", 1), ("CHECK", 6), ("GC", 6), ("STATUS", 6)]
)
def test_a_malformed_version_is_undecodable_where_it_must_be_compared(
    command: str, code: int, version: str
) -> None:
    """Code 6 on verbs with a lowest version; elsewhere just one that we do not speak."""
    error = refused(environment(command), netconf(cniVersion=version))
    assert error.code == code
    assert len(error.msg + error.details) < 500


@pytest.mark.parametrize("garbage", [[], 0, False, "text", [1, {"a": None}], 1.5])
def test_garbage_from_others_never_matters_to_del(garbage: object) -> None:
    """A DEL that fails keeps the pod from going; ADD and CHECK say what is wrong."""
    stdin = netconf(prevResult=garbage, runtimeConfig=garbage)
    request = parse_request(environment("DEL"), stdin)
    assert request.prev_result == garbage
    assert request.runtime_config == {}
    for command in ("ADD", "CHECK"):
        error = refused(environment(command), netconf(prevResult=garbage))
        assert isinstance(error, DecodingFailure)
        assert error.msg.startswith("prevResult is ")
        assert refused(environment(command), netconf(runtimeConfig=garbage)).code == 7


def test_foreign_values_cannot_forge_lines() -> None:
    """Whatever a caller sends is quoted, escaped and cut."""
    evil = 'x\n{"level": "info"}\x1b[2J' + "y" * 10_000
    for env, stdin in (
        (environment("ADD", CNI_CONTAINERID=evil), b""),
        (environment("ADD", CNI_IFNAME=evil), b""),
        (environment(evil), netconf()),
        (environment("ADD"), netconf(name=evil)),
        (environment("ADD"), netconf(cniVersion=evil)),
        (environment("CHECK"), netconf(cniVersion=evil)),
        (environment("ADD"), netconf(cniVersion=[evil])),
        (environment("ADD"), netconf(runtimeConfig=evil)),
        (environment("ADD"), netconf(prevResult=evil)),
        (environment("GC"), netconf(**{KEY: evil})),
        (environment("GC"), netconf(**{KEY: [{evil: evil}]})),
    ):
        error = refused(env, stdin)
        assert (error.msg + error.details).isprintable()
        assert len(error.msg) < 600


# -- GC --------------------------------------------------------------------------------------------

ONE = [{"containerID": "a", "ifname": "eth0"}]
TWO = [*ONE, {"containerid": "b", "ifName": "net1"}]


@pytest.mark.parametrize(
    ("keys", "listed"),
    [
        ({}, None),
        ({KEY: None}, None),
        ({KEY: []}, set()),
        ({OLD_KEY: []}, set()),
        ({KEY: ONE}, {("a", "eth0")}),
        ({OLD_KEY: ONE}, {("a", "eth0")}),
        ({KEY: ONE, OLD_KEY: TWO}, {("a", "eth0")}),
        ({KEY: [], OLD_KEY: TWO}, set()),
        ({KEY: None, OLD_KEY: ONE}, {("a", "eth0")}),
        ({KEY: TWO}, {("a", "eth0"), ("b", "net1")}),
        ({KEY: ONE * 2}, {("a", "eth0")}),
    ],
)
def test_valid_attachments_are_read_under_either_key(
    keys: JSON, listed: set[tuple[str, str]] | None
) -> None:
    """No list is not an empty list: with the former nothing may be removed."""
    assert valid_attachments(parse_request(environment("GC"), netconf(**keys))) == listed


@pytest.mark.parametrize(
    "garbage",
    [
        {},
        "text",
        0,
        [None],
        ["a"],
        [{}],
        [{"containerID": "a"}],
        [{"containerID": "", "ifname": "eth0"}],
        [{"containerID": 1, "ifname": "eth0"}],
        [*ONE, {"containerID": "b", "ifname": None}],
    ],
)
@pytest.mark.parametrize("key", [KEY, OLD_KEY])
def test_a_malformed_list_of_attachments_is_refused(key: str, garbage: object) -> None:
    """Code 7: nothing is removed on the word of a list that cannot be read."""
    error = refused(environment("GC"), netconf(**{key: garbage}))
    assert isinstance(error, InvalidNetconf)
    assert key in error.msg
    with pytest.raises(InvalidNetconf):
        valid_attachments(Request("GC", config={key: garbage}))


def test_other_verbs_do_not_look_at_attachments() -> None:
    """The list is GC's."""
    assert parse_request(environment("DEL"), netconf(**{KEY: "garbage"})).command == "DEL"


# -- the version of a refusal ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stdin", "version"),
    [
        (b'{"cniVersion": "0.3.1"}', "0.3.1"),
        (b'{"cniversion": "0.3.1"}', "0.3.1"),
        (b"{}", "0.1.0"),
        (b'{"cniVersion": "9.9.9"}', "1.1.0"),
        (b'{"cniVersion": 1}', "1.1.0"),
        (b"garbage", "1.1.0"),
        (b"", "1.1.0"),
    ],
)
def test_a_refusal_speaks_the_version_of_the_request_if_it_can(stdin: bytes, version: str) -> None:
    """Else the newest one."""
    assert request_version(stdin) == version
