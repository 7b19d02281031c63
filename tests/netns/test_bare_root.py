"""A root that holds only the node's libc, its loader and the bundle: no shell, no iptables.

The bundled plugin is started in it as a runtime starts it, in a mount namespace of its own; the
pods' connections are made from outside, where there are programs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from namespaces import inside
from netns.plugin import JSON, Answer, Node
from netns.traffic import (
    APPLICATION,
    DNS,
    FAMILIES,
    INBOUND,
    OUTBOUND,
    OUTSIDE,
    POD,
    PROXY,
    PROXY_LISTENERS,
    TRANSPARENT_LISTENERS,
    Arrival,
    Call,
    Listener,
    Wire,
    endpoint,
    reach,
    serving,
    wired,
)

pytestmark = pytest.mark.netns

CHECKOUT = Path(__file__).resolve().parents[2]
BUNDLE = CHECKOUT / "dist" / "istio-cni.d" / "current"
DUAL_STACK: JSON = {"name": "ISTIO_DUAL_STACK", "value": "true"}
NEEDED = re.compile(r"ld-linux[^/]*\.so\.\d|lib(c|m|dl|pthread|rt|util)\.so\.\d+|libz\.so\.1")
"""The loader, the parts of glibc, and zlib, which the frozen programs' boot loader wants."""
MOUNT_POINTS = ("bundle", "manifests", "proc", "run/istio-cni", "run/netns")


@pytest.fixture(scope="module")
def bundle() -> Path:
    """Return the bundle's directory, if it was made of the sources as they are now."""
    if not BUNDLE.exists():
        pytest.skip("needs dist/: `make bundle` first")
    made = (BUNDLE / "istio-cni").stat().st_mtime
    sources = [*CHECKOUT.glob("src/**/*.py"), *CHECKOUT.glob("packaging/bundle.*")]
    if any(path.stat().st_mtime > made for path in sources):
        pytest.skip("dist/ is older than the sources: `make bundle` first")
    return BUNDLE.resolve()


def libraries(bundle: Path) -> list[Path]:
    """Return the node's own files that the bundle's programs and libraries load."""
    inner = bundle / "_internal"
    programs = [path for path in bundle.iterdir() if path.is_file()]
    bundled = list(inner.rglob("*.so*"))
    listed = _ldd(programs, {}) + _ldd(bundled, {"LD_LIBRARY_PATH": str(inner)})
    found = {Path(path) for path in re.findall(r"(/\S+) \(0x", listed)}
    return sorted(path for path in found if inner not in path.parents)


def _ldd(files: list[Path], env: dict[str, str]) -> str:
    path = {"PATH": os.environ["PATH"]}
    return subprocess.check_output(["ldd", *files], env=path | env, text=True, timeout=60)


@pytest.fixture(scope="module")
def root(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the root: the node's libraries, and empty directories to mount on."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for mount namespaces")
    root = tmp_path_factory.mktemp("root")
    for library in libraries(bundle):
        target = root / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    for name in MOUNT_POINTS:
        (root / name).mkdir(parents=True)
    return root


class BareNode:
    """A node on which the plugin sees nothing but the root, its pods' manifests and its run dir."""

    def __init__(self, node: Node, root: Path, bundle: Path) -> None:
        self.node = node
        self._root, self._bundle = root, bundle

    def call(self, verb: str, netns: str = "", **keys: object) -> Answer:
        """Call the bundled plugin for the pod in a namespace; keys are of its configuration."""
        places = {"cni_agent_run_dir": "/run/istio-cni", "pod_source": "manifests:/manifests"}
        config = self.node.config(**{**places, **keys})
        return self.node.call(verb, netns, config=config, wrapper=self._wrapper(netns))

    def _wrapper(self, netns: str) -> list[str]:
        """Return a command that takes the place of the program it is given, in a fresh view."""
        binds: dict[str, object] = {
            "": self._root,  # a mount point, as roots are
            "bundle": self._bundle,
            "manifests": self.node.manifests,
            "proc": "/proc",
            "run/istio-cni": self.node.run_dir,
        }
        mounts = [
            shlex.join(["mount", "--bind", str(source), str(self._root / name)])
            for name, source in binds.items()
        ]
        if netns:
            mounts.append(f"mount --rbind /run/netns {shlex.quote(str(self._root / 'run/netns'))}")
        start = shlex.join(["exec", "chroot", str(self._root), "/bundle/istio-cni"])
        script = " && ".join([*mounts, start])
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]


@pytest.fixture
def bare(tmp_path: Path, root: Path, bundle: Path) -> BareNode:
    """Make a node of the root and the bundle, with a pod of the mesh."""
    bare = BareNode(Node(tmp_path), root, bundle)
    bare.node.add_pod(env=[DUAL_STACK])
    return bare


@pytest.fixture
def wire(new_netns: Callable[[], str]) -> Iterator[Wire]:
    """Set up a pod with an application and an outside; the proxy is each test's own."""
    servers = [Listener(80), Listener(53, udp=True)]
    with wired(new_netns, [Listener(8080), Listener(15021)], servers) as wire:
        yield wire


def places(arrivals: list[Arrival | str]) -> list[tuple[str, int, str] | str]:
    """Leave out of arrivals what differs from run to run."""
    return [one if isinstance(one, str) else one[:3] for one in arrivals]


def ruleset(netns: str) -> str:
    """List the rules of a namespace, of all that use nf_tables."""
    return inside(netns, ["nft", "list", "ruleset"])


def decision(answer: Answer) -> JSON:
    """Return the line of the log that says what the plugin did."""
    (line,) = [line for line in answer.log if line["level"] == "info"]
    return line


OUT = [Call(OUTSIDE[family], 80) for family in FAMILIES]
IN = [Call(POD[family], 8080) for family in FAMILIES]


