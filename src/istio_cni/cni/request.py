"""What the runtime asks for: CNI_* variables and stdin become one checked `Request`.

The environment names the attachment, stdin holds the configuration; everything after this module
works on values that are known to be well formed. The checks come in the order of the common Go
skeleton (containernetworking/cni, pkg/skel), so that a call with several faults gets the code
that runtimes know. We are more liberal where refusing helps nobody: CNI_PATH may be missing,
CNI_ARGS may hold anything, and of the configuration nothing but name and version can make a DEL
fail, because a failing DEL keeps the pod's addresses and leaves it terminating.
"""

from __future__ import annotations

from istio_cni.cni.document import decode
from istio_cni.constants import MAX_INTERFACE_NAME, NEWEST_VERSION, SUPPORTED_VERSIONS
from istio_cni.errors import (
    DecodingFailure,
    IncompatibleVersion,
    InvalidEnvironment,
    InvalidNetconf,
    IstioCNIError,
    quoted,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from istio_cni.cni.document import JSON

VERBS = ("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION")
OLDEST_VERSION = SUPPORTED_VERSIONS[0]  # what a configuration without cniVersion means

_ATTACHMENT = ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME")
_REQUIRED = {"ADD": _ATTACHMENT, "DEL": (_ATTACHMENT[0], _ATTACHMENT[2]), "CHECK": _ATTACHMENT}
_OLDEST_FOR = {"CHECK": (0, 4, 0), "GC": (1, 1, 0), "STATUS": (1, 1, 0)}
_NAME_RULE = "a letter or digit must come first, then letters, digits, '_', '.' and '-' only"
_ATTACHMENT_KEYS = ("cni.dev/valid-attachments", "cni.dev/attachments")  # the latter at first


class Request:
    """One CNI call, checked; `config` is the whole stdin object with its keys as given.

    `prev_result` is an object or None for ADD and CHECK, any JSON value otherwise. The attachment's
    fields are empty for verbs that concern none.
    """

    __slots__ = (
        "args",
        "cni_version",
        "command",
        "config",
        "container_id",
        "ifname",
        "name",
        "netns",
        "prev_result",
        "runtime_config",
    )

    def __init__(
        self,
        command: str,
        *,
        container_id: str = "",
        netns: str = "",
        ifname: str = "",
        args: dict[str, str] | None = None,
        cni_version: str = NEWEST_VERSION,
        name: str = "",
        config: JSON | None = None,
        prev_result: object = None,
        runtime_config: JSON | None = None,
    ) -> None:
        self.command = command
        self.container_id = container_id
        self.netns = netns
        self.ifname = ifname
        self.args = args or {}
        self.cni_version = cni_version
        self.name = name
        self.config = config or {}
        self.prev_result = prev_result
        self.runtime_config = runtime_config or {}

    @property
    def pod_name(self) -> str:
        """The pod's name, "" when the runtime is not Kubernetes'."""
        return self.args.get("K8S_POD_NAME", "")

    @property
    def pod_namespace(self) -> str:
        """The pod's namespace, "" when the runtime is not Kubernetes'."""
        return self.args.get("K8S_POD_NAMESPACE", "")

    @property
    def pod_uid(self) -> str:
        """The pod's uid, "" from runtimes that do not send it."""
        return self.args.get("K8S_POD_UID", "")


def lookup(mapping: Mapping[str, object], key: str, default: object = None) -> object:
    """Find the value of `key`, spelled exactly or else in any case; then the last one counts."""
    return mapping[key] if key in mapping else folded(mapping).get(key.lower(), default)


def folded(mapping: Mapping[str, object]) -> dict[str, object]:
    """Return the values by their keys in lower case; of several, the last one counts."""
    return {name.lower(): value for name, value in mapping.items()}


def parse_environment(env: Mapping[str, str]) -> Request:
    """Check what the environment alone tells: verb, attachment, arguments.

    Raises InvalidEnvironment, for all missing variables at once. An unknown verb passes: it is
    refused after stdin has been read.
    """
    command = env.get("CNI_COMMAND", "")
    required = _REQUIRED.get(command, ())
    missing = [name for name in ("CNI_COMMAND", *required) if not env.get(name)]
    if missing:
        raise InvalidEnvironment(f"required environment variables missing: {','.join(missing)}")
    request = Request(command, args=parse_args(env.get("CNI_ARGS", "")))
    if not required:
        return request
    request.container_id = env["CNI_CONTAINERID"]
    request.ifname = env["CNI_IFNAME"]
    request.netns = env.get("CNI_NETNS", "")
    if not _is_name(request.container_id):
        raise InvalidEnvironment(f"CNI_CONTAINERID is {quoted(request.container_id)}: {_NAME_RULE}")
    if not _is_interface_name(request.ifname):
        raise InvalidEnvironment(
            f"CNI_IFNAME is {quoted(request.ifname)}: an interface name has at most "
            f"{MAX_INTERFACE_NAME} bytes, no '/', ':' or white space, and is not '.' or '..'"
        )
    return request


def parse_args(text: str) -> dict[str, str]:
    """Read CNI_ARGS; pairs without key or `=` are dropped, of equal keys the last one counts.

    A value may hold `=`. Unknown keys are kept, and harmless, whatever IgnoreUnknown says.
    """
    pairs = (pair.partition("=") for pair in text.split(";"))
    return {key: value for key, equals, value in pairs if key and equals}


def complete(request: Request, stdin: bytes) -> Request:
    """Complete what the environment has told by stdin; the first check that fails raises its error.

    Raises InvalidEnvironment, DecodingFailure, InvalidNetconf or IncompatibleVersion.
    """
    request.config = decode(stdin)
    request.name = _network_name(request.config)
    if request.command not in VERBS:
        raise InvalidEnvironment(
            f"CNI_COMMAND is {quoted(request.command)}, not one of {', '.join(VERBS)}"
        )
    request.cni_version = _config_version(request.config)
    _check_version(request.command, request.cni_version)
    request.prev_result = lookup(request.config, "prevResult")
    runtime_config = lookup(request.config, "runtimeConfig")
    if isinstance(runtime_config, dict):
        request.runtime_config = runtime_config
    elif runtime_config is not None and request.command in ("ADD", "CHECK"):
        raise InvalidNetconf(f"runtimeConfig is {quoted(runtime_config)}, not an object")
    if request.command in ("ADD", "CHECK") and not isinstance(request.prev_result, dict | None):
        raise DecodingFailure(f"prevResult is {quoted(request.prev_result)}, not an object")
    if request.command == "GC":
        valid_attachments(request)  # a garbled list is the runtime's fault and reported as such
    return request


def valid_attachments(request: Request) -> frozenset[tuple[str, str]] | None:
    """List GC's still valid attachments as (container id, ifname); None: no list, touch nothing.

    A null counts as no list: Go writes it for one that nobody filled. Raises InvalidNetconf.
    """
    for key in _ATTACHMENT_KEYS:
        given = lookup(request.config, key)
        if given is None:
            continue
        if not isinstance(given, list):
            raise InvalidNetconf(f"{key} is {quoted(given)}, not a list")
        return frozenset(_attachment(item, f"{key}[{index}]") for index, item in enumerate(given))
    return None


def request_version(stdin: bytes) -> str:
    """Choose the version of a refusal: the request's own if we speak it, else the newest."""
    try:
        version = _config_version(decode(stdin))
    except IstioCNIError:
        return NEWEST_VERSION
    return version if version in SUPPORTED_VERSIONS else NEWEST_VERSION


def _network_name(config: JSON) -> str:
    """Read the configuration's name; raises InvalidNetconf."""
    name = lookup(config, "name")
    if name is None or name == "":
        raise InvalidNetconf("the network configuration has no name")
    if not isinstance(name, str) or not _is_name(name):
        raise InvalidNetconf(f"the network configuration's name is {quoted(name)}: {_NAME_RULE}")
    return name


def _config_version(config: JSON) -> str:
    """Read cniVersion, not yet judged; missing, null and empty mean the oldest."""
    version = lookup(config, "cniVersion")
    if version is None or version == "":
        return OLDEST_VERSION
    if not isinstance(version, str):
        raise DecodingFailure(f"cniVersion is {quoted(version)}, not a string")
    return version


def _check_version(command: str, version: str) -> None:
    """Refuse a version that is too old for the verb, or not literally one of ours."""
    oldest = _OLDEST_FOR.get(command)
    if oldest is not None and _version_parts(version) < oldest:
        raise IncompatibleVersion(
            f"configuration version {quoted(version)} does not allow {command}",
            f"{command} needs {'.'.join(map(str, oldest))} or newer",
        )
    if version not in SUPPORTED_VERSIONS:
        raise IncompatibleVersion(
            "incompatible CNI versions",
            f"configuration is {quoted(version)}, plugin supports {', '.join(SUPPORTED_VERSIONS)}",
        )


def _version_parts(version: str) -> tuple[int, int, int]:
    """Split a version into three numbers, missing ones 0; raises DecodingFailure."""
    parts = version.split(".")
    if len(parts) > 3 or not all(p.isascii() and p.isdigit() and len(p) < 10 for p in parts):
        raise DecodingFailure(f"cniVersion is {quoted(version)}, not up to three numbers with dots")
    major, minor, micro = (int(part) for part in [*parts, "0", "0"][:3])
    return major, minor, micro


def _is_name(text: str) -> bool:
    """Tell whether a container id or network name has the form that the specification asks for."""
    allowed = text.replace("_", "a").replace(".", "a").replace("-", "a")
    return text[:1].isalnum() and allowed.isalnum() and text.isascii()


def _is_interface_name(text: str) -> bool:
    """Tell whether the kernel takes the interface name."""
    size = len(text.encode(errors="replace"))  # a byte that is no UTF-8 arrives as one surrogate
    forbidden = any(char in "/:\0" or char.isspace() for char in text)
    return 1 <= size <= MAX_INTERFACE_NAME and text not in (".", "..") and not forbidden


def _attachment(item: object, where: str) -> tuple[str, str]:
    """Check one entry of GC's list."""
    if not isinstance(item, dict):
        raise InvalidNetconf(f"{where} is {quoted(item)}, not an object")
    container_id, ifname = lookup(item, "containerID"), lookup(item, "ifname")
    if not isinstance(container_id, str) or not isinstance(ifname, str) or not container_id:
        raise InvalidNetconf(f"{where} is {quoted(item)}: containerID and ifname must be strings")
    return container_id, ifname
