"""SIGKILL at any moment: what a reader sees is whole, and the next start goes on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import istio_cni

ROUNDS = 30
LIST = {"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge"}]}
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from istio_cni.install.bundle import Bundle
from istio_cni.install.credentials import Credentials, Target
from istio_cni.install.network import Network
from istio_cni.install.run import Installer
where, bundle = sys.argv[2:4]
now = 0.0
def clock():
    global now
    now += 600.0
    return now
sys.stdout.write("started")
sys.stdout.flush()
while True:
    target = Target(f"{where}/run", "https://10.0.0.1:443", "")
    parts = (
        Bundle(bundle, f"{where}/bin", f"{where}/agent.sock"),
        Credentials(target, lambda: ("token", 3600.0), clock),
        Network(f"{where}/net", "", {"type": "istio-cni", "name": bundle}),
    )
    installer = Installer(parts)
    for _ in range(3):
        installer.look()
    if len(sys.argv) > 4:
        sys.exit(installer.missing or 0)
    installer.remove(lambda _: None)
"""


class Reader(threading.Thread):
    """Looks at the node as a runtime does, all the time; `wrong` is what it should not see."""

    def __init__(self, node: Path, bundles: list[Path]) -> None:
        super().__init__()
        self.node = node
        self.whole = [read_tree(bundle) for bundle in bundles]
        self.wrong: list[str] = []
        self.seen: set[str] = set()
        self.ending = threading.Event()

    def run(self) -> None:
        """Look until it is enough."""
        while not self.ending.is_set():
            self.look_at_conflist()
            self.look_at_program()

    def look_at_conflist(self) -> None:
        """Expect it at any time, in one form or the other, and JSON."""
        texts = []
        for name in ("10.conflist", "10.conf", "10.conflist"):
            try:
                texts.append((self.node / "net" / name).read_text())
            except FileNotFoundError:
                continue
        if not texts:
            self.wrong.append("no configuration at all")
        for text in texts:
            try:
                plugins = json.loads(text).get("plugins", [])
            except ValueError:
                self.wrong.append(f"not JSON: {text}")
            else:
                self.seen.add(f"{len(plugins)} plugins")

    def look_at_program(self) -> None:
        """Expect a whole launcher, and something whole for it to start, while it is there."""
        program, current = self.node / "bin/istio-cni", self.node / "bin/istio-cni.d/current"
        try:
            before = (identity(program), os.readlink(current))
            launcher = program.read_text()
            found = read_tree(current.resolve(strict=True))
            after = (identity(program), os.readlink(current))
        except FileNotFoundError:
            self.confirm(program, current)
            return
        if before == after:
            self.seen.add("a bundle")
            if found not in self.whole:
                self.wrong.append(f"half a bundle: {sorted(found)}")
            if launcher not in [bundle["launcher"] for bundle in self.whole]:
                self.wrong.append("half a launcher")

    def confirm(self, program: Path, current: Path) -> None:
        """Complain of a launcher without anything to start, if it is there before and after."""
        try:
            before = identity(program)
            leads = current.exists()
            if not leads and identity(program) == before:
                self.wrong.append("a launcher that has nothing to start")
        except FileNotFoundError:
            return


def identity(path: Path) -> tuple[int, int]:
    """Tell one file from another that has its name later; numbers alone are used again."""
    status = path.lstat()
    return status.st_ino, status.st_ctime_ns


def read_tree(directory: Path) -> dict[str, str]:
    """Return the files below a directory, but for those under way."""
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def start(node: Path, bundle: Path, *more: str) -> subprocess.Popen[str]:
    """Start an installer on a node."""
    source = str(Path(istio_cni.__file__).parents[1])
    argv = [sys.executable, "-I", "-c", CHILD, source, str(node), str(bundle), *more]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def test_nothing_half_done_is_ever_seen_and_the_next_start_converges(tmp_path: Path) -> None:
    """Two versions in turn install and remove as fast as they can until they are killed."""
    bundles = []
    for version in ("one", "two"):
        bundle = tmp_path / version
        (bundle / "_internal").mkdir(parents=True)
        for name in ("istio-cni", "launcher", "_internal/a", "_internal/b"):
            (bundle / name).write_text(f"{name} of {version}\n" * 2000)
        bundles.append(bundle)
    node = tmp_path / "node"
    for name in ("bin", "net"):
        (node / name).mkdir(parents=True)
    (node / "net/10.conflist").write_text(json.dumps(LIST))
    reader = Reader(node, bundles)
    reader.start()
    dice = random.Random(1)  # noqa: S311 # moments, not secrets
    try:
        for round_ in range(ROUNDS):
            with start(node, bundles[round_ % 2]) as child:
                assert child.stdout is not None
                child.stdout.read(7)
                time.sleep(dice.uniform(0.001, 0.06))
                child.kill()
            if dice.random() < 0.3:  # an old CNI writes its single configuration again
                single = {"cniVersion": "1.0.0", "name": "pods", "type": "bridge"}
                (node / "net/.new").write_text(json.dumps(single))
                (node / "net/.new").rename(node / "net/10.conf")
        with start(node, bundles[0], "once") as child:
            assert child.wait(10) == 0
    finally:
        reader.ending.set()
        reader.join()
    assert reader.wrong == []
    assert {"1 plugins", "2 plugins", "a bundle"} <= reader.seen
    assert read_tree((node / "bin/istio-cni.d/current").resolve()) == reader.whole[0]
    assert os.listdir(node / "net") == ["10.conflist"]
    assert [name for name in os.listdir(node / "bin") if name.startswith(".")] == []
    assert len(os.listdir(node / "bin/istio-cni.d")) <= 4
