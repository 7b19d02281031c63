"""What decisions need of a pod's object, in the shape in which the API server has it.

A pod's object takes 10 to 30 kB, most of it status, volumes and who last wrote which field. What
`plugin.pod` and `plugin.identity` read is a tenth of that, and the same strings in most pods of a
node. Annotations are the one place where less is kept than `Pod` would show: those under other
prefixes than ours and the kubelet's do not count in any decision. So the plugin's debug line, which
names a pod's annotations, names those that are kept where the pod came from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from istio_cni.constants import PROXY_CONTAINER

JSON = dict[str, object]
Key = tuple[str, str]
Share = Callable[[str], str]

ANNOTATIONS = (  # prefixes
    "traffic.sidecar.istio.io/",
    "sidecar.istio.io/",
    "ambient.istio.io/",
    "istio.io/",
    "kubernetes.io/config.",  # where the kubelet has the pod from, and a static pod's uid
)
STRINGS_MAX = 8192  # then sharing begins anew


class Strings:
    """Gives equal strings as one object, so that a node's pods share what they have in common."""

    def __init__(self, most: int = STRINGS_MAX) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        """Return an equal string."""
        if len(self._known) >= self._most:
            self._known.clear()  # what is shared stays so
        return self._known.setdefault(text, text)


def trim(pod: Mapping[str, object], share: Share) -> JSON:
    """Return what `Pod` and the functions of `identity` need of an object; the rest is let go."""
    metadata, spec = _object(pod, "metadata"), _object(pod, "spec")
    about: JSON = {name: _text(metadata, name, share) for name in ("namespace", "name", "uid")}
    about["labels"] = _texts(metadata, "labels", "", share)
    about["annotations"] = _texts(metadata, "annotations", ANNOTATIONS, share)
    kept: JSON = {
        kind: [_container(container, share) for container in _objects(spec, kind)]
        for kind in ("initContainers", "containers")
    }
    if spec.get("hostNetwork") is True:
        kept["hostNetwork"] = True
    return {"metadata": about, "spec": kept}


def key(pod: Mapping[str, object]) -> Key:
    """Return a pod's namespace and name."""
    metadata = _object(pod, "metadata")
    return _text(metadata, "namespace", str), _text(metadata, "name", str)


def _container(container: JSON, share: Share) -> JSON:
    """Keep a container's name, and of a proxy what says what it is and how it was set up."""
    name = _text(container, "name", share)
    kept: JSON = {"name": name}
    if name != PROXY_CONTAINER:
        return kept
    arguments = container.get("args")
    kept["args"] = arguments[:2] if isinstance(arguments, list) else []
    security = _object(container, "securityContext")
    kept["securityContext"] = {
        key: security[key] for key in ("runAsUser", "runAsGroup") if key in security
    }
    kept["env"] = [_variable(variable, share) for variable in _objects(container, "env")]
    return kept


def _variable(variable: JSON, share: Share) -> JSON:
    """Keep a variable's value, or that it comes from elsewhere."""
    kept: JSON = {"name": _text(variable, "name", share)}
    value = variable.get("value")
    if value is not None:
        kept["value"] = share(value) if isinstance(value, str) else value
    elif variable.get("valueFrom") is not None:
        kept["valueFrom"] = {}
    return kept


def _object(parent: Mapping[str, object], key: str) -> JSON:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}


def _objects(parent: JSON, key: str) -> list[JSON]:
    value = parent.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(parent: JSON, key: str, share: Share) -> str:
    value = parent.get(key)
    return share(value) if isinstance(value, str) else ""


def _texts(parent: JSON, key: str, prefixes: str | tuple[str, ...], share: Share) -> JSON:
    """Return those pairs of strings whose key begins with one of the prefixes."""
    return {
        share(name): share(value)
        for name, value in _object(parent, key).items()
        if isinstance(value, str) and name.startswith(prefixes)
    }
