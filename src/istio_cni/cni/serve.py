"""The dispatcher: one CNI call in, one JSON document or nothing out, an exit status.

Everything a runtime can see of a call is decided here, so that no verb can get it wrong: what is
printed where, that stdout gets one document at most, in which version, and that any failure
whatever becomes an error object. DEL and GC cannot fail once their request is understood: the
last plugin of a chain is the first to be asked for DEL, and its error would keep the pod's
addresses and leave the pod terminating. What went wrong is in the log instead, as is any failure.

VERSION needs neither stdin nor JSON and loads neither: runtimes ask it of every plugin of a
chain.
"""

from __future__ import annotations

from istio_cni.cni.document import render
from istio_cni.cni.request import complete, parse_environment, request_version
from istio_cni.constants import NEWEST_VERSION, STDIN_MAX_BYTES, SUPPORTED_VERSIONS
from istio_cni.errors import InternalError, IOFailure, IstioCNIError, as_ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

    from istio_cni.cni.document import JSON
    from istio_cni.cni.request import Request

    Verbs = Mapping[str, Callable[[Request], JSON | None]]
    Report = Callable[[str, str, IstioCNIError], None]  # verb, container id, what went wrong


def serve(
    env: Mapping[str, str],
    read_stdin: Callable[[], bytes],
    stdout: TextIO,
    stderr: TextIO,
    verbs: Verbs,
    report: Report,
    about: str,
) -> int:
    """Run one verb, write its one document, return the exit status.

    A verb without handler succeeds. `report` logs what went wrong. `about` is what a person reads
    who starts the plugin by hand; without it, that is an error. stdin is read once, and not at all
    where the protocol needs none.
    """
    command = env.get("CNI_COMMAND", "")
    if not command and about:
        write(
            stderr, f"{about}\nCNI protocol versions supported: {', '.join(SUPPORTED_VERSIONS)}\n"
        )
        return 0
    if command == "VERSION":
        return 0 if write(stdout, answer_version()) else 1
    stdin, status = b"", 0
    try:
        request = parse_environment(env)  # what is wrong there is said without waiting for stdin
        stdin = _read(read_stdin)
        answer = _run(complete(request, stdin), verbs, report)
        text = "" if answer is None else render(answer)
    except Exception as error:  # the one place where a failure becomes the runtime's
        known = _reported(error, command, env.get("CNI_CONTAINERID", ""), report)
        text, status = _refusal(known, error, request_version(stdin)), 1
    if text and not write(stdout, text):
        unread = IOFailure("the answer cannot be written to stdout: nobody reads it")
        _reported(unread, command, env.get("CNI_CONTAINERID", ""), report)
        return 1
    return status


def answer_version() -> str:
    """Write the answer to VERSION by hand: `json` alone would double the time of the call."""
    versions = ",\n".join(f'        "{version}"' for version in SUPPORTED_VERSIONS)
    head = f'{{\n    "cniVersion": "{NEWEST_VERSION}",\n    "supportedVersions": [\n'
    return f"{head}{versions}\n    ]\n}}"


def _read(read_stdin: Callable[[], bytes]) -> bytes:
    """Read all of stdin; raises IOFailure."""
    try:
        stdin = read_stdin()
    except (OSError, ValueError) as error:  # ValueError: closed before we were started
        raise IOFailure(f"cannot read the network configuration from stdin: {error}") from error
    if len(stdin) > STDIN_MAX_BYTES:
        raise IOFailure(f"the network configuration on stdin has more than {STDIN_MAX_BYTES} bytes")
    return stdin


def _run(request: Request, verbs: Verbs, report: Report) -> JSON | None:
    """Call the verb's handler; what it returns is printed for ADD alone."""
    handler = verbs.get(request.command)
    if handler is None:
        return None
    try:
        answer = handler(request)
    except Exception as error:
        if request.command not in ("DEL", "GC"):
            raise
        _reported(error, request.command, request.container_id, report)
        return None
    return answer if request.command == "ADD" else None


def _reported(error: Exception, verb: str, container_id: str, report: Report) -> IstioCNIError:
    """Log a failure and return it as one of ours; a log that fails is not worth a call."""
    known = as_ours(error)
    try:
        report(verb, container_id, known)
    except Exception:
        return known
    return known


def _refusal(known: IstioCNIError, error: Exception, version: str) -> str:
    """Write the error object of a failed call; tracebacks are for the log only."""
    details = _origin(error) if isinstance(known, InternalError) else known.details
    refusal: JSON = {"cniVersion": version, "code": known.code, "msg": known.msg}
    return render(refusal | {"details": details} if details else refusal)


def _origin(error: Exception) -> str:
    """Say in a few words where an exception was raised: file, line, function.

    One that a child process had comes with that process's traceback as its details.
    """
    if isinstance(error, InternalError):
        for line in reversed(error.details.splitlines()):
            if line.startswith('  File "'):
                _, path, rest = line.split('"', 2)
                number, _, function = rest.removeprefix(", line ").partition(", in ")
                return f"{path.rpartition('/')[2]}:{number} in {function}"
    frames = error.__traceback__
    if frames is None:
        return ""
    while frames.tb_next is not None:
        frames = frames.tb_next
    code = frames.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{frames.tb_lineno} in {code.co_qualname}"


def write(stream: TextIO, text: str) -> bool:
    """Write a text and flush it; False when nobody can read it any more."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        _close(stream)
        return False
    return True


def _close(stream: TextIO) -> None:
    """Give up a broken stream, or the interpreter would complain of it once more at its end."""
    try:
        stream.close()
    except (OSError, ValueError):
        return
