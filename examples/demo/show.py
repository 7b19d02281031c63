"""What a person sees: headings, notes, checks, a summary, each line as soon as it is known.

On a terminal there are colours (unless NO_COLOR says otherwise) and lines that fit its width;
anywhere else plain text, one line for each check.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import TextIO

GREEN, RED, BOLD, DIM = "32", "31", "1", "2"
MARKS = {True: "✓", False: "✗"}
WORDS = {True: "ok    ", False: "FAILED"}  # where the encoding has no marks
NARROWEST = 40


class Show:
    """Writes to one stream and counts checks."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str]) -> None:
        self._stream = stream
        terminal = stream.isatty()
        dumb = environ.get("TERM", "dumb") == "dumb"
        self._colours = terminal and not dumb and not environ.get("NO_COLOR")
        self._marks = MARKS if _can_write(stream, MARKS.values()) else WORDS
        columns = shutil.get_terminal_size().columns if terminal else 0
        self._width = max(columns, NARROWEST) if terminal else 0
        self._gap = ""
        self.passed = self.failed = 0

    def heading(self, text: str) -> None:
        """Begin a part."""
        lines = "\n".join(self._fitted(text, "", ""))
        self._write(f"{self._gap}{self._coloured(BOLD, lines)}")
        self._gap = "\n"

    def note(self, text: str) -> None:
        """Say something that is not checked."""
        self._write("\n".join(self._fitted(text, "  ", "  ")))

    def listing(self, lines: Iterable[str]) -> None:
        """Show lines of a program as they are."""
        for line in lines:
            self._write(self._coloured(DIM, f"    {line}"))

    def check(self, what: str, passed: bool, found: str = "", column: int = 0) -> None:
        """Report one check; `found` is what was seen, and worth reading either way.

        With a column, `found` stands there, which makes a table of several checks.
        """
        if passed:
            self.passed += 1
        else:
            self.failed += 1
        mark = self._marks[passed]
        text = f"{what}: {found}" if found else what
        if column:
            text = f"{what:<{column}} {found}"
        first, *rest = self._fitted(text, f"  {mark} ", " " * (len(mark) + 3))
        colour = GREEN if passed else RED
        self._write("\n".join((first.replace(mark, self._coloured(colour, mark), 1), *rest)))

    def summary(self, seconds: float) -> None:
        """End with one line."""
        total = self.passed + self.failed
        text = f"{self.passed} of {total} checks passed in {seconds:.1f} s"
        self._write(f"\n{self._coloured(RED if self.failed else GREEN, text)}")

    def _fitted(self, text: str, first: str, rest: str) -> list[str]:
        """Break a text into lines where there is a width to fit into."""
        if not self._width:
            return [first + text]
        return textwrap.wrap(
            text,
            self._width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _coloured(self, colour: str, text: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self._colours else text

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _can_write(stream: TextIO, texts: Iterable[str]) -> bool:
    """Tell whether a stream's encoding has these characters."""
    try:
        "".join(texts).encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
