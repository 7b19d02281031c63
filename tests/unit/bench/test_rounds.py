"""The order of the rounds, and how a program is started and timed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from bench import __main__ as program
from bench.figures import FLOOR
from bench.process import BenchFailed, run


class Fake:
    """A case that takes notes of its calls."""

    def __init__(self, name: str, notes: list[str], every: int = 1) -> None:
        self.rows = (f"{name} one", f"{name} two")
        self.every = every
        self._name = name
        self._notes = notes

    def prepare(self) -> None:
        """Note it."""
        self._notes.append("-")

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Note it, a proof as a capital letter."""
        self._notes.append(self._name.upper() if prove else self._name)
        return (1.0, 2.0)


def test_each_round_has_every_case_once_in_an_order_that_moves_on() -> None:
    """All are prepared first; the round before the first proves, and does not count."""
    notes: list[str] = []
    samples = program.measure([Fake(name, notes) for name in "abc"], 3)
    assert "".join(notes) == "---ABC---bca---cab---abc"
    assert samples["a one"] == [1.0] * 3
    assert samples["c two"] == [2.0] * 3


def test_a_heavy_case_comes_every_so_many_rounds() -> None:
    """It is proved like all others, and has a sample even in a run of one round."""
    notes: list[str] = []
    cases = [Fake("a", notes), Fake("b", notes, every=3)]
    samples = program.measure(cases, 5)
    assert "".join(notes) == "--AB--ba-a-a--ab-a"
    assert (len(samples["a one"]), len(samples["b one"])) == (5, 2)
    assert len(program.measure(cases, 1)["b one"]) == 1


@pytest.mark.parametrize(
    ("words", "rows"), [(None, "ab"), (["b o"], "b"), (["a", "b two"], "ab"), (["two"], "ab")]
)
def test_rows_are_chosen_by_words_in_their_names(words: list[str] | None, rows: str) -> None:
    """A case goes with any of its rows."""
    found = [Fake(name, []) for name in "ab"]
    chosen = program._wanted(found, words)  # noqa: SLF001 # the whole of `--rows`
    assert "".join(case.rows[0][0] for case in chosen) == rows


def test_a_word_for_memory_chooses_the_floor_only() -> None:
    """There is no case of it: it is looked at when all has been measured."""
    found = [Fake("floor", [])]
    found[0].rows = (FLOOR,)
    assert program._wanted([*found, Fake("a", [])], ["RSS"]) == found  # noqa: SLF001 # likewise


def test_a_word_in_no_row_is_refused() -> None:
    """With the names that there are."""
    with pytest.raises(BenchFailed, match="a one\n  a two"):
        program._wanted([Fake("a", [])], ["nothing"])  # noqa: SLF001 # likewise


def test_a_program_is_given_its_streams_and_timed() -> None:
    """Nothing of our environment reaches it."""
    script = "read line; echo $line $WHAT; echo said >&2; env; exit 3"
    outcome = run(["/bin/sh", "-c", script], {"WHAT": "it"}, b"do\n")
    assert outcome.stdout.splitlines()[0] == b"do it"
    assert b"HOME=" not in outcome.stdout
    assert (outcome.status, outcome.stderr) == (3, b"said\n")
    assert 0 < outcome.took_s < 30
