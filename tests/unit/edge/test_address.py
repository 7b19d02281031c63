"""Which hosts are addresses already, and what a name becomes."""

from __future__ import annotations

import pytest

from istio_cni.edge.kube import address


@pytest.mark.parametrize(
    ("host", "numeric"),
    [
        ("10.0.0.1", True),
        ("fd00::1", True),
        ("[fd00::1]", True),
        ("localhost", False),
        ("10.0.0.1.example", False),
        ("", False),
    ],
)
def test_addresses_are_told_from_names(host: str, numeric: bool) -> None:
    """With the brackets of a URL and without."""
    assert address.is_numeric(host) is numeric


def test_a_name_becomes_an_address() -> None:
    """Or an error that says why not."""
    assert address.is_numeric(address.resolve("localhost"))
    with pytest.raises(OSError, match=r"\w"):
        address.resolve("no-such-host.invalid")
