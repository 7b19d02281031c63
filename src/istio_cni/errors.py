"""All error types of the product, and how a foreign value is shown in them.

    IstioCNIError                 anything we can name; carries the CNI error code
    ├── IncompatibleVersion   1   cniVersion unknown, or the verb needs a newer one
    ├── UnknownContainer      3   CHECK: the network namespace is gone (never from ADD)
    ├── InvalidEnvironment    4   CNI_* missing or malformed
    ├── IOFailure             5   stdin, run dir or another file cannot be read or written
    ├── DecodingFailure       6   not JSON, or a version string that is none
    ├── InvalidNetconf        7   a key of the network configuration is missing or wrong
    ├── InvalidNetns          8   the namespace is the host's, or cannot be opened
    ├── TryAgainLater        11   clears by itself: API server down, lock held, time over
    │   ├── GivenUp               whoever asked has gone, or asks somebody else: no more changes
    │   └── Interrupted           programming was stopped half way; a later call completes or undoes
    ├── PluginNotAvailable   50   STATUS: the next ADD would fail
    ├── KubeconfigUnusable  101   the run dir's kubeconfig is missing or unusable
    ├── PodLookupFailed     102   the API server answers, but not with this pod
    ├── InvalidParameter    105   an annotation, flag or configuration value is refused
    │   └── InvalidSettings       several of them at once, a line each: exit status 2
    ├── ProgrammingFailed   106   the kernel or iptables refused the rules
    │   └── NoUsableBackend       no iptables variant works; lists every candidate
    ├── RulesAltered        107   CHECK: the rules are not what ADD made
    ├── CaptureNotWorking         validation mode: exit status 126
    └── InternalError       999   a fault of ours, and nothing else
        └── Stranded              a thread cannot get back to its own namespace: it must end

Codes below 100 are the CNI specification's; the others are documented in docs/errors.md.
"""

from __future__ import annotations

import errno

from istio_cni.constants import QUOTED_MAX_BYTES

try:
    from _json import encode_basestring_ascii
except ImportError:  # an interpreter that has it in Python only
    from json.encoder import encode_basestring_ascii


_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class IstioCNIError(Exception):
    """A failure with a CNI error code, a one-line message, and details that help beyond it."""

    code = 999

    def __init__(self, msg: str, details: str = "") -> None:
        super().__init__(msg)
        self.msg = msg
        self.details = details


class IncompatibleVersion(IstioCNIError):
    """The configuration's cniVersion is not supported, or too old for the verb."""

    code = 1


class UnknownContainer(IstioCNIError):
    """The container's network namespace does not exist any more; the runtime need not clean up."""

    code = 3


class InvalidEnvironment(IstioCNIError):
    """A CNI_* variable is missing or malformed; the message names it."""

    code = 4


class IOFailure(IstioCNIError):
    """A file or stream of ours cannot be read or written."""

    code = 5


class DecodingFailure(IstioCNIError):
    """Input that should be JSON, or a version, is not."""

    code = 6


class InvalidNetconf(IstioCNIError):
    """A key of the network configuration is missing or has a value that is not allowed."""

    code = 7


class InvalidNetns(IstioCNIError):
    """CNI_NETNS is the host's own namespace, or no namespace that can be opened."""

    code = 8


class TryAgainLater(IstioCNIError):
    """A condition that clears by itself; the runtime should repeat the call."""

    code = 11


class GivenUp(TryAgainLater):
    """Whoever asked has gone on alone; nothing is to be changed any more, records included."""


class Interrupted(TryAgainLater):
    """Programming was stopped half way, and what is there now is not known."""


class PluginNotAvailable(IstioCNIError):
    """STATUS: an ADD would fail now."""

    code = 50


class KubeconfigUnusable(IstioCNIError):
    """The kubeconfig in the run dir is missing, or holds nothing that we can use."""

    code = 101


class PodLookupFailed(IstioCNIError):
    """The API server answered, but the pod of this request is not to be had from it."""

    code = 102


class InvalidParameter(IstioCNIError):
    """A value that a person wrote (annotation, flag, variable, configuration key) is refused."""

    code = 105


class InvalidSettings(InvalidParameter):
    """Flags or variables of the node agent that are refused; each problem is one line."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ProgrammingFailed(IstioCNIError):
    """The kernel or a tool refused; the former state is restored unless the message says no."""

    code = 106


class NoUsableBackend(ProgrammingFailed):
    """No candidate can program this namespace; each is paired with the reason."""

    def __init__(self, msg: str, candidates: tuple[tuple[str, str], ...]) -> None:
        super().__init__(msg, "; ".join(f"{name}: {reason}" for name, reason in candidates))
        self.candidates = candidates


class RulesAltered(IstioCNIError):
    """CHECK: the kernel does not hold what ADD programmed; names the first difference."""

    code = 107


class CaptureNotWorking(IstioCNIError):
    """Validation mode: a probe connection was not redirected."""


class InternalError(IstioCNIError):
    """A fault of ours: any exception that is not one of the above."""

    @classmethod
    def of(cls, error: BaseException) -> InternalError:
        """Wrap a foreign exception; its traceback goes into the details."""
        import traceback  # a fault of ours only

        frames = traceback.format_exception(error)
        return cls(f"internal error: {type(error).__name__}: {quoted(str(error))}", "".join(frames))


def as_ours(error: BaseException) -> IstioCNIError:
    """Return an error of ours as it is, and any other one as what it is to us.

    That the system is short of something passes; all else is a fault of ours.
    """
    if isinstance(error, IstioCNIError):
        return error
    if isinstance(error, OSError) and error.errno in _SHORTAGES:
        return TryAgainLater(f"the system is short of something: {error.strerror}")
    return InternalError.of(error)


class Stranded(InternalError):
    """A thread is in a foreign namespace and cannot get home; it must do nothing more."""


def json_string(text: str) -> str:
    """Write a text as a JSON string in ASCII, by the function that `json.dumps` calls for it.

    The package itself loads re and enum, which costs a pod 7 ms; many messages need nothing else.
    """
    return encode_basestring_ascii(text)


def quoted(value: object) -> str:
    """Show a foreign value as JSON, control characters escaped, cut at 256 bytes.

    Pod annotations, file contents and program output reach logs, events and terminals; none of them
    may forge a line or move a cursor. What JSON has no form for is shown as the string it prints.
    """
    if not isinstance(value, str):
        import json  # values that should have been strings

        try:
            shown = json.dumps(value, default=str).replace("\x7f", "\\u007f")
        except (TypeError, ValueError, RecursionError):  # odd keys of a mapping, cycles
            return quoted(str(value))
        if len(shown) <= QUOTED_MAX_BYTES:
            return shown
        return f"{shown[:QUOTED_MAX_BYTES]}… ({len(shown)} characters)"
    text = value[:QUOTED_MAX_BYTES]
    while True:  # until it fits: never half an escape at the end
        shown = json_string(text).replace("\x7f", "\\u007f")
        excess = len(shown) - QUOTED_MAX_BYTES
        if excess <= 0:
            break
        text = text[: -(excess // 12 + 1)]  # a character takes twelve at most
    return shown if text == value else f'{shown[:-1]}…" ({len(value)} characters)'
