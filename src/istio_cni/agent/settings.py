"""Settings of `install-cni`: a flag, else a variable, else the default; refused before anything.

One table, the fields of `Settings`: each gives a flag (`--cni-conf-name`), a variable
(`CNI_CONF_NAME`), a line of the help page and, with its type, what is allowed. Names and defaults
are the reference's; those that it does not have say so in docs/configuration.md. As there, a
variable that is set but empty counts as set; unlike there, a value that is wrong is refused also
when it comes from a variable.

Source: istio cni/pkg/config, cni/cmd/install-cni.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from istio_cni import constants
from istio_cni.agent import values
from istio_cni.agent.values import NOT_YET
from istio_cni.constants import VERSION
from istio_cni.errors import InvalidSettings, quoted
from istio_cni.plugin.netconf import BACKENDS

ABOUT = "Puts the mesh's CNI plugin on this node and keeps it there until it is told to end."
EPILOG = "Where a flag is missing, its variable counts, also an empty one; else the default."
SERVICE_ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
NO_EFFECT = f"no effect: what it is for {NOT_YET}"
MISSING = "\0"  # a flag's value that was not given; no argument of a program can hold it


class Inert(BaseModel):
    """Options of the reference that are accepted, checked, and without effect in this version."""

    cni_conf_group_read: values.Bool = Field(False, description=NO_EFFECT)
    istio_owned_cni_config_filename: str = Field("", description=NO_EFFECT)
    ztunnel_uds_address: str = Field("/var/run/ztunnel/ztunnel.sock", description=NO_EFFECT)
    enable_ambient_detection_retry: values.Bool = Field(False, description=NO_EFFECT)
    repair_enabled: values.Bool = Field(True, description=f"{NO_EFFECT}; true is warned of")
    repair_repair_pods: values.Bool = Field(False, description=f"{NO_EFFECT}; true is warned of")
    repair_delete_pods: values.Bool = Field(False, description=f"{NO_EFFECT}; true is warned of")
    repair_label_pods: values.Bool = Field(False, description=f"{NO_EFFECT}; true is warned of")
    repair_broken_pod_label_key: str = Field("cni.istio.io/uninitialized", description=NO_EFFECT)
    repair_broken_pod_label_value: str = Field("true", description=NO_EFFECT)
    repair_node_name: str = Field("", description=NO_EFFECT)
    repair_sidecar_annotation: str = Field(constants.STATUS_ANNOTATION, description=NO_EFFECT)
    repair_init_container_name: str = Field("istio-validation", description=NO_EFFECT)
    repair_init_container_termination_message: str = Field("", description=NO_EFFECT)
    repair_init_container_exit_code: values.Number = Field(126, description=NO_EFFECT)
    repair_label_selectors: str = Field("", description=NO_EFFECT)
    repair_field_selectors: str = Field("", description=NO_EFFECT)

    def repair_wishes(self) -> list[str]:
        """Return the options that somebody has set to switch repair on."""
        names = [name for name in Inert.model_fields if name.startswith("repair_")]
        return [each for each in names if each in self.model_fields_set and self._is_true(each)]

    def _is_true(self, name: str) -> bool:
        return getattr(self, name) is True


class Settings(Inert):
    """What `install-cni` was told; every field is a flag and a variable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mounted_cni_net_dir: values.Directory = Field(
        "/host/etc/cni/net.d", description="the host's CNI configurations, as mounted here"
    )
    mounted_cni_bin_dir: values.Directory = Field(
        "/host/opt/cni/bin", description="the host's CNI plugins, as mounted here"
    )
    cni_agent_run_dir: values.Directory = Field(
        constants.RUN_DIR, description="the run dir: the same path here and on the host"
    )
    cni_conf_name: values.FileName = Field(
        "", description="the configuration to chain into; empty: the first valid one, always"
    )
    bundle_dir: values.Directory = Field(
        "/opt/cni/bin/istio-cni.d/current", description="the plugin's bundle in this image"
    )
    kubeconfig_mode: values.FileMode = Field(
        0o600, description="file mode of the plugin's kubeconfig, in octal"
    )
    kube_ca_file: values.OptionalFile = Field(
        "", description="authority of the API server for the plugin; empty: the account's"
    )
    skip_tls_verify: values.Bool = Field(
        False, description="let the plugin trust any API server; for experiments"
    )
    service_account_dir: values.Directory = Field(
        SERVICE_ACCOUNT_DIR, description="this pod's own credentials"
    )
    plugin_service_account: values.Name = Field(
        "istio-cni-plugin", description="the account whose tokens the plugin's kubeconfig gets"
    )
    pod_namespace: values.OptionalName = Field(
        "", description="this pod's namespace; empty: the one that its credentials name"
    )
    pod_name: values.OptionalName = Field("", description="this pod's name, for the log")
    node_name: values.OptionalName = Field(
        "", description="this node's name, whose pods are followed; empty: each one is asked for"
    )
    host_proc_dir: values.Directory = Field(
        "/host/proc", description="the host's /proc, as mounted here: tells the host's namespaces"
    )
    exclude_namespaces: values.Namespaces = Field(
        (), description="namespaces that are left alone, separated by commas"
    )
    backend: values.Backend = Field(
        BACKENDS[0],
        description="how the plugin programs rules: iptables, nftables, or auto, which takes "
        "iptables where the node has it",
    )
    native_nftables: values.Bool = Field(False, description="the same as BACKEND=nftables")
    force_iptables_binary: values.Variant = Field(
        "", description="the iptables variant that the plugin uses; empty: found out for each pod"
    )
    strict_annotations: values.Bool = Field(
        False, description="refuse pods with unknown annotations under our prefixes"
    )
    outbound_owner_groups: values.Groups = Field(
        "*", description="ids of the groups whose traffic is captured, separated by commas"
    )
    outbound_owner_groups_exclude: values.Groups = Field(
        "", description="ids of groups whose traffic is not captured"
    )
    host_ipv4_loopback_cidr: values.Loopback = Field(
        "", description="IPv4 destinations that count as loopback; empty: 127.0.0.1/32"
    )
    log_level: values.LogLevel = Field("info", description="of this program")
    plugin_log_level: values.PluginLogLevel = Field("info", description="of the plugin")
    health_port: values.Port = Field(8000, description="where /healthz and /readyz are served")
    monitoring_port: values.Number = Field(
        15014, description="where /metrics is served; 0 or less: nowhere"
    )
    chained_cni_plugin: values.OnlyTrue = Field(True, description=f"false {NOT_YET}")
    istio_owned_cni_config: values.OnlyFalse = Field(False, description=f"true {NOT_YET}")
    ambient_enabled: values.OnlyFalse = Field(False, description=f"true {NOT_YET}")

    @field_validator("native_nftables")
    @classmethod
    def _one_back_end(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("backend") == "iptables":
            raise ValueError("false, since the back end is iptables")
        return value

    @field_validator("outbound_owner_groups")
    @classmethod
    def _few_groups_for_iptables(cls, value: str, info: ValidationInfo) -> str:
        native = info.data.get("native_nftables") or info.data.get("backend") == "nftables"
        most = constants.MAX_OWNER_GROUPS_IPTABLES
        if not native and value.count(",") >= most:
            raise ValueError(f"at most {most} groups, unless BACKEND is nftables")
        return value

    def effective(self) -> dict[str, str]:
        """Return what has an effect, as people would write it."""
        return {
            name: _written(name, getattr(self, name))
            for name in Settings.model_fields
            if name not in Inert.model_fields
        }


class Option(NamedTuple):
    """A setting as people name it, and its default as they would write it."""

    field: str
    flag: str
    variable: str
    default: str
    description: str


def options() -> tuple[Option, ...]:
    """Return all settings, in the order of the help page: those without effect last."""
    fields = Settings.model_fields
    return tuple(
        Option(
            name,
            "--" + name.replace("_", "-"),
            name.upper(),
            _written(name, fields[name].default),
            fields[name].description or "",
        )
        for name in sorted(fields, key=lambda name: name in Inert.model_fields)
    )


def _written(name: str, value: object) -> str:
    """Write a value as a person would."""
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_mode") and isinstance(value, int):
        return f"{value:04o}"
    return ",".join(value) if isinstance(value, tuple) else str(value)


class _Parser(argparse.ArgumentParser):
    """Reports as all other problems are: in one line."""

    def error(self, message: str) -> NoReturn:
        raise InvalidSettings((message,))


def _parser() -> _Parser:
    parser = _Parser(
        prog="install-cni", usage="%(prog)s [--FLAG=VALUE ...]", description=ABOUT, epilog=EPILOG,
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"install-cni {VERSION}")
    for option in options():
        is_bool = isinstance(Settings.model_fields[option.field].default, bool)
        parser.add_argument(
            option.flag,
            nargs="?",
            const="true" if is_bool else MISSING,
            metavar="BOOL" if is_bool else "TEXT",
            help=f"{option.description} (default: {option.default or 'empty'}; "
            f"variable: {option.variable})",
        )
    return parser


def read_settings(argv: Sequence[str], env: Mapping[str, str]) -> Settings:
    """Read flags and variables. Raises InvalidSettings with every problem at once.

    `--help` and `--version` end the program, as argparse does.
    """
    found, unknown = _parser().parse_known_args(argv)
    flags: dict[str, str] = vars(found)
    problems = [f"{quoted(word)} is not allowed; allowed: see --help" for word in unknown]
    given: dict[str, str] = {}
    names: dict[str, str] = {}
    for option in options():
        if option.field in flags:
            given[option.field], names[option.field] = flags[option.field], option.flag
        elif option.variable in env:
            given[option.field], names[option.field] = env[option.variable], option.variable
        if given.get(option.field) == MISSING:
            problems.append(f"{option.flag}: a value is missing")
            del given[option.field]
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        problems += [_problem(details, names) for details in error.errors()]
        raise InvalidSettings(tuple(problems)) from error
    if problems:
        raise InvalidSettings(tuple(problems))
    return settings


def _problem(details: Mapping[str, object], names: Mapping[str, str]) -> str:
    """Say in one line what is wrong with a setting."""
    location = details["loc"]
    field = str(location[0]) if isinstance(location, tuple) else ""
    context = details.get("ctx")
    allowed = context.get("error", details["msg"]) if isinstance(context, dict) else details["msg"]
    value = quoted(details.get("input"))
    return f"{names.get(field, field)}: {value} is not allowed; allowed: {allowed}"
