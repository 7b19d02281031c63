"""The pods of this node, in memory: most look-ups need no API server.

One thread lists, then watches from the list's version on. What is cached is replaced as a whole by
each list and changed by each event, in order; an end that passed while nobody listened is either in
the stream that goes on from the last version, or missing in the next list. So nothing is kept that
has gone, whatever fails in between.

A cache may be behind, and is asked by name. Hence it answers only who knows the uid: an object of a
former pod is never given, and a runtime that gives no uid gets no answer at all. With the right uid
an object is good even while the server is away, but for annotations and labels that were edited
since. `None` means: ask the server, once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from istio_cni.agent.trim import Known, Strings, trim
from istio_cni.edge.kube.stream import Event, Expired, Garbled, ServerTrouble, Silent, Unauthorized
from istio_cni.edge.kube.watch import NodePods
from istio_cni.errors import InternalError, IstioCNIError
from istio_cni.plugin.pod import Pod

Name = tuple[str, str]  # namespace and name
LOG = logging.getLogger("cni-agent")
RETRY_AFTER_MAX_S = 120.0  # a server that names more is not taken at its word
STOP_S = 2.0


class Pace(NamedTuple):
    """Pauses between tries, `first_s` to `most_s`; a stream of `lasting_s` makes good for them."""

    first_s: float = 0.2
    most_s: float = 30.0
    lasting_s: float = 5.0


class PodCache:
    """What `source` has, trimmed; follows it from `start` to `stop`. Safe to use by any thread."""

    def __init__(
        self,
        source: NodePods,
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trouble = "not listed yet"
        """Why the pods are not being watched, "" while they are."""
        self._source = source
        self._pace = pace or Pace()
        self._clock = clock
        self._pauses = Pauses(self._pace, random.SystemRandom().random)
        self._strings = Strings()
        self._lock = threading.Lock()
        self._pods: dict[Name, Known] = {}
        self._version = ""  # of the last event; "" before a list
        self._heard_at = -math.inf
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)

    def find(self, namespace: str, name: str, uid: str) -> Pod | None:
        """Return the pod that the runtime knows by `uid`, if it is here."""
        if not uid:
            return None
        with self._lock:
            known = self._pods.get((namespace, name))
        return known.pod if known is not None and uid in known.uids else None

    @property
    def size(self) -> int:
        """The number of pods."""
        return len(self._pods)

    @property
    def age_s(self) -> float:
        """Seconds since the server was last heard: a list, an event, a bookmark; or infinity."""
        return self._clock() - self._heard_at

    @property
    def is_synced(self) -> bool:
        """Whether there has been a list."""
        return self._heard_at > -math.inf

    def start(self) -> None:
        """Begin to follow; once only."""
        self._thread.start()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End, also in the middle of a silent connection.

        A connection that is still being made is left to a thread that nothing waits for.
        """
        self._stopping.set()
        self._source.interrupt()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            error = self._attempt()
            pause_s = self._pauses.after(error)
            if self._stopping.is_set():
                return
            if error is not None:
                self._tell(error, pause_s)
            self._stopping.wait(pause_s)

    def _attempt(self) -> IstioCNIError | None:
        """List if need be, then watch; return what ended it, None where the server did."""
        try:
            if not self._version:
                self._list()
            self._watch()
        except (Expired, Garbled) as error:
            self._version = ""
            return error
        except IstioCNIError as error:
            return error
        except Exception as error:  # a thread that ends in silence would let the cache grow old
            self._version = ""
            return InternalError.of(error)
        return None

    def _list(self) -> None:
        """Put a list in place of what was cached."""
        version, pods = self._source.list_pods(lambda pod: trim(pod, self._strings))
        listed = {_name(known.pod): known for known in pods}
        with self._lock:
            self._pods = listed
        self._version = version
        self._heard_at = self._clock()
        LOG.info("%d pods of this node are known", len(listed))

    def _watch(self) -> None:
        """Apply what happens until the stream ends."""
        began: float | None = None
        try:
            with contextlib.closing(self._source.watch_pods(self._version)) as events:
                for event in events:
                    self._apply(event)
                    self._heard_at = self._clock()
                    if began is None:
                        began = self._heard_at
                        self._well()
        finally:
            if began is not None and self._clock() - began >= self._pace.lasting_s:
                self._pauses.settle()

    def _apply(self, event: Event) -> None:
        """Take over one event; done twice, it changes nothing."""
        if event.kind in ("ADDED", "MODIFIED"):
            known = trim(event.pod, self._strings)
            with self._lock:
                self._pods[_name(known.pod)] = known
        elif event.kind == "DELETED":
            with self._lock:
                self._pods.pop(_name(Pod(event.pod)), None)
        self._version = event.version

    def _well(self) -> None:
        if self.trouble:
            LOG.info("the pods of this node are being watched")
        self.trouble = ""

    def _tell(self, error: IstioCNIError, pause_s: float) -> None:
        """Log trouble that is new; what a second try at once may cure is none yet."""
        is_news = pause_s > 0 and error.msg != self.trouble
        LOG.log(logging.WARNING if is_news else logging.DEBUG, "%s", error.msg)
        if error.details:
            LOG.debug("%s", error.details)
        if pause_s:
            self.trouble = error.msg


def _name(pod: Pod) -> Name:
    return pod.namespace, pod.name


class Pauses:
    """How long to wait after each end of a stream; `jitter` gives a share of 0 to 1.

    A stream that the server ended or that fell silent, a version that expired and a token that was
    replaced are everyday: the first of each kind is no reason to wait. All else, and a second one
    before a stream has lasted, waits twice as long each time.
    """

    def __init__(self, pace: Pace, jitter: Callable[[], float]) -> None:
        self._pace = pace
        self._jitter = jitter
        self._next_s = pace.first_s
        self._excused: set[type] = set()

    def settle(self) -> None:
        """Begin anew: a stream has lasted."""
        self._next_s = self._pace.first_s
        self._excused.clear()

    def after(self, error: IstioCNIError | None) -> float:
        """Return the seconds to wait after an end, None being the server's own."""
        kind = type(error)
        asked_s = error.retry_after_s if isinstance(error, ServerTrouble) else 0.0
        if (error is None or kind in (Expired, Silent, Unauthorized)) and kind not in self._excused:
            self._excused.add(kind)
            return self._spread(asked_s)
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._pace.most_s / 2)
        return self._spread(max(pause_s, asked_s))

    def _spread(self, pause_s: float) -> float:
        """Lengthen a pause by up to its length, so that nodes do not come all at once."""
        return min(pause_s, RETRY_AFTER_MAX_S) * (1 + self._jitter())
