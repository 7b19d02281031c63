"""A launcher in a directory of its own with a bundle that tells what it got, and an agent for it.

    installed = Installation(tmp_path / "bin", program, tmp_path / "run")
    with FakeAgent(installed.socket, done(b"{}")) as agent:
        answer = installed.call("ADD")
    assert agent.call.environment["CNI_COMMAND"] == "ADD"

The agent reads frames by the numbers of launcher/frame.h, and nothing of the product is imported:
what is tested on the other side of the socket must not agree with itself only.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

HEADER = Path(__file__).parents[1] / "launcher" / "frame.h"
REQUEST = struct.Struct("=IHH16sQII")
REPLY = struct.Struct("=IHBB")
LIMIT = {
    name: int(value, 0)
    for name, value in re.findall(r"#define FRAME_(\w+) (\w+)", HEADER.read_text())
}
VERSION, DONE, DECLINED = LIMIT["VERSION"], LIMIT["DONE"], LIMIT["DECLINED"]
PATIENCE_S = 30.0

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
TELL = f"""#!{sys.executable} -IS
import json, os, sys
fds = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{fd}}")]
place = os.lseek(0, 0, 1) if os.path.basename(os.readlink("/proc/self/fd/0"))[:6] == "memfd:" else 0
stdin = b"".join(iter(lambda: os.read(0, 1 << 20), b""))
told = {{
    "argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ), "place": place,
    "fds": fds, "stdin": stdin.decode("latin-1") if len(stdin) < 1000 else len(stdin),
}}
print(json.dumps(told))
raise SystemExit(int(os.environ.get("CNI_TEST_STATUS", "0")))
"""


class Frame(NamedTuple):
    """One call as it arrived; `files` are device and inode of the descriptors sent with it."""

    head: bytes
    magic: int
    version: int
    netns_error: int
    request_id: str
    deadline_ns: int
    environment: dict[str, str]
    stdin: bytes
    files: list[tuple[int, int]]
    body: bytes


def answer(kind: int, body: bytes = b"", *, status: int = 0, version: int = VERSION) -> bytes:
    """Write a reply in bytes."""
    return REPLY.pack(len(body), version, kind, status) + body


def done(body: bytes = b"", status: int = 0) -> bytes:
    """Write the reply to a call that was carried out."""
    return answer(DONE, body, status=status)


def declined(reason: str) -> bytes:
    """Write the reply to a call that was not touched."""
    return answer(DECLINED, reason.encode())


def read_frame(connection: socket.socket) -> Frame:
    """Read a whole call; raises EOFError if it ends before."""
    room = socket.CMSG_SPACE(8 * array.array("i").itemsize)
    head, messages, _, _ = connection.recvmsg(REQUEST.size, room)
    descriptors = array.array("i")
    for _, _, data in messages:
        descriptors.frombytes(data)
    files = [(status.st_dev, status.st_ino) for status in map(os.fstat, descriptors)]
    for descriptor in descriptors:
        os.close(descriptor)
    head += _read(connection, REQUEST.size - len(head))
    magic, version, netns_error, identity, deadline, variables, size = REQUEST.unpack(head)
    environment = _read(connection, variables)
    stdin = _read(connection, size)
    pairs = (text.partition("=") for text in os.fsdecode(environment).split("\0")[:-1])
    return Frame(
        head,
        magic,
        version,
        netns_error,
        identity.hex(),
        deadline,
        {name: value for name, _, value in pairs},
        stdin,
        files,
        environment + stdin,
    )


def _read(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise EOFError(f"{size} bytes are missing")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class FakeAgent:
    """Listens at `path` and answers every call with the same bytes, or as a function does.

    The function gets the connection, and does all there is to do until it is closed. `calls` are
    the frames that were read whole.
    """

    def __init__(
        self,
        path: Path,
        answers: bytes | Callable[[socket.socket], None],
        *,
        backlog: int = 64,
        accepts: bool = True,
    ) -> None:
        self.calls: list[Frame] = []
        self._answers = answers
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        directory = os.open(path.parent, os.O_PATH)  # so that the path may have any length
        try:
            self._listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
        self._listener.listen(backlog)
        self._thread = threading.Thread(target=self._serve, daemon=True) if accepts else None

    def __enter__(self) -> Self:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._thread:
            self._thread.join(PATIENCE_S)

    @property
    def call(self) -> Frame:
        """The one call there was."""
        (call,) = self.calls
        return call

    def read(self, connection: socket.socket) -> None:
        """Read a call whole and keep it."""
        self.calls.append(read_frame(connection))

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, EOFError):
                connection.settimeout(PATIENCE_S)
                if callable(self._answers):
                    self._answers(connection)
                else:
                    self.read(connection)
                    connection.sendall(self._answers)


class Answer(NamedTuple):
    """What the runtime sees of a call, and how long it took."""

    status: int
    stdout: bytes
    stderr: bytes
    took_s: float

    @property
    def json(self) -> dict[str, object]:
        """The one document on stdout."""
        document: dict[str, object] = json.loads(self.stdout)
        return document

    @property
    def told(self) -> dict[str, object]:
        """What the bundle says it was given; it was started, and all was well."""
        assert (self.status, self.stderr) == (0, b"")
        return self.json

    @property
    def env(self) -> dict[str, str]:
        """The environment that the bundle was given."""
        env = self.told["env"]
        assert isinstance(env, dict)
        return env

    @property
    def fallback(self) -> str:
        """The word that says why the bundle was started."""
        return self.env["CNI_ISTIO_FALLBACK"].partition(":")[0]

    @property
    def msg(self) -> str:
        """The message of the error on stdout, which is the only thing there."""
        assert (self.status, self.stderr) == (1, b"")
        assert self.json.keys() == {"cniVersion", "code", "msg"}
        assert (self.json["cniVersion"], self.json["code"]) == ("1.1.0", 5)
        return str(self.json["msg"])


class Installation:
    """A directory of CNI plugins with the launcher, a bundle, and a link to an agent's socket."""

    def __init__(self, directory: Path, program: Path, run_dir: Path) -> None:
        self.directory = directory
        self.program = directory / "istio-cni"
        self.bundles = directory / "istio-cni.d"
        self.socket = run_dir / "agent.sock"
        self.bundles.mkdir(parents=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        shutil.copy(program, self.program)
        self.add_bundle("1.0")
        (self.bundles / "agent.sock").symlink_to(self.socket)

    def add_bundle(self, version: str, text: str = TELL) -> Path:
        """Let a version of the bundle be the current one."""
        bundle = self.bundles / version
        bundle.mkdir()
        write_program(bundle / "istio-cni", text)
        current = self.bundles / "current"
        current.unlink(missing_ok=True)
        current.symlink_to(version)
        return bundle

    def call(
        self,
        command: str | None = "ADD",
        stdin: bytes = b"{}",
        *,
        env: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        cwd: Path | None = None,
    ) -> Answer:
        """Call the plugin as a runtime does."""
        started = time.monotonic()
        done = subprocess.run(
            [*wrapper, str(self.program)],
            env=self.environment(command, env),
            input=stdin,
            capture_output=True,
            cwd=cwd,
            timeout=PATIENCE_S,
        )
        took_s = time.monotonic() - started
        return Answer(done.returncode, done.stdout, done.stderr, took_s)

    def start(self, command: str = "ADD", **options: object) -> subprocess.Popen[bytes]:
        """Start a call whose streams are the test's business."""
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return] # passed on
            [str(self.program)], env=self.environment(command), **options
        )

    @staticmethod
    def environment(
        command: str | None, changes: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Make the environment of a call; with no command, there is no variable of it."""
        named = {} if command is None else {"CNI_COMMAND": command}
        return {"PATH": PATH, **named, **(changes or {})}


def write_program(path: Path, text: str) -> None:
    """Write a script that can be run."""
    path.write_text(text)
    path.chmod(0o755)
