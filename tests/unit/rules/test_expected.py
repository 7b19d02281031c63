"""Every case's rules, held as the whole text that `istio-iptables --dry-run` prints."""

from __future__ import annotations

import json
import os

import pytest

from cases import CASES
from istio_cni.capture.main import run
from istio_cni.capture.settings import to_settings

ENDINGS = {"iptables": "iptables", "nft": "nftables"}
"""The back end whose text a file of that name holds."""
EXPECTED = os.path.join(os.path.dirname(__file__), "expected")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", CASES)
def test_dry_run_prints_the_expected_rules(
    name: str,
    ending: str,
    tmp_path: os.PathLike[str],
    capsys: pytest.CaptureFixture[str],
    refresh_expected: bool,
) -> None:
    """The documents under their headers, nothing else on stdout."""
    path = os.path.join(tmp_path, "capture.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(to_settings(CASES[name].config._replace(backend=ENDINGS[ending])), file)
    assert run(["--config", path, "--dry-run"], {}) == 0
    text = capsys.readouterr().out
    expected = os.path.join(EXPECTED, f"{name}.{ending}")
    if refresh_expected:
        with open(expected, "w", encoding="utf-8") as file:
            file.write(text)
    with open(expected, encoding="utf-8") as file:
        assert text == file.read()


def test_every_expected_file_belongs_to_a_case() -> None:
    """A case that was renamed leaves no file behind."""
    assert sorted(os.listdir(EXPECTED)) == sorted(
        f"{name}.{ending}" for name in CASES for ending in ENDINGS
    )
