"""The demo as people start it: what it proves, what it prints, and that nothing stays behind."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.netns

ROOT = Path(__file__).parents[2]
DEMO = (sys.executable, "-m", "examples.demo")
TIMEOUT_S = 60
ESCAPE = "\x1b"
SUMMARY = re.compile(r"^(\d+) of (\d+) checks passed in \d+\.\d s$", re.MULTILINE)


@pytest.fixture(autouse=True, scope="module")
def _needs() -> None:
    """Skip where the demo itself would say that something is missing."""
    code = "from examples.demo import needs, node; print('; '.join(needs.missing(node.families())))"
    argv = [sys.executable, "-c", code]
    missing = subprocess.check_output(argv, cwd=ROOT, text=True, timeout=TIMEOUT_S).strip()
    if missing:
        pytest.skip(f"the demo lacks: {missing}")


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Return an environment in which temporary files, and processes, can be told from others'."""
    base = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    return {**base, "TMPDIR": str(tmp_path), "TERM": "xterm", **more}


@contextmanager
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the demo with its output in pipes; kill it if it is still there at the end."""
    with subprocess.Popen(
        DEMO,
        cwd=ROOT,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()


def on_terminal(tmp_path: Path, **more: str) -> tuple[int, str]:
    """Run the demo on a terminal; return its exit status and what a person would see."""
    ours, its = pty.openpty()
    demo = subprocess.Popen(
        DEMO, cwd=ROOT, env=environment(tmp_path, **more), stdout=its, stderr=its, stdin=its
    )
    os.close(its)
    seen, limit = b"", time.monotonic() + TIMEOUT_S
    try:
        while select.select([ours], [], [], max(0.0, limit - time.monotonic()))[0]:
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:  # EIO: the other side is closed
                break
    finally:
        os.close(ours)
        try:
            status = demo.wait(5)
        finally:
            demo.kill()
    return status, seen.decode()


def processes_of(tmp_path: Path) -> list[int]:
    """List living processes that were started with the test's TMPDIR."""
    mark = f"TMPDIR={tmp_path}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def namespaces_of(pids: list[int]) -> set[str]:
    """Return the network namespaces that processes are in or hold by a descriptor."""
    found = set()
    for pid in pids:
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            descriptors = []
        for link in (Path(f"/proc/{pid}/ns/net"), *descriptors):
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("net:["):
                found.add(target)
    return found


def wait_until_part(demo: subprocess.Popen[str], part: str) -> None:
    """Read the demo's output up to the heading of a part."""
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith(part):
            return
    pytest.fail("the demo ended before it came so far")


def assert_held_by_processes_alone(tmp_path: Path) -> None:
    """Show that the namespaces of a running demo will end with its processes.

    The kernel keeps a namespace for a process, a descriptor or a mount, and uses its number again
    at once, so that looking for the number afterwards would prove nothing.
    """
    made = namespaces_of(processes_of(tmp_path)) - namespaces_of([os.getpid()])
    assert len(made) >= 5  # the node, the outside, three pods
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not [name for name in made if name in mounts]


def assert_nothing_left(tmp_path: Path) -> None:
    """Show that no process of the demo lives; one that was killed may take a moment to die."""
    limit = time.monotonic() + 5
    while (left := processes_of(tmp_path)) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not left


def test_demo_passes_and_prints_plain_text_into_a_pipe(tmp_path: Path) -> None:
    """Every check passes; no escape codes; nothing in the temporary directory."""
    with started(tmp_path) as demo:
        stdout, stderr = demo.communicate(timeout=TIMEOUT_S)
    assert (demo.returncode, stderr) == (0, "")
    assert ESCAPE not in stdout
    assert "✗" not in stdout
    summary = SUMMARY.search(stdout)
    assert summary is not None
    assert summary[1] == summary[2] == str(len(re.findall(r"^  ✓ ", stdout, re.MULTILINE)))
    assert not list(tmp_path.iterdir())
    assert_nothing_left(tmp_path)


