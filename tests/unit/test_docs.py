"""What the documentation claims is what the programs do."""

from __future__ import annotations

import inspect
import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from istio_cni import errors
from istio_cni.agent.settings import options
from istio_cni.capture.main import run
from istio_cni.capture.settings import SETTINGS
from istio_cni.plugin.annotations import ANNOTATIONS, KUBEVIRT
from istio_cni.plugin.netconf import Netconf

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "examples" / "README.md"]


def rows(page: str) -> list[list[str]]:
    """Return the cells of every table row of a page, without the code quotes."""
    lines = (ROOT / page).read_text().splitlines()
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [row for row in cells if len(row) > 1 and not set(row[0]) <= set("-: ")]


def names_in(page: str, column: int = 0) -> set[str]:
    """Return the words in code quotes of one column of a page's tables."""
    return {name for row in rows(page) for name in re.findall(r"`([^`]+)`", row[column])}


def test_readme_lists_every_annotation_with_its_default() -> None:
    """The table has a row for each annotation that shapes rules, and the default that applies."""
    listed = {row[0].strip("`"): row[2].strip("`") for row in rows("README.md") if len(row) == 4}
    for row in ANNOTATIONS:
        shown = listed[row.name]
        default = "none" if row.default == "" else row.default
        assert shown == default, row.name
    assert KUBEVIRT in listed


def test_readme_example_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The `--config` example's output is the program's, to the letter."""
    text = (ROOT / "README.md").read_text()
    match = re.search(r"\$ echo '(?P<config>.*?)' \|\n.*?--dry-run\n(?P<output>.*?)```", text, re.S)
    assert match is not None
    stdin, sys.stdin = sys.stdin, io.StringIO(match["config"])
    try:
        out = io.StringIO()
        with redirect_stdout(out):
            assert run(["--config", "-", "--dry-run"], {}) == 0
    finally:
        sys.stdin = stdin
    assert out.getvalue() == match["output"]


def test_readme_commands_exist() -> None:
    """Every `make` target that the pages name is one."""
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"(?:^|`)make ([a-z0-9]+)", text, re.M)
        assert set(named) <= targets, page


def test_configuration_lists_every_key() -> None:
    """The page has exactly the keys that the plugin reads, and those that go by another name."""
    keys = names_in("docs/configuration.md")
    expected = {*Netconf.__slots__, "native_nftables", "capabilities"}
    assert expected <= keys


def test_configuration_lists_every_setting() -> None:
    """With its flags and variables, and the default that help shows, if it is a plain one."""
    keys = {setting.key for setting in SETTINGS}
    listed = {
        row[0].strip("`"): row[1:] for row in rows("docs/configuration.md") if row[0][1:-1] in keys
    }
    assert listed.keys() == keys
    for setting in SETTINGS:
        names, default, _ = listed[setting.key]
        flags = [f"--{setting.flag}"] if setting.flag else []
        flags += [f"-{setting.short}"] if setting.short else []
        assert re.findall(r"`([^`]+)`", names) == [*flags, *setting.env], setting.key
        if setting.default:
            assert default == f"`{setting.default}`"


def test_configuration_lists_every_option_of_the_node_agent() -> None:
    """Those of its model and no other, with the default."""
    page = (ROOT / "docs/configuration.md").read_text()
    section = page.split("## Configuration of install-cni\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(--[a-z0-9-]+)` \| (?:empty|`(.+?)`) \|", section, re.M)
    assert listed == [(option.flag, option.default) for option in options()]


def test_errors_lists_every_code() -> None:
    """The page has a row for each code that an error of ours carries, and no other."""
    classes = [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.IstioCNIError)
    ]
    listed = {int(row[0]) for row in rows("docs/errors.md") if row[0].isdigit()}
    assert listed == {value.code for value in classes}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links of a page point to files that exist."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_departures_name_tests_that_exist() -> None:
    """Each departure from the reference names its test, and that test is there."""
    named = 0
    for row in rows("docs/departures.md"):
        for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[-1]):
            assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
            named += 1
    assert named >= 20
