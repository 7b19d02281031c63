"""Serves the launcher: threads of which one takes the next caller, one call at a time.

The kernel queues callers, as many as `callers.BACKLOG`; beyond that, and while no thread takes
them in time, launchers run the plugin by themselves. A thread that is stranded in a foreign
namespace ends and leaves its place to a new one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from istio_cni.agent.lead import PATIENCE_S, Lead, Turn
from istio_cni.edge import proc
from istio_cni.edge.callers import Caller, Listener

LOG = logging.getLogger("cni-agent")
Answer = Callable[[Caller, Turn], object]
WORKERS = 16  # calls that wait for the API server or a lock hold up no other
_PAUSE_S = 0.05  # when there are no descriptors left


class Server:
    """Threads behind a listener, from now until `stop`.

    `answer(caller, turn)` lets go of the turn while it waits for somebody else.
    """

    def __init__(self, path: str, answer: Answer, workers: int = WORKERS) -> None:
        """Listen and serve. Raises IOFailure."""
        self._answer = answer
        self._stopping = threading.Event()
        self._home = proc.namespace(proc.OWN_NETNS)
        self._listener = Listener(path)
        self._lead = Lead(self._listener.has_callers)
        self._stranded: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads = [self._start(number) for number in range(workers)]
        threading.Thread(target=self._replace, name="workers", daemon=True).start()

    def _start(self, number: int) -> threading.Thread:
        thread = threading.Thread(
            target=self._work, args=(number,), name=f"worker-{number}", daemon=True
        )
        thread.start()
        return thread

    def _replace(self) -> None:
        """Start others for stranded threads, and let nobody lead who takes too long.

        A thread begins in the namespace of the one that starts it.
        """
        while not self._stopping.is_set():
            with suppress(queue.Empty):
                number = self._stranded.get(timeout=PATIENCE_S)
                self._threads[number] = self._start(number)
            self._lead.look()

    def _work(self, number: int) -> None:
        while not self._stopping.is_set():
            with self._lead.taken() as turn:
                self._serve(turn)
            if proc.namespace(proc.THREAD_NETNS) != self._home:
                LOG.error("worker %d ends: it cannot get back to its own network namespace", number)
                self._stranded.put(number)
                return

    def _serve(self, turn: Turn) -> None:
        """Take one caller in, and answer it."""
        if self._stopping.is_set():
            return
        try:
            caller = self._listener.accept()
        except OSError as error:
            if not self._stopping.wait(_PAUSE_S):
                LOG.warning("no caller can be taken in: %s", error.strerror)
            return
        turn.begin()
        try:
            with caller:
                self._answer(caller, turn)
        except Exception:  # a fault of ours must not cost the next pod its worker
            LOG.exception("a call was given up")

    def stop(self, wait_s: float) -> bool:
        """Take no more callers, finish what was taken in; tell whether all of it was in time."""
        self._stopping.set()
        self._listener.close()
        until = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
