"""The bundle on nodes that would do it harm: it loads nothing of theirs, and misses nothing.

Each kind of harm is shown to work, too, where the start leaves out what keeps it off.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fake_apiserver import FakeApiServer
from istio_cni.constants import LAUNCHER_FILE
from namespaces import inside
from netns.bare_root import DUAL_STACK, BareNode, bare, bundle, opened, portable
from netns.plugin import Answer, Node, environment, stdin

__all__ = ["bare"]  # a fixture
pytestmark = pytest.mark.netns

NFTABLES = {"backend": "nftables"}
FIPS_ONLY = b"""\
openssl_conf = init
[init]
alg_section = algorithms
[algorithms]
default_properties = fips=yes
"""
HOSTILE = """\
#include <fcntl.h>
__attribute__((constructor)) static void loaded(void) { open("/loaded", O_CREAT | O_WRONLY, 0600); }
"""


@pytest.fixture
def asking(tmp_path: Path, server: FakeApiServer) -> BareNode:
    """Make the same node, whose pod is on an API server."""
    bare = BareNode(tmp_path, bundle(), server)
    bare.node.add_pod(env=[DUAL_STACK])
    return bare


def captures(bare: BareNode, netns: str) -> bool:
    """Tell whether an ADD makes rules; it must succeed, and a CHECK and a DEL after it."""
    added = bare.call("ADD", netns)
    assert (added.status, added.logged("", "warn")) == (0, False), added
    made = inside(netns, ["nft", "list", "ruleset"]) != ""
    assert bare.call("CHECK", netns).silent
    assert bare.call("DEL", netns).silent
    assert inside(netns, ["nft", "list", "ruleset"]) == ""
    return made


def answers(answer: Answer) -> bool:
    """Tell whether this is what VERSION is answered with."""
    return answer.status == 0 and "1.1.0" in answer.stdout


def interpreter() -> Path:
    """Return this machine's loader, of which the bundle's is a copy."""
    path = Path(portable.Elf((bundle() / "istio-cni").read_bytes()).interpreter)
    if not path.exists():
        pytest.skip("needs the loader of the machine that made the bundle")
    return path


def strace(bare: BareNode, trace: Path) -> None:
    """Have the calls of a node traced."""
    program = shutil.which("strace")
    if program is None:
        pytest.skip("needs strace")
    bare.around = [program, "-f", "-s", "4096", "-e", "trace=%file", "-o", str(trace)]


# -- what is in it ---------------------------------------------------------------------------------


def test_every_object_finds_all_it_needs_in_the_bundle() -> None:
    """Nothing is missing, so no directory of the node is searched; none names one either."""
    portable.verify(bundle())


def test_a_missing_library_is_noticed_when_a_bundle_is_made(tmp_path: Path) -> None:
    """A library that no longer comes along does not wait for a node to be missed."""
    copy = Path(shutil.copytree(bundle(), tmp_path / "bundle"))
    (copy / portable.LIBC_DIR / "libm.so.6").unlink()
    with pytest.raises(portable.BundleFailed, match=r"needs libm\.so\.6, which the bundle has not"):
        portable.verify(copy)


def test_an_unknown_loader_makes_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of glibc that reads another file needs a person to look at it."""
    monkeypatch.setitem(portable.HARDWIRED, b"/etc/ld.so.novelty", b"/dev/null/.novelty")
    copy = Path(shutil.copytree(bundle(), tmp_path / "bundle"))
    shutil.rmtree(copy / portable.LIBC_DIR)
    (copy / LAUNCHER_FILE).unlink()  # comes when the bundle is complete
    with pytest.raises(portable.BundleFailed, match=r"/etc/ld\.so\.novelty 0 times"):
        portable.complete(copy)


def test_search_paths_go_and_nothing_else_does(tmp_path: Path) -> None:
    """Python's own build may leave the directories of the machine that it was made on."""
    source, library = tmp_path / "empty.c", tmp_path / "empty.so"
    source.write_text("")
    for kind in ("--enable-new-dtags", "--disable-new-dtags"):
        flags = ["-shared", "-Wl,-rpath,/somewhere", f"-Wl,{kind}", "-Wl,-soname,empty.so.1"]
        _compile(source, library, *flags)
        elf = portable.Elf(library.read_bytes())
        before = (elf.needed, elf.soname, len(elf.data))
        assert elf.search_paths == ["/somewhere"]
        assert elf.drop_search_paths()
        assert (elf.search_paths, elf.drop_search_paths()) == ([], False)
        assert (elf.needed, elf.soname, len(elf.data)) == before


