"""Network configuration files: which one the runtime uses, and our entry in its list of plugins.

Runtimes take the first valid file of the directory, by the bytes of its name. What others wrote is
kept as it is, numbers, order and unknown keys included.

Source: containernetworking/cni libcni/conf.go; istio cni/pkg/install (getCNIConfigFilepath,
insertCNIConfig).
"""

from __future__ import annotations

from istio_cni.cni.document import decode, render
from istio_cni.constants import PLUGIN_TYPE
from istio_cni.errors import DecodingFailure, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from istio_cni.cni.document import JSON

LIST, SINGLE = ".conflist", ".conf"
CONVERTED_NAME = "k8s-pod-network"  # of a list made from a configuration without a name
CONVERTED_VERSION = "0.3.1"
SWITCHES = ("disableCheck", "disableGC", "loadOnlyInlinedPlugins")


def is_config_name(name: str) -> bool:
    """Tell whether a runtime would read a file of this name."""
    return name.endswith((LIST, SINGLE))


def choose(files: Mapping[str, bytes], name: str = "") -> str:
    """Return the name of the file to chain into, "" while there is none.

    `name` is the operator's wish, which counts also for a file under the other of the two endings;
    without one it is the first valid file, as runtimes see it.
    """
    if name:
        return next((each for each in (name, twin(name)) if each in files), "")
    for each in sorted(filter(is_config_name, files), key=_bytes):
        try:
            document = _read(each, files[each], single=each.endswith(SINGLE))
        except DecodingFailure:
            continue  # runtimes go on to the next one, too
        if _foreign(document):  # a list of ours alone makes no interface
            return each
    return ""


def _bytes(name: str) -> bytes:
    return name.encode(errors="surrogateescape")


def twin(name: str) -> str:
    """Return the name of a file that holds the same in the other form; "" where there is none."""
    if name.endswith(LIST):
        return name.removesuffix(LIST) + SINGLE
    return name.removesuffix(SINGLE) + LIST if name.endswith(SINGLE) else ""


def read(name: str, text: bytes) -> JSON:
    """Read a file, by what it holds: a single configuration becomes a list of one.

    Raises DecodingFailure for what no runtime would take.
    """
    return _read(name, text, single=None)


def _read(name: str, text: bytes, *, single: bool | None) -> JSON:
    """Read a file that holds a single configuration, or a list; None is for what it looks like."""
    where = quoted(name)
    document = decode(text, where)
    if single if single is not None else "type" in document:
        if not _type(document):
            raise DecodingFailure(f"{where} has no type")
        document = _converted(document)
    if defect := _defect(document):
        raise DecodingFailure(f"{where} {defect}")
    return document


def _defect(document: JSON) -> str:
    """Say why a runtime would refuse a list of plugins; "" if it would not."""
    plugins, versions = document.get("plugins"), document.get("cniVersions", [])
    if not isinstance(document.get("name"), str) or not document["name"]:
        return "has no name"
    if not isinstance(document.get("cniVersion", ""), str):
        return "has a cniVersion that is no string"
    if not isinstance(versions, list) or not all(isinstance(each, str) for each in versions):
        return "has cniVersions that are no list of strings"
    for switch in SWITCHES:
        value = document.get(switch, False)
        if not isinstance(value, bool) and value not in ("true", "false"):
            return f"has a {switch} that is neither true nor false"
    if not isinstance(plugins, list) or not plugins:
        return "has no list of plugins"
    return "" if all(map(_type, plugins)) else "has a plugin without a type"


def _converted(single: JSON) -> JSON:
    """Make a list of a single configuration; it keeps the network's name and version."""
    plugin = {key: value for key, value in single.items() if key != "cniVersion"}
    return {
        "cniVersion": single.get("cniVersion") or CONVERTED_VERSION,
        "name": single.get("name") or CONVERTED_NAME,
        "plugins": [plugin],
    }


def _type(plugin: object) -> str:
    kind = plugin.get("type") if isinstance(plugin, dict) else None
    return kind if isinstance(kind, str) else ""


def has_own_entry(document: JSON) -> bool:
    """Tell whether a list of plugins has an entry of ours."""
    return len(_foreign(document)) < len(_plugins(document))


def has_plugins(document: JSON) -> bool:
    """Tell whether a list of plugins has any."""
    return bool(_plugins(document))


def is_replaceable(document: JSON, successor: JSON) -> bool:
    """Tell whether a file may be replaced by another one's list: ours before, or the same network.

    That is what a killed conversion leaves, and a primary CNI that writes its single configuration
    again.
    """
    return has_own_entry(document) or document.get("name") == successor.get("name")


def chained(document: JSON, entry: JSON) -> JSON:
    """Return a list with our entry last and nowhere else."""
    return {**document, "plugins": [*_foreign(document), entry]}


def unchained(document: JSON) -> JSON:
    """Return a list without our entries."""
    return {**document, "plugins": _foreign(document)}


def _plugins(document: JSON) -> list[JSON]:
    plugins = document.get("plugins")
    return plugins if isinstance(plugins, list) else []


def _foreign(document: JSON) -> list[JSON]:
    return [plugin for plugin in _plugins(document) if _type(plugin) != PLUGIN_TYPE]


def write(document: JSON) -> bytes:
    """Return a file's content."""
    return f"{render(document)}\n".encode()
