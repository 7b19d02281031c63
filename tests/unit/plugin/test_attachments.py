"""Records of attachments: written, read, handed on and removed, whatever the directory is like."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from istio_cni.errors import IOFailure, TryAgainLater
from istio_cni.plugin.attachments import Attachment, Attachments

JSON = dict[str, object]


class RunDir:
    """A run dir with its records, and what was logged about them."""

    def __init__(self, path: Path) -> None:
        self.warnings: list[str] = []
        self.attachments = Attachments(str(path), lambda _, message: self.warnings.append(message))
        self.path = Path(self.attachments.directory)

    @property
    def names(self) -> list[str]:
        """All files beside the records, the records included."""
        return sorted(path.name for path in self.path.iterdir())


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Make a run dir."""
    return RunDir(tmp_path / "run")


def attachment(container_id: str = "c1", ifname: str = "eth0", **fields: object) -> Attachment:
    """Make a record in which every field is set."""
    defaults: JSON = {
        "network": "k8s",
        "netns": "/run/netns/x",
        "inode": (4, 4026532000),
        "cookie": 77,
        "pod": "shop/web",
        "pod_uid": "u1",
        "settings": {"PROXY_PORT": "15001", "DUAL_STACK": True},
        "variants": {"iptables": "nft"},
    }
    return Attachment(container_id, ifname, **(defaults | fields))  # type: ignore[arg-type]


def fields(record: Attachment | None) -> JSON:
    """Show a record."""
    assert record is not None
    return {name: getattr(record, name) for name in Attachment.__slots__}


def test_a_record_reads_back_as_it_was_written(run_dir: RunDir) -> None:
    """Every field; the file is for root only and nothing else is left."""
    written = attachment(made_rules=False)
    run_dir.attachments.write(written)
    assert fields(run_dir.attachments.read("c1", "eth0")) == fields(written)
    assert run_dir.names == ["c1-eth0"]
    assert (run_dir.path / "c1-eth0").stat().st_mode & 0o777 == 0o600
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert run_dir.warnings == []


def test_a_record_belongs_to_its_container_and_interface(run_dir: RunDir) -> None:
    """Names with dashes can make one file name in two ways; the content tells them apart."""
    run_dir.attachments.write(attachment("a", "b-eth0"))
    assert run_dir.attachments.read("a-b", "eth0") is None
    assert run_dir.attachments.of_container("a-b") == []
    assert fields(run_dir.attachments.read("a", "b-eth0"))["container_id"] == "a"


def test_records_are_found_by_container(run_dir: RunDir) -> None:
    """Not those of containers whose ids begin alike."""
    for key in (("c1", "eth0"), ("c1", "net1"), ("c12", "eth0"), ("c1-2", "eth0")):
        run_dir.attachments.write(attachment(*key))
    found = {(one.container_id, one.ifname) for one in run_dir.attachments.of_container("c1")}
    assert found == {("c1", "eth0"), ("c1", "net1")}
    assert len(list(run_dir.attachments.all())) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b"\xff\xfe",
        b"{}",
        b'{"inode": null}',
        b'{"inode": 5}',
        b'{"inode": [1, 2]}',
        b'{"inode": [1, 2], "container_id": "c1"}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_record_is_not_there(run_dir: RunDir, content: bytes) -> None:
    """Neither a crash nor a half-filled record."""
    run_dir.attachments.write(attachment())
    (run_dir.path / "c1-eth0").write_bytes(content)
    assert run_dir.attachments.read("c1", "eth0") is None
    assert list(run_dir.attachments.all()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"container_id": "c2"},
        {"container_id": 1},
        {"ifname": "net1"},
        {"ifname": None},
        {"container_id": "../../c1"},
        {"inode": [1]},
        {"inode": ["1", "2"]},
        {"inode": [True, 2]},
        {"inode": "12"},
        {"cookie": "1"},
        {"cookie": True},
        {"made_rules": 1},
        {"settings": []},
        {"variants": None},
        {"variants": {"iptables": 1}},
        *({key: 1} for key in ("network", "netns", "pod", "pod_uid", "backend")),
    ],
)
def test_a_record_that_is_altered_is_none(run_dir: RunDir, change: JSON) -> None:
    """One that names another file could have that one removed; types are those of `write`."""
    run_dir.attachments.write(attachment())
    path = run_dir.path / "c1-eth0"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert list(run_dir.attachments.all()) == []
    assert run_dir.attachments.read("c1", "eth0") is None


def test_a_record_of_another_version_is_read(run_dir: RunDir) -> None:
    """Keys that are unknown are passed over, missing ones have their defaults."""
    run_dir.attachments.write(attachment())
    path = run_dir.path / "c1-eth0"
    document = json.loads(path.read_text())
    del document["variants"], document["backend"]
    path.write_text(json.dumps(document | {"later": 1}))
    record = run_dir.attachments.read("c1", "eth0")
    assert record is not None
    assert (record.variants, record.backend, record.cookie) == ({}, "iptables", 77)


def test_remove_takes_what_a_killed_writer_left(run_dir: RunDir) -> None:
    """Of this attachment only; and it may be repeated."""
    run_dir.attachments.write(attachment())
    for name in (".c1-eth0.4711", ".c1-eth0.4712", ".c1-eth01.4711", ".c1.lock"):
        (run_dir.path / name).touch()
    for _ in range(2):
        run_dir.attachments.remove("c1", "eth0")
        assert run_dir.names == [".c1-eth01.4711", ".c1.lock"]


