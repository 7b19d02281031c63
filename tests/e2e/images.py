"""The images of the stories, made of what `make bundle` has frozen and of this machine's programs.

They stand in for a registry: the node agent with the plugin's bundle, and a proxy with Envoy and
istio-iptables, as injected pods have it. Every cluster of a run gets the same ones.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from e2e.cluster.image import Image
from e2e.cluster.needs import ClusterFailed

DIST = Path(__file__).resolve().parents[2] / "dist"
ENVOY = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages", "envoy",
             "_bin", "envoy")  # fmt: skip
SBIN = Path("/usr/sbin")
NAMES = ("", "-save", "-restore")


@cache
def installer() -> Image:
    """Return the DaemonSet's image: frozen install-cni, the plugin's bundle, iptables."""
    image = Image()
    image.add_tree("/opt/install-cni", _made("install-cni"))
    image.add_link("/usr/local/bin/install-cni", "/opt/install-cni/install-cni")
    image.add_tree("/opt/cni/bin/istio-cni.d", _made("istio-cni.d"))
    _add_iptables(image)
    return image


@cache
def proxy() -> Image:
    """Return the image of istio-proxy, istio-validation and istio-init."""
    image = Image()
    image.add_busybox()
    image.add_program("/usr/local/bin/envoy", ENVOY)
    image.add_tree("/opt/istio-cni", _made("istio-cni.d/current").resolve())
    image.add_link("/usr/local/bin/istio-iptables", "/opt/istio-cni/istio-iptables")
    _add_iptables(image)
    return image


def _made(name: str) -> Path:
    if not (DIST / name).exists():
        raise ClusterFailed(f"dist/{name} is missing: `make bundle` makes it")
    return DIST / name


def _add_iptables(image: Image) -> None:
    """Add both variants for both families, with their extensions."""
    extensions = _extensions()
    image.add_tree(str(extensions), extensions)
    for multi, variant in (("xtables-nft-multi", "nft"), ("xtables-legacy-multi", "legacy")):
        image.add_program(f"/usr/sbin/{multi}", (SBIN / multi).resolve())
        for family in ("iptables", "ip6tables"):
            for suffix in NAMES:
                image.add_link(f"/usr/sbin/{family}-{variant}{suffix}", multi)
                if variant == "nft":
                    image.add_link(f"/usr/sbin/{family}{suffix}", multi)


def _extensions() -> Path:
    found = sorted(Path("/usr/lib").glob("*-linux-gnu/xtables"))
    if not found:
        raise ClusterFailed("iptables' extensions are not in /usr/lib/*-linux-gnu/xtables")
    return found[0]
