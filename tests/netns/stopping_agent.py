"""`python -m netns.stopping_agent SOCKET MARK MOMENT`: an agent that waits to be stopped.

Whoever gets to the moment first makes the file MARK and waits until it is gone, so that a test can
stop all of the agent meanwhile; it goes on with its next step then. Moments are between two steps
of the product, so that no test has to be lucky. (The first process of a process namespace cannot
stop itself.)
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import agent_process
from istio_cni.agent import call
from istio_cni.edge import files, netlink
from istio_cni.edge.netfilter import Netfilter
from istio_cni.plugin import program, verbs
from istio_cni.plugin.attachments import Attachments

Stop = Callable[[], None]


class Moment:
    """A function of the product, and on which of its calls to stop, before it or after it."""

    def __init__(self, owner: object, name: str, number: int = 1, *, after: bool = False) -> None:
        self._owner, self._name, self._left, self._after = owner, name, number, after

    def watch(self, stop: Stop) -> None:
        """Stop there, once."""
        function = getattr(self._owner, self._name)

        def watched(*args: object, **kwargs: object) -> object:
            self._left -= 1
            if self._left == 0 and not self._after:
                stop()
            try:
                return function(*args, **kwargs)
            finally:
                if self._left == 0 and self._after:
                    stop()

        setattr(self._owner, self._name, watched)


class Program:
    """The start of a program of iptables that changes rules, and which one of them."""

    def __init__(self, number: int) -> None:
        self._left = number

    def watch(self, stop: Stop) -> None:
        """Stop before it is started, once."""
        start = subprocess.Popen.__init__

        def watched(*args: object, **kwargs: object) -> None:
            if "-restore" in str(args[1]):
                self._left -= 1
                if self._left == 0:
                    stop()
            start(*args, **kwargs)  # type: ignore[call-overload] # passed on

        subprocess.Popen.__init__ = watched  # type: ignore[method-assign]


MOMENTS: dict[str, Moment | Program] = {
    "read": Moment(call.frame, "read_environment"),
    "looked up": Moment(call.Serving, "find_pod", after=True),
    "before the lock": Moment(program, "capture"),
    "lock taken": Moment(files.FileLock, "__enter__", after=True),
    "record written": Moment(Attachments, "write", after=True),
    "before the batch": Moment(netlink.Ruleset, "commit"),
    "after the batch": Moment(netlink.Ruleset, "commit", after=True),
    "before the record": Moment(Attachments, "write", 2),
    "before the first program": Program(1),
    "between the programs": Program(2),
    "after the programs": Moment(Netfilter, "load_together", after=True),
    "deleting": Moment(verbs.Verbs, "delete"),
    "record dropped": Moment(Attachments, "drop", after=True),
}


def main() -> None:
    """Serve, and stop at the moment."""
    mark = Path(sys.argv.pop(2))

    def stop() -> None:
        mark.touch()
        while mark.exists():
            time.sleep(0.001)

    MOMENTS[sys.argv.pop(2)].watch(stop)
    agent_process.main()


if __name__ == "__main__":
    main()
