"""What decisions and rules need to know of a pod, read from its object.

Source: istio cni/pkg/plugin/kubernetes.go.
"""

from __future__ import annotations

from istio_cni.constants import PROXY_CONTAINER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    JSON = Mapping[str, object]


class Proxy:
    """The proxy container: type, ids, environment; None for a variable whose value is elsewhere."""

    __slots__ = ("env", "gid", "kind", "uid")

    def __init__(self) -> None:
        self.kind = ""
        self.uid: int | None = None
        self.gid: int | None = None
        self.env: dict[str, str | None] = {}


class Pod:
    """One pod. `containers` names init and regular containers; `proxy` is None without a proxy."""

    __slots__ = (
        "annotations",
        "containers",
        "host_network",
        "labels",
        "name",
        "namespace",
        "proxy",
        "uid",
    )

    def __init__(self, document: JSON) -> None:
        metadata, spec = _object(document, "metadata"), _object(document, "spec")
        self.name = _text(metadata, "name")
        self.namespace = _text(metadata, "namespace") or "default"
        self.uid = _text(metadata, "uid")
        self.labels = _texts(metadata, "labels")
        self.annotations = _texts(metadata, "annotations")
        self.host_network = spec.get("hostNetwork") is True
        containers = [*_objects(spec, "initContainers"), *_objects(spec, "containers")]
        self.containers = tuple(_text(container, "name") for container in containers)
        self.proxy: Proxy | None = None
        for container in containers:
            if _text(container, "name") == PROXY_CONTAINER:
                self.proxy = self.proxy or Proxy()
                _read_proxy(self.proxy, container)


def _read_proxy(proxy: Proxy, container: JSON) -> None:
    """Read a proxy container; of several, the last one counts and environments are merged."""
    arguments = container.get("args")
    words = arguments if isinstance(arguments, list) else []
    proxy.kind = str(words[1]) if len(words) >= 2 and words[0] == "proxy" else ""
    security = _object(container, "securityContext")
    proxy.uid, proxy.gid = _number(security, "runAsUser"), _number(security, "runAsGroup")
    for variable in _objects(container, "env"):
        proxy.env[_text(variable, "name")] = _literal(variable)


def _literal(variable: JSON) -> str | None:
    """Return a variable's value, None if it comes from elsewhere: a field, a Secret, a ConfigMap.

    What YAML made a boolean or a number of, in a manifest that no API server has seen, counts as it
    was meant.
    """
    value = variable.get("value")
    if value is None:
        return None if variable.get("valueFrom") is not None else ""
    if isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _object(parent: JSON, key: str) -> JSON:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}


def _objects(parent: JSON, key: str) -> list[JSON]:
    value = parent.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(parent: JSON, key: str) -> str:
    value = parent.get(key)
    return value if isinstance(value, str) else ""


def _texts(parent: JSON, key: str) -> dict[str, str]:
    return {name: value for name, value in _object(parent, key).items() if isinstance(value, str)}


def _number(parent: JSON, key: str) -> int | None:
    value = parent.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
