"""An installation of the launcher for each test; it is built once, if its sources are newer."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from launcher_agent import Installation

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "packaging"))


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    """Load the program that builds the launcher; without its compiler there is nothing to test."""
    import launcher

    if not launcher.has_compiler():
        pytest.skip("needs the package ziglang, a C compiler")
    return launcher


@pytest.fixture(scope="session")
def program(builder: ModuleType) -> Path:
    """Build the launcher if its sources are newer."""
    path: Path = builder.build(None, ROOT / "build" / "launcher" / "istio-cni")
    return path


@pytest.fixture
def installed(tmp_path: Path, program: Path) -> Installation:
    """Install the launcher on a node whose agent is not running."""
    return Installation(tmp_path / "bin", program, tmp_path / "run")


@pytest.fixture
def root() -> None:
    """Skip a test whose agent would not be trusted."""
    if os.geteuid() != 0:
        pytest.skip("needs root: the launcher trusts no agent but root's")
