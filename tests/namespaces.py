"""Run programs and functions inside a network namespace that a test made.

A function runs in a forked child that enters the namespace first, so that no thread of the test
process stands in a foreign namespace, and what is process-wide (a cache, a user id) ends with it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

CLONE_NEWNET = 0x40000000
TIMEOUT_S = 60.0


def ip(*args: str) -> str:
    """Run `ip` in the test's own namespace; return what it prints."""
    return _run(["ip", *args])


def inside(
    path: str,
    argv: Sequence[str],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Run a program in the namespace at `path`; return its standard output. Sysfs is the test's.

    Unless `check` is off, a failure is raised with the program's standard error.
    """
    return _run(["nsenter", f"--net={path}", *argv], stdin, env, check, timeout_s)


def _run(
    argv: Sequence[str],
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> str:
    done = subprocess.run(
        argv,
        input=stdin,
        env=env,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def call_inside(path: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a child process in the namespace at `path`; return or raise what it does.

    Any callable will do; the result must survive pickling. Files and sysfs are the test's.
    """
    return _call(path, None, lambda: function(*args, **kwargs))


def call_inside_as(
    uid: int, path: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Do what `call_inside` does, as user and group `uid` without other groups or capabilities.

    What the function imports when called must be readable by that user.
    """
    return _call(path, uid, lambda: function(*args, **kwargs))


def _call(path: str, uid: int | None, function: Callable[[], R]) -> R:
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _child(path, uid, function, write_end)
    os.close(write_end)
    try:
        answer = _read_all(read_end)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(read_end)
        _, status = os.waitpid(child, 0)
    if not answer:
        raise AssertionError(f"the child ended without an answer, wait status {status}")
    result: R
    error: Exception | None
    result, error = pickle.loads(answer)  # noqa: S301 - our own child wrote it
    if error is not None:
        raise error
    return result


def _child(path: str, uid: int | None, function: Callable[[], R], answer_to: int) -> NoReturn:
    answer: tuple[R | None, BaseException | None]
    try:
        enter(path)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        answer = function(), None
    except BaseException as error:  # pytest's outcomes, too: the parent raises it
        error.add_note(f"in the child process:\n{traceback.format_exc()}")
        answer = None, error
    try:
        data = _pickled(answer)
        while data:
            data = data[os.write(answer_to, data) :]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)  # neither pytest's nor any fixture's clean-up belongs to the child


def _pickled(answer: tuple[object, BaseException | None]) -> bytes:
    """Pickle an answer; one that does not survive that becomes an error that shows it."""
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)  # noqa: S301 - just made
    except Exception:
        shown = "".join(traceback.format_exception(answer[1])) if answer[1] else repr(answer[0])
        data = pickle.dumps((None, AssertionError(f"not picklable: {shown}")))
    return data


def _read_all(file: int) -> bytes:
    data = b""
    while True:
        if not select.select([file], [], [], TIMEOUT_S)[0]:
            raise TimeoutError(f"the child has not answered for {TIMEOUT_S:g} s")
        piece = os.read(file, 1 << 16)
        if not piece:
            return data
        data += piece


def enter(path: str) -> None:
    """Move the calling thread into a network namespace; for children only."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(file, CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(file)
