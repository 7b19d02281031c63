"""Validation mode in real namespaces, with redirect rules made by hand."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import pytest

from istio_cni.capture import validation
from istio_cni.errors import CaptureNotWorking
from namespaces import call_inside, call_inside_as, inside

pytestmark = pytest.mark.netns

OUTBOUND, INBOUND, PROBE, UID = 15001, 15006, 15002, 1337
LOCAL = {4: "127.0.0.1", 6: "::1"}
TARGET = {4: "127.0.0.6:15002", 6: "[::6]:15002"}
FAMILIES = pytest.mark.parametrize("family", [4, 6])


def capture(path: str, family: int, port: int = INBOUND, program: str = "nft") -> None:
    """Redirect what the proxy's user sends to other addresses on `lo`, as the full rules do."""
    iptables = {4: "iptables", 6: "ip6tables"}[family] + f"-{program}"
    local = {4: "127.0.0.1/32", 6: "::1/128"}[family]
    rule = ["-o", "lo", "!", "-d", local, "-p", "tcp", "-m", "owner", "--uid-owner", str(UID)]
    to = ["-j", "REDIRECT", "--to-ports", str(port)]
    inside(path, [iptables, "-t", "nat", "-A", "OUTPUT", *rule, *to])


def add_target(path: str) -> None:
    """Give `lo` the address that IPv6 validation connects to."""
    inside(path, ["ip", "addr", "add", "::6/128", "dev", "lo"])


def validate_as(uid: int, path: str, family: int, timeout_s: float = 5.0) -> list[str]:
    """Validate in a namespace; return the log, which an error carries as its notes."""

    def run() -> list[str]:
        log: list[str] = []
        try:
            validation.validate(family == 6, OUTBOUND, INBOUND, PROBE, timeout_s, log.append)
        except CaptureNotWorking as error:
            for line in log:
                error.add_note(line)
            raise
        return log

    return call_inside_as(uid, path, run)


def took(function: Callable[[], object]) -> float:
    """Measure how long a call takes, in seconds."""
    start = time.monotonic()
    function()
    return time.monotonic() - start


@FAMILIES
@pytest.mark.parametrize("program", ["nft", "legacy"])
@pytest.mark.parametrize("port", [INBOUND, OUTBOUND])
def test_captured_pod_passes_at_once(netns: str, family: int, program: str, port: int) -> None:
    """The first connection is enough, at either of the proxy's ports."""
    add_target(netns)
    capture(netns, family, port, program)
    assert took(lambda: validate_as(UID, netns, family)) < 0.9
    log = validate_as(UID, netns, family)
    assert log == [f"traffic capture works: a connection to {TARGET[family]} was redirected"]


@FAMILIES
def test_uncaptured_pod_fails_when_the_time_is_over(netns: str, family: int) -> None:
    """The message says what was tried, where, what it means and who must run it."""
    add_target(netns)

    def fail() -> None:
        with pytest.raises(CaptureNotWorking) as failure:
            validate_as(UID, netns, family, timeout_s=1.3)
        message = failure.value.msg
        shown = (
            "127.0.0.1:15001 or 127.0.0.1:15006" if family == 4 else "[::1]:15001 or [::1]:15006"
        )
        assert f"from {LOCAL[family]} to {TARGET[family]} arrived at {shown}. " in message
        assert "within 1.3 s" in message
        assert "scheduled before the CNI plugin of its node was ready" in message
        assert "user id 1337" in message
        assert "\n" not in message
        refused = f"connecting from {LOCAL[family]} to {TARGET[family]}: Connection refused"
        assert failure.value.__notes__[:2] == [refused] * 2

    assert 1.3 <= took(fail) < 2


@FAMILIES
def test_other_user_fails(netns: str, family: int) -> None:
    """Rules that let other users' traffic on `lo` alone let this one's alone as well."""
    add_target(netns)
    capture(netns, family)
    with pytest.raises(CaptureNotWorking, match="user id 1000 and works only as the proxy's"):
        validate_as(1000, netns, family, timeout_s=0.3)


def test_only_the_asked_family_counts(netns: str) -> None:
    """A pod whose host address is IPv4 is not validated by its IPv6 rules, nor the reverse."""
    add_target(netns)
    capture(netns, 6)
    validate_as(UID, netns, 6)
    with pytest.raises(CaptureNotWorking):
        validate_as(UID, netns, 4, timeout_s=0.3)


def test_missing_target_address_is_logged(netns: str) -> None:
    """Without the additional address IPv6 has no way to the target; the log says so."""
    capture(netns, 6)
    with pytest.raises(CaptureNotWorking) as failure:
        validate_as(UID, netns, 6, timeout_s=0.3)
    assert f"connecting from ::1 to {TARGET[6]}: " in failure.value.__notes__[0]