# -- what it loads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["VERSION", "ADD", "ADD over HTTPS"])
def test_nothing_outside_the_bundle_is_opened(
    tmp_path: Path, server: FakeApiServer, pod_netns: str, verb: str
) -> None:
    """No library, no cache of them, no locale, no name service, no time zone: not even tried."""
    bare = BareNode(tmp_path, bundle(), server if "HTTPS" in verb else None)
    bare.node.add_pod(env=[DUAL_STACK])
    strace(bare, trace := tmp_path / "trace")
    answer = bare.call(verb.split()[0], "" if verb == "VERSION" else pod_netns)
    assert answer.status == 0, answer
    tried = opened(trace, bare.start.argv[0])
    assert "/bundle/_internal/libc/libc.so.6" in tried
    known = ("/bundle/", "/proc/", "/manifests", "/run/istio-cni", "/run/netns/", "/dev/null")
    assert {path for path in tried if not path.startswith(known)} == set()


def test_nothing_of_this_machine_is_loaded(
    tmp_path: Path, server: FakeApiServer, pod_netns: str
) -> None:
    """The same without a root of its own, where there is everything that could be found."""
    folder, node = str(bundle()), Node(tmp_path, server)
    node.add_pod()
    start, trace = portable.recipe(folder), tmp_path / "trace"
    program = shutil.which("strace") or pytest.skip("needs strace")
    subprocess.run(
        [program, "-f", "-s", "4096", "-e", "trace=%file", "-o", str(trace), *start.argv],
        env={**environment("ADD", pod_netns), **start.env},
        input=stdin(node.config(**NFTABLES)),
        check=True,
        timeout=60,
    )
    known = (folder, "/proc/", str(tmp_path), "/run/netns/", "/dev/null")
    tried = opened(trace, start.argv[0])
    assert f"{folder}/_internal/libssl.so.3" in tried
    assert {path for path in tried if not path.startswith(known)} == set()


def test_programs_that_it_starts_get_nothing_of_its_start(tmp_path: Path, pod_netns: str) -> None:
    """The node's iptables run with the node's loader and libraries, and know of no other."""
    node, start, trace = Node(tmp_path), portable.recipe(str(bundle())), tmp_path / "trace"
    node.add_pod()
    program = shutil.which("strace") or pytest.skip("needs strace")
    subprocess.run(
        [program, "-f", "-v", "-s", "4096", "-e", "trace=execve", "-o", str(trace), *start.argv],
        env={**environment("ADD", pod_netns), **start.env},
        input=stdin(node.config(backend="iptables")),
        check=True,
        timeout=60,
    )
    children = [line for line in trace.read_text().splitlines() if "tables" in line.split(",")[0]]
    assert children
    for line in children:
        environments = re.findall(r"\[[^]]*\]", line)[1]
        names = {name for name, _ in re.findall(r'"(\w+)=([^"]*)"', environments)}
        assert names <= {"PATH", "LC_ALL", "XTABLES_LOCKFILE"}


def test_the_node_s_preload_file_is_not_read(bare: BareNode, tmp_path: Path) -> None:
    """It would put a library of the node, made for its libc, into every program."""
    (source := tmp_path / "hostile.c").write_text(HOSTILE)
    _compile(source, bare.root / "hostile.so", "-shared")
    bare.put("/etc/ld.so.preload", b"/hostile.so\n", 0o644)
    assert answers(bare.call("VERSION"))
    assert not (bare.root / "loaded").exists()
    bare.put("/ld-as-it-was.so.1", interpreter().read_bytes())
    bare.start.argv[0] = "/ld-as-it-was.so.1"
    assert answers(bare.call("VERSION"))
    assert (bare.root / "loaded").exists()


def test_the_node_s_openssl_cnf_is_not_read(asking: BareNode, pod_netns: str) -> None:
    """A node that allows FIPS alone has no provider of that kind for our libcrypto."""
    library = (asking.bundle / "_internal" / "libcrypto.so.3").read_bytes()
    directory = re.search(rb'OPENSSLDIR: "([^"]+)"', library)
    assert directory is not None
    asking.put(f"{directory[1].decode()}/openssl.cnf", FIPS_ONLY, 0o644)
    assert captures(asking, pod_netns)
    answer = asking.call("ADD", pod_netns, env={"OPENSSL_CONF": None})
    assert (answer.status, "library has no ciphers" in answer.msg) == (1, True)


