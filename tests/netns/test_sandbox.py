"""Work inside a pod's namespace: what it sees of the node, where it ends, what it leaves behind."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from istio_cni.capture.settings import to_settings
from istio_cni.edge import netns as namespaces
from istio_cni.errors import InvalidNetns, IstioCNIError, ProgrammingFailed, TryAgainLater
from istio_cni.rules.iptables import render
from istio_cni.rules.model import Family
from istio_cni.rules.sidecar import generate
from namespaces import call_inside, call_inside_as, inside, ip
from netns.programming import (
    CLI,
    TPROXY,
    VARIANTS,
    bind_here,
    check,
    clean_up,
    config,
    holders,
    program,
    residents,
    restore,
    state,
    wait_until,
    wrap,
)
from netns.traffic import (
    APPLICATION,
    FAMILIES,
    OUTBOUND,
    OUTSIDE,
    PROXY,
    PROXY_LISTENERS,
    Arrival,
    Call,
    Listener,
    attempt,
    join,
    serving,
)

pytestmark = pytest.mark.netns

variants = pytest.mark.parametrize("variant", VARIANTS)
HERE = "/proc/self/ns/net"
BOTH = {variant: {"iptables": variant, "ip6tables": variant} for variant in VARIANTS}
CLONE_NEWUSER = 0x10000000


def soon(seconds: float = 5.0) -> float:
    """Return a deadline."""
    return time.monotonic() + seconds


# -- the node's files --------------------------------------------------------------------------


def test_node_without_shell_and_mount_programs_suffices(netns: str) -> None:
    """Nothing but iptables is started: no sh, no mount, no nsenter, no ip."""
    names = ("dash", "bash", "nsenter", "unshare", "ip", "nft", "modprobe", "mount")
    found = [path for name in names if (path := shutil.which(name))]

    def run() -> dict[str, str]:
        bind_here({os.path.realpath(path): "/dev/null" for path in found})
        with pytest.raises(PermissionError):
            subprocess.call(["sh", "-c", ":"])
        outcome = program(netns, config())
        assert outcome.warnings == []
        return outcome.variants

    assert call_inside(HERE, run) == BOTH["nft"]
    assert holders(netns) == BOTH["nft"]


def test_root_that_is_no_mount_point_costs_one_warning(netns: str, tmp_path: Path) -> None:
    """In a chroot nothing can be mounted; capture works without the sandbox."""

    def run() -> list[str]:
        bind_here({})
        for name in ("usr", "etc", "proc", "run", "dev"):
            (tmp_path / name).mkdir()
            subprocess.check_call(["mount", "--rbind", f"/{name}", str(tmp_path / name)])
        for name in ("bin", "sbin", "lib", "lib64"):
            (tmp_path / name).symlink_to(f"usr/{name}")
        from istio_cni.capture import iptables  # noqa: F401 # its file is out of sight then

        os.chroot(tmp_path)
        os.chdir("/")
        return program(netns, config()).warnings

    assert call_inside(HERE, run) == [
        "no mount sandbox (Invalid argument): iptables sees the node's files as they are"
    ]
    assert holders(netns) == BOTH["nft"]


@variants
def test_missing_rights_cost_one_warning(netns: str, tmp_path: Path, variant: str) -> None:
    """An init container has NET_ADMIN, not SYS_ADMIN: neither mounts nor process namespaces."""
    file = tmp_path / "capture.json"
    file.write_text(json.dumps(to_settings(config(variant, **TPROXY))))
    command = [str(CLI), "--config", str(file), "--cni-mode", "--network-namespace", netns]
    privileges = ["setpriv", "--bounding-set", "-sys_admin"]
    done = subprocess.run(
        ["ip", "netns", "exec", os.path.basename(netns), *privileges, *command],
        capture_output=True,
        text=True,
        check=True,
    )
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("WARN")]
    assert "no mount sandbox (Operation not permitted)" in warning
    assert holders(netns) == BOTH[variant]


SLEEPY = r"""
#include <fcntl.h>
#include <grp.h>
#include <nss.h>
#include <pwd.h>
#include <unistd.h>
static enum nss_status ask(int *error) {
    int file = open(WITNESS, O_WRONLY | O_CREAT | O_APPEND, 0666);
    write(file, ".", 1);
    close(file);
    usleep(100 * 1000);
    return NSS_STATUS_NOTFOUND;
}
enum nss_status _nss_sleepy_getpwnam_r(
    const char *name, struct passwd *found, char *buffer, size_t size, int *error) {
    return ask(error);
}
enum nss_status _nss_sleepy_getgrnam_r(
    const char *name, struct group *found, char *buffer, size_t size, int *error) {
    return ask(error);
}
"""


@pytest.fixture
def sleepy(tmp_path: Path) -> Callable[[], None]:
    """Make a node whose name service is slow; the value turns the calling child's into that."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, for a name service module")
    source, libraries = tmp_path / "sleepy.c", tmp_path / "lib"
    source.write_text(SLEEPY)
    libraries.mkdir()
    target = libraries / "libnss_sleepy.so.2"
    witness = f'-DWITNESS="{tmp_path}/asked"'
    subprocess.check_call(["gcc", "-w", "-shared", "-fPIC", witness, "-o", target, source])
    switch = tmp_path / "nsswitch.conf"
    switch.write_text("passwd: sleepy\ngroup: sleepy\n")
    loaded = Path("/proc/self/maps").read_text().split()
    directory = next(
        os.path.dirname(path) for path in loaded if "/libc.so" in path or "/libc-" in path
    )

    def become() -> None:
        bind_here({"/etc/nsswitch.conf": switch})
        layers = f"lowerdir={libraries}:{directory}"
        subprocess.check_call(["mount", "-t", "overlay", "overlay", "-o", layers, directory])

    return become


