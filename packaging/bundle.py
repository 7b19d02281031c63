"""Freezes the programs: the plugin's bundle for nodes, and the node agent for its image.

    python packaging/bundle.py              # what `make bundle` runs

    dist/istio-cni                the launcher, which runtimes start
    dist/istio-cni.d/<version>/   istio-cni, istio-iptables, all of Python that they need, and the
                                  launcher once more, for the installer
    dist/istio-cni.d/current      -> <version>
    dist/install-cni/             install-cni and all of Python that it needs

A runtime starts the plugin on the node itself, outside any image, so it brings its interpreter.
Each folder is made aside and moved into place when it is whole; before that the plugin's bundle has
answered VERSION and, with root, captured a pod in a network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from istio_cni.constants import LAUNCHER_FILE, VERSION

sys.path.insert(0, str(Path(__file__).parent))  # bench loads this file by its path
import launcher
from portable import BundleFailed, Start, complete, recipe

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
BUNDLE_DIR = DIST / "istio-cni.d"
PODS = ROOT / "examples" / "pods"
PLUGIN = {
    "istio-cni": "from istio_cni.plugin.main import main\n\nmain()\n",
    "istio-iptables": "from istio_cni.capture.main import main\n\nraise SystemExit(main())\n",
}
AGENT = {"install-cni": "from istio_cni.agent.main import main\n\nraise SystemExit(main())\n"}
FLOOR = {"floor": "pass\n"}
"""A program that does nothing, frozen as the plugin is: what no Python can be faster than."""


def main() -> int:
    """Make all that a release has; return the exit status."""
    started = time.monotonic()
    try:
        current = make_plugin()
        agent = freeze("install-cni", AGENT, DIST / "install-cni", heavy=True, check=smoke_agent)
    except BundleFailed as error:
        print(f"bundle: {error}", file=sys.stderr)  # noqa: T201 # a person's program
        return 1
    for folder in (current.resolve(), agent):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        _tell(f"{folder.relative_to(ROOT)}: {size / 2**20:.1f} MiB")
    _tell(f"done in {time.monotonic() - started:.0f} s")
    return 0


def _tell(what: str) -> None:
    print(f"bundle: {what}", flush=True)  # noqa: T201 # a person's program


def make_plugin() -> Path:
    """Freeze the plugin and return the link to its folder."""
    built = _launcher()
    add = {LAUNCHER_FILE: built}
    folder = freeze("istio-cni", PLUGIN, BUNDLE_DIR / VERSION, portable=True, add=add, check=smoke)
    aside = BUNDLE_DIR / f".current.{os.getpid()}"
    aside.symlink_to(folder.name)
    return aside.replace(BUNDLE_DIR / "current")


def _launcher() -> Path:
    """Build the launcher, which is to be in the bundle and beside it; return where it is."""
    try:
        built = launcher.build(output=ROOT / "build" / "launcher" / "istio-cni")
    except launcher.LauncherFailed as error:
        raise BundleFailed(str(error)) from error
    _made(DIST)
    aside = DIST / f".istio-cni.{os.getpid()}"
    shutil.copy(built, aside)
    aside.replace(DIST / "istio-cni")
    return built


def freeze(
    name: str,
    programs: Mapping[str, str],
    folder: Path,
    *,
    heavy: bool = False,
    portable: bool = False,
    add: Mapping[str, Path] = MappingProxyType({}),
    check: Callable[[Path], None],
) -> Path:
    """Freeze programs (name and Python text) into one folder, which appears when it is whole.

    `heavy` lets it have what no plugin may come to need; a `portable` one brings its libc. `add`
    has files to put into it as they are, by name.
    `check` is called with the folder before it appears. Raises BundleFailed.
    """
    _tell(f"freezing {name}, for about half a minute")
    with tempfile.TemporaryDirectory(dir=_made(ROOT / "build"), prefix=f"{name}.") as work:
        scripts = {program: Path(work, f"{program}.py") for program in programs}
        for program, script in scripts.items():
            script.write_text(programs[program], encoding="utf-8")
        wanted = {
            "folder": name,
            "heavy": heavy,
            "programs": {program: str(script) for program, script in scripts.items()},
        }
        _run(
            [
                *(sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level=ERROR"),
                *("--workpath", f"{work}/work", "--distpath", f"{work}/dist"),
                str(ROOT / "packaging" / "bundle.spec"),
            ],
            env={**os.environ, "BUNDLE": json.dumps(wanted)},
        )
        made = Path(work, "dist", name)
        if portable:
            complete(made)
        for file, source in add.items():
            shutil.copy(source, made / file)
        _tell(f"trying {name}")
        check(made)
        _move(made, folder)
    return folder


def _move(made: Path, folder: Path) -> None:
    """Put a folder in the place of another one."""
    _made(folder.parent)
    old = folder.with_name(f".{folder.name}.{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def smoke(folder: Path) -> None:
    """Prove that a bundle works, started plainly and by its own loader. Raises BundleFailed.

    With root, also in a root that holds nothing else, and that an ADD captures. Without /proc the
    boot loader cannot start itself anew, so there an answer proves that it does not try to.
    """
    plain, own = Start([str(folder / "istio-cni")], {}), recipe(str(folder))
    _prove_version(plain)
    _prove_version(own)
    _prove_launcher(folder)
    _run([str(folder / "istio-iptables"), "--version"], env={})
    if os.geteuid() != 0:
        _tell("a bare root and a captured ADD were not tried: that needs root")
        return
    alone = recipe(f"/{folder.name}")
    _prove_version(Start(["chroot", str(folder.parent), *alone.argv], alone.env))
    with _netns() as netns, tempfile.TemporaryDirectory() as run_dir:
        _call("ADD", own, netns, run_dir)
        _call("CHECK", plain, netns, run_dir)
        clean_up = [str(folder / "istio-iptables"), "--cleanup-only", "--log_as_json"]
        said = _run(["ip", "netns", "exec", netns, *clean_up], stderr=subprocess.STDOUT)
        if "removed" not in said:
            raise BundleFailed(f"an ADD succeeds and captures nothing: {said}")


def _prove_version(start: Start) -> None:
    path = {"PATH": os.environ["PATH"]}
    answer = json.loads(_run(start.argv, env={**path, **start.env, "CNI_COMMAND": "VERSION"}))
    if "1.1.0" not in answer["supportedVersions"]:
        raise BundleFailed(f"VERSION answers {answer}")


def _call(verb: str, start: Start, netns: str, run_dir: str) -> None:
    """Call the plugin for a pod of the examples. Raises BundleFailed."""
    config = {
        "cniVersion": "1.0.0",
        "name": "smoke",
        "type": "istio-cni",
        "cni_agent_run_dir": run_dir,
        "pod_source": f"manifests:{PODS}",
        "prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "192.0.2.5/24"}]},
    }
    env = {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": "smoke",
        "CNI_NETNS": f"/run/netns/{netns}",
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web",
        "CNI_PATH": "/opt/cni/bin",
    }
    _run(start.argv, env={**start.env, **env}, stdin=json.dumps(config))


def _prove_launcher(folder: Path) -> None:
    """Prove that the launcher starts the bundle as the recipe says. Raises BundleFailed."""
    with tempfile.TemporaryDirectory() as bin_dir:
        program = shutil.copy(folder / LAUNCHER_FILE, f"{bin_dir}/istio-cni")
        Path(bin_dir, "istio-cni.d").mkdir()
        Path(bin_dir, "istio-cni.d", "current").symlink_to(folder)
        _prove_version(Start([program], {}))


def smoke_agent(folder: Path) -> None:
    """Prove that the frozen agent starts. Raises BundleFailed."""
    _run([str(folder / "install-cni"), "--version"], env={})


@contextlib.contextmanager
def _netns() -> Iterator[str]:
    """Make a network namespace with the addresses of a pod."""
    name = f"istio-{uuid.uuid4().hex[:8]}"
    _run(["ip", "netns", "add", name])
    try:
        for address in ("192.0.2.5/24", "2001:db8::5/64"):
            _run(["ip", "-n", name, "addr", "add", address, "dev", "lo"])
        _run(["ip", "-n", name, "link", "set", "lo", "up"])
        yield name
    finally:
        _run(["ip", "netns", "del", name])


def _run(
    argv: list[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    stderr: int = subprocess.PIPE,
) -> str:
    """Run a program and return what it prints; raises BundleFailed with all that it said."""
    done = subprocess.run(
        argv,
        env=env,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    if done.returncode != 0:
        said = f"{done.stdout}{done.stderr or ''}".strip()
        raise BundleFailed(f"{argv[0]} ended with status {done.returncode}:\n{said}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
