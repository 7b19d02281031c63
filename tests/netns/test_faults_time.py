"""Programs that hang, and interrupts: every wait ends, and what was there before is there again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from istio_cni.capture import apply
from istio_cni.capture.settings import to_settings
from istio_cni.cni.request import Request
from istio_cni.edge import netns as namespaces
from istio_cni.edge.netfilter import SEARCH_PATH, Netfilter
from istio_cni.errors import IstioCNIError, ProgrammingFailed, TryAgainLater
from istio_cni.plugin import program as plugin_program
from istio_cni.plugin.attachments import Attachments
from istio_cni.plugin.host import Host
from istio_cni.plugin.log import Log
from namespaces import call_inside
from netns.programming import (
    ALL_DNS,
    CLI,
    FIRST_TABLE_ONLY,
    TPROXY,
    VARIANTS,
    bind_here,
    config,
    program,
    residents,
    rules,
    state,
    wait_until,
    with_binds,
    wrap,
)

pytestmark = pytest.mark.netns

variants = pytest.mark.parametrize("variant", VARIANTS)
HANG = "sleep 60 & sleep 60"
ONCE = 'if [ -e $HERE/hung ]; then exec $REAL "$@"; fi; : > $HERE/hung;'


def took(started: float) -> float:
    """Return the time since an instant, in seconds."""
    return time.monotonic() - started


@variants
@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("where", ["at once", "after the first table"])
def test_restore_that_hangs_is_ended(
    netns: str, tmp_path: Path, variant: str, rerun: bool, where: str
) -> None:
    """It is killed with all it started, in time for the former state to come back."""
    if rerun:
        program(netns, config(variant, **ALL_DNS))
    before = state(netns)
    script = f"{ONCE} {HANG}" if where == "at once" else f"{FIRST_TABLE_ONLY} {HANG}"
    wrap(tmp_path, f"iptables-{variant}-restore", script)
    started = time.monotonic()
    with pytest.raises(TryAgainLater, match=r"-restore did not end within 0\.\d s"):
        program(netns, config(variant, **TPROXY, **ALL_DNS), wrappers=tmp_path, seconds=0.7)
    assert took(started) < 1.5
    assert residents(netns) == []
    assert state(netns) == before


def test_save_that_hangs_is_ended(netns: str, tmp_path: Path) -> None:
    """Nothing has been touched by then, and nothing is afterwards."""
    program(netns, config("nft"))
    before = state(netns)
    wrap(tmp_path, "iptables-nft-save", HANG)
    started = time.monotonic()
    with pytest.raises(TryAgainLater, match="iptables-nft-save did not end within"):
        program(netns, config("nft", **TPROXY), wrappers=tmp_path, seconds=0.5)
    assert took(started) < 1.2
    assert residents(netns) == []
    assert state(netns) == before


def add_within(
    netns: str, directory: Path, seconds: float
) -> tuple[IstioCNIError, float, Attachments]:
    """Do the plugin's work for a pod with failing programs; its error, and how long it took."""
    request = Request("ADD", container_id="c0ffee", netns=netns, ifname="eth0")
    attachments = Attachments(str(directory / "run"), lambda *_: pytest.fail("records fail"))

    def add() -> tuple[IstioCNIError, float]:
        bind_here({"/usr/local/sbin": directory})
        started = time.monotonic()
        host = Host(Log(sink=lambda _, line: pytest.fail(line)))
        wanted, limit = config("", **TPROXY, DUAL_STACK=True), started + seconds
        with pytest.raises(IstioCNIError) as failure:
            plugin_program.capture(
                host, request, wanted, "uid", host.pin(request), attachments, limit
            )
        return failure.value, took(started)

    return (*call_inside("/proc/self/ns/net", add), attachments)


