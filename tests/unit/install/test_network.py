"""Our entry in real directories of network configurations."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from istio_cni.errors import DecodingFailure, IOFailure, TryAgainLater
from istio_cni.install.network import Network

JSON = dict[str, object]
ENTRY: JSON = {"type": "istio-cni", "name": "istio-cni"}
BRIDGE: JSON = {"type": "bridge"}
LIST: JSON = {"cniVersion": "1.0.0", "name": "pods", "plugins": [BRIDGE]}
SINGLE: JSON = {"cniVersion": "1.0.0", "name": "pods", **BRIDGE}


def put(path: Path, document: JSON, mode: int = 0o644) -> Path:
    """Write a configuration as another component does."""
    path.write_text(json.dumps(document))
    path.chmod(mode)
    return path


def types(path: Path) -> list[str]:
    """Return the plugins of a list."""
    return [plugin["type"] for plugin in json.loads(path.read_text())["plugins"]]


def install(directory: Path, name: str = "", entry: JSON = ENTRY) -> list[str]:
    """Look once, as a process that has just started."""
    return list(Network(str(directory), name, entry).install())


def test_the_entry_is_added_and_then_left_alone(tmp_path: Path) -> None:
    """A second look writes nothing: others watch this directory."""
    path = put(tmp_path / "10-pods.conflist", LIST)
    assert install(tmp_path) == [f'"{path}" has our entry']
    assert types(path) == ["bridge", "istio-cni"]
    before = path.stat()
    assert install(tmp_path) == []
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert os.listdir(tmp_path) == ["10-pods.conflist"]


def test_mode_and_content_of_others_stay(tmp_path: Path) -> None:
    """Installed and removed, the file is as it was, whatever the umask."""
    path = put(tmp_path / "10-pods.conflist", {**LIST, "more": {"b": 1, "a": 2}}, 0o664)
    network = Network(str(tmp_path), "", ENTRY)
    former = os.umask(0o077)
    try:
        list(network.install())
        assert path.stat().st_mode & 0o777 == 0o664
        assert list(network.remove()) == [f'"{path}" is without our entry']
    finally:
        os.umask(former)
    assert json.loads(path.read_text()) == {**LIST, "more": {"b": 1, "a": 2}}
    assert path.stat().st_mode & 0o777 == 0o664


def test_a_link_becomes_a_file_with_the_mode_of_what_it_led_to(tmp_path: Path) -> None:
    """A link's own mode, 0777, would let everybody write."""
    directory = tmp_path / "net.d"
    directory.mkdir()
    put(tmp_path / "real.conflist", LIST, 0o640)
    (directory / "10.conflist").symlink_to("../real.conflist")
    install(directory)
    assert (directory / "10.conflist").lstat().st_mode == 0o100640


def test_an_entry_of_other_settings_is_replaced(tmp_path: Path) -> None:
    """Also one that somebody moved, or put there twice."""
    old = {**ENTRY, "plugin_log_level": "debug"}
    path = put(tmp_path / "10.conflist", {**LIST, "plugins": [old, BRIDGE, old]})
    assert install(tmp_path)
    assert json.loads(path.read_text())["plugins"] == [BRIDGE, ENTRY]


def test_a_single_configuration_becomes_a_list_with_its_mode(tmp_path: Path) -> None:
    """The former file goes once the list is there, and stays away when we leave."""
    put(tmp_path / "bridge.conf", SINGLE, 0o640)
    put(tmp_path / "list.conflist", LIST)
    network = Network(str(tmp_path), "", ENTRY)
    list(network.install())
    assert sorted(os.listdir(tmp_path)) == ["bridge.conflist", "list.conflist"]
    assert types(tmp_path / "bridge.conflist") == ["bridge", "istio-cni"]
    assert (tmp_path / "bridge.conflist").stat().st_mode & 0o777 == 0o640
    assert types(tmp_path / "list.conflist") == ["bridge"]
    list(network.remove())
    assert types(tmp_path / "bridge.conflist") == ["bridge"]
    assert not (tmp_path / "bridge.conf").exists()


@pytest.mark.parametrize("former", [{**ENTRY, "old": True}, None], ids=["killed", "removed"])
def test_a_conversion_goes_on_where_it_was_interrupted(tmp_path: Path, former: JSON) -> None:
    """The list of a killed run, or of an installation that is gone, does not stand in the way."""
    left = [{"type": "older"}, former] if former else [{"type": "older"}]
    put(tmp_path / "a.conf", SINGLE)
    put(tmp_path / "a.conflist", {**LIST, "plugins": left})
    install(tmp_path)
    assert os.listdir(tmp_path) == ["a.conflist"]
    assert types(tmp_path / "a.conflist") == ["bridge", "istio-cni"]


