"""`istio-cni`: started by the container runtime, once per pod and verb.

Reads CNI_* variables and stdin, answers on stdout, logs on stderr. Runtimes start it for every pod
of the node, so what most pods do not need is imported later: docs/architecture.md has the budget.
"""

from __future__ import annotations

import gc
import os
import sys

from istio_cni.cni.request import VERBS
from istio_cni.cni.serve import serve
from istio_cni.constants import QUOTED_MAX_BYTES, STDIN_MAX_BYTES, VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn, TextIO

    from istio_cni.cni.document import JSON
    from istio_cni.cni.request import Request
    from istio_cni.cni.serve import Report, Verbs
    from istio_cni.errors import IstioCNIError
    from istio_cni.plugin.log import Log

ABOUT = f"istio-cni {VERSION}: captures pod traffic for a service mesh; a chained CNI plugin"


def main() -> NoReturn:
    """Run the plugin and end the process on the spot.

    Nothing is left to clean up, and the interpreter's own way out takes as long as an ADD of a pod
    that is not ours.
    """
    gc.disable()  # looking for cycles is a twentieth of a captured ADD; the process ends in seconds
    try:
        status = run()
    except KeyboardInterrupt:
        status = 130
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # closed, then or now
            continue
    os._exit(status)


def run() -> int:
    """Run the plugin with the process's environment and streams; return its exit status."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"istio-cni {VERSION}\n")
        return 0
    _undo_when_told_to_end()
    stdin, stdout, stderr = _open_streams()
    env = {name: value for name, value in os.environ.items() if name.startswith("CNI_")}
    logs: list[Log] = []
    verbs, report = _host(env, stderr, logs)

    def read_stdin() -> bytes:
        return stdin.buffer.read(STDIN_MAX_BYTES + 1)  # one more, so that too much is noticed

    try:
        return serve(env, read_stdin, stdout, stderr, verbs, report, ABOUT)
    finally:
        for log in logs:
            log.close()


def _undo_when_told_to_end() -> None:
    """Take SIGTERM for SIGINT: what is half done is undone on the way out."""
    import _signal  # type: ignore[import-not-found] # `signal` wraps it in enums, for 5 ms

    _signal.signal(_signal.SIGTERM, _signal.default_int_handler)


def _open_streams() -> tuple[TextIO, TextIO, TextIO]:
    """Return the standard streams, one that is closed opened on /dev/null.

    Else the next file to be opened would get its number, and be read or written in its place.
    """
    return (
        sys.stdin or open(os.devnull),
        sys.stdout or open(os.devnull, "w"),
        sys.stderr or open(os.devnull, "w"),
    )


def _host(env: dict[str, str], stderr: TextIO, logs: list[Log]) -> tuple[Verbs, Report]:
    """Return the verbs and what logs a failure; both are loaded when they are called.

    So VERSION does not pay for them, and a bundle that is damaged fails as any other call does. The
    log that they make is put into `logs`.
    """

    def log() -> Log:
        if not logs:
            logs.append(_log(env, stderr))
        return logs[0]

    def call(request: Request) -> JSON | None:
        from istio_cni.plugin.host import Host  # every verb but VERSION
        from istio_cni.plugin.verbs import Verbs

        override = env.get("CNI_NETNS_OVERRIDE", "").lower() in ("1", "true")
        return Verbs(Host(log(), netns_override=override)).table()[request.command](request)

    def report(verb: str, container_id: str, error: IstioCNIError) -> None:
        log().bind(verb=verb, container_id=container_id)
        log().failure(error)

    return dict.fromkeys(VERBS, call), report


def _log(env: dict[str, str], stderr: TextIO) -> Log:
    """Make the log of a call; it says why the launcher did not leave it to the agent.

    That there is no agent is a way to run a node, and a field of the next line. Other reasons are
    worth a line of their own. The agent counts both.
    """
    from istio_cni.plugin.log import Log  # every verb but VERSION

    log = Log(stderr, request_id=env.get("CNI_ISTIO_REQUEST_ID", ""))
    reason = env.get("CNI_ISTIO_FALLBACK", "")[:QUOTED_MAX_BYTES]
    word, _, text = reason.partition(":")
    log.bind_next(fallback=word)
    if word not in ("", "absent"):
        log.bind(
            verb=env.get("CNI_COMMAND", ""),
            container_id=env.get("CNI_CONTAINERID", ""),
            netns=env.get("CNI_NETNS", ""),
        )
        log.warn(f"the node agent did not carry this call out: {text.strip() or word}")
    return log


if __name__ == "__main__":
    main()