def test_plugin_keeps_its_deadline(pod_netns: str, tmp_path: Path) -> None:
    """Half of a short time is kept for the roll-back; record and rules are gone by the end."""
    before = state(pod_netns)
    wrap(tmp_path, "iptables-nft-restore", f"{FIRST_TABLE_ONLY} {HANG}")
    error, took_s, attachments = add_within(pod_netns, tmp_path, 1.6)
    assert isinstance(error, TryAgainLater)
    assert "iptables-nft-restore did not end within" in error.msg
    assert 0.7 < took_s < 1.6
    assert attachments.read("c0ffee", "eth0") is None
    assert state(pod_netns) == before
    assert residents(pod_netns) == []


def test_plugin_keeps_its_deadline_when_the_roll_back_hangs(pod_netns: str, tmp_path: Path) -> None:
    """There is time left for the drop rules, and for saying so."""
    hang = f'case $text in *ISTIO_INBOUND*) {HANG};; esac; echo "$text" | $REAL "$@"'
    script = f"[ -e $HERE/hung ] || {{ {FIRST_TABLE_ONLY} : > $HERE/hung; {HANG}; }}; text=$(cat)"
    wrap(tmp_path, "iptables-nft-restore", f"{script}; {hang}")
    error, took_s, _ = add_within(pod_netns, tmp_path, 2.0)
    assert isinstance(error, ProgrammingFailed)
    assert "drop rules are in place" in error.msg
    assert took_s < 2.0
    assert rules(pod_netns).count("-j DROP") == 6


@pytest.mark.parametrize("late_s", [0.0, 2.0])
def test_who_was_stopped_has_time_to_take_back_what_was_loaded(
    pod_netns: str, tmp_path: Path, late_s: float
) -> None:
    """A program loads its rules, and when it is looked at again all time is over."""
    script = 'text=$(cat); [ -e $HERE/hung ] && { echo "$text" | $REAL "$@"; exit; }'
    script += f'; : > $HERE/hung; echo "$text" | $REAL "$@"; {HANG}'
    wrap(tmp_path, "iptables-nft-restore", script)
    before = rules(pod_netns)

    def work() -> str:
        until = time.monotonic() + 1.0
        search = f"{tmp_path}:{SEARCH_PATH}"
        net = Netfilter(deadline=until, rollback_deadline=until, search_path=search, late_s=late_s)
        wanted = config("nft")
        try:
            apply.program(net, wanted, lambda *_: None, apply.choose(net, wanted))
        except IstioCNIError as error:
            return error.msg
        return "it was done"

    message = call_inside(pod_netns, work)
    assert "did not end within" in message
    assert ("could not be restored" in message) == (not late_s)
    assert (rules(pod_netns) == before) == bool(late_s)


def test_program_that_hangs_takes_its_own_along(netns: str, tmp_path: Path) -> None:
    """What a wrapper started might go on programming, so it is killed with it."""
    wrap(tmp_path, "iptables-nft-save", HANG)
    wrap(tmp_path, "iptables-nft-restore", HANG)

    def run() -> float:
        net = Netfilter(deadline=time.monotonic() + 0.3, search_path=str(tmp_path))
        with pytest.raises(TryAgainLater, match="iptables-nft-save did not end within"):
            net.save(net.find("iptables-nft", 4))
        return wait_until(lambda: "sleep" not in residents(netns), "all have ended")

    assert call_inside(netns, run) < 0.5


def test_child_that_ignores_its_deadline_is_killed(netns: str) -> None:
    """Whatever it does and has running, it is over when the time is; the error says what now."""

    def hang(_: object) -> object:
        subprocess.Popen(["sleep", "60"], process_group=0)
        time.sleep(60)
        return None

    file = namespaces.open_netns(netns)
    started = time.monotonic()
    with pytest.raises(TryAgainLater, match="took too long and was stopped half way; repeating"):
        namespaces.run_inside(hang, file, deadline=started + 0.4, log=lambda *_: None)
    assert 0.4 <= took(started) < 0.8
    assert residents(netns) == []
    os.close(file)


def test_child_that_dies_leaves_open_what_is_there(netns: str) -> None:
    """It is not mistaken for success, nor for a failure that was undone."""

    def die(_: object) -> object:
        os._exit(0)

    with pytest.raises(Exception, match="died without an answer") as failure:
        namespaces.run_inside(die, None, deadline=time.monotonic() + 5, log=lambda *_: None)
    assert type(failure.value).__name__ == "Interrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", [[], ["--cni-mode"]], ids=["plain", "CNI"])
