"""Directories of files that belong together, taken as a whole. For the installer alone."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator

from istio_cni.errors import IOFailure, quoted

FILE, LINK, DIRECTORY, OTHER = "file", "link", "directory", "other"
Item = tuple[str, int, str]
"""What is at a place: its kind, its mode, and a file's SHA-256 or where a link leads."""


def contents(directory: str) -> dict[str, Item]:
    """Return what is below a directory, by relative path, parents first. Raises IOFailure."""
    try:
        return {path: _item(directory, path, status) for path, status in _walk(directory)}
    except OSError as error:
        raise _failed("read", error.filename or directory, error) from error


def item(path: str) -> Item | None:
    """Return what is at a path, None for nothing. Raises IOFailure."""
    directory, name = os.path.split(path)
    try:
        return _item(directory, name, os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failed("read", path, error) from error


def look(path: str) -> tuple[object, ...] | None:
    """Return what changes with any change of a file, at the price of a look; None for nothing."""
    try:
        return _look(os.stat(path, follow_symlinks=False))
    except OSError:
        return None


def _look(status: os.stat_result) -> tuple[object, ...]:
    return status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino


def signature(directory: str) -> tuple[tuple[object, ...], ...] | None:
    """Return what changes with any change below a directory, at the price of looking at names.

    None if there is no such directory.
    """
    try:
        return tuple((path, *_look(status)) for path, status in _walk(directory))
    except OSError:
        return None


def _walk(directory: str, inner: str = "") -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(os.path.join(directory, inner)) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        path = os.path.join(inner, name)
        status = os.stat(os.path.join(directory, path), follow_symlinks=False)
        yield path, status
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(directory, path)


def _item(directory: str, path: str, status: os.stat_result) -> Item:
    whole, mode = os.path.join(directory, path), stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return LINK, 0, os.readlink(whole)
    if stat.S_ISDIR(status.st_mode):
        return DIRECTORY, mode, ""
    if not stat.S_ISREG(status.st_mode):
        return OTHER, mode, ""
    with open(whole, "rb") as stream:
        return FILE, mode, hashlib.file_digest(stream, "sha256").hexdigest()


def make_directory(path: str, mode: int) -> None:
    """Make a directory of a mode, instead of whatever else is there. Raises IOFailure."""
    try:
        if not os.path.isdir(path) or os.path.islink(path):
            remove_tree(path)
            os.makedirs(path)
        os.chmod(path, mode)
    except OSError as error:
        raise _failed("make", path, error) from error


def newest(directory: str, but: str) -> str:
    """Return the name of the directory below another that changed last; "" if there is none.

    Links and `but` do not count. Raises IOFailure.
    """
    try:
        with os.scandir(directory) as entries:
            found = [
                (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name)
                for entry in entries
                if entry.name != but and entry.is_dir(follow_symlinks=False)
            ]
    except OSError as error:
        raise _failed("list", directory, error) from error
    return max(found, default=(0, ""))[1]


def is_directory(path: str) -> bool:
    """Tell whether there is a directory, or a link to one."""
    return os.path.isdir(path)


def link_target(path: str) -> str:
    """Return where a link leads, "" if there is no link."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def remove_tree(path: str) -> bool:
    """Remove a directory with all below it, or a file; False if nothing is there.

    Raises IOFailure.
    """
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _failed("remove", path, error) from error
    return True


def _failed(what: str, path: str, error: OSError) -> IOFailure:
    return IOFailure(f"cannot {what} {quoted(path)}: {error.strerror}")
