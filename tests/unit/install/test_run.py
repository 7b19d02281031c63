"""The order of the parts, and what trouble with one of them means for the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from istio_cni.errors import IOFailure
from istio_cni.install.run import RELOAD_S, Installer


class Part:
    """Tells a shared list what it was told to do; fails while `failure` is set."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self.done = done
        self.failure: Exception | None = None
        self.log: list[str] = []
        self.comes_back = False

    def _step(self, verb: str) -> Iterator[str]:
        if self.failure:
            raise self.failure
        self.done.append(f"{verb} {self.name}")
        yield f"{verb} {self.name}"

    def install(self) -> Iterator[str]:
        """Install."""
        self.log.append(f"+ {self.name}")
        return self._step("+")

    def remove(self) -> Iterator[str]:
        """Remove what is there."""
        if self.failure or f"+ {self.name}" in self.log:
            self.log = [] if not self.comes_back else self.log
            return self._step("-")
        return iter(())


@pytest.fixture
def done() -> list[str]:
    """Return the list of what was done, in order."""
    return []


@pytest.fixture
def parts(done: list[str]) -> list[Part]:
    """Make three parts, as there are."""
    return [Part(name, done) for name in ("bundle", "kubeconfig", "conflist")]


def test_the_conflist_waits_for_what_it_leads_to(parts: list[Part], done: list[str]) -> None:
    """What is missing is the first trouble, and all is well once it is gone."""
    installer = Installer(parts)
    assert installer.missing
    parts[1].failure = IOFailure("no kubeconfig")
    installer.look()
    assert (done, installer.missing) == (["+ bundle"], "no kubeconfig")
    parts[1].failure = None
    installer.look()
    assert done[1:] == ["+ bundle", "+ kubeconfig", "+ conflist"]
    assert installer.missing == ""


def test_once_installed_trouble_with_one_part_leaves_the_others_be(
    parts: list[Part], done: list[str]
) -> None:
    """The entry is kept in the conflist also while the API server is away."""
    installer = Installer(parts)
    installer.look()
    done.clear()
    parts[1].failure = IOFailure("the token has ended")
    installer.look()
    assert (done, installer.missing) == (["+ bundle", "+ conflist"], "the token has ended")


def test_all_trouble_is_told_at_once(parts: list[Part], caplog: pytest.LogCaptureFixture) -> None:
    """Who mends one thing must not find the next one afterwards."""
    counted: list[str] = []
    installer = Installer(parts, counted.append)
    installer.look()
    parts[0].failure = IOFailure("no bundle")
    for _ in range(2):
        parts[1].failure = IOFailure("the token has ended")
        installer.look()
        assert installer.missing == "no bundle; the token has ended"
        parts[1].failure = None
        installer.look()
        assert installer.missing == "no bundle"
    assert counted == ["", "Part", "Part", "Part"]  # one for the bundle, two for the token
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "not in place: no bundle",
        "not in place: the token has ended",
        "not in place: the token has ended",
    ]


def test_the_same_trouble_is_told_of_once(
    parts: list[Part], caplog: pytest.LogCaptureFixture
) -> None:
    """Though it is looked for every second."""
    caplog.set_level(logging.WARNING)
    parts[2].failure = IOFailure("no configuration yet")
    installer = Installer(parts)
    for _ in range(3):
        installer.look()
    assert [record.getMessage() for record in caplog.records] == [
        "not in place: no configuration yet"
    ]


def test_a_fault_of_ours_is_trouble_as_any_other(parts: list[Part]) -> None:
    """The next look goes on."""
    installer = Installer(parts)
    parts[0].failure = ZeroDivisionError("oops")
    installer.look()
    assert installer.missing == 'internal error: ZeroDivisionError: "oops"'
    parts[0].failure = None
    installer.look()
    assert installer.missing == ""


def test_the_way_out_is_the_way_in_backwards(
    parts: list[Part], done: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With time for runtimes before the program goes; a step that fails is no reason to stop."""
    installer = Installer(parts)
    installer.look()
    done.clear()
    parts[1].failure = IOFailure("read-only")
    installer.remove(lambda seconds: done.append(f"wait {seconds}"))
    assert done == ["- conflist", f"wait {RELOAD_S}", "- bundle"]
    assert installer.missing
    assert caplog.records[-1].getMessage() == "not taken away: read-only"


def test_where_the_entry_stays_the_plugin_stays(parts: list[Part], done: list[str]) -> None:
    """Else the runtime would fail every pod for want of a program that it is told to call."""
    installer = Installer(parts)
    installer.look()
    done.clear()
    parts[2].failure = IOFailure("read-only")
    installer.remove(lambda seconds: done.append(f"wait {seconds}"))
    assert done == []


def test_an_entry_that_comes_back_keeps_the_plugin(parts: list[Part], done: list[str]) -> None:
    """Once is taken out again; one that always does is somebody else's wish."""
    installer = Installer(parts)
    installer.look()
    done.clear()

    def put_back(_seconds: float) -> None:
        if done == ["- conflist"]:
            parts[2].log.append("+ conflist")

    installer.remove(put_back)
    assert done == ["- conflist", "- conflist", "- kubeconfig", "- bundle"]
    installer.look()
    done.clear()
    parts[2].comes_back = True
    installer.remove(lambda _seconds: None)
    assert set(done) == {"- conflist"}
