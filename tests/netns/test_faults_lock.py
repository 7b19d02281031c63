"""The xtables lock, which is one for the whole node: pods do not wait for it, people do."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from istio_cni.capture.settings import to_settings
from istio_cni.errors import TryAgainLater
from namespaces import call_inside, inside
from netns.plugin import WEB, Node
from netns.programming import (
    CLI,
    TPROXY,
    Outcome,
    bind_here,
    config,
    holders,
    program,
    restore,
    state,
    with_binds,
    wrap,
)

pytestmark = pytest.mark.netns

LEGACY = {"iptables": "legacy", "ip6tables": "legacy"}
FOREIGN = "*filter\n-A INPUT -s 192.0.2.0/24 -j DROP\nCOMMIT\n"


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    """Make a file that stands for the node's lock, and hold it."""
    path = tmp_path / "lock"
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    yield path
    os.close(file)


def program_here(netns: str, lock: Path, **how: Any) -> tuple[Outcome, float]:
    """Program the legacy variant on a node with that lock; also return how long it took."""
    settings = how.pop("settings", {})

    def run() -> tuple[Outcome, float]:
        bind_here({"/run/xtables.lock": lock})
        started = time.monotonic()
        outcome = program(netns, config("legacy", **settings), **how)
        return outcome, time.monotonic() - started

    result: tuple[Outcome, float] = call_inside(netns, run)
    return result


def test_plugin_does_not_wait(pod_netns: str, lock: Path, tmp_path: Path) -> None:
    """An ADD with iptables-legacy has a lock of the pod's own."""
    restore(pod_netns, "iptables-legacy", FOREIGN)
    restore(pod_netns, "ip6tables-legacy", FOREIGN.replace("192.0.2.0/24", "2001:db8::/32"))
    node = Node(tmp_path)
    node.add_pod(env=[{"name": "ISTIO_DUAL_STACK", "value": "true"}])
    answer = node.call(
        "ADD",
        pod_netns,
        prev_result={"cniVersion": "1.1.0", "interfaces": []},
        wrapper=with_binds({"/run/xtables.lock": lock}),
    )
    assert answer.status == 0, answer.stdout
    assert answer.took_s < 2
    assert not any(line["level"] == "warn" for line in answer.log)
    assert holders(pod_netns) == {"iptables": "legacy", "ip6tables": "legacy"}
    assert node.record(WEB)


def test_command_line_in_cni_mode_does_not_wait(netns: str, lock: Path, tmp_path: Path) -> None:
    """It names the namespace it runs in, which serves as lock file."""
    file = tmp_path / "capture.json"
    file.write_text(json.dumps(to_settings(config("legacy"))))
    argv = [str(CLI), "--config", str(file), "--cni-mode", "--network-namespace", netns]
    inside(netns, [*with_binds({"/run/xtables.lock": lock}), *argv], timeout_s=3)
    assert holders(netns) == LEGACY


def test_pods_do_not_wait_for_each_other(netns: str, lock: Path) -> None:
    """The namespace's file is the lock, whatever the node's lock is."""
    outcome, took_s = program_here(netns, lock)
    assert outcome.variants == LEGACY
    assert outcome.warnings == []
    assert took_s < 2


def test_older_iptables_has_the_lock_put_over(netns: str, lock: Path, tmp_path: Path) -> None:
    """Before 1.8.6 the path of the lock is fixed; in the sandbox another file lies there."""
    script = 'case $1 in --version) echo "iptables v1.8.4 (legacy)";; *) exec $REAL;; esac'
    for base in ("iptables", "ip6tables"):
        wrap(tmp_path, f"{base}-legacy-save", script)
        wrap(tmp_path, f"{base}-legacy-restore", '[ -z "$XTABLES_LOCKFILE" ] && exec $REAL "$@"')
    outcome, took_s = program_here(netns, lock, wrappers=tmp_path)
    assert outcome.variants == LEGACY
    assert outcome.warnings == []
    assert took_s < 2


def test_older_iptables_without_sandbox_says_so(netns: str, lock: Path, tmp_path: Path) -> None:
    """Where nothing can be mounted the node's lock counts; the error names it."""
    script = 'case $1 in --version) echo "iptables v1.8.4 (legacy)";; *) exec $REAL;; esac'
    for base in ("iptables", "ip6tables"):
        wrap(tmp_path, f"{base}-legacy-save", script)
        wrap(tmp_path, f"{base}-legacy-restore", 'exec $REAL "$@"')
    with pytest.raises(TryAgainLater, match="the xtables lock is held by another process"):
        program_here(netns, lock, wrappers=tmp_path, sandbox=False, lock_wait_s=1)


@pytest.mark.parametrize("rerun", [False, True])
def test_command_line_waits_and_then_names_the_lock(netns: str, lock: Path, rerun: bool) -> None:
    """It is neither the kernel that lacks something nor a reason to capture half."""
    if rerun:
        program(netns, config("legacy"))
    before = state(netns)
    started = time.monotonic()
    with pytest.raises(TryAgainLater) as failure:
        program_here(netns, lock, cni_mode=False, lock_wait_s=1, settings=TPROXY)
    assert 1 <= time.monotonic() - started < 3
    message = failure.value.msg
    assert "the xtables lock is held by another process and was not released in time" in message
    assert "kernel" not in message
    assert "\n" not in message
    assert state(netns) == before


def test_command_line_goes_on_when_the_lock_is_released(netns: str, tmp_path: Path) -> None:
    """Waiting is what it does, so a short hold costs nothing but time."""
    path = tmp_path / "lock"
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    release = threading.Timer(0.6, fcntl.flock, (file, fcntl.LOCK_UN))
    release.start()
    try:
        outcome, took_s = program_here(netns, path, cni_mode=False, lock_wait_s=10)
    finally:
        release.join()
        os.close(file)
    assert outcome.variants == LEGACY
    assert 0.4 < took_s < 3
