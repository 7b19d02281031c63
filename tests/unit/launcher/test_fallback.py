"""What the bundle gets when it runs in the agent's place, and what the runtime gets without one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from portable import recipe

from launcher_agent import LIMIT, PATH, FakeAgent, Installation, declined, read_frame, write_program

STRACE = shutil.which("strace")
LOADER_TELLS = f"""#!{sys.executable} -IS
import json, os, sys
print(json.dumps({{"argv": sys.argv, "env": dict(os.environ)}}))
"""


def give_loader(bundle: Path) -> None:
    """Let a bundle bring a loader, which tells how it was started."""
    loader = Path(recipe(str(bundle)).argv[0])
    loader.parent.mkdir(parents=True)
    write_program(loader, LOADER_TELLS)


def injected(*faults: str) -> list[str]:
    """Make a command under which system calls fail, as they do on other kernels."""
    if STRACE is None:
        pytest.skip("needs strace, to let system calls fail")
    return [STRACE, "-o/dev/null", *(f"--inject={fault}" for fault in faults)]


# -- the bundle ------------------------------------------------------------------------------------


def test_the_bundle_gets_the_variables_of_cni_and_path(installed: Installation) -> None:
    """Loader, Python and OpenSSL obey variables, and a runtime's are not meant for the plugin."""
    ignored = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "SSL_CERT_FILE", "HTTPS_PROXY")
    spoofed = {
        "CNI_ISTIO_FALLBACK": "x",
        "CNI_ISTIO_REQUEST_ID": "x",
        "OPENSSL_CONF": "/evil",
        "_PYI_ARCHIVE_FILE": "/evil",
        "GLIBC_TUNABLES": "x",
    }
    env = {"CNI_ARGS": "A=1", **dict.fromkeys(ignored, "/nowhere"), **spoofed}
    told = installed.call("ADD", env=env).env
    told.pop("LC_CTYPE", None)  # Python's own
    identity = told.pop("CNI_ISTIO_REQUEST_ID")
    assert len(identity) == 32
    assert int(identity, 16)
    assert told == {
        "CNI_ARGS": "A=1",
        "CNI_COMMAND": "ADD",
        "CNI_ISTIO_FALLBACK": "absent: No such file or directory",
        "OPENSSL_CONF": "/dev/null",
        "PATH": PATH,
        "TZ": "/dev/null",
    }


def test_the_bundle_has_the_request_id_that_the_agent_was_told(
    installed: Installation, root: None
) -> None:
    """So that a reader of logs finds both."""
    with FakeAgent(installed.socket, declined("stopping")) as agent:
        env = installed.call().env
    assert env["CNI_ISTIO_REQUEST_ID"] == agent.call.request_id


@pytest.mark.parametrize("size", [0, 1, 999, LIMIT["STDIN_MAX"]])
def test_the_bundle_gets_stdin_from_its_start(size: int, installed: Installation) -> None:
    """A file in memory takes the place of the runtime's pipe, which has been read."""
    stdin = os.urandom(size)
    told = installed.call(stdin=stdin).told
    assert told["place"] == 0
    assert told["stdin"] == (stdin.decode("latin-1") if size < 1000 else size)


def test_version_has_an_empty_stdin(installed: Installation) -> None:
    """The runtime's may stay open for ever."""
    reader, writer = os.pipe()
    process = installed.start("VERSION", stdin=reader, stdout=subprocess.PIPE)
    stdout, _ = process.communicate(timeout=10)
    os.close(reader)
    os.close(writer)
    assert json.loads(stdout)["stdin"] == ""


@pytest.mark.parametrize("closed", ["", "<&-", "<&- >&- 2>&-", ">&- 2>&-"])
def test_the_bundle_has_three_descriptors(
    closed: str, installed: Installation, tmp_path: Path, root: None
) -> None:
    """Also when the runtime gives none, and whatever the launcher had open."""
    told = tmp_path / "told"
    script = installed.bundles / "current" / "istio-cni"
    script.write_text(script.read_text().replace("print(", f"open({str(told)!r}, 'w').write("))
    close = ["sh", "-c", f'exec "$0" {closed}']
    with FakeAgent(installed.socket, declined("stopping")):
        installed.call(wrapper=close, env={"CNI_NETNS": "/proc/self/ns/net"})
    assert json.loads(told.read_text())["fds"] == [0, 1, 2]


