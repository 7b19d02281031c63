"""What a setting may be: how a text becomes a value, and what is said to be allowed if it cannot.

Every check takes the text that somebody wrote, or the default as it stands in the table. pydantic
collects the ValueErrors, whose text says what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator

from istio_cni.errors import InvalidParameter
from istio_cni.plugin.netconf import BACKENDS, VARIANTS
from istio_cni.rules import config as grammar

LEVELS = ("debug", "info", "warn", "error")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # of most objects of Kubernetes
FILE = re.compile(r"(?!\.{1,2}$)[^/\0]{1,200}")
MODE = re.compile(r"0?[0-7]{3}")
NUMBER = re.compile(r"-?[0-9]{1,9}")
NOT_YET = "is not part of this version"
GROUPS = "ids of groups and ranges of ids, or *"


def _bool(text: str) -> bool:
    """Read a boolean as Go spells it; set but empty is false."""
    found = grammar.parse_bool(text) if text else False
    if found is None:
        raise ValueError("true or false")
    return found


def _only(wanted: bool) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        if _bool(text) is not wanted:
            raise ValueError(f"{str(wanted).lower()}; {str(not wanted).lower()} {NOT_YET}")
        return wanted

    return check


def _mode(text: str) -> int:
    if not MODE.fullmatch(text):
        raise ValueError("a file mode in octal, such as 0600")
    return int(text, 8)


def _number(text: str) -> int:
    """Read a whole number; set but empty is 0."""
    if text and not NUMBER.fullmatch(text):
        raise ValueError("a number")
    return int(text or "0")


def _port(text: str) -> int:
    found = grammar.number(text, 1, 65535)
    if found is None:
        raise ValueError("a port, 1 to 65535")
    return found


def _namespaces(text: str) -> tuple[str, ...]:
    """Read a list separated by commas; blanks around items do not matter, empty items are none."""
    found = [item.strip() for item in text.split(",") if item.strip()]
    if not all(map(NAME.fullmatch, found)):
        raise ValueError("names of namespaces, separated by commas")
    return tuple(dict.fromkeys(found))


def _path(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError("an absolute path")
    return text


def _groups(text: str) -> str:
    try:
        found = grammar.parse_group_selection(text, "")
    except InvalidParameter:
        raise ValueError(GROUPS) from None
    if isinstance(found, tuple) and not all(map(grammar.is_id, found)):
        raise ValueError(f"{GROUPS}; a node's names mean nothing in a pod")
    return text


def _loopback(text: str) -> str:
    try:
        return grammar.parse_loopback(text, "")
    except InvalidParameter:
        raise ValueError("an IPv4 CIDR inside 127.0.0.0/8, such as 127.0.0.1/32") from None


def _matching(pattern: re.Pattern[str], allowed: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(allowed)
        return text

    return check


def _word(*words: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in words:
            raise ValueError(", ".join(word or '""' for word in words))
        return text

    return check


def _or_empty(check: Callable[[str], str]) -> BeforeValidator:
    return BeforeValidator(lambda text: check(text) if text else text)


_name = _matching(NAME, "a name of Kubernetes")

Bool = Annotated[bool, BeforeValidator(_bool)]
OnlyFalse = Annotated[bool, BeforeValidator(_only(False))]
OnlyTrue = Annotated[bool, BeforeValidator(_only(True))]
Number = Annotated[int, BeforeValidator(_number)]
Port = Annotated[int, BeforeValidator(_port)]
FileMode = Annotated[int, BeforeValidator(_mode)]
Directory = Annotated[str, BeforeValidator(_path)]
OptionalFile = Annotated[str, _or_empty(_path)]
FileName = Annotated[str, _or_empty(_matching(FILE, "a file name"))]
Name = Annotated[str, BeforeValidator(_name)]
OptionalName = Annotated[str, _or_empty(_name)]
Namespaces = Annotated[tuple[str, ...], BeforeValidator(_namespaces)]
Groups = Annotated[str, _or_empty(_groups)]
Loopback = Annotated[str, _or_empty(_loopback)]
Variant = Annotated[str, BeforeValidator(_word(*VARIANTS))]
Backend = Annotated[str, BeforeValidator(_word(*BACKENDS))]
LogLevel = Annotated[str, BeforeValidator(_word(*LEVELS))]
PluginLogLevel = Annotated[str, BeforeValidator(_word(*LEVELS, "fatal", "none"))]
