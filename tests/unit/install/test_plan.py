"""The wanted, as values."""

from __future__ import annotations

import json

from istio_cni.install import plan


def test_a_server_that_was_found_by_its_name_is_verified_by_it() -> None:
    """The plugin connects to the address and asks no name service."""
    cluster = json.loads(plan.kubeconfig("https://10.0.0.1:443", b"", "t", "api.example"))
    assert cluster["clusters"][0]["cluster"]["tls-server-name"] == "api.example"
    assert b"tls-server-name" not in plan.kubeconfig("https://10.0.0.1:443", b"", "t")
