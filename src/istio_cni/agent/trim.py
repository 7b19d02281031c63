"""What decisions need of a pod's object, in little memory.

A pod's object takes 10 to 30 kB, most of it status, volumes and who last wrote which field. What
`Pod` holds of it is a tenth of that, and the same strings in most pods of a node. Annotations are
the one place where less is kept: those under other prefixes than ours do not count in any decision.
So the plugin's debug line, which names a pod's annotations, names only these where the pod came
from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from istio_cni.plugin import identity
from istio_cni.plugin.pod import Pod

ANNOTATIONS = (  # prefixes
    "traffic.sidecar.istio.io/",
    "sidecar.istio.io/",
    "ambient.istio.io/",
    "istio.io/",
)
STRINGS_MAX = 8192  # then sharing begins anew


class Known(NamedTuple):
    """A pod, and the uids by which runtimes know it."""

    pod: Pod
    uids: tuple[object, ...]


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

    def texts(
        self, texts: Mapping[str, str], prefixes: str | tuple[str, ...] = ""
    ) -> dict[str, str]:
        """Return those pairs whose name begins with one of the prefixes."""
        return {
            self(name): self(value) for name, value in texts.items() if name.startswith(prefixes)
        }


def trim(document: Mapping[str, object], share: Strings) -> Known:
    """Read a pod's object; nothing of it is held that is not needed."""
    pod = Pod(document)
    pod.namespace = share(pod.namespace)
    pod.labels = share.texts(pod.labels)
    pod.annotations = share.texts(pod.annotations, ANNOTATIONS)
    pod.containers = tuple(map(share, pod.containers))
    proxy = pod.proxy
    if proxy is not None:
        proxy.kind = share(proxy.kind)
        proxy.env = {
            share(name): value if value is None else share(value)
            for name, value in proxy.env.items()
        }
    return Known(pod, identity.uids(document))
