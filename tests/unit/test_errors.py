"""How foreign values are shown, on one line, harmless, and not too long; what errors are to us."""

from __future__ import annotations

import datetime
import errno
import json

import pytest

from istio_cni.constants import QUOTED_MAX_BYTES
from istio_cni.errors import (
    InternalError,
    InvalidNetns,
    TryAgainLater,
    as_ours,
    json_string,
    quoted,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("eth0", '"eth0"'),
        ("", '""'),
        ('a"b\\', r'"a\"b\\"'),
        ("a\nb\t\x1b[2J\x00", r'"a\nb\t\u001b[2J\u0000"'),
        ("\x7f\x9bü\u2028\ud800", r'"\u007f\u009b\u00fc\u2028\ud800"'),
        (None, "null"),
        (True, "true"),
        (5, "5"),
        (1.5, "1.5"),
        (["a", 1], '["a", 1]'),
        ({"a": {"b": "\x7f"}}, r'{"a": {"b": "\u007f"}}'),
        ({1: 2}, '{"1": 2}'),
        ({(1, 2): 3}, '"{(1, 2): 3}"'),
        (datetime.date(2026, 1, 2), '"2026-01-02"'),
        (ValueError('not "this"'), r'"not \"this\""'),
    ],
)
def test_a_value_is_shown_as_json(value: object, shown: str) -> None:
    """ASCII without control characters; what JSON cannot say is a string."""
    assert quoted(value) == shown


@pytest.mark.parametrize("text", ["x", "\\", '"', "\x01", "ü", "😀", "\x7f", "a\n"])
@pytest.mark.parametrize("size", [254, 256, 257, 300, 10_000])
def test_a_long_text_is_cut_between_characters(text: str, size: int) -> None:
    """What is left is JSON, but for the mark that something is missing, and its length is told."""
    value = (text * size)[:size]
    shown = quoted(value)
    if shown.endswith('"'):
        assert json.loads(shown) == value
    else:
        head, mark, tail = shown.partition('…" ')
        assert (mark, tail) == ('…" ', f"({size} characters)")
        assert value.startswith(json.loads(f'{head}"'))
        assert QUOTED_MAX_BYTES - 13 <= len(head) + 1 <= QUOTED_MAX_BYTES
    assert len(shown.encode()) < QUOTED_MAX_BYTES + 30


def test_a_large_value_is_cut() -> None:
    """Nesting without end included."""
    shown = quoted(list(range(10_000)))
    assert shown.startswith("[0, 1, 2")
    assert shown.endswith("characters)")
    assert len(shown) < QUOTED_MAX_BYTES + 30
    endless: list[object] = []
    endless.append(endless)
    assert quoted(endless) == '"[[...]]"'


@pytest.mark.parametrize("text", ["", "a", 'a"\\/\b\f\n\r\t', "ü€😀\u2028\x7f\x00", "\udcff"])
def test_a_json_string_is_the_standard_library_s(text: str) -> None:
    """Only cheaper to get."""
    assert json_string(text) == json.dumps(text)


def test_a_shortage_passes_and_a_fault_does_not() -> None:
    """The runtime repeats a call that failed for want of descriptors or memory."""
    assert as_ours(OSError(errno.EMFILE, "Too many open files")).code == TryAgainLater.code
    assert as_ours(OSError(errno.ENOSPC, "No space left on device")).code == InternalError.code
    refused = InvalidNetns("no")
    assert as_ours(refused) is refused
