"""What an ADD leaves behind for CHECK, DEL and GC: one file per attachment in the run dir.

CHECK proves the kernel against what was programmed, not against annotations that may have been
edited since. The record is written before the first rule, so that a killed ADD can be undone, and
completed afterwards. It is bound to one namespace by inode and by the kernel's cookie: inodes are
used again at once.

Records help, but no pod may fail for want of one: trouble with the directory is logged, and what
cannot be read is not there.
"""

from __future__ import annotations

import os

from istio_cni.constants import ATTACHMENTS_DIR
from istio_cni.edge import files
from istio_cni.errors import IOFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Log = Callable[[str, str], None]


class Attachment:
    """One record. `settings` is the configuration in the terms of `istio-iptables --config`.

    `made_rules` is False for further interfaces of a pod that an earlier one captured. `variants`
    and `settings` are empty while the rules are being programmed.
    """

    __slots__ = (
        "backend",
        "container_id",
        "cookie",
        "ifname",
        "inode",
        "made_rules",
        "netns",
        "network",
        "pod",
        "pod_uid",
        "settings",
        "variants",
    )

    def __init__(
        self,
        container_id: str,
        ifname: str,
        *,
        network: str = "",
        netns: str = "",
        inode: tuple[int, int] = (0, 0),
        cookie: int = 0,
        pod: str = "",
        pod_uid: str = "",
        made_rules: bool = True,
        backend: str = "iptables",
        settings: dict[str, object] | None = None,
        variants: dict[str, str] | None = None,
    ) -> None:
        self.container_id = container_id
        self.ifname = ifname
        self.network = network
        self.netns = netns
        self.inode = inode
        self.cookie = cookie
        self.pod = pod
        self.pod_uid = pod_uid
        self.made_rules = made_rules
        self.backend = backend
        self.settings = settings or {}
        self.variants = variants or {}


class Attachments:
    """The records in a run dir; `log(level, message)` is told of trouble with it, once."""

    __slots__ = ("_is_made", "_log", "_told", "directory")

    def __init__(self, run_dir: str, log: Log) -> None:
        self.directory = os.path.join(run_dir, ATTACHMENTS_DIR)
        self._log = log
        self._told = False
        self._is_made = False

    def lock(self, container_id: str, deadline: float) -> files.FileLock:
        """Return the lock that keeps calls for one container apart.

        Raises IOFailure here or when it is entered, and then also TryAgainLater.
        """
        self._make_directory()
        return files.FileLock(self._path(_lock_name(container_id)), deadline)

    def _make_directory(self) -> None:
        """Make the directory, once a call. Raises IOFailure."""
        if not self._is_made:
            files.make_directory(self.directory)
            self._is_made = True

    def has_traces(self, container_id: str, ifname: str) -> bool:
        """Tell whether there is a record, or the lock or half a record of a call under way.

        Of a killed call, too: nobody else would ever clean up after it.
        """
        name = _name(container_id, ifname)
        names = self._names("")
        half = any(other.startswith(f".{name}.") for other in names)
        return half or name in names or _lock_name(container_id) in names

    def write(self, attachment: Attachment) -> None:
        """Write a record, whole; half of a first one says as much: that an ADD has begun."""
        import json  # captured pods only

        document = {name: getattr(attachment, name) for name in Attachment.__slots__}
        path = self._path(_name(attachment.container_id, attachment.ifname))
        try:
            self._make_directory()
            content = json.dumps(document).encode()
            if attachment.settings or not files.create(path, content):
                # ours alone; and a crash of the machine takes the namespace with it
                files.write_whole(path, content, keep=False, flush=False)
        except IOFailure as error:
            self._tell(error)

    def read(self, container_id: str, ifname: str) -> Attachment | None:
        """Return the record of an attachment; None if there is none, or none that can be read."""
        record = self._load(_name(container_id, ifname))
        same = record and (record.container_id, record.ifname) == (container_id, ifname)
        return record if same else None

    def of_container(self, container_id: str) -> list[Attachment]:
        """Return all records of a container."""
        records = self._records(f"{container_id}-")
        return [record for record in records if record.container_id == container_id]

    def all(self) -> Iterator[Attachment]:
        """Read every record; what is none is passed over."""
        return self._records("")

    def is_taken_over(self, record: Attachment) -> bool:
        """Tell whether a record of another container speaks of the same namespace.

        A killed ADD leaves a record without the kernel's cookie; its namespace may be gone, and
        path and inode those of the next pod by now.
        """
        return not record.cookie and any(
            (other.inode, other.netns) == (record.inode, record.netns)
            for other in self.all()
            if other.container_id != record.container_id
        )

    def remove(self, container_id: str, ifname: str) -> None:
        """Remove a record, and what a killed writer of it left behind."""
        name = _name(container_id, ifname)
        try:
            for left in self._names(f".{name}."):
                files.remove(self._path(left))
            files.remove(self._path(name))
        except IOFailure as error:
            self._tell(error)

    def heir(self, record: Attachment) -> Attachment | None:
        """Return another attachment in the same namespace, which its pod still has.

        A pod is captured until its last attachment goes, in whatever order they go.
        """
        others = (other for other in self.of_container(record.container_id))
        return next((other for other in others if _share(other, record)), None)

    def drop(self, record: Attachment) -> None:
        """Remove a record; another attachment takes over the rules that it has made."""
        heir = self.heir(record)
        self.remove(record.container_id, record.ifname)
        if heir is not None and record.made_rules:
            heir.made_rules = True
            self.write(heir)

    def _records(self, prefix: str) -> Iterator[Attachment]:
        for name in self._names(prefix):
            record = None if name.startswith(".") else self._load(name)
            if record is not None:
                yield record

    def _names(self, prefix: str) -> list[str]:
        try:
            return files.list_names(self.directory, prefix)
        except IOFailure as error:
            self._tell(error)
            return []

    def _load(self, name: str) -> Attachment | None:
        import json  # captured pods only

        try:
            content = files.read_whole(self._path(name))
        except IOFailure as error:
            self._tell(error)
            return None
        try:
            fields = json.loads(content or b"")
            known = {key: fields[key] for key in Attachment.__slots__ if key in fields}
            if not all(_is_of_type(key, value) for key, value in known.items()):
                return None
            known["inode"] = tuple(known["inode"])
            record = Attachment(**known)  # keys of a later version are passed over
            return record if name == _name(record.container_id, record.ifname) else None
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _tell(self, error: IOFailure) -> None:
        if not self._told:
            self._log("warn", f"records of attachments cannot be kept: {error.msg}")
        self._told = True


def _name(container_id: str, ifname: str) -> str:
    return f"{container_id}-{ifname}"


def _is_of_type(key: str, value: object) -> bool:
    """Tell whether a field of a record is what `write` makes of it; no name leads elsewhere."""
    if key == "inode":
        return isinstance(value, list) and [type(number) for number in value] == [int, int]
    if key == "cookie":
        return type(value) is int
    if key == "made_rules":
        return isinstance(value, bool)
    if key == "settings":
        return isinstance(value, dict)
    if key == "variants":
        return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    return isinstance(value, str) and not (key in ("container_id", "ifname") and "/" in value)


def _lock_name(container_id: str) -> str:
    return f".{container_id}.lock"  # names of records begin with no dot


def _share(one: Attachment, other: Attachment) -> bool:
    """Tell whether two records are about two interfaces in one namespace; 0 is no cookie yet."""
    same = one.cookie == other.cookie or 0 in (one.cookie, other.cookie)
    return one.ifname != other.ifname and one.inode == other.inode and same