def test_interrupted_command_restores(
    netns: str, tmp_path: Path, mode: list[str], number: signal.Signals
) -> None:
    """Stopped in the middle, it brings the former rules back and leaves nobody at work."""
    program(netns, config("nft", **ALL_DNS))
    before = state(netns)
    wrap(tmp_path, "iptables-nft-restore", f"{FIRST_TABLE_ONLY} : > $HERE/stopped; {HANG}")
    file = tmp_path / "capture.json"
    file.write_text(json.dumps(to_settings(config("nft", **TPROXY))))
    command = [str(CLI), "--config", str(file), "--reconcile", *mode]
    inner = with_binds({"/usr/local/sbin": tmp_path})
    running = subprocess.Popen(
        ["ip", "netns", "exec", os.path.basename(netns), *inner, *command],
        stderr=subprocess.PIPE,
        env=os.environ | {"PATH": f"/usr/local/sbin:{os.environ['PATH']}"},
    )
    try:
        wait_until((tmp_path / "stopped").exists, "the first table is loaded")
        started = time.monotonic()
        running.send_signal(number)
        assert running.communicate(timeout=10) == (None, b"")
        assert running.returncode == 130
        assert took(started) < 3
    finally:
        running.kill()
        running.wait()
    assert residents(netns) == []
    assert state(netns) == before


@variants
def test_talkative_programs_are_listened_to(netns: str, tmp_path: Path, variant: str) -> None:
    """A program that fills its pipes before it reads is not a program that hangs."""
    noise = "head -c 300000 /dev/zero | tr '\\0' '#' | fold -w 99"
    for base in ("iptables", "ip6tables"):
        wrap(tmp_path, f"{base}-{variant}-restore", f'{noise} | tee /dev/stderr; exec $REAL "$@"')
        wrap(tmp_path, f"{base}-{variant}-save", f'{noise} | tee /dev/stderr; exec $REAL "$@"')
    ports = {"OUTBOUND_PORTS_EXCLUDE": ",".join(map(str, range(2000, 2600)))}
    program(netns, config(variant), wrappers=tmp_path)
    program(netns, config(variant, **ports), wrappers=tmp_path)
    assert rules(netns).count("--dport 2599") == 4


def test_program_that_does_not_read_is_a_failure_like_others(netns: str, tmp_path: Path) -> None:
    """A document that does not fit the pipe finds it closed; what counts is the exit status."""
    wrap(tmp_path, "iptables-nft-restore", "exec <&-; sleep 0.1; echo 'no memory' >&2; exit 1")
    ports = {"OUTBOUND_PORTS_EXCLUDE": ",".join(map(str, range(2000, 3000)))}
    program(netns, config("nft"))
    before = state(netns)
    with pytest.raises(ProgrammingFailed, match="no memory"):
        program(netns, config("nft", **ports), wrappers=tmp_path)
    assert state(netns) == before


def test_long_answers_of_the_child_arrive_whole() -> None:
    """Logs and result may be larger than any pipe."""
    text = "x" * 200_000
    log: list[str] = []

    def talk(inside: namespaces.Inside) -> object:
        for _ in range(5):
            inside.log("info", text)
        return text

    limit = time.monotonic() + 10
    answer = namespaces.run_inside(talk, None, deadline=limit, log=lambda _, line: log.append(line))
    assert answer == text
    assert log == [text] * 5


def test_status_is_not_lost_where_child_signals_are_ignored(netns: str, tmp_path: Path) -> None:
    """A caller that ignores SIGCHLD hands that down; a failed restore is still a failure."""
    wrap(tmp_path, "iptables-nft-restore", f"{FIRST_TABLE_ONLY} exit 1")

    def run() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with pytest.raises(ProgrammingFailed, match="exit status 1"):
            program(netns, config("nft", **ALL_DNS), wrappers=tmp_path)

    call_inside(netns, run)
    assert "ISTIO" not in state(netns)