@pytest.mark.parametrize(
    ("name", "traces"),
    [
        ("c1-eth0", True),
        (".c1-eth0.4711", True),
        (".c1.lock", True),
        ("c1-eth01", False),
        (".c1-eth01.4711", False),
        (".c12.lock", False),
    ],
)
def test_traces_of_a_call_are_seen(run_dir: RunDir, name: str, traces: bool) -> None:
    """A record, half a record, a lock; no directory is made for the question."""
    assert not run_dir.attachments.has_traces("c1", "eth0")
    assert not run_dir.path.exists()
    run_dir.path.mkdir(parents=True)
    (run_dir.path / name).touch()
    assert run_dir.attachments.has_traces("c1", "eth0") is traces


@pytest.mark.parametrize("left", [b"", b'{"backend": "ipta', b"[]"])
def test_half_a_first_record_is_written_over(run_dir: RunDir, left: bytes) -> None:
    """A killed ADD leaves it; it says no more than that there was one."""
    run_dir.path.mkdir(parents=True)
    file = run_dir.path / "c1-eth0"
    file.write_bytes(left)
    assert run_dir.attachments.has_traces("c1", "eth0")
    assert run_dir.attachments.read("c1", "eth0") is None
    for record in (attachment(settings={}, variants={}), attachment()):
        run_dir.attachments.write(record)
        assert fields(run_dir.attachments.read("c1", "eth0")) == fields(record)
        assert run_dir.names == ["c1-eth0"]
    file.write_bytes(left)
    run_dir.attachments.remove("c1", "eth0")
    assert run_dir.names == []


def test_a_link_in_a_first_record_s_place_leads_nowhere(run_dir: RunDir, tmp_path: Path) -> None:
    """It is replaced."""
    run_dir.path.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    (run_dir.path / "c1-eth0").symlink_to(elsewhere)
    run_dir.attachments.write(attachment(settings={}, variants={}))
    assert elsewhere.read_text() == "precious"
    assert run_dir.attachments.read("c1", "eth0") is not None


# -- several interfaces of one pod -----------------------------------------------------------------


def test_rules_are_another_interface_s_when_their_maker_goes(run_dir: RunDir) -> None:
    """The last one to go finds nobody to hand them to."""
    first, second = attachment(), attachment(ifname="net1", made_rules=False)
    run_dir.attachments.write(first)
    run_dir.attachments.write(second)
    heir = run_dir.attachments.heir(first)
    assert heir is not None
    assert heir.ifname == "net1"
    run_dir.attachments.drop(first)
    record = run_dir.attachments.read("c1", "net1")
    assert record is not None
    assert record.made_rules
    assert run_dir.attachments.heir(record) is None
    run_dir.attachments.drop(record)
    assert run_dir.names == []


def test_an_interface_that_made_no_rules_hands_none_on(run_dir: RunDir) -> None:
    """Whoever made them keeps them."""
    run_dir.attachments.write(attachment())
    second = attachment(ifname="net1", made_rules=False)
    run_dir.attachments.drop(second)
    heir = run_dir.attachments.heir(second)
    assert heir is not None
    assert (heir.ifname, heir.made_rules) == ("eth0", True)


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        ({"inode": (4, 4026532001)}, False),
        ({"cookie": 78}, False),
        ({"cookie": 0}, True),  # its ADD was never finished
        ({"container_id": "c2"}, False),
        ({}, True),
    ],
)
def test_only_records_of_the_same_namespace_share_its_rules(
    run_dir: RunDir, other: JSON, shared: bool
) -> None:
    """Inodes come back; cookies do not."""
    run_dir.attachments.write(attachment(**{"ifname": "net1", **other}))  # type: ignore[arg-type]
    assert (run_dir.attachments.heir(attachment()) is not None) is shared


# -- the lock --------------------------------------------------------------------------------------


def test_calls_for_one_container_exclude_each_other(run_dir: RunDir) -> None:
    """The second one gives up when its time is over; others are not concerned."""
    now = time.monotonic()
    with run_dir.attachments.lock("c1", now):
        assert run_dir.names == [".c1.lock"]
        assert list(run_dir.attachments.all()) == []
        with pytest.raises(TryAgainLater), run_dir.attachments.lock("c1", now):
            pass
        with run_dir.attachments.lock("c2", now):
            pass
    with run_dir.attachments.lock("c1", now):
        pass
    assert run_dir.names == []


# -- a directory that is no use --------------------------------------------------------------------


def test_trouble_with_the_directory_is_told_once_and_never_raised(tmp_path: Path) -> None:
    """Except by the lock, without which the caller must decide."""
    (tmp_path / "attachments").write_text("a file")
    run_dir = RunDir(tmp_path)
    run_dir.attachments.write(attachment())
    run_dir.attachments.remove("c1", "eth0")
    assert run_dir.attachments.read("c1", "eth0") is None
    assert list(run_dir.attachments.all()) == []
    assert run_dir.attachments.of_container("c1") == []
    assert not run_dir.attachments.has_traces("c1", "eth0")
    run_dir.attachments.drop(attachment())
    (warning,) = run_dir.warnings
    assert str(run_dir.path) in warning
    with pytest.raises(IOFailure), run_dir.attachments.lock("c1", time.monotonic()):
        pass


def test_strange_things_in_the_directory_are_passed_over(run_dir: RunDir, tmp_path: Path) -> None:
    """A directory, a link, a name that is too long: told of, and the others are read."""
    run_dir.attachments.write(attachment())
    (run_dir.path / "c1-folder").mkdir()
    (run_dir.path / "c1-link").symlink_to(tmp_path)
    assert [one.ifname for one in run_dir.attachments.of_container("c1")] == ["eth0"]
    assert len(run_dir.warnings) == 1
    assert run_dir.attachments.read("c" * 300, "eth0") is None
    run_dir.attachments.remove("c1", "folder")
    assert "c1-folder" in run_dir.names
