"""Builds the launcher: the small static program that runtimes start in the plugin's place.

    python packaging/launcher.py                    # dist/istio-cni, for this machine
    python packaging/launcher.py --arch aarch64     # dist/istio-cni.aarch64
    python packaging/launcher.py --fuzz 1000000     # hostile input, under sanitizers

The compiler is a Python package that brings a libc for both kinds of machine, so nothing has to be
installed. It compiles that libc once, into build/zig, for about a minute. The same sources give the
same bytes, wherever they lie.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from istio_cni.constants import NEWEST_VERSION, SUPPORTED_VERSIONS, VERSION

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "launcher" / "istio-cni.c"
FUZZ = ROOT / "launcher" / "fuzz.c"
CACHE = ROOT / "build" / "zig"
INPUTS = (
    SOURCE,
    ROOT / "launcher" / "frame.h",
    ROOT / "src" / "istio_cni" / "constants.py",
    Path(__file__).resolve(),
)
ARCHITECTURES = ("x86_64", "aarch64")
DEFINES = (
    f'-DVERSION="{VERSION}"',
    f'-DPROTOCOLS="{", ".join(SUPPORTED_VERSIONS)}"',
    f'-DNEWEST_PROTOCOL="{NEWEST_VERSION}"',
)
STRICT = (
    *("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wconversion", "-Wsign-conversion"),
    *("-Wshadow", "-Wcast-qual", "-Wvla", "-Wundef", "-Wstrict-prototypes", "-Wmissing-prototypes"),
    *("-Wformat=2", "-Wnull-dereference"),
)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")


class LauncherFailed(Exception):
    """The launcher could not be built or failed a check; the message is for a person."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build, or fuzz; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", choices=ARCHITECTURES, help="default: this machine's")
    parser.add_argument("--output", type=Path, metavar="PATH")
    parser.add_argument("--fuzz", type=int, metavar="N", help="run N hostile inputs instead")
    parser.add_argument("--seed", type=int, help="of --fuzz; default: the time")
    wanted = parser.parse_args(argv)
    try:
        if wanted.fuzz is not None:
            seed = int(time.time()) if wanted.seed is None else wanted.seed
            print(fuzz(wanted.fuzz, seed))  # noqa: T201 # a person's program
        else:
            build(wanted.arch, wanted.output)
    except LauncherFailed as error:
        print(f"launcher: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def build(arch: str | None = None, output: Path | None = None) -> Path:
    """Compile the launcher if it is missing or older than its sources; return its path.

    Prints a line with its size. Raises LauncherFailed.
    """
    machine = platform.machine()
    arch = arch or machine
    if arch not in ARCHITECTURES:
        raise LauncherFailed(f"no launcher for {arch}; there is one for {', '.join(ARCHITECTURES)}")
    if output is None:
        output = ROOT / "dist" / ("istio-cni" if arch == machine else f"istio-cni.{arch}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with _alone():
        if not _is_current(output):
            _compile(arch, output)
    print(f"launcher: {output}: {output.stat().st_size / 1000:.1f} kB, {arch}")  # noqa: T201
    return output


def has_compiler() -> bool:
    """Tell whether the compiler's package is installed."""
    return importlib.util.find_spec("ziglang") is not None


def fuzz(count: int, seed: int) -> str:
    """Run the launcher's parts on hostile input under sanitizers; return what the run says.

    Raises LauncherFailed, with the sanitizers' report and the seed.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise LauncherFailed("--fuzz needs a C compiler with sanitizers, such as gcc")
    CACHE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent, prefix="fuzz.") as work:
        program = f"{work}/fuzz"
        _run([compiler, *STRICT, *SANITIZERS, *DEFINES, "-o", program, str(FUZZ)])
        return _run([program, str(count), str(seed)]).strip()


def _is_current(output: Path) -> bool:
    """Tell whether a program is newer than all that it is made of."""
    if not output.exists():
        return False
    made = output.stat().st_mtime_ns
    return all(path.stat().st_mtime_ns < made for path in INPUTS)


def _compile(arch: str, output: Path) -> None:
    """Compile beside the place where the program will be, and move it there when it is whole."""
    if not has_compiler():
        raise LauncherFailed("no compiler: install the package ziglang, as `make setup` does")
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as work:
        made = Path(work, "istio-cni")
        _run(
            [
                *(sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-musl"),
                *("-static", "-Os", "-s", "-Wl,--build-id=none", f"-ffile-prefix-map={ROOT}=."),
                *(*STRICT, *DEFINES, "-o", str(made), str(SOURCE)),
            ]
        )
        made.chmod(0o755)
        made.replace(output)


@contextmanager
def _alone() -> Iterator[None]:
    """Build one at a time: tests that run side by side all want the same program."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(argv: list[str]) -> str:
    """Run a program and return what it prints; raises LauncherFailed with all that it said."""
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(CACHE), "ZIG_LOCAL_CACHE_DIR": str(CACHE)}
    done = subprocess.run(
        argv,
        env={**os.environ, **caches},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        timeout=1800,
    )
    if done.returncode != 0:
        raise LauncherFailed(
            f"{argv[0]} ended with status {done.returncode}: {done.stdout.strip()}"
        )
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
