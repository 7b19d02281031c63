"""Which object counts as the pod of a request."""

from __future__ import annotations

import pytest

from istio_cni.plugin.identity import is_same_manifest, is_same_pod

MIRROR = "kubernetes.io/config.mirror"

PLAIN = {"metadata": {"uid": "a"}}
STATIC = {"metadata": {"uid": "a", "annotations": {MIRROR: "b"}}}
UNNAMED = {"metadata": {"annotations": {"other": "b"}}}


@pytest.mark.parametrize(
    ("pod", "uid", "same"),
    [
        (PLAIN, "a", True),
        (PLAIN, "b", False),
        (PLAIN, "A", False),
        (PLAIN, "", True),  # an old runtime does not tell the uid
        (STATIC, "b", True),  # the kubelet's uid, which the runtime passes on
        (STATIC, "a", True),
        (STATIC, "c", False),
        (UNNAMED, "a", False),
        (UNNAMED, "", True),
        ({}, "a", False),
        ({"metadata": None}, "a", False),
        ({"metadata": {"uid": None, "annotations": None}}, "a", False),
    ],
)
def test_a_pod_is_known_by_its_uid_or_its_mirror(
    pod: dict[str, object], uid: str, same: bool
) -> None:
    """A uid that was given must be the object's own or, for a static pod, the mirrored one."""
    assert is_same_pod(pod, uid) is same


@pytest.mark.parametrize(
    ("pod", "uid", "same"),
    [
        (PLAIN, "a", True),
        (PLAIN, "b", False),
        (PLAIN, "", True),
        (STATIC, "b", True),
        (STATIC, "c", False),
        (UNNAMED, "a", True),
        ({"metadata": {"uid": ""}}, "a", True),
        ({}, "a", True),
    ],
)
def test_a_manifest_without_uid_stands_for_any_pod_of_its_name(
    pod: dict[str, object], uid: str, same: bool
) -> None:
    """People write no uids; where one is written it must agree."""
    assert is_same_manifest(pod, uid) is same
