"""Start a program as a runtime does, and time it from the start to its end.

posix_spawn, because a fork of this interpreter would be a good part of what is measured.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TIMEOUT_S = 60.0


class BenchFailed(Exception):
    """Something could not be measured; the message is for a person."""


class Outcome(NamedTuple):
    """What a program did, and how long it took until its end was known."""

    took_s: float
    status: int
    stdout: bytes
    stderr: bytes


def run(argv: Sequence[str], env: Mapping[str, str], stdin: bytes = b"") -> Outcome:
    """Run a program with exactly this environment; `stdin` must fit into a pipe.

    Raises BenchFailed if it does not end in time.
    """
    stdin_end, stdin_feed = os.pipe()
    stdout_end, stdout_feed = os.pipe()
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    try:
        os.write(stdin_feed, stdin)
        os.close(stdin_feed)
        streams = ((stdin_end, 0), (stdout_feed, 1), (stderr, 2))
        started = time.perf_counter()
        child = os.posix_spawn(
            argv[0],
            list(argv),
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in streams],
        )
        os.close(stdout_feed)
        stdout = _read_all(stdout_end, child)
        _, status = os.waitpid(child, 0)
        took_s = time.perf_counter() - started
        said = os.pread(stderr, 1 << 20, 0)
    finally:
        for descriptor in (stdin_end, stdout_end, stderr):
            os.close(descriptor)
    return Outcome(took_s, os.waitstatus_to_exitcode(status), stdout, said)


def _read_all(descriptor: int, child: int) -> bytes:
    poll, data = select.poll(), b""
    poll.register(descriptor)
    while poll.poll(TIMEOUT_S * 1000):
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return data
        data += piece
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise BenchFailed(f"a program did not end within {TIMEOUT_S:g} s")
