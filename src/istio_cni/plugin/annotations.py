"""From a pod's annotations and its proxy's environment to the capture configuration.

Every value is validated against a closed grammar before it comes near a rule. Present but empty
differs from absent: a default applies only when the annotation is absent.

Source: istio cni/pkg/plugin/redirect.go; README has the same table for people.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from istio_cni import constants
from istio_cni.errors import InvalidNetconf, InvalidParameter, quoted
from istio_cni.plugin.netconf import Netconf, refusal
from istio_cni.plugin.pod import Pod
from istio_cni.rules import config as grammar
from istio_cni.rules.config import ALL, CaptureConfig
from istio_cni.rules.model import PortRange

TRAFFIC = "traffic.sidecar.istio.io/"
SIDECAR = "sidecar.istio.io/"
REROUTE = "istio.io/reroute-virtual-interfaces"
KUBEVIRT = f"{TRAFFIC}kubevirtInterfaces"
EXCLUDE_INBOUND = f"{TRAFFIC}excludeInboundPorts"
SWITCHES = ("ISTIO_META_DNS_CAPTURE", "ISTIO_DUAL_STACK", "INVALID_DROP")  # of the proxy
KEPT, TEXT_KEPT_MAX = 128, 256  # configurations; characters of each text that led to one
UNKNOWN_MAX = 5  # unknown annotations that are named; the rest is counted


class Annotation(NamedTuple):
    """One annotation that shapes the rules: its field, its default when absent, its grammar."""

    name: str
    field: str
    default: str
    parse: Callable[[str, str], object]


def _mode(text: str, where: str) -> str:
    if text not in grammar.MODES:
        raise grammar.refuse(where, text, "REDIRECT, TPROXY or NONE")
    return text


ANNOTATIONS = (
    Annotation(constants.MODE_ANNOTATION, "mode", "REDIRECT", _mode),
    Annotation(
        f"{TRAFFIC}includeOutboundIPRanges", "outbound_ranges", ALL, grammar.parse_range_selection
    ),
    Annotation(
        f"{TRAFFIC}excludeOutboundIPRanges", "outbound_ranges_excluded", "", grammar.parse_ranges
    ),
    Annotation(EXCLUDE_INBOUND, "inbound_ports_excluded", "", grammar.parse_ports),
    Annotation(f"{TRAFFIC}includeInboundPorts", "inbound_ports", ALL, grammar.parse_port_selection),
    Annotation(
        f"{TRAFFIC}excludeOutboundPorts",
        "outbound_ports_excluded",
        constants.DEFAULT_EXCLUDED_OUTBOUND_PORT,
        grammar.parse_ports,
    ),
    Annotation(f"{TRAFFIC}includeOutboundPorts", "outbound_ports", "", grammar.parse_ports),
    Annotation(
        f"{TRAFFIC}excludeInterfaces", "excluded_interfaces", "", grammar.parse_strict_interfaces
    ),
    Annotation(REROUTE, "reroute_interfaces", "", grammar.parse_strict_interfaces),
)

# what injectors and people set under our prefixes without any effect on rules
OTHER_KNOWN = frozenset(
    f"{SIDECAR}{name}"
    for name in (
        *("agentLogLevel", "bootstrapOverride", "componentLogLevel", "controlPlaneAuthPolicy"),
        *("discoveryAddress", "enableCoreDump", "extraStatTags", "inject", "logLevel"),
        *("nativeSidecar", "proxyCPU", "proxyCPULimit", "proxyImage", "proxyImageType"),
        *("proxyMemory", "proxyMemoryLimit", "rewriteAppHTTPProbers", "statsCompression"),
        *("statsEvictionInterval", "statsHistogramBuckets", "statsInclusionPrefixes"),
        *("statsInclusionRegexps", "statsInclusionSuffixes", "status", "userVolume"),
        "userVolumeMount",
    )
)
_KNOWN = OTHER_KNOWN | {row.name for row in ANNOTATIONS} | {KUBEVIRT}


class _Said(NamedTuple):
    """All that a configuration depends on: what the pod says, and what the operator.

    `annotations` are text and name of each row's; `switches` the values of `SWITCHES`, False for a
    variable that is not there.
    """

    annotations: tuple[tuple[str, str], ...]
    switches: tuple[str | bool | None, ...]
    uid: int | None
    gid: int | None
    backend: str
    iptables_variant: str
    owner_groups: str
    owner_groups_excluded: str
    loopback: str

    @property
    def is_short(self) -> bool:
        """Whether the pod says so little that it may be kept."""
        texts = [text for text, _ in self.annotations]
        texts += [switch for switch in self.switches if isinstance(switch, str)]
        return max(map(len, texts)) <= TEXT_KEPT_MAX


def capture_config(pod: Pod, netconf: Netconf) -> tuple[CaptureConfig, list[str]]:
    """Return a pod's configuration and what its author should be told.

    Families are left open: they depend on the addresses in the namespace. Raises InvalidParameter
    for the first annotation, in the reference's order, that is not allowed.
    """
    warnings = _unknown(pod, strict=netconf.strict_annotations)
    environment = pod.proxy.env if pod.proxy else {}
    said = _Said(
        tuple(_value(row, pod) for row in ANNOTATIONS),
        tuple(environment.get(name, False) for name in SWITCHES),
        pod.proxy.uid if pod.proxy else None,
        pod.proxy.gid if pod.proxy else None,
        netconf.backend,
        netconf.iptables_variant,
        netconf.outbound_owner_groups,
        netconf.outbound_owner_groups_exclude,
        netconf.host_ipv4_loopback_cidr,
    )
    config, more = (_kept if said.is_short else _configured)(said)
    return config, [*warnings, *more]


def _configured(said: _Said) -> tuple[CaptureConfig, tuple[str, ...]]:
    """Read what was said; return the configuration and what is wrong without being refused."""
    rows = zip(ANNOTATIONS, said.annotations, strict=True)
    fields = {row.field: row.parse(*text) for row, text in rows}
    config = CaptureConfig(
        proxy_uids=(_id(said.uid, "runAsUser"),),
        proxy_gids=(_id(said.gid, "runAsGroup"),),
        backend=said.backend,
        iptables_variant=said.iptables_variant,
    )._replace(**fields)  # type: ignore[arg-type] # each row's parser fits its field
    warnings = []
    if config.inbound_ports != ALL and config.inbound_ports_excluded:
        warnings.append(f"{EXCLUDE_INBOUND} has no effect: only listed inbound ports are captured")
    config = _with_operators(_with_status_ports(config), said)
    return _with_switches(config, said.switches, warnings), tuple(warnings)


_kept = lru_cache(maxsize=KEPT)(_configured)
"""The same once each: most pods of a node say the same."""


def _value(row: Annotation, pod: Pod) -> tuple[str, str]:
    """Return an annotation's text and name; the old alias counts if the proper one is absent."""
    name = row.name
    if name == REROUTE and name not in pod.annotations and KUBEVIRT in pod.annotations:
        name = KUBEVIRT
    return pod.annotations.get(name, row.default), f"annotation {name}"


