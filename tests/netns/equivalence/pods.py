"""A pod among its neighbours, with servers everywhere and a process that acts there.

Both pods are asked before either is waited for, so a comparison takes no longer than one pod does.
Whoever acts in a pod enters its namespaces, so that is a process of its own: the test's process
stays where it is, and the servers do not notice that rules change around them.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from netns.programming import FORK, started
from netns.traffic import PROXY, TRANSPARENT_LISTENERS, Listener, serving

from .calls import make_calls
from .neighbourhood import settle
from .places import OWN_INBOUND, OWN_OUTBOUND
from .probes import Probe

_SERVERS = {
    "pod": (
        *map(Listener, (8080, 9090, 22, 15008, 15020, 15021, 53)),
        *(Listener(53, udp=True), Listener(5300, udp=True)),
    ),
    "outside": (
        *map(Listener, (80, 443, 8443, 22, 15020, 53)),
        *(Listener(port, udp=True) for port in (53, 5300, 15020)),
    ),
    "second": (Listener(80), Listener(53), Listener(53, udp=True)),
    "guest": (Listener(8080),),
}
_PROXY = (
    *TRANSPARENT_LISTENERS,
    Listener(OWN_OUTBOUND, PROXY),
    Listener(OWN_INBOUND, PROXY, transparent=True),
)


class Failed(Exception):
    """Something went wrong in a pod; the text says what."""


class Pod:
    """A pod among its neighbours, and the process that acts there."""

    def __init__(self, places: Mapping[str, str], worker: Connection) -> None:
        self.path = places["pod"]
        self._places = places
        self._worker = worker

    def ask(self, what: Callable[..., Any], *args: object) -> None:
        """Have something done; the answer is waited for later."""
        self._worker.send((what, args))

    def ask_calls(self, probes: Sequence[Probe], first_port: int, patience_s: float) -> None:
        """Have connections made, each from a port of its own."""
        self.ask(make_calls, self._places, probes, first_port, patience_s)

    def answer(self) -> Any:
        """Wait for what was asked for; raises Failed."""
        result, failure = self._worker.recv()
        if failure:
            raise Failed(failure)
        return result


@contextmanager
def two_pods(new_netns: Callable[[], str]) -> Iterator[tuple[Pod, Pod]]:
    """Set up two pods, each with a neighbourhood of its own, servers running everywhere."""
    with ExitStack() as stack:
        yield (
            stack.enter_context(_pod(new_netns)),
            stack.enter_context(_pod(new_netns)),
        )


@contextmanager
def _pod(new_netns: Callable[[], str]) -> Iterator[Pod]:
    places = {name: new_netns() for name in _SERVERS}
    settle(places)
    ours, theirs = FORK.Pipe()
    with ExitStack() as stack:
        for at, listeners in _SERVERS.items():
            stack.enter_context(serving(places[at], at, listeners))
        stack.enter_context(serving(places["pod"], "proxy", _PROXY))
        stack.enter_context(started(_work, theirs))
        theirs.close()
        stack.callback(ours.close)
        yield Pod(places, ours)


def _work(orders: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test's; it ends this process
    while True:
        try:
            what, args = orders.recv()
        except EOFError:
            return
        try:
            orders.send((what(*args), ""))
        except Exception:
            orders.send((None, traceback.format_exc()))