@variants
@pytest.mark.parametrize("sandbox", [True, False])
def test_name_service_is_not_asked(
    netns: str, tmp_path: Path, sleepy: Callable[[], None], variant: str, sandbox: bool
) -> None:
    """`-m owner` asks for names; in the sandbox nobody answers slowly, outside somebody does."""

    def run() -> float:
        sleepy()
        started = time.monotonic()
        program(netns, config(variant), sandbox=sandbox)
        return time.monotonic() - started

    took_s = call_inside(HERE, run)
    assert holders(netns) == BOTH[variant]
    if sandbox:
        assert took_s < 1
        assert not (tmp_path / "asked").exists()
    else:
        assert took_s > 1.2
        assert len((tmp_path / "asked").read_text()) >= 12


def test_programs_get_an_environment_of_ours(netns: str, tmp_path: Path) -> None:
    """A bundle's library path, a locale or a proxy setting of the caller reaches none of them."""
    wrap(tmp_path, "iptables-nft-restore", 'env > $HERE/env; exec $REAL "$@"')

    def run() -> None:
        os.environ.update(LD_LIBRARY_PATH="/bundle", LANG="de_DE.UTF-8", XTABLES_LOCKFILE="/x")
        program(netns, config(), wrappers=tmp_path)

    call_inside(HERE, run)
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert names - {"PWD", "OLDPWD", "SHLVL", "_", "REAL", "HERE"} == {"PATH", "LC_ALL"}


# -- whose the namespace is --------------------------------------------------------------------