def _with_status_ports(config: CaptureConfig) -> CaptureConfig:
    """Leave the proxy's own status ports out of inbound capture, whatever else is excluded."""
    status = [PortRange(int(port), int(port)) for port in constants.STATUS_PORTS]
    ports = dict.fromkeys((*config.inbound_ports_excluded, *status))
    return config._replace(inbound_ports_excluded=tuple(ports))


def _id(number: int | None, where: str) -> str:
    """Write the proxy's uid or gid; 0 counts as not given, as the reference has it."""
    if not number:
        return constants.PROXY_ID
    if not grammar.is_id(str(number)):
        raise grammar.refuse(f"{where} of the proxy", number, "0-4294967294")
    return str(number)


def _with_operators(config: CaptureConfig, said: _Said) -> CaptureConfig:
    """Add what the node's operator says; group names mean nothing in a pod, so ids only.

    Raises InvalidNetconf: it is not the pod's author who has to mend it.
    """
    include, exclude = "outbound_owner_groups", "outbound_owner_groups_exclude"
    try:
        groups = grammar.parse_group_selection(said.owner_groups, include)
        excluded = grammar.parse_owners(said.owner_groups_excluded, exclude)
        if said.loopback:
            cidr = grammar.parse_loopback(said.loopback, "host_ipv4_loopback_cidr")
            config = config._replace(loopback_v4=cidr)
    except InvalidParameter as error:
        raise InvalidNetconf(f"network configuration, {error.msg}") from error
    for where, names in ((include, () if isinstance(groups, str) else groups), (exclude, excluded)):
        for name in names:
            if not grammar.is_id(name):
                raise refusal(where, name, "group ids: a node's names mean nothing in a pod")
    return config._replace(owner_groups=groups, owner_groups_excluded=excluded)


def _with_switches(
    config: CaptureConfig, switches: tuple[str | bool | None, ...], warnings: list[str]
) -> CaptureConfig:
    dns, dual_stack, drop_invalid = (
        _switch(name, text, warnings) for name, text in zip(SWITCHES, switches, strict=True)
    )
    return config._replace(
        redirect_dns=dns, capture_all_dns=dns, dual_stack=dual_stack, drop_invalid=drop_invalid
    )


def _switch(name: str, text: str | bool | None, warnings: list[str]) -> bool:
    """Read a boolean of the proxy's environment; what cannot be read is off, and reported."""
    if isinstance(text, bool):
        return text
    if text is None:
        warnings.append(f"{name} of the proxy comes from a reference and is not readable: off")
        return False
    value = grammar.parse_bool(text)
    if value is None:
        warnings.append(f"{name} of the proxy: {quoted(text)} is not a boolean: off")
    return value is True


def _unknown(pod: Pod, *, strict: bool) -> list[str]:
    """Name annotations under our prefixes that nobody knows, each with the nearest known name."""
    unknown = [
        name
        for name in pod.annotations
        if name.startswith((TRAFFIC, SIDECAR)) and name not in _KNOWN
    ]
    texts = [f"unknown annotation {quoted(name)}{_hint(name)}" for name in unknown[:UNKNOWN_MAX]]
    if texts and strict:
        raise InvalidParameter(f"{texts[0]} (strict_annotations is on)")
    if len(unknown) > UNKNOWN_MAX:
        texts.append(f"and {len(unknown) - UNKNOWN_MAX} more unknown annotations")
    return texts


def _hint(name: str) -> str:
    """Ask whether a known annotation was meant; only what follows the prefix tells them apart."""
    from difflib import get_close_matches  # a mistake only

    ends = {full.rpartition("/")[2].lower(): full for full in _KNOWN}
    near = get_close_matches(name.rpartition("/")[2].lower(), ends, 1)
    return f"; did you mean {ends[near[0]]}?" if near else ""