def ends(at: str, calls: list[Call], port: int = 0) -> list[tuple[str, int, str]]:
    """Return where calls end that reach one server, by default under the port they asked for."""
    return [(at, port or call.port, endpoint(*call[:2])) for call in calls]


# -- what is there -------------------------------------------------------------------------------


def test_nothing_of_the_node_is_needed_but_libraries(root: Path) -> None:
    """The README names them; a bundle that wants another one of the node's shows here."""
    files = [path for path in root.rglob("*") if path.is_file()]
    assert [path.name for path in files if not NEEDED.fullmatch(path.name)] == []
    assert any(path.name == "libc.so.6" for path in files)


def test_version_is_answered(bare: BareNode) -> None:
    """It is what a runtime asks first."""
    answer = bare.call("VERSION")
    assert (answer.status, answer.stderr) == (0, "")
    assert "1.1.0" in answer.json["supportedVersions"]  # type: ignore[operator] # a list


def test_a_pod_outside_the_mesh_passes(bare: BareNode, pod_netns: str) -> None:
    """Nothing is programmed, and nothing is missed."""
    bare.node.add_pod(sidecar=False)
    answer = bare.call("ADD", pod_netns)
    assert (answer.status, answer.logged("", "warn")) == (0, False)
    assert ruleset(pod_netns) == ""
    assert bare.call("DEL", pod_netns).silent


# -- a captured pod ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("auto", "no iptables"), (None, "no iptables"), ("nftables", "")],
    ids=["auto", "default", "nftables"],
)
def test_the_bundled_plugin_captures_a_pod(
    bare: BareNode, wire: Wire, backend: str | None, reason: str
) -> None:
    """Out to 15001, in to 15006, the proxy past both; CHECK proves it, DEL undoes it."""
    added = bare.call("ADD", wire.pod, backend=backend)
    assert (added.status, added.logged("", "warn")) == (0, False)
    line = decision(added)
    assert line["backend"] == "nftables"
    assert reason in str(line["reason"])
    with serving(wire.pod, "proxy", PROXY_LISTENERS):
        assert places(reach(wire.pod, APPLICATION, *OUT)) == ends("proxy", OUT, OUTBOUND)
        assert places(reach(wire.outside, APPLICATION, *IN)) == ends("proxy", IN, INBOUND)
        assert places(reach(wire.pod, PROXY, *OUT)) == ends("outside", OUT)
        health = [Call(POD[family], 15021) for family in FAMILIES]
        assert places(reach(wire.outside, APPLICATION, *health)) == ends("pod", health)
    assert bare.call("CHECK", wire.pod, backend=backend).silent
    assert bare.call("DEL", wire.pod, backend=backend).silent
    assert (ruleset(wire.pod), bare.node.records) == ("", [])
    assert places(reach(wire.pod, APPLICATION, *OUT)) == ends("outside", OUT)
    assert places(reach(wire.outside, APPLICATION, *IN)) == ends("pod", IN)


def test_tproxy_and_dns_need_no_program_either(bare: BareNode, wire: Wire) -> None:
    """Routes and policy rules are made as the rules are, and go as they do."""
    bare.node.add_pod(
        annotations={"sidecar.istio.io/interceptionMode": "TPROXY"},
        env=[DUAL_STACK, {"name": "ISTIO_META_DNS_CAPTURE", "value": "true"}],
    )
    assert bare.call("ADD", wire.pod).status == 0
    questions = [Call(OUTSIDE[family], 53, udp=True) for family in FAMILIES]
    with serving(wire.pod, "proxy", TRANSPARENT_LISTENERS):
        arrived = reach(wire.outside, APPLICATION, *IN)
        assert places(arrived) == ends("proxy", IN, INBOUND)
        assert places(reach(wire.pod, APPLICATION, *OUT)) == ends("proxy", OUT, OUTBOUND)
        asked = places(reach(wire.pod, APPLICATION, *questions))
        assert [one[:2] for one in asked] == [("proxy", DNS)] * 2
    assert bare.call("CHECK", wire.pod).silent
    assert bare.call("DEL", wire.pod).silent
    assert ruleset(wire.pod) == ""
    for family in ("-4", "-6"):
        assert "133" not in inside(wire.pod, ["ip", family, "rule"])


def test_a_second_add_changes_nothing(bare: BareNode, pod_netns: str) -> None:
    """What is there is read back without any program, and found to be right."""
    assert bare.call("ADD", pod_netns).status == 0
    before = inside(pod_netns, ["nft", "-s", "-a", "list", "ruleset"])  # with handles
    assert bare.call("ADD", pod_netns).status == 0
    assert inside(pod_netns, ["nft", "-s", "-a", "list", "ruleset"]) == before != ""


def test_check_names_what_is_gone(bare: BareNode, pod_netns: str) -> None:
    """Code 107, and an ADD puts it right."""
    assert bare.call("ADD", pod_netns).status == 0
    inside(pod_netns, ["nft", "flush", "chain", "inet", "istio-proxy-nat", "istio-output"])
    answer = bare.call("CHECK", pod_netns)
    assert (answer.status, answer.code) == (1, 107)
    assert "istio-output" in answer.msg
    assert bare.call("ADD", pod_netns).status == 0
    assert bare.call("CHECK", pod_netns).silent


def test_iptables_is_refused_by_name_where_it_is_not(bare: BareNode, pod_netns: str) -> None:
    """Who wants it gets it, or an error that says what to install; nothing is half done."""
    answer = bare.call("ADD", pod_netns, backend="iptables")
    assert answer.status == 1
    assert "no usable iptables" in answer.msg
    assert (ruleset(pod_netns), bare.node.records) == ("", [])