def test_demo_shows_marks_and_colours_on_a_terminal(tmp_path: Path) -> None:
    """A person sees ✓ only, in colour, and lines that fit."""
    status, seen = on_terminal(tmp_path, COLUMNS="70")
    assert status == 0
    assert "✓" in seen
    assert "✗" not in seen
    plain = re.sub(r"\x1b\[\d*m", "", seen).splitlines()
    listed = [line for line in plain if not line.startswith("    ")]
    assert ESCAPE in seen
    assert max(map(len, listed)) <= 70


def test_demo_respects_no_color(tmp_path: Path) -> None:
    """With NO_COLOR the marks stay and the colours go."""
    status, seen = on_terminal(tmp_path, NO_COLOR="1")
    assert status == 0
    assert "✓" in seen
    assert ESCAPE not in seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("part", ["1.", "3."])
def test_stopped_demo_leaves_nothing(tmp_path: Path, number: signal.Signals, part: str) -> None:
    """A signal in the middle ends it: no process, namespace or temporary file stays."""
    with started(tmp_path) as demo:
        wait_until_part(demo, part)
        assert_held_by_processes_alone(tmp_path)
        assert list(tmp_path.iterdir())
        demo.send_signal(number)
        _, stderr = demo.communicate(timeout=10)
    assert demo.returncode == 128 + number
    assert stderr == f"demo: stopped by {number.name}; everything is taken down\n"
    assert not list(tmp_path.iterdir())
    assert_nothing_left(tmp_path)


def test_killed_demo_leaves_no_process_and_no_namespace(tmp_path: Path) -> None:
    """Even SIGKILL takes servers and namespaces with it."""
    with started(tmp_path) as demo:
        wait_until_part(demo, "3.")
        assert_held_by_processes_alone(tmp_path)
        demo.kill()
        demo.communicate(timeout=10)
    assert_nothing_left(tmp_path)


def test_two_demos_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Same names and addresses, but no namespace in common."""
    with started(tmp_path) as one, started(tmp_path) as other:
        for demo in (one, other):
            stdout, stderr = demo.communicate(timeout=TIMEOUT_S)
            assert (demo.returncode, stderr) == (0, ""), stdout
    assert not list(tmp_path.iterdir())


def test_demo_without_ipv6_says_so_and_does_ipv4(tmp_path: Path) -> None:
    """A machine with IPv6 disabled is shown IPv4 alone."""
    switch = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
    if not os.path.exists(switch):
        pytest.skip("needs a kernel with IPv6, to disable it in a namespace")
    script = f'echo 1 > {switch} && exec "$@"'
    argv = ["unshare", "--net", "sh", "-c", script, "sh", *DEMO]
    env = environment(tmp_path)
    stdout = subprocess.check_output(argv, cwd=ROOT, env=env, text=True, timeout=TIMEOUT_S)
    assert "IPv4 only" in stdout
    assert "proxy:15006" in stdout
    assert "]:" not in stdout


def test_demo_as_ordinary_user_says_what_it_needs(tmp_path: Path) -> None:
    """One line on standard error, nothing on standard output, exit status 2."""
    probe = ["unshare", "--user", "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode != 0:
        pytest.skip("needs user namespaces, to be nobody in one")
    env = environment(tmp_path)
    argv = ["unshare", "--user", *DEMO]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"demo: cannot run here: not root[^\n]*\n", done.stderr)


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("ip", "no program ip (install iproute2)"),
        ("iptables-save", "no program iptables-save (install iptables)"),
        (
            "host-local",
            "no CNI plugin host-local in /opt/cni/bin, /usr/lib/cni, CNI_PATH "
            "(install containernetworking-plugins)",
        ),
    ],
)
def test_demo_names_what_is_missing(tmp_path: Path, lacking: str, said: str) -> None:
    """A program that is not there is named with its package, before anything is done."""
    code = f"""
import shutil, sys
found = shutil.which
shutil.which = lambda name, **more: None if name == {lacking!r} else found(name, **more)
from examples.demo.__main__ import main
sys.exit(main())
"""
    env = environment(tmp_path)
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (done.stdout, done.stderr) == ("", f"demo: cannot run here: {said}\n")
