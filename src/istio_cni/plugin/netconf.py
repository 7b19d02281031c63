"""Our keys of the network configuration, checked; other plugins' keys are not our business.

Names and defaults of the reference's keys are kept; `backend`, `iptables_variant`, `pod_source`,
`strict_annotations`, `status_strict` and the `outbound_*` and `host_*` keys are ours. The latter
stand for what the reference's plugin reads from the runtime's environment.

A key that cannot be used takes its default and is among `problems`. ADD refuses them once it would
have to rely on the configuration; the other verbs log them, since a DEL has to clean up also what a
mistaken edit left behind, and the agent's own pod has to start so that it can write a better one.

Source: istio cni/pkg/plugin (Config); docs/configuration.md lists them for people.
"""

from __future__ import annotations

import os

from istio_cni.cni.request import folded
from istio_cni.constants import RUN_DIR
from istio_cni.errors import InvalidNetconf, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

BACKENDS = ("auto", "iptables", "nftables")
VARIANTS = ("", "legacy", "nft")
NODE_BACKENDS = ("", "iptables-nft", "iptables-legacy", "nftables")
KUBERNETES = "kubernetes"
MANIFESTS = "manifests:"
POD_SOURCES = f'"{KUBERNETES}" or "{MANIFESTS}<directory>"'


class _Reader:
    """Reads keys by their type; what is refused goes into `problems` and the default comes back.

    Keys are asked for in lower case, as all of ours are, and found in any.
    """

    __slots__ = ("_values", "problems")

    def __init__(self, config: Mapping[str, object]) -> None:
        self._values = {**folded(config), **config}  # spelled exactly, else in any case
        self.problems: list[InvalidNetconf] = []

    def refuse(self, key: str, value: object, allowed: str) -> None:
        """Note that a key cannot be used."""
        self.problems.append(refusal(key, value, allowed))

    def text(self, key: str, default: str = "") -> str:
        """Read a string."""
        value = self._values.get(key)
        if value is None or isinstance(value, str):
            return default if value is None else value
        self.refuse(key, value, "a string")
        return default

    def path(self, key: str) -> str:
        """Read a string that the kernel would take as a path."""
        value = self.text(key)
        if _is_path(value):
            return value
        self.refuse(key, value, "a path")
        return ""

    def one_of(self, key: str, allowed: tuple[str, ...]) -> str:
        """Read one of several words; the first one is the default."""
        value = self.text(key, allowed[0])
        if value in allowed:
            return value
        self.refuse(key, value, ", ".join(filter(None, allowed)))
        return allowed[0]

    def flag(self, key: str) -> bool:
        """Read a boolean, false by default."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value is True

    def texts(self, key: str) -> frozenset[str]:
        """Read a list of strings, empty by default."""
        value = self._values.get(key)
        items = [] if value is None else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return frozenset(items)
        self.refuse(key, value, "a list of strings")
        return frozenset()


class Netconf(_Reader):
    """The keys that concern us, by their names in the configuration."""

    __slots__ = (
        "ambient_enabled",
        "backend",
        "cni_agent_run_dir",
        "exclude_namespaces",
        "host_ipv4_loopback_cidr",
        "iptables_variant",
        "node_backend",
        "outbound_owner_groups",
        "outbound_owner_groups_exclude",
        "plugin_log_level",
        "pod_namespace",
        "pod_source",
        "status_strict",
        "strict_annotations",
    )

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        self.plugin_log_level = self.text("plugin_log_level") or "info"
        self.cni_agent_run_dir = self.path("cni_agent_run_dir") or RUN_DIR
        self.ambient_enabled = self.flag("ambient_enabled")
        self.exclude_namespaces = self.texts("exclude_namespaces")
        self.pod_namespace = self.text("pod_namespace")
        self.pod_source = self.path("pod_source") or KUBERNETES
        if self.pod_source != KUBERNETES and not self.manifests:
            self.refuse("pod_source", self.pod_source, POD_SOURCES)
            self.pod_source = KUBERNETES
        self.backend = self._backend()
        self.iptables_variant = self.one_of("iptables_variant", VARIANTS)
        self.node_backend = self.one_of("node_backend", NODE_BACKENDS)
        self.strict_annotations = self.flag("strict_annotations")
        self.status_strict = self.flag("status_strict")
        self.outbound_owner_groups = self.text("outbound_owner_groups", "*")
        self.outbound_owner_groups_exclude = self.text("outbound_owner_groups_exclude")
        self.host_ipv4_loopback_cidr = self.text("host_ipv4_loopback_cidr")

    def _backend(self) -> str:
        """Read the back end; `native_nftables`, the reference's word for nftables, wins."""
        backend = self.one_of("backend", BACKENDS)
        return "nftables" if self.flag("native_nftables") else backend

    @property
    def manifests(self) -> str:
        """The directory of pod manifests, "" when pods come from the API server."""
        source = self.pod_source
        return source[len(MANIFESTS) :] if source.startswith(MANIFESTS) else ""


def _is_path(text: str) -> bool:
    """Tell whether the kernel would take a text as a path; Python raises ValueError otherwise."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeError:  # half a surrogate pair, which JSON can express
        return False


def refusal(key: str, value: object, allowed: str, why: str = "is not allowed") -> InvalidNetconf:
    """Build the one-line refusal of a key: its name, its value, what is allowed."""
    return InvalidNetconf(
        f"network configuration, {key}: {quoted(value)} {why}; allowed: {allowed}"
    )
