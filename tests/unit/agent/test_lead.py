"""One thread takes callers in and one works, unless that one takes too long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from istio_cni.agent.lead import PATIENCE_S, Lead, Turn
from istio_cni.edge.callers import Listener
from waiting import wait

WAIT_S = 10.0


def nobody() -> bool:
    """Tell that no caller waits."""
    return False


@contextmanager
def looked_after(lead: Lead) -> Iterator[None]:
    """Have somebody look whether the leader takes too long, for the time of a block."""
    ending = threading.Event()

    def look() -> None:
        while not ending.wait(PATIENCE_S / 4):
            lead.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


class Follower:
    """A thread that wants to lead, and does `what` once it does."""

    def __init__(self, lead: Lead, what: Callable[[Turn], object] = lambda _: None) -> None:
        self.leads = threading.Event()
        self._lead = lead
        self._what = what
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._lead.taken() as turn:
            self.leads.set()
            self._what(turn)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def test_the_next_one_leads_when_the_block_ends() -> None:
    """However long nobody calls."""
    lead = Lead(nobody)
    with looked_after(lead), lead.taken():
        follower = Follower(lead)
        assert not follower.leads.wait(3 * PATIENCE_S)
    follower.join()
    with lead.taken():
        pass


@pytest.mark.parametrize("fault", [None, ValueError()])
def test_who_lets_go_works_again_and_leads_no_more(fault: Exception | None) -> None:
    """Two threads that take no time do not work at once; nor does the end give the lead away."""
    lead, going, working = Lead(nobody), threading.Event(), threading.Event()

    def follow(turn: Turn) -> None:
        turn.begin()
        working.set()
        going.wait(WAIT_S)

    with suppress(ValueError), lead.taken() as turn:
        turn.begin()
        second = Follower(lead, follow)
        assert not second.leads.wait(PATIENCE_S / 2)
        with turn.let_go():
            assert working.wait(WAIT_S)
            threading.Timer(PATIENCE_S / 2, going.set).start()
            since = time.monotonic()
        assert going.is_set()
        assert time.monotonic() - since < PATIENCE_S
        second.join()
        second = Follower(lead)
        assert second.leads.wait(WAIT_S)
        if fault:
            raise fault
    second.join()
    with lead.taken():
        pass


def test_nobody_waits_long_for_work() -> None:
    """Whoever has it may wait for something, too; then two work at once."""
    lead, going = Lead(nobody), threading.Event()
    with lead.taken() as turn:
        turn.begin()
        with turn.let_go():
            second = Follower(lead, lambda turn: (turn.begin(), going.wait(WAIT_S)))
            assert second.leads.wait(WAIT_S)
        since = time.monotonic()
        with turn.let_go():
            pass
        assert time.monotonic() - since < 3 * PATIENCE_S
    going.set()
    second.join()


def test_a_leader_that_takes_too_long_is_left_behind() -> None:
    """It may wait for a lock; when it ends, that is nothing to those who lead by then."""
    lead, going = Lead(nobody), threading.Event()
    with looked_after(lead), lead.taken() as slow:
        slow.begin()
        second = Follower(lead, lambda turn: (turn.begin(), going.wait(WAIT_S)))
        since = time.monotonic()
        assert second.leads.wait(WAIT_S)
        assert time.monotonic() - since > PATIENCE_S / 2
        third = Follower(lead, lambda _: going.wait(WAIT_S))
        assert third.leads.wait(WAIT_S)  # one by one
    fourth = Follower(lead)
    assert not fourth.leads.wait(3 * PATIENCE_S)
    going.set()
    for each in (second, third, fourth):
        each.join()


def test_a_turn_tells_whether_callers_wait(tmp_path: Path) -> None:
    """Those who have connected, and were not accepted yet."""
    listener = Listener(str(tmp_path / "agent.sock"))
    with Lead(listener.has_callers).taken() as turn:
        assert not turn.is_wanted()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / "agent.sock"))
            assert turn.is_wanted()
            with listener.accept():
                assert not turn.is_wanted()
        listener.close()
        assert not turn.is_wanted()


def test_who_waited_last_leads_first() -> None:
    """And all of them in the end."""
    lead, led = Lead(nobody), []
    with lead.taken():
        followers = []
        for number in range(5):
            followers.append(Follower(lead, lambda _, number=number: led.append(number)))
            wait(lambda: len(lead._waiting) == len(followers), "it waits")  # noqa: SLF001
    for each in followers:
        each.join()
    assert led == [4, 3, 2, 1, 0]
