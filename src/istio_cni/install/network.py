"""Our entry in the conflist that the runtime uses, on disk.

The directory is looked at anew each time: a primary CNI may come, go, or change the file's name.
Files are shared with others, so nothing is written that is there already, and what is written
replaces a file as a whole, its mode and owner kept.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator

from istio_cni import constants
from istio_cni.cni import conflist
from istio_cni.edge import files
from istio_cni.errors import DecodingFailure, IOFailure, TryAgainLater, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.cni.document import JSON

LOG = logging.getLogger("cni-agent")
NEW_MODE = 0o600  # of a file whose former mode is not to be had
CONFIG_MAX_BYTES = 4 * 1024 * 1024  # containerd takes 2 MiB
FIGHT = 5  # rewrites in a row
FIGHT_WINDOW_S = 5.0  # from one to the next


class Network:
    """The directory of CNI configurations, and the file in it that the operator named, or ""."""

    def __init__(
        self, directory: str, name: str, entry: JSON, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._name = name
        self._entry = entry
        self._clock = clock
        self._rewrites = 0
        self._rewritten_at = -FIGHT_WINDOW_S
        files.sweep(directory, conflist.is_config_name)

    def install(self) -> Iterator[str]:
        """Put our entry where it belongs and nowhere else; yield what was done, for the log.

        Raises TryAgainLater while there is no configuration to chain into, DecodingFailure when the
        operator's choice is none, IOFailure.
        """
        texts, unread = self._read()
        name = conflist.choose(texts, self._name)
        if not name:
            wanted = f"file {quoted(self._name)}" if self._name else "valid configuration"
            aside = f" (passed over: {'; '.join(unread)})" if unread else ""
            raise TryAgainLater(
                f"no {wanted} in {quoted(self._directory)} yet{aside}; the cluster's CNI writes one"
            )
        document = conflist.read(name, texts[name])
        wanted_list = conflist.chained(document, self._entry)
        if name.endswith(conflist.SINGLE):
            target = conflist.twin(name)
            yield from self._convert(name, target, wanted_list, texts.get(target, b""))
        else:
            target = name
            if document != wanted_list:
                self._write(name, wanted_list)
                yield f"{self._shown(name)} has our entry"
                self._watch_for_fights(name)
        for other in sorted(texts.keys() - {name, target}):
            yield from self._unchain(other, texts[other])

    def _read(self) -> tuple[dict[str, bytes], list[str]]:
        """Read the files that a runtime would, and the one that the operator named.

        One that cannot be read is as good as none: runtimes go on to the next. Why it cannot comes
        second.
        """
        wished = (self._name, conflist.twin(self._name))
        texts, unread = {}, []
        for name in files.list_names(self._directory):
            if conflist.is_config_name(name) or name in wished:
                try:
                    text = files.read_whole(
                        self._path(name), limit=CONFIG_MAX_BYTES + 1, follow=True
                    )
                except IOFailure as error:
                    if not isinstance(error.__cause__, IsADirectoryError):
                        unread.append(error.msg)
                    continue
                if text is not None and len(text) > CONFIG_MAX_BYTES:
                    unread.append(f"{self._shown(name)} is larger than any configuration")
                elif text is not None:
                    texts[name] = text
        return texts, unread

    def _convert(self, single: str, target: str, wanted: JSON, present: bytes) -> Iterator[str]:
        """Write the list, then remove the single configuration: a runtime finds one at any time."""
        if present and not _may_replace(target, present, wanted):
            raise IOFailure(
                f"{self._shown(single)} is to become {quoted(target)}, which is there and holds "
                "another network; remove one of them"
            )
        self._write(target, wanted, single)
        files.remove(self._path(single))
        yield f"{self._shown(target)} has our entry, made of {quoted(single)}"
        self._watch_for_fights(single)

    def _unchain(self, name: str, text: bytes, *, ending: bool = False) -> Iterator[str]:
        """Take our entries out of a file that is not, or no more, the one to chain into.

        At the end, one that nobody can read is trouble: runtimes may read more than we do.
        """
        try:
            document = conflist.read(name, text)
        except DecodingFailure as error:
            if ending and constants.PLUGIN_TYPE.encode() in text:
                raise IOFailure(f"{error.msg}, and may have our entry") from error
            return  # nothing that a runtime would use
        if name.endswith(conflist.SINGLE) or not conflist.has_own_entry(document):
            return
        rest = conflist.unchained(document)
        self._write(name, rest)
        alone = "" if conflist.has_plugins(rest) else ", and no plugin at all: it may be removed"
        yield f"{self._shown(name)} is without our entry{alone}"

    def _write(self, name: str, document: JSON, model: str = "") -> None:
        """Write a list; mode and owner are those of the file `model`, or of the one replaced."""
        text = conflist.write(document)
        files.write_whole(self._path(name), text, NEW_MODE, model=model or name)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _shown(self, name: str) -> str:
        return quoted(self._path(name))

    def _watch_for_fights(self, name: str) -> None:
        """Tell of another component that takes our entry out as often as we put it in."""
        now = self._clock()
        in_a_row = now - self._rewritten_at < FIGHT_WINDOW_S
        self._rewrites = self._rewrites + 1 if in_a_row else 1
        self._rewritten_at = now
        if self._rewrites > FIGHT:
            path = self._path(name)
            hint = " (set Cilium's cni.exclusive=false)" if "cilium" in path.lower() else ""
            LOG.warning(
                "%s was rewritten %d times in a row: another component seems to revert it%s",
                quoted(path), self._rewrites, hint,
            )  # fmt: skip

    def remove(self) -> Iterator[str]:
        """Take our entries out of all files and yield what was done.

        Raises IOFailure at the end if that failed somewhere, or a file may still have one.
        """
        texts, problems = self._read()
        for name, text in texts.items():
            try:
                yield from self._unchain(name, text, ending=True)
            except IOFailure as error:
                problems.append(error.msg)
        if problems:
            raise IOFailure("; ".join(problems))


def _may_replace(name: str, text: bytes, wanted: JSON) -> bool:
    """Tell whether a list that is already there may give way; one that nobody reads may."""
    try:
        return conflist.is_replaceable(conflist.read(name, text), wanted)
    except DecodingFailure:
        return True