@contextmanager
def user_namespace_pod(outside: str, *, mapped_first: bool = False) -> Iterator[tuple[str, int]]:
    """Make a pod in a user namespace with ids from 100000 on; its path and a process in it.

    Runtimes map ids after they have made the network namespace, or before.
    """
    name, processes = f"istio-{os.urandom(4).hex()}", []

    def start(*command: str, kind: str) -> int:
        process = subprocess.Popen([*command, "sleep", "60"])
        processes.append(process)
        own, path = os.stat(f"/proc/self/ns/{kind}").st_ino, f"/proc/{process.pid}/ns/{kind}"
        wait_until(lambda: os.stat(path).st_ino != own, "the namespace")
        return process.pid

    try:
        kinds = ["--user"] if mapped_first else ["--user", "--net"]
        first = last = start("unshare", *kinds, kind=kinds[-1][2:])
        for file in ("uid_map", "gid_map"):
            Path(f"/proc/{first}/{file}").write_text("0 100000 65536")
        if mapped_first:
            last = start("nsenter", "--user", f"--target={first}", "unshare", "--net", kind="net")
        ip("netns", "attach", name, str(last))
        join(f"/run/netns/{name}", outside)
        yield f"/run/netns/{name}", last
    finally:
        for process in processes:
            process.kill()
            process.wait()
        subprocess.call(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def reach_within(path: str, process: int, uid: int, *calls: Call) -> list[Arrival | str]:
    """Make connections as a user of the pod's own user namespace."""

    def connect() -> list[Arrival | str]:
        libc = ctypes.CDLL(None, use_errno=True)
        file = os.open(f"/proc/{process}/ns/user", os.O_RDONLY)
        assert libc.setns(file, CLONE_NEWUSER) == 0
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        assert Path("/proc/self/uid_map").read_text().split() == ["0", "100000", "65536"]
        return [attempt(call) for call in calls]

    arrivals: list[Arrival | str] = call_inside(path, connect)
    return arrivals


@pytest.mark.parametrize("variant", [*VARIANTS, ""])
@pytest.mark.parametrize("mapped_first", [True, False])
def test_pod_in_a_user_namespace_is_captured(netns: str, variant: str, mapped_first: bool) -> None:
    """Owners are the pod's ids there: its 1337 is the proxy, whoever that is on the node."""
    calls = [Call(OUTSIDE[family], 80) for family in FAMILIES]
    with (
        user_namespace_pod(netns, mapped_first=mapped_first) as (path, process),
        serving(path, "proxy", PROXY_LISTENERS),
        serving(netns, "outside", [Listener(80)]),
    ):
        before = state(path)
        wanted = config(variant, **TPROXY)
        outcome = program(path, wanted)
        assert outcome.variants == BOTH[variant or "nft"]
        assert outcome.warnings == []
        assert program(path, wanted).changed == []
        assert check(path, wanted, outcome.variants) == ""
        to_proxy = reach_within(path, process, APPLICATION, *calls)
        assert [one[:2] for one in to_proxy] == [("proxy", OUTBOUND)] * 2
        directly = reach_within(path, process, PROXY, *calls)
        assert [one[:2] for one in directly] == [("outside", 80)] * 2
        clean_up(path)
        assert state(path) == before


def test_owner_matches_need_the_user_namespace(netns: str) -> None:
    """From outside the kernel refuses them, which is why the child goes in."""
    with user_namespace_pod(netns) as (path, _):
        text = render(generate(config()), Family.V4)
        with pytest.raises(AssertionError, match="exit"):
            restore(path, "iptables-nft", text)


def test_wrong_paths_are_refused_at_once(tmp_path: Path) -> None:
    """Neither a file nor a pipe nobody writes to is a network namespace; the path is shown."""
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        "file": '/file" is not a network namespace',
        "pipe": '/pipe" is not a network namespace',
        "none": 'cannot open network namespace ".*/none": No such file or directory',
        "/proc/self/ns/mnt": "is not a network namespace",
    }

    def refuse() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for name, reason in reasons.items():
            with pytest.raises(InvalidNetns, match=reason):
                namespaces.open_netns(str(tmp_path / name))
        assert len(os.listdir("/proc/self/fd")) == before

    call_inside(HERE, refuse)


# -- the child ---------------------------------------------------------------------------------


def test_no_descriptor_and_no_process_is_left(netns: str, tmp_path: Path) -> None:
    """Fifty runs in one process, failures of all kinds among them."""
    wrap(tmp_path, "iptables-nft-save", "exit 1")
    wanted = config("nft", ENABLE_INBOUND_IPV6=False)
    other = config("nft", ENABLE_INBOUND_IPV6=False, **TPROXY)

    def fail(kind: type[IstioCNIError], **how: object) -> None:
        with pytest.raises(kind):
            program(how.pop("path", netns), how.pop("wanted", wanted), **how)  # type: ignore[arg-type] # each fits

    def run() -> tuple[int, int]:
        program(netns, wanted)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            program(netns, wanted)
            program(netns, wanted, sandbox=False)
            fail(TryAgainLater, seconds=0.0)
            fail(ProgrammingFailed, wrappers=tmp_path, wanted=other, existing="refuse")
            fail(InvalidNetns, path=str(tmp_path))
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        return before, len(os.listdir("/proc/self/fd"))

    before, after = call_inside(netns, run)
    assert after == before


