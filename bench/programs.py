"""The programs that set the scale, made here when they are missing or older than their recipe."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from .process import BenchFailed

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
RECIPES = tuple(ROOT / "packaging" / name for name in ("bundle.py", "bundle.spec", "portable.py"))
DIST = ROOT / "dist"
NOTHING = "int main(void) { return 0; }\n"


class Frozen(NamedTuple):
    """The paths of what `make bundle` makes."""

    launcher: str
    plugin: str
    agent: str

    @property
    def bundle(self) -> str:
        """The directory of the plugin."""
        return os.path.dirname(self.plugin)


FROZEN = Frozen(
    str(DIST / "istio-cni"),
    str(DIST / "istio-cni.d" / "current" / "istio-cni"),
    str(DIST / "install-cni" / "install-cni"),
)


def frozen() -> Frozen:
    """Return what is measured. Raises BenchFailed if it was not frozen yet."""
    for path in FROZEN:
        if not os.access(path, os.X_OK):
            raise BenchFailed(f"there is no {os.path.relpath(path, ROOT)}; `make bundle` makes it")
    return FROZEN


def floor() -> str:
    """Return the path of a program that does nothing, frozen by the recipe of the plugin."""
    program = BUILD / "floor" / "floor"
    newest = max(recipe.stat().st_mtime for recipe in RECIPES)
    if not program.exists() or program.stat().st_mtime < newest:
        spec = importlib.util.spec_from_file_location("bundle", RECIPES[0])
        if spec is None or spec.loader is None:
            raise BenchFailed(f"{RECIPES[0]} cannot be loaded")
        bundle = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bundle)
        try:
            bundle.freeze("floor", bundle.FLOOR, program.parent, check=_prove_floor)
        except bundle.BundleFailed as error:
            raise BenchFailed(str(error)) from error
    return str(program)


def _prove_floor(folder: Path) -> None:
    subprocess.run([str(folder / "floor")], env={}, check=True)


def static() -> str | None:
    """Return the path of a static C program that does nothing; None where none can be made."""
    program, compiler = BUILD / "static", shutil.which("cc")
    if program.exists():
        return str(program)
    if compiler is None:
        return None
    BUILD.mkdir(exist_ok=True)
    argv = [compiler, "-O2", "-static", "-x", "c", "-", "-o", str(program)]
    done = subprocess.run(argv, input=NOTHING, text=True, capture_output=True, check=False)
    return str(program) if done.returncode == 0 else None