@FAMILIES
def test_silent_drop_fails_when_the_time_is_over(netns: str, family: int) -> None:
    """An attempt that stays without any answer is given up, and time is kept."""
    add_target(netns)
    drop = ["-A", "OUTPUT", "-p", "tcp", "--dport", str(PROBE), "-j", "DROP"]
    inside(netns, [{4: "iptables-nft", 6: "ip6tables-nft"}[family], *drop])

    def fail() -> None:
        with pytest.raises(CaptureNotWorking):
            validate_as(UID, netns, family, timeout_s=1.3)

    assert 1.3 <= took(fail) < 2


def test_no_time_fails_at_once(netns: str) -> None:
    """Zero seconds are no time to try anything, captured or not."""
    capture(netns, 4)
    with pytest.raises(CaptureNotWorking, match="within 0 s"):
        validate_as(UID, netns, 4, timeout_s=0.0)


def test_rules_that_come_late_are_found(netns: str) -> None:
    """The connection is tried again every second."""

    def run() -> list[str]:
        log: list[str] = []

        def then_capture(line: str) -> None:
            os.seteuid(0)
            if not log:
                capture(netns, 4)
            os.seteuid(UID)
            log.append(line)

        os.seteuid(UID)
        validation.validate(False, OUTBOUND, INBOUND, PROBE, 5.0, then_capture)
        return log

    refused, works = call_inside(netns, run)
    assert refused.endswith("Connection refused")
    assert works.startswith("traffic capture works")


def occupied(ports: tuple[int, ...], family: int, timeout_s: float = 5.0) -> list[str]:
    """Validate while root holds some of the proxy's ports, without sharing them."""
    log: list[str] = []
    with ExitStack() as held:
        for port in ports:
            kind = socket.AF_INET if family == 4 else socket.AF_INET6
            held.enter_context(socket.create_server((LOCAL[family], port), family=kind))
        os.setresuid(UID, UID, UID)
        validation.validate(family == 6, OUTBOUND, INBOUND, PROBE, timeout_s, log.append)
    return log


@FAMILIES
def test_one_port_that_is_taken_is_tolerated(netns: str, family: int) -> None:
    """The other listener suffices; the log says which one is missing."""
    add_target(netns)
    capture(netns, family)
    taken, works = call_inside(netns, occupied, (OUTBOUND,), family)
    shown = {4: "127.0.0.1:15001", 6: "[::1]:15001"}[family]
    assert taken == f"listening on {shown}: Address already in use"
    assert works.startswith("traffic capture works")


@FAMILIES
def test_both_ports_taken_fail_at_once(netns: str, family: int) -> None:
    """There is nothing to wait for, however long one may."""
    capture(netns, family)

    def fail() -> None:
        with pytest.raises(CaptureNotWorking, match=r"neither .*:15001 nor .*:15006 can be"):
            call_inside(netns, occupied, (OUTBOUND, INBOUND), family, 60.0)

    assert took(fail) < 2


def test_other_connections_do_not_count(netns: str) -> None:
    """Neither one that was made to the listener itself nor one to another captured port."""
    capture(netns, 4)
    let_probe_pass = ["-p", "tcp", "--dport", str(PROBE), "-j", "RETURN"]
    inside(netns, ["iptables-nft", "-t", "nat", "-I", "OUTPUT", *let_probe_pass])

    def run() -> list[str]:
        log: list[str] = []
        clients = [socket.socket(), socket.socket()]

        def then_connect(line: str) -> None:
            if not log:
                clients[0].connect(("127.0.0.1", INBOUND))
                clients[1].connect(("127.0.0.6", 4321))
            log.append(line)

        with pytest.raises(CaptureNotWorking):
            validation.validate(False, OUTBOUND, INBOUND, PROBE, 1.5, then_connect)
        for client in clients:
            log.append(f"answer: {client.recv(16).decode()}")
            client.close()
        return log

    log = call_inside_as(UID, netns, run)
    for port in (INBOUND, 4321):
        assert f"a connection to port {port} arrived, and was not ours" in log
        assert f"answer: {port}" in log


def test_waiting_costs_no_processor_time(netns: str) -> None:
    """The loop sleeps between attempts; it does not spin."""

    def run() -> float:
        start = time.process_time()
        with pytest.raises(CaptureNotWorking):
            validation.validate(False, OUTBOUND, INBOUND, PROBE, 1.5, lambda _line: None)
        return time.process_time() - start

    assert call_inside_as(UID, netns, run) < 0.2


def test_attempts_are_a_second_apart(netns: str) -> None:
    """Failures are logged once an attempt."""
    moments: list[float] = []

    def run() -> list[float]:
        with pytest.raises(CaptureNotWorking):
            validation.validate(
                False, OUTBOUND, INBOUND, PROBE, 2.5, lambda _line: moments.append(time.monotonic())
            )
        return moments

    times = call_inside_as(UID, netns, run)
    assert len(times) == 3
    assert all(0.9 < after - before < 1.3 for before, after in pairwise(times))