def test_child_keeps_none_of_its_callers_descriptors(netns: str, tmp_path: Path) -> None:
    """Locks and pipes of the caller end with the caller; programs get three and our own lock."""
    wrap(tmp_path, "iptables-nft-restore", 'ls -l /proc/self/fd > $HERE/open; exec $REAL "$@"')

    def run() -> list[str]:
        left = os.open(tmp_path / "left-open", os.O_WRONLY | os.O_CREAT)
        os.set_inheritable(left, True)
        file = namespaces.open_netns(netns)
        program(netns, config(), wrappers=tmp_path)
        answer = namespaces.run_inside(opened, file, deadline=soon(), log=lambda *_: None)
        assert isinstance(answer, list)
        return answer

    child = call_inside(HERE, run)
    assert not any("left-open" in path for path in child)
    assert len([path for path in child if path.startswith("pipe:")]) <= 4
    listed = (tmp_path / "open").read_text()
    assert "left-open" not in listed
    assert listed.count("socket:") == 1


def opened(_: object) -> list[str]:
    """List what the calling process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the listing's own
    return found


@pytest.mark.parametrize("uid", [0, APPLICATION])
def test_answer_does_not_wait_for_what_holds_the_pipe(netns: str, uid: int) -> None:
    """Something that the work left running, or another thread forked, may have it open."""

    def work(_: object) -> str:
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        return "done"

    def run() -> float:
        started = time.monotonic()
        sandbox = uid == 0
        answer = namespaces.run_inside(
            work, None, deadline=soon(20), log=lambda *_: None, sandbox=sandbox
        )
        assert answer == "done"
        return time.monotonic() - started

    assert call_inside_as(uid, netns, run) < 1
    if uid == 0:
        assert wait_until(lambda: not residents(netns), "all have ended") < 0.5


def test_without_rights_programs_are_ended_all_the_same(netns: str) -> None:
    """Where there is no process namespace, the child's programs are killed one by one."""

    def work(_: object) -> None:
        subprocess.Popen(["sleep", "60"], process_group=0)
        time.sleep(60)

    def run() -> None:
        with pytest.raises(TryAgainLater, match="took too long"):
            namespaces.run_inside(
                work, None, deadline=soon(0.3), log=lambda *_: None, sandbox=False
            )
        assert "sleep" not in residents(netns)

    call_inside_as(APPLICATION, netns, run)
    assert residents(netns) == []


def test_caller_can_fork_as_before(netns: str) -> None:
    """The process namespace is for the child alone; later children of the caller are its own."""
    file = namespaces.open_netns(netns)
    own = os.stat("/proc/self/ns/pid").st_ino
    inner = namespaces.run_inside(
        lambda _: [os.getpid(), os.stat("/proc/self/ns/pid").st_ino],
        file,
        deadline=soon(),
        log=lambda *_: None,
    )
    os.close(file)
    assert inner[0] == 1  # type: ignore[index] # a list
    assert os.stat("/proc/self/ns/pid_for_children").st_ino == own
    seen = subprocess.check_output(["sh", "-c", "echo $$"], text=True)
    assert int(seen) > 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_threads_of_one_process_work_side_by_side(
    new_netns: Callable[[], str], tmp_path: Path
) -> None:
    """As in an agent: a slow pod delays no other, and none is left with a lock held."""
    slow, *quick = [new_netns() for _ in range(7)]
    wrap(tmp_path, "iptables-nft-restore", 'sleep 0.7; exec $REAL "$@"')
    busy = threading.Event()
    took: list[float] = []

    def one(path: str) -> dict[str, str]:
        started = time.monotonic()
        found = program(path, config("nft")).variants
        took.append(time.monotonic() - started)
        return found

    def churn() -> None:
        while not busy.is_set():
            json.dumps(list(range(100)))

    noise = threading.Thread(target=churn)
    noise.start()
    try:
        with ThreadPoolExecutor(7) as pool:
            first = pool.submit(program, slow, config("nft"), wrappers=tmp_path)
            assert list(pool.map(one, quick)) == [BOTH["nft"]] * 6
            assert not first.done()
            assert first.result().variants == BOTH["nft"]
    finally:
        busy.set()
        noise.join()
    assert max(took) < 1.4
    assert inside(slow, ["iptables-nft-save"]).count("ISTIO_REDIRECT") > 1
