"""What is wanted on the node, as values: the entry in the conflist, the kubeconfig, the names.

Source: istio cni/pkg/install (createCNIConfig, kubeconfig.go); cni/pkg/plugin (Config).
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping

from istio_cni import constants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.cni.document import JSON


def entry(keys: Mapping[str, object]) -> JSON:
    """Return our entry in a list of plugins.

    `keys` are those of the network configuration, by their names there. The runtime fills
    `capabilities`; without them every pod outside the mesh would need the API server.
    """
    return {
        "type": constants.PLUGIN_TYPE,
        "name": constants.PLUGIN_TYPE,
        "ipam": {},
        "dns": {},
        "capabilities": {constants.POD_ANNOTATIONS_CAPABILITY: True},
        **keys,
    }


def kubeconfig(server: str, authority: bytes, token: str, server_name: str = "") -> bytes:
    """Return the plugin's kubeconfig; without authority (PEM) the server is not verified.

    `server_name` is what its certificate is for, where that is not the host of the URL `server`.

    JSON, which is YAML: the plugin reads it without loading a parser for more.
    """
    cluster: JSON = {"server": server}
    if server_name:
        cluster["tls-server-name"] = server_name
    if authority:
        cluster["certificate-authority-data"] = b64encode(authority).decode()
    else:
        cluster["insecure-skip-tls-verify"] = True
    context = {"cluster": "local", "user": "istio-cni"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": cluster}],
        "users": [{"name": "istio-cni", "user": {"token": token}}],
        "contexts": [{"name": "istio-cni-context", "context": context}],
        "current-context": "istio-cni-context",
    }
    return f"{json.dumps(document, indent=2)}\n".encode()


def server_url(protocol: str, host: str, port: str) -> str:
    """Return the API server's URL; an IPv6 address gets its brackets, once."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{protocol}://{host}:{port}"


def bundle_name(contents: Mapping[str, tuple[object, ...]]) -> str:
    """Name a bundle by its version and what is in it, so that two that differ never share one."""
    described = json.dumps(sorted(contents.items())).encode()
    return f"{constants.VERSION}-{hashlib.sha256(described).hexdigest()[:8]}"
