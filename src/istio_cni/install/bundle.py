"""The plugin's bundle on the node: copied whole, led to by links that are swapped.

    istio-cni                    the launcher, a file: it finds the rest beside itself
    istio-cni.d/agent.sock       -> the socket of the node agent, in the run dir
    istio-cni.d/current          -> 0.1.0-1a2b3c4d
    istio-cni.d/0.1.0-1a2b3c4d/  named by version and content

Nothing leads to a directory before all of it is there, so files are written straight into it, and a
copy that was killed goes on where it ended. A directory's name says what is in it, so a file that
differs is damaged and is put right in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from istio_cni import constants
from istio_cni.edge import files, trees
from istio_cni.errors import IOFailure, quoted
from istio_cni.install.plan import bundle_name

FILE_MAX_BYTES = 256 * 1024 * 1024
PROGRAM_MODE = 0o755


class Bundle:
    """The bundle at `source`, to be installed into `bin_dir`. All methods may raise IOFailure.

    `socket` is the path of the agent's socket, as the node has it.
    """

    def __init__(self, source: str, bin_dir: str, socket: str) -> None:
        self._source = os.path.realpath(source)
        self._bin_dir = bin_dir
        self._socket = socket
        self._wanted = trees.contents(self._source)
        if not {constants.PLUGIN_TYPE, constants.LAUNCHER_FILE} <= self._wanted.keys():
            raise IOFailure(f"there is no bundle of the plugin in {quoted(source)}")
        if odd := [path for path, (kind, *_) in self._wanted.items() if kind == trees.OTHER]:
            raise IOFailure(f"{quoted(odd[0])} in {quoted(source)} is no file, directory or link")
        self.name = bundle_name(self._wanted)
        self._bundles_dir = os.path.join(bin_dir, constants.BUNDLES_DIR)
        self._target = os.path.join(self._bundles_dir, self.name)
        self._entry_seen: object = None  # how the launcher looked when it was compared
        self._seen: object = None  # how the target looked when all of it was compared
        self._pruned = False
        files.sweep(bin_dir, lambda name: name == constants.PLUGIN_TYPE)

    def install(self) -> Iterator[str]:
        """Put right what is not, and yield what was done, for the log."""
        if not trees.is_directory(self._bin_dir):  # made here, it would be this container's
            raise IOFailure(
                f"there is no directory {quoted(self._bin_dir)}; "
                "the host's directory of CNI plugins is to be mounted there"
            )
        yield from self._restore()
        current = os.path.join(self._bundles_dir, constants.CURRENT_BUNDLE)
        former = trees.link_target(current)
        if former != self.name:
            files.replace_link(current, self.name)
            self._pruned = False
            yield f"bundle {self.name} is the current one"
        link = os.path.join(self._bundles_dir, constants.AGENT_LINK)
        if trees.link_target(link) != self._socket:
            files.replace_link(link, self._socket)
            yield f"the plugin asks the agent at {quoted(self._socket)}"
        if not self._is_entry():
            launcher = os.path.join(self._source, constants.LAUNCHER_FILE)
            self._write(launcher, self._entry, PROGRAM_MODE)
            yield f"the plugin is {quoted(self._entry)}"
        if not self._pruned:
            yield from self._prune(former)
            self._pruned = True

    @property
    def _entry(self) -> str:
        return os.path.join(self._bin_dir, constants.PLUGIN_TYPE)

    def _is_entry(self) -> bool:
        """Tell whether the launcher is in place, at the price of a look where nothing changed."""
        looks = trees.look(self._entry)
        if looks is None or looks != self._entry_seen:
            kind, _, digest = self._wanted[constants.LAUNCHER_FILE]
            if trees.item(self._entry) != (kind, PROGRAM_MODE, digest):
                return False
            self._entry_seen = looks
        return True

    def _restore(self) -> Iterator[str]:
        """Write what is missing or damaged in the target, if anything changed since last time."""
        looks = trees.signature(self._target)
        if looks is not None and looks == self._seen:
            return
        trees.make_directory(self._bundles_dir, 0o755)
        trees.make_directory(self._target, 0o755)
        there = trees.contents(self._target)
        copied = [path for path, item in self._wanted.items() if there.get(path) != item]
        for path in copied:
            self._copy(path, self._wanted[path])
        for path in there.keys() - self._wanted.keys():  # what a killed copy has left
            trees.remove_tree(os.path.join(self._target, path))
        if copied:
            yield f"bundle {self.name}: {len(copied)} files written"
        self._seen = looks  # of before the comparison; after a change it does not match, once

    def _copy(self, path: str, item: trees.Item) -> None:
        kind, mode, where = item
        source, target = os.path.join(self._source, path), os.path.join(self._target, path)
        if kind == trees.DIRECTORY:
            trees.make_directory(target, mode)
        elif kind == trees.LINK:
            files.replace_link(target, where)
        else:
            self._write(source, target, mode)

    @staticmethod
    def _write(source: str, target: str, mode: int) -> None:
        content = files.read_whole(source, limit=FILE_MAX_BYTES)
        if content is None:
            raise IOFailure(f"{quoted(source)} went away")
        files.write_whole(target, content, mode, keep=False)

    def _prune(self, former: str) -> Iterator[str]:
        """Remove bundles but the present and the former one, from which a plugin may still run.

        What else is in the directory, such as links that a killed run has left, goes, too. Which
        one was the former is not known after a restart; the newest of the others is it.
        """
        if former in ("", self.name):
            former = trees.newest(self._bundles_dir, self.name)
        keep = (self.name, former, constants.CURRENT_BUNDLE, constants.AGENT_LINK)
        for name in files.list_names(self._bundles_dir):
            if name not in keep:
                trees.remove_tree(os.path.join(self._bundles_dir, name))
                yield f"old bundle {quoted(name)} removed"

    def remove(self) -> Iterator[str]:
        """Take the plugin off the node, if it is ours, and yield what was done."""
        problem: IOFailure | None = None
        try:
            if self._is_entry():
                files.remove(self._entry)
                yield f"{quoted(self._entry)} removed"
        except IOFailure as error:
            problem = error
        if trees.remove_tree(self._bundles_dir):
            yield f"{quoted(self._bundles_dir)} removed"
        if problem is not None:
            raise problem