def test_another_network_is_not_overwritten_by_a_conversion(tmp_path: Path) -> None:
    """Both files stay as they are, and the message says what to do."""
    put(tmp_path / "a.conf", SINGLE)
    put(tmp_path / "a.conflist", {**LIST, "name": "other"})
    with pytest.raises(IOFailure, match="remove one of them"):
        install(tmp_path)
    assert types(tmp_path / "a.conflist") == ["bridge"]
    assert json.loads((tmp_path / "a.conf").read_text()) == SINGLE


def test_a_new_primary_is_followed(tmp_path: Path) -> None:
    """The entry moves to the file that the runtime uses now; with a name given it stays."""
    put(tmp_path / "20.conflist", LIST)
    network, named = (Network(str(tmp_path), name, ENTRY) for name in ("", "20.conflist"))
    list(network.install())
    put(tmp_path / "10.conflist", LIST)
    assert list(named.install()) == []
    assert len(list(network.install())) == 2
    assert types(tmp_path / "10.conflist") == ["bridge", "istio-cni"]
    assert types(tmp_path / "20.conflist") == ["bridge"]


def test_without_a_primary_there_is_nothing_to_do_yet(tmp_path: Path) -> None:
    """No directory, an empty one, no file of the name given: wait."""
    for directory, name in ((tmp_path / "none", ""), (tmp_path, ""), (tmp_path, "10.conflist")):
        with pytest.raises(TryAgainLater, match=r"yet; the cluster's CNI writes one"):
            install(directory, name)


def test_a_choice_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    """By name, and left as it is."""
    path = put(tmp_path / "10.conflist", {})
    with pytest.raises(DecodingFailure, match=r"10\.conflist"):
        install(tmp_path, "10.conflist")
    assert path.read_text() == "{}"


def test_directories_and_dangling_links_are_passed_over(tmp_path: Path) -> None:
    """What cannot be read is no configuration for a runtime either."""
    (tmp_path / "00.conflist").mkdir()
    (tmp_path / "01.conf").symlink_to("nowhere")
    path = put(tmp_path / "10.conflist", LIST)
    assert install(tmp_path) == [f'"{path}" has our entry']


def test_temporary_files_of_ours_go_at_the_start(tmp_path: Path) -> None:
    """Those of a killed writer; what only resembles them stays."""
    (tmp_path / ".10.conflist.123-a1b2c3").touch()
    kept = {".10.conflist.x-a1b2c3", ".10.conflist.123-zzzzzz", ".other.123-a1b2c3", "10.conflist~"}
    for name in kept:
        (tmp_path / name).touch()
    Network(str(tmp_path), "", ENTRY)
    assert set(os.listdir(tmp_path)) == kept


def test_a_list_that_was_ours_alone_stays_and_is_told_of(tmp_path: Path) -> None:
    """Nothing that somebody may have made is deleted."""
    path = put(tmp_path / "10.conflist", {**LIST, "plugins": [ENTRY]})
    (line,) = Network(str(tmp_path), "", ENTRY).remove()
    assert "no plugin at all" in line
    assert types(path) == []


@pytest.mark.parametrize("name", ["05-cilium.conflist", "10-pods.conflist"])
def test_a_fight_over_the_file_is_told_of(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time after five rewrites in a row; not if they are far from each other."""
    caplog.set_level(logging.WARNING)
    now = [0.0]
    network = Network(str(tmp_path), "", ENTRY, lambda: now[0])
    for seconds, rewrites, warnings in ((60.0, 7, 0), (2.0, 5, 0), (2.0, 2, 2)):
        for _ in range(rewrites):
            put(tmp_path / name, LIST)
            list(network.install())
            now[0] += seconds
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == warnings
    assert "another component seems to revert it" in said[0]
    assert ("cni.exclusive=false" in said[0]) is ("cilium" in name)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b'"name"', b'"note": "caf\xe9", "name"', 1),
        lambda text: text.replace(b'"plugins"', b'"Plugins"'),
        lambda text: text[: len(text) - 3],
        lambda text: text + b" " * 5_000_000,
    ],
    ids=["not UTF-8", "other case", "half", "huge"],
)
def test_a_file_that_only_runtimes_can_read_is_trouble_at_the_end(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    """It may name the plugin, which must then stay."""
    path = put(tmp_path / "10-pods.conflist", LIST)
    install(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(IOFailure, match=r"10-pods\.conflist"):
        list(Network(str(tmp_path), "", ENTRY).remove())


def test_a_large_configuration_is_read_whole(tmp_path: Path) -> None:
    """Runtimes take 2 MiB."""
    path = put(tmp_path / "10-pods.conflist", LIST)
    path.write_bytes(path.read_bytes() + b" " * 1_900_000)
    install(tmp_path)
    assert types(path)[-1] == "istio-cni"
