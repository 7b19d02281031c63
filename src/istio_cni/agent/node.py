"""What the settings mean for this node: what is seen of it, and the parts to install, in order.

What the environment of a pod says of the API server is read here, and nothing else of it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from istio_cni import constants
from istio_cni.agent.settings import Settings
from istio_cni.edge import files, proc
from istio_cni.edge.kube import address, tokens
from istio_cni.errors import InvalidSettings, quoted
from istio_cni.install import plan
from istio_cni.install.bundle import Bundle
from istio_cni.install.credentials import Credentials, Target
from istio_cni.install.network import Network
from istio_cni.plugin.netconf import Netconf
from istio_cni.rules.config import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.cni.document import JSON

LOG = logging.getLogger("cni-agent")
SERVICE = "KUBERNETES_SERVICE_"


class View(NamedTuple):
    """What the agent sees of the node; `mounts` is a descriptor, None where its files are ours.

    Without `host_netns` no caller can be told from a pod.
    """

    host_netns: tuple[int, int] | None
    own_netns: tuple[int, int] | None
    mounts: int | None


def view(settings: Settings) -> View:
    """Look at process 1 of the node, through its /proc."""
    namespaces = os.path.join(settings.host_proc_dir, "1", "ns")
    host_netns = proc.namespace(os.path.join(namespaces, "net"))
    if host_netns is None:
        LOG.warning(
            "the plugin is not served and does all by itself: %s is not to be seen; "
            "the host's /proc is to be mounted there, and SYS_PTRACE granted",
            quoted(os.path.join(namespaces, "net")),
        )
    mounts = os.path.join(namespaces, "mnt")
    foreign = proc.namespace(mounts) not in (None, proc.namespace(proc.OWN_MOUNTS))
    pinned = proc.pin(mounts) if foreign else None
    own_netns = proc.namespace(proc.OWN_NETNS)
    return View(host_netns, own_netns, pinned if isinstance(pinned, int) else None)


class Pod(NamedTuple):
    """What the agent's own pod knows: the API server's URL, and the namespace that it is in.

    The URL has an address; `server_name` is the name that it was found by, "" for none.
    """

    server: str
    server_name: str
    namespace: str


def own_pod(settings: Settings, env: Mapping[str, str]) -> Pod:
    """Read what every pod is told. Raises InvalidSettings for what cannot be used."""
    server, server_name = _server(env)
    namespace = settings.pod_namespace or _own_namespace(settings.service_account_dir)
    if not namespace:
        raise InvalidSettings(('POD_NAMESPACE: "" is not allowed; allowed: this pod\'s namespace',))
    return Pod(server, server_name, namespace)


def parts(
    settings: Settings, env: Mapping[str, str], pod: Pod, node_backend: str
) -> tuple[Bundle, Credentials, Network]:
    """Return what is to be on the node, in order; `node_backend` is what `auto` means there.

    Raises IOFailure when there is no bundle.
    """
    account_dir, account = settings.service_account_dir, settings.plugin_service_account
    ca_file = settings.kube_ca_file or os.path.join(account_dir, "ca.crt")
    target = Target(
        settings.cni_agent_run_dir,
        pod.server,
        "" if settings.skip_tls_verify else ca_file,
        settings.kubeconfig_mode,
        pod.server_name,
    )
    api = {name: env[name] for name in (f"{SERVICE}HOST", f"{SERVICE}PORT")}
    return (
        Bundle(settings.bundle_dir, settings.mounted_cni_bin_dir, socket_path(settings)),
        Credentials(
            target, lambda: tokens.mint(account_dir, api, pod.namespace, account), _seconds
        ),
        Network(
            settings.mounted_cni_net_dir,
            settings.cni_conf_name,
            plan.entry(entry_keys(settings, pod.namespace, node_backend)),
        ),
    )


def socket_path(settings: Settings) -> str:
    """Return where the agent serves the launcher: the same path here and on the node."""
    return os.path.join(settings.cni_agent_run_dir, constants.AGENT_SOCKET)


def _seconds() -> float:
    """Count seconds, those that the machine was suspended for included: tokens end meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _server(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the API server's URL, as every pod's environment has it, by address; and its name."""
    host, port = env.get(f"{SERVICE}HOST", ""), env.get(f"{SERVICE}PORT", "")
    protocol = env.get(f"{SERVICE}PROTOCOL") or "https"
    problems = []
    if not host:
        problems.append(f'{SERVICE}HOST: "" is not allowed; allowed: the API server, as in any pod')
    if number(port, 1, 65535) is None:
        problems.append(
            f"{SERVICE}PORT: {quoted(port)} is not allowed; allowed: a port, 1 to 65535"
        )
    if protocol not in ("https", "http"):
        problems.append(
            f"{SERVICE}PROTOCOL: {quoted(protocol)} is not allowed; allowed: https, http"
        )
    if problems:
        raise InvalidSettings(tuple(problems))
    name = "" if address.is_numeric(host) else host
    try:
        host = address.resolve(name) if name else host
    except OSError as error:
        LOG.warning("%sHOST: %s cannot be resolved: %s", SERVICE, quoted(name), error.strerror)
        name = ""
    return plan.server_url(protocol, host, port), name


def _own_namespace(account_dir: str) -> str:
    text = files.read_whole(os.path.join(account_dir, "namespace"), follow=True) or b""
    return text.decode("utf-8", "replace").strip()


def entry_keys(settings: Settings, namespace: str, node_backend: str = "") -> JSON:
    """Return the keys of the network configuration that follow from the settings.

    The reference's are always there; ours are where they differ from the default.
    """
    reference: JSON = {
        "plugin_log_level": settings.plugin_log_level,
        "cni_agent_run_dir": settings.cni_agent_run_dir,
        "ambient_enabled": settings.ambient_enabled,
        "exclude_namespaces": list(settings.exclude_namespaces),
        "pod_namespace": namespace,
        "native_nftables": settings.native_nftables,
        "enable_ambient_detection_retry": False,
    }
    ours = {
        "backend": settings.backend,
        "iptables_variant": settings.force_iptables_binary,
        "node_backend": node_backend,
        "strict_annotations": settings.strict_annotations,
        "outbound_owner_groups": settings.outbound_owner_groups,
        "outbound_owner_groups_exclude": settings.outbound_owner_groups_exclude,
        "host_ipv4_loopback_cidr": settings.host_ipv4_loopback_cidr,
    }
    defaults = Netconf({})
    return reference | {key: each for key, each in ours.items() if each != getattr(defaults, key)}