# -- other roots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("proc", [True, False], ids=["with /proc", "without /proc"])
def test_version_needs_no_proc(bare: BareNode, proc: bool) -> None:
    """Nor a second start of the boot loader, which could not work there."""
    bare.proc = proc
    assert answers(bare.call("VERSION"))


@pytest.mark.parametrize("missing", ["_PYI_ARCHIVE_FILE", "_PYI_PARENT_PROCESS_LEVEL"])
def test_each_variable_for_the_boot_loader_is_needed(bare: BareNode, missing: str) -> None:
    """Without it the boot loader starts itself anew; another release may want another one."""
    bare.proc = False
    answer = bare.call("VERSION", env={missing: None})
    assert (answer.status != 0, "failed to restart process" in answer.stderr) == (True, True)


@pytest.mark.parametrize("proc", [True, False], ids=["with /proc", "without /proc"])
def test_a_static_busybox_is_enough_of_a_node(bare: BareNode, pod_netns: str, proc: bool) -> None:
    """As in small distributions, whose one program has no libc either."""
    busybox = shutil.which("busybox")
    if busybox is None or portable.Elf(Path(busybox).read_bytes()).interpreter:
        pytest.skip("needs a static busybox")
    bare.put("/bin/busybox", Path(busybox).read_bytes())
    bare.within = ["/bin/busybox", "sh", "-c", 'exec "$@"', "sh"]
    bare.proc = proc
    assert answers(bare.call("VERSION"))
    if proc:
        assert captures(bare, pod_netns)


def test_a_node_with_musl(asking: BareNode, pod_netns: str) -> None:
    """Its loader is its libc, and neither is ours."""
    loaders = list(Path("/lib").glob("ld-musl-*.so.1"))
    if not loaders:
        pytest.skip("needs musl")
    asking.put(str(loaders[0]), loaders[0].read_bytes())
    said = subprocess.run(["chroot", asking.root, loaders[0]], capture_output=True, text=True)
    assert said.stderr.startswith("musl libc")
    assert captures(asking, pod_netns)


# -- hardship --------------------------------------------------------------------------------------


def test_a_full_tmp_without_programs_does_not_matter(bare: BareNode, pod_netns: str) -> None:
    """Nothing is unpacked."""
    bare.mounts = [
        f"mount -t tmpfs -o size=4k,noexec tmpfs {bare.root}/tmp",
        f"head -c 4096 /dev/zero >{bare.root}/tmp/full",
        f"! touch {bare.root}/tmp/full/more {bare.root}/tmp/more 2>/dev/null",
    ]
    assert captures(bare, pod_netns)


def test_a_root_that_is_read_only_does_not_matter(bare: BareNode, pod_netns: str) -> None:
    """Only the run dir is written to."""
    bare.mounts = [
        f"mount -o remount,bind,ro {bare.root / name}" for name in ("bundle", "manifests", "")
    ]
    bare.mounts.append(f"! touch {bare.root}/written 2>/dev/null")
    assert captures(bare, pod_netns)


def test_an_empty_environment_does_not_matter(bare: BareNode, pod_netns: str) -> None:
    """No HOME and no locale in any call here; now no PATH either."""
    assert bare.call("ADD", pod_netns, env={"PATH": None}, **NFTABLES).status == 0
    assert bare.call("CHECK", pod_netns, env={"PATH": None}, **NFTABLES).silent


def test_closed_descriptors_do_not_matter(bare: BareNode, pod_netns: str) -> None:
    """What is opened first gets number 0, and must not be taken for stdin."""
    null = bare.put("/dev/null", b"")
    bare.mounts = [f"mount --bind /dev/null {null}"]
    bare.redirections = "<&- >&- 2>&-"
    assert bare.call("VERSION")[:2] == (0, "")
    bare.redirections = ">&- 2>&-"
    assert bare.call("ADD", pod_netns)[:3] == (0, "", "")
    bare.redirections = ""
    assert bare.call("CHECK", pod_netns).silent
    assert len(bare.node.records) == 1


def _compile(source: Path, target: Path, *flags: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-fPIC", *flags, source, "-o", target], check=True)
