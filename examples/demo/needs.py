"""What the demo needs of a machine, looked for before anything is done."""

from __future__ import annotations

import os
import shutil
import sys

SBIN = "/usr/local/sbin:/usr/sbin:/sbin"  # not in every root's PATH
PLUGIN_DIRECTORIES = ("/opt/cni/bin", "/usr/lib/cni")  # upstream's place, Debian's place
STANDARD_PLUGINS = ("bridge", "host-local")
OUR_PLUGIN = "istio-cni"


def search_path() -> str:
    """Return CNI_PATH for the chain: our plugin beside this Python, the others where they are."""
    given = os.environ.get("CNI_PATH", "").split(":")
    directories = (os.path.dirname(sys.executable), *given, *PLUGIN_DIRECTORIES)
    return ":".join(filter(None, directories))


def missing(families: tuple[int, ...]) -> list[str]:
    """Name what is missing, each with what to do about it."""
    found = []
    if os.geteuid() != 0:
        found.append("not root, which network namespaces need (run it with sudo)")
    programs = ["ip", "iptables", "iptables-save"]
    programs += ["ip6tables", "ip6tables-save"] if 6 in families else []
    packages = dict.fromkeys(programs, "iptables") | {"ip": "iproute2"}
    absent = [name for name in programs if shutil.which(name) is None]
    found += [f"no program {name} (install {packages[name]})" for name in absent]
    plugins = [name for name in STANDARD_PLUGINS if not shutil.which(name, path=search_path())]
    if plugins:
        where = ", ".join((*PLUGIN_DIRECTORIES, "CNI_PATH"))
        names = " and ".join(plugins)
        found.append(f"no CNI plugin {names} in {where} (install containernetworking-plugins)")
    if not shutil.which(OUR_PLUGIN, path=os.path.dirname(sys.executable)):
        found.append(f"no {OUR_PLUGIN} beside {sys.executable} (run make setup)")
    return found
