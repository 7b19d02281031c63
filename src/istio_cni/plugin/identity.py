"""Whether an object is the pod that the runtime means, and not a former one of the same name.

A StatefulSet's pods and static pods come back under their old names, and caches may still show the
object that was deleted; its annotations must never decide about its successor. The runtime's uid
settles it. A static pod is known to the runtime by the kubelet's uid, which the API server keeps in
an annotation of the mirror object, whose own uid is another.
"""

from __future__ import annotations

from istio_cni.constants import MIRROR_ANNOTATION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def is_same_pod(pod: Mapping[str, object], uid: str) -> bool:
    """Whether `pod`, as the API server has it, is of the runtime's uid; "" matches any."""
    return not uid or uid in uids(pod)


def is_same_manifest(pod: Mapping[str, object], uid: str) -> bool:
    """Like `is_same_pod`, for a manifest that a person wrote: one without any uid is accepted."""
    return not uids(pod) or is_same_pod(pod, uid)


def uids(pod: Mapping[str, object]) -> tuple[object, ...]:
    """Return the uids under which `pod` may be known; none without usable metadata."""
    metadata = pod.get("metadata")
    if not isinstance(metadata, dict):
        return ()
    annotations = metadata.get("annotations")
    mirror = annotations.get(MIRROR_ANNOTATION) if isinstance(annotations, dict) else None
    return tuple(uid for uid in (metadata.get("uid"), mirror) if uid not in (None, ""))
