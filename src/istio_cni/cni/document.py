"""JSON documents of the protocol: stdin to an object, an object to the text on stdout.

A chained plugin hands on a result that others made. The standard library's decoder and encoder
would respell its numbers on the way (`1.50` becomes 1.5, `1e3` becomes 1000.0), and would accept
and print NaN, which no other decoder takes. So numbers whose spelling would change keep their
text, and the writer is ours: four spaces a level, as the reference prints.

The parser is the standard library's, taken from the C module below `json`: the package loads re and
enum for the sake of its error messages, and that would cost a pod that is not ours more than all
the rest of the call. Where the module is missing or the text is wrong, the package is asked.
"""

from __future__ import annotations

from istio_cni.errors import DecodingFailure, json_string, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    JSON = dict[str, object]

MAX_DEPTH = 200  # levels: far above any configuration, far below what the interpreter's stack holds
MAX_INTEGER_DIGITS = 600  # the interpreter may refuse to convert an integer of more than 640


class Number(float):
    """A JSON number that keeps its text where Python's would change it: `1.50`, `1e3`, `-0`."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        """Take the number as it was written."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __repr__(self) -> str:
        return self.text


def decode(text: bytes, where: str = "stdin") -> JSON:
    """Read the JSON object on stdin or `where`; of a repeated key the last one counts.

    Raises DecodingFailure: not UTF-8, not JSON (NaN is none), no object, or nested without measure.
    """
    if not text.strip():
        raise DecodingFailure(f"{where} is empty: a network configuration in JSON is expected")
    try:
        config = _parse(text.decode())
        may_be_deep = text.count(b"{") + text.count(b"[") > MAX_DEPTH
        too_deep = may_be_deep and _is_deeper(config, MAX_DEPTH)
    except RecursionError:
        too_deep = True
    except ValueError as error:  # bytes that are no UTF-8 end here, too
        raise DecodingFailure(f"{where} is not JSON: {error}") from error
    if too_deep:
        raise DecodingFailure(f"{where} is JSON nested more than {MAX_DEPTH} levels deep")
    if not isinstance(config, dict):
        raise DecodingFailure(f"{where} is not a JSON object: {quoted(config)}")
    return config


def render(value: object, line: str = "\n") -> str:
    """Write a value as JSON: ASCII, four spaces a level, no newline at the end.

    `line` starts a line on the value's own level. Raises TypeError for what JSON cannot say.
    """
    inner = line + "    "
    if isinstance(value, str):
        return json_string(value)
    if isinstance(value, dict):
        members = [
            f"{inner}{json_string(key)}: {render(item, inner)}" for key, item in value.items()
        ]
        return f"{{{','.join(members)}{line}}}" if members else "{}"
    if isinstance(value, (list, tuple)):
        items = [inner + render(item, inner) for item in value]
        return f"[{','.join(items)}{line}]" if items else "[]"
    if isinstance(value, Number):
        return value.text
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    import json  # nothing that was decoded here

    return json.dumps(value, allow_nan=False)


class _Rules:
    """How JSON is read, in the attributes that the scanner asks its `json.JSONDecoder` for."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None

    @staticmethod
    def parse_int(text: str) -> int | Number:
        """Read an integer; one that `int` would respell or refuse keeps its text."""
        return Number(text) if text == "-0" or len(text) > MAX_INTEGER_DIGITS else int(text)

    @staticmethod
    def parse_float(text: str) -> Number:
        """Read a number with a point or an exponent."""
        return Number(text)

    @staticmethod
    def parse_constant(name: str) -> object:
        """Refuse what Python's decoder takes and no other one does: NaN and the infinities."""
        raise ValueError(f"{name} is no value of JSON")


def _parse(text: str) -> object:
    """Parse one JSON value; raises ValueError, which tells where the text is wrong."""
    try:
        from _json import make_scanner

        stripped = text.strip(" \t\n\r")
        value, end = make_scanner(_Rules)(stripped, 0)  # type: ignore[arg-type] # duck-typed
        if end == len(stripped):
            return value
    except (ImportError, AttributeError, StopIteration, ValueError, SystemError):
        pass  # SystemError: the scanner cannot raise its own error while the package is not loaded
    import json  # to say what is wrong and where

    return json.loads(
        text,
        parse_int=_Rules.parse_int,
        parse_float=_Rules.parse_float,
        parse_constant=_Rules.parse_constant,
    )


def _is_deeper(value: object, levels: int) -> bool:
    """Tell whether lists and objects are nested in more than so many levels."""
    containers = [value]
    for _ in range(levels):
        containers = [
            child
            for item in containers
            for child in (
                item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            )
            if isinstance(child, (dict, list))
        ]
        if not containers:
            return False
    return True