def test_the_bundle_starts_where_the_caller_is(installed: Installation, tmp_path: Path) -> None:
    """A relative CNI_NETNS means the same to it."""
    assert installed.call(cwd=tmp_path).told["cwd"] == str(tmp_path)


def test_the_bundles_status_and_output_are_the_calls(installed: Installation) -> None:
    """The launcher is gone by then."""
    assert installed.call(env={"CNI_TEST_STATUS": "3"}).status == 3


def test_the_current_bundle_runs(installed: Installation) -> None:
    """The link is read once: program and libraries are of one version."""
    installed.add_bundle("2.0")
    assert installed.call().told["argv"] == [str(installed.bundles / "2.0" / "istio-cni")]


def test_the_link_may_lead_anywhere(installed: Installation, tmp_path: Path) -> None:
    """A development install has its bundle elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(installed.bundles / "1.0", elsewhere)
    current = installed.bundles / "current"
    current.unlink()
    current.symlink_to(elsewhere)
    assert installed.call().told["argv"] == [str(elsewhere / "istio-cni")]


def test_the_launcher_may_be_called_by_a_link(installed: Installation, tmp_path: Path) -> None:
    """The bundle is beside the program itself."""
    link = tmp_path / "link"
    link.symlink_to(installed.program)
    done = subprocess.run([link], env=installed.environment("ADD"), input=b"", capture_output=True)
    assert json.loads(done.stdout)["argv"] == [str(installed.bundles / "1.0" / "istio-cni")]


def test_the_launcher_may_be_replaced_while_it_runs(installed: Installation) -> None:
    """An upgrade renames the new one over it, as the call waits for its stdin."""
    process = installed.start("ADD", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    aside = installed.program.with_name("aside")
    shutil.copy(installed.program, aside)
    aside.replace(installed.program)
    stdout, _ = process.communicate(b"{}", timeout=10)
    assert json.loads(stdout)["stdin"] == "{}"


def test_a_bundle_with_a_loader_is_started_by_it(installed: Installation) -> None:
    """So it needs no libc of the node, and PyInstaller's program starts once, not twice."""
    bundle = installed.bundles / "1.0"
    start = recipe(str(bundle))
    give_loader(bundle)
    told = installed.call().json
    assert told["argv"] == start.argv
    env = told["env"]
    assert isinstance(env, dict)
    added = {"CNI_ISTIO_FALLBACK", "CNI_ISTIO_REQUEST_ID", "LC_CTYPE"}  # the last is Python's
    own = {name: value for name, value in env.items() if name not in added}
    assert own == {"CNI_COMMAND": "ADD", "PATH": PATH, **start.env}


# -- other kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        "memfd_create:error=EINVAL:when=1",
        "memfd_create:error=ENOSYS",
        "getrandom:error=EAGAIN",
        "readlink:error=ENOENT:when=1",
    ],
    ids=["before 6.3", "no memfd", "no random numbers yet", "no /proc"],
)
@pytest.mark.parametrize("size", [5, 1 << 20])
def test_what_a_kernel_lacks_is_made_up_for(fault: str, size: int, installed: Installation) -> None:
    """The bundle gets its stdin all the same."""
    told = installed.call(stdin=b"x" * size, wrapper=injected(fault)).told
    assert told["stdin"] == ("x" * size if size < 1000 else size)


def test_without_any_place_for_stdin_the_bundle_is_not_started(installed: Installation) -> None:
    """It would take an empty stdin for the runtime's."""
    faults = injected("memfd_create:error=ENOSYS", "pipe2:error=EMFILE")
    assert "cannot be started: stdin: No file descriptors" in installed.call(wrapper=faults).msg


def test_the_agent_is_told_to_stop_before_anything_else(
    installed: Installation, root: None
) -> None:
    """By the end of the connection: bundle and agent must not work on a pod at the same time."""
    heard: list[float] = []

    def silent(connection: socket.socket) -> None:
        read_frame(connection)
        assert connection.recv(1) == b""
        heard.append(time.monotonic())

    slow = injected("memfd_create:delay_enter=500000:when=1")  # microseconds
    with FakeAgent(installed.socket, silent):
        assert installed.call("STATUS", wrapper=slow).fallback == "timeout"
        ended = time.monotonic()
    assert ended - heard[0] > 0.4


