"""Installs in order, looks again every second, and takes everything back at the end.

Order matters. The runtime must find the program once it knows the entry, so the entry comes last
and goes first. Looking compares what is wanted with what is there, so it does not matter what
changed it, who was killed when, or which event was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from istio_cni.errors import InternalError, IstioCNIError

LOG = logging.getLogger("cni-agent")
LOOK_EVERY_S = 1.0
END_LOOKS = 4  # for an entry that somebody puts back
RELOAD_S = 1.0  # until runtimes have read a directory that has changed


class Part(Protocol):
    """Something on the node that is put there and taken away; both tell what they did."""

    def install(self) -> Iterator[str]:
        """Put right what is not. Raises IstioCNIError."""

    def remove(self) -> Iterator[str]:
        """Take it away. Raises IstioCNIError."""


class Installer:
    """The parts, in the order in which they are installed; the last one is the conflist.

    `count` is told of each change: "" once all is in place, the name of the part's class if one is
    not any more, or for another reason.
    """

    def __init__(
        self, parts: Sequence[Part], count: Callable[[str], None] = lambda _: None
    ) -> None:
        self._parts = parts
        self._count = count
        self._installed = False
        self._problems: dict[int, str] = {}  # by the part's number
        self.missing = "not looked yet"
        """What is not in place, "" once all is."""

    def look(self) -> None:
        """Put everything in place as far as it goes; what keeps it from it is in `missing`.

        No part is begun before those that it needs are in place. Later on, trouble with one leaves
        the others be: an entry that is taken out while a token has ended still comes back.
        """
        problems: dict[int, str] = {}
        for number, part in enumerate(self._parts):
            problem, _ = _told(part.install())
            if problem:
                problems[number] = problem
                if problem != self._problems.get(number):
                    LOG.warning("not in place: %s", problem)
                    self._count(type(part).__name__)
            if problems and not self._installed:
                break
        if self.missing and not problems:
            LOG.info("all is in place: pods of the mesh are captured from now on")
            self._count("")
        self._installed = self._installed or not problems
        self._problems = problems
        self.missing = "; ".join(problems.values())

    def remove(self, pause: Callable[[float], object]) -> None:
        """Take everything away, last part first; what cannot be is told.

        Where the entry stays, all stays: a runtime that is told to call a program that is gone
        starts no pod at all. `pause` waits some seconds: between the entry's end and the program's.
        Another agent, or who keeps copies of the file, may put the entry back meanwhile, so it is
        looked for again before the program goes.
        """
        self.missing = "this node agent is ending"
        entry, *others = reversed(self._parts)
        for look in range(END_LOOKS):
            problem, told = _told(entry.remove())
            if problem:
                LOG.error("the entry cannot be taken out, so the plugin stays, too: %s", problem)
                return
            if look and not told:
                break
            pause(RELOAD_S)
        else:
            LOG.error("the entry is put back each time it is taken out, so the plugin stays, too")
            return
        for part in others:
            problem, _ = _told(part.remove())
            if problem:
                LOG.error("not taken away: %s", problem)


def _told(steps: Iterator[str]) -> tuple[str, int]:
    """Take the steps, telling of each; return what stopped them, "" if nothing did, and how many.

    A fault of ours stops them, too, and may be gone next time.
    """
    told = 0
    try:
        for line in steps:
            LOG.info("%s", line)
            told += 1
    except IstioCNIError as error:
        return error.msg, told
    except Exception as error:
        fault = InternalError.of(error)
        LOG.debug("%s", fault.msg, exc_info=error)
        return fault.msg, told
    return "", told
