"""JSON in and out: what is taken, what is refused, and that nothing is respelled on the way."""

from __future__ import annotations

import json

import pytest

from istio_cni.cni.document import MAX_DEPTH, Number, decode, render
from istio_cni.errors import DecodingFailure

NUMBERS = [
    "0",
    "-0",
    "1.0",
    "1.50",
    "1e3",
    "1E+3",
    "-0.0",
    "1e999",
    "123456789012345678901",
    "9" * 5000,
]


def nested(levels: int) -> bytes:
    """Write an object of so many levels."""
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(
    "stdin",
    [
        b"",
        b" \n",
        b"{",
        b"{} {}",
        b"null",
        b"[]",
        b'"text"',
        b"3",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\0}\0",
        b'{"a": "\n"}',
        b"{'a': 1}",
        nested(MAX_DEPTH + 1),
        nested(100_000),
        b"[" * 100_000,
    ],
    ids=lambda stdin: repr(stdin[:20]),
)
def test_anything_but_one_json_object_is_a_decoding_failure(stdin: bytes) -> None:
    """Not UTF-8, not JSON, not an object, or too deep: code 6, never another exception."""
    with pytest.raises(DecodingFailure, match=r"^stdin is ") as caught:
        decode(stdin)
    assert caught.value.code == 6
    assert "\n" not in caught.value.msg


def test_what_is_as_deep_as_allowed_is_taken() -> None:
    """The limit itself is within the limit, for reading and for writing."""
    assert render(decode(nested(MAX_DEPTH))).count("{") == MAX_DEPTH


def test_of_a_repeated_key_the_last_one_counts() -> None:
    """As in the decoders of the runtimes."""
    assert decode(b'{"name": "a", "name": "b"}') == {"name": "b"}


@pytest.mark.parametrize("text", NUMBERS, ids=lambda text: text[:12])
def test_a_number_is_written_as_it_was_read(text: str) -> None:
    """No digit, exponent or sign changes, and none is too long."""
    assert render(decode(b'{"n": %s}' % text.encode())) == f'{{\n    "n": {text}\n}}'


def test_a_number_is_still_a_number() -> None:
    """Its text is for printing; it compares and prints in messages as a number."""
    value = decode(b'{"n": 1.50}')["n"]
    assert value == 1.5
    assert isinstance(value, Number)
    assert str(value) == "1.50"


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": []},
        {"a": {}, "b": [1, [2, {"c": None}]], "ü": 'ü\u2028\x7f"\\\n'},
        {"a": [True, False, None, -1, 1.5, ""]},
        {"lone surrogate": "\ud800"},
    ],
)
def test_render_prints_what_the_standard_library_prints(value: dict[str, object]) -> None:
    """Four spaces a level, keys in order, ASCII, no newline at the end; and it reads back."""
    assert render(value) == json.dumps(value, indent=4)
    assert decode(render(value).encode()) == value


@pytest.mark.parametrize("value", [{"a": object()}, {"a": {1, 2}}])
def test_what_json_cannot_say_is_a_type_error(value: object) -> None:
    """The caller turns it into an internal error; half a document is never printed."""
    with pytest.raises(TypeError):
        render(value)


def test_nan_is_never_written() -> None:
    """No other decoder would take it."""
    with pytest.raises(ValueError, match="JSON"):
        render({"a": float("nan")})