# -- no bundle -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["link", "bundle", "program", "permission", "interpreter"])
@pytest.mark.parametrize("command", ["ADD", "CHECK", "STATUS", "VERSION", "NONSENSE"])
def test_without_bundle_a_call_fails_and_says_what_is_missing(
    command: str, lacks: str, installed: Installation
) -> None:
    """One error object, with the path and what the agent had to say."""
    place = damage(installed, lacks)
    msg = installed.call(command).msg
    reason = "Permission denied" if lacks == "permission" else "No such file or directory"
    assert msg == (
        f"istio-cni: the plugin's bundle cannot be started: {place}: {reason}; "
        "the node agent was asked first: absent: No such file or directory; "
        "the node agent's installer puts the bundle back when it starts"
    )


@pytest.mark.parametrize("lacks", ["link", "bundle", "program", "permission", "interpreter"])
@pytest.mark.parametrize("command", ["DEL", "GC"])
def test_without_bundle_nothing_is_undone_and_no_pod_is_kept(
    command: str, lacks: str, installed: Installation
) -> None:
    """A DEL that fails would leave the pod terminating, and its addresses taken."""
    damage(installed, lacks)
    answer = installed.call(command)
    assert (answer.status, answer.stdout, answer.stderr) == (0, b"", b"")


def damage(installed: Installation, lacks: str) -> Path:
    """Take a part of the bundle away; return the path that will be complained of."""
    program = installed.bundles / "1.0" / "istio-cni"
    if lacks == "link":
        (installed.bundles / "current").unlink()
        return installed.bundles / "current"
    if lacks == "bundle":
        shutil.rmtree(program.parent)
    elif lacks == "program":
        program.unlink()
        give_loader(program.parent)
    elif lacks == "permission":
        program.chmod(0o644)
    else:
        write_program(program, "#!/nowhere/python\n")
    return program


def test_an_error_is_json_whatever_the_path(tmp_path: Path, program: Path) -> None:
    """Quotes, line ends, bytes that are no UTF-8, and any length."""
    odd = os.fsdecode(b'"\\\n\x01\x7f\xff\xc3\xbc')
    installed = Installation(tmp_path / odd, program, tmp_path / "run")
    (installed.bundles / "current").unlink()
    msg = installed.call().msg
    assert f'{tmp_path}/"\\\n\x01\x7f\ufffd\ufffd\ufffd/istio-cni.d/current: No such' in msg
    deep = Installation(tmp_path.joinpath(*["\x01" * 200] * 15), program, tmp_path / "run")
    shutil.rmtree(deep.bundles)
    assert len(deep.call().stdout) < 8192


def test_an_error_says_what_the_agent_had_to_say(installed: Installation, root: None) -> None:
    """In its own words, none of which can break the JSON."""
    (installed.bundles / "current").unlink()
    with FakeAgent(installed.socket, declined('queue "full"\n…')):
        msg = installed.call().msg
    assert 'asked first: declined: queue "full"\n\ufffd\ufffd\ufffd; ' in msg


def test_nobody_who_reads_the_error_is_a_failure_all_the_same(installed: Installation) -> None:
    """And not a signal."""
    (installed.bundles / "current").unlink()
    reader, writer = os.pipe()
    os.close(reader)
    process = installed.start("ADD", stdin=subprocess.DEVNULL, stdout=writer)
    assert process.wait(10) == 1
    os.close(writer)


# -- started by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [None, ""])
def test_a_person_is_told_what_this_is(command: str | None, installed: Installation) -> None:
    """As the plugin itself says it, without waiting for stdin."""
    reader, writer = os.pipe()
    mine = subprocess.run(
        [installed.program], env=installed.environment(command), stdin=reader, capture_output=True
    )
    os.close(reader)
    os.close(writer)
    plugin = subprocess.run(
        [sys.executable, "-m", "istio_cni.plugin.main"], env={}, input=b"", capture_output=True
    )
    assert (mine.returncode, mine.stdout) == (0, b"")
    assert mine.stderr == plugin.stderr


def test_it_knows_its_version(installed: Installation) -> None:
    """Whatever the environment."""
    for command in (None, "ADD"):
        said = subprocess.run(
            [installed.program, "--version"],
            env=installed.environment(command),
            capture_output=True,
        )
        plugin = subprocess.run(
            [sys.executable, "-m", "istio_cni.plugin.main", "--version"], capture_output=True
        )
        assert (said.returncode, said.stdout, said.stderr) == (0, plugin.stdout, b"")
