"""Files of ours: written whole, read whole, locked, relative to their directory's descriptor.

A reader never sees half a file: content goes to a temporary name, is flushed, then renamed over. No
link is followed where none is expected.
"""

from __future__ import annotations

import fcntl
import os
import time

from istio_cni.errors import IOFailure, TryAgainLater, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ_MAX_BYTES = 1 << 20
_TYPE_BITS, _REGULAR = 0o170000, 0o100000  # of st_mode; the module `stat` would cost a load
_HEX = frozenset("0123456789abcdef")


def write_whole(
    path: str,
    content: bytes,
    mode: int = 0o600,
    *,
    keep: bool = True,
    model: str = "",
    flush: bool = True,
) -> None:
    """Replace a file's content; an existing file's mode and owner are kept, unless told otherwise.

    With `model` they are those of the file of that name beside it, also if that is a link to one.
    Without `keep`, the file has exactly `mode`. Without `flush`, it may be half a file after a
    crash of the machine, and of that only. Raises IOFailure.
    """
    directory, name = os.path.split(path)
    try:
        parent = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _replace(parent, name, content, mode, keep=keep, model=model, flush=flush)
        finally:
            os.close(parent)
    except OSError as error:
        raise IOFailure(f"cannot write {quoted(path)}: {error.strerror}") from error


def create(path: str, content: bytes) -> bool:
    """Make a file that is not there, 0600; False if it is. Raises IOFailure.

    Cheaper than `write_whole`, and for files that may be found half written, or empty.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o600)
        try:
            _write(file, content)
        finally:
            os.close(file)
    except FileExistsError:
        return False
    except OSError as error:
        raise IOFailure(f"cannot write {quoted(path)}: {error.strerror}") from error
    return True


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def temporary_name(name: str) -> str:
    """Return the name under which a file is made before it is renamed; for one writer alone."""
    return f".{name}.{os.getpid()}-{os.urandom(3).hex()}"


def _replace(
    parent: int, name: str, content: bytes, mode: int, *, keep: bool, model: str, flush: bool
) -> None:
    temporary = temporary_name(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, mode, dir_fd=parent)
    try:
        try:
            if keep:
                _keep_owner(parent, model or name, file, follow=bool(model))
            else:
                os.fchmod(file, mode)  # whatever the umask
            _write(file, content)
            if flush:
                os.fsync(file)
        finally:
            os.close(file)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        os.unlink(temporary, dir_fd=parent)
        raise
    if flush:
        os.fsync(parent)


def _keep_owner(parent: int, name: str, file: int, *, follow: bool) -> None:
    try:
        before = os.stat(name, dir_fd=parent, follow_symlinks=follow)
    except FileNotFoundError:
        return
    if before.st_mode & _TYPE_BITS != _REGULAR:  # a link's own mode is 0777
        return
    os.fchmod(file, before.st_mode & 0o7777)
    os.fchown(file, before.st_uid, before.st_gid)


def replace_link(path: str, target: str) -> None:
    """Make a link, in place of whatever file or link has its name. Raises IOFailure.

    Whoever follows it gets to the old target or the new one, and never to none.
    """
    directory, name = os.path.split(path)
    try:
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            temporary = temporary_name(name)
            os.symlink(target, temporary, dir_fd=parent)
            try:
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                os.unlink(temporary, dir_fd=parent)
                raise
            os.fsync(parent)
        finally:
            os.close(parent)
    except OSError as error:
        raise IOFailure(f"cannot make the link {quoted(path)}: {error.strerror}") from error


def read_whole(path: str, *, limit: int = READ_MAX_BYTES, follow: bool = False) -> bytes | None:
    """Return a file's content, None if there is no such file. Raises IOFailure.

    Reads at most `limit` bytes. A link is followed only where one is expected.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
        try:
            with open(file, "rb", closefd=False) as stream:  # refuses a directory
                return stream.read(limit)
        finally:
            os.close(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IOFailure(f"cannot read {quoted(path)}: {error.strerror}") from error


def list_names(directory: str, prefix: str = "") -> list[str]:
    """Return the names in a directory that begin so, sorted; none if it does not exist.

    Raises IOFailure.
    """
    try:
        return sorted(name for name in os.listdir(directory) if name.startswith(prefix))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise IOFailure(f"cannot list {quoted(directory)}: {error.strerror}") from error


def make_directory(path: str, mode: int = 0o700) -> None:
    """Make a directory and its parents; one that exists is kept as it is. Raises IOFailure."""
    if os.path.isdir(path):
        return
    try:
        os.makedirs(path, mode, exist_ok=True)
    except OSError as error:
        raise IOFailure(f"cannot make the directory {quoted(path)}: {error.strerror}") from error


def sweep(directory: str, is_ours: Callable[[str], bool]) -> None:
    """Remove temporary files that a killed writer has left, of files whose names are ours.

    Raises IOFailure.
    """
    for name in list_names(directory):
        stem, _, suffix = name[1:].rpartition(".")
        process, dash, random = suffix.partition("-")
        is_number = process.isascii() and process.isdigit()
        is_random = len(random) == 6 and _HEX.issuperset(random)
        if name[:1] == "." and dash and is_number and is_random and is_ours(stem):
            remove(os.path.join(directory, name))


def remove(path: str) -> bool:
    """Remove a file; False if there is none. Raises IOFailure."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise IOFailure(f"cannot remove {quoted(path)}: {error.strerror}") from error
    return True


class FileLock:
    """An exclusive lock file: waited for until a deadline, released and removed on the way out.

    The file that a waiter has opened may be removed by the former holder; it then opens the new
    one. Raises TryAgainLater when it is not to be had in time, IOFailure when it cannot be made.
    """

    __slots__ = ("_file", "deadline", "path")

    def __init__(self, path: str, deadline: float) -> None:
        self.path = path
        self.deadline = deadline
        self._file = -1

    def __enter__(self) -> FileLock:
        try:
            while not self._take():
                if time.monotonic() >= self.deadline:
                    raise TryAgainLater(f"another call holds {quoted(self.path)}")
                time.sleep(0.01)
        except OSError as error:
            raise IOFailure(f"cannot lock {quoted(self.path)}: {error.strerror}") from error
        return self

    def _take(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_ino == os.stat(self.path, follow_symlinks=False).st_ino:
                self._file = file
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(file)
        return False

    def __exit__(self, *error: object) -> None:
        try:
            os.unlink(self.path)
        except OSError:  # the directory went away: nothing to lock any more
            return
        finally:
            os.close(self._file)
