"""The plugin's kubeconfig in the run dir: the token of an account that can read pods, kept fresh.

A token is renewed at half its life, so half of it is left for an API server that is away. What is
on disk stays until something better replaces it. Asking happens on a thread of its own: an API
server that is slow holds up neither the rest of the installation nor its end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from istio_cni import constants
from istio_cni.edge import files
from istio_cni.errors import InternalError, IOFailure, IstioCNIError, TryAgainLater, quoted
from istio_cni.install import plan

LOG = logging.getLogger("cni-agent")
CA_MAX_BYTES = 1024 * 1024
BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 30.0
ANSWER_S = 0.5  # an API server that is well answers within that
ASKING_MAX_S = 30.0  # then the question counts as lost

Mint = Callable[[], tuple[str, float]]
"""Asks for a token; returns it and its life in seconds. May raise TryAgainLater and others."""


class Target(NamedTuple):
    """What the kubeconfig says: URL of the server, the file with its authority, "" for none.

    `server_name` is what its certificate is for, "" if that is the host of the URL.
    """

    run_dir: str
    server: str
    ca_file: str
    mode: int = 0o600
    server_name: str = ""


class Credentials:
    """The kubeconfig that `target` describes; `clock` counts seconds and does not jump."""

    def __init__(self, target: Target, mint: Mint, clock: Callable[[], float]) -> None:
        self._target = target
        self._path = os.path.join(target.run_dir, constants.KUBECONFIG_FILE)
        self._mint = mint
        self._clock = clock
        self._asking: _Asking | None = None
        self._token = ""
        self._renew_at = self._ends_at = 0.0
        self._backoff_s = BACKOFF_FIRST_S
        self._trouble: IstioCNIError | None = None
        files.sweep(target.run_dir, lambda name: name == constants.KUBECONFIG_FILE)

    def install(self) -> Iterator[str]:
        """Renew the token when it is time, write what differs; yield what was done, for the log.

        Raises TryAgainLater and others while there is no token that works; IOFailure.
        """
        yield from self._renew()
        if not self._token or self._clock() >= self._ends_at:
            raise self._trouble or TryAgainLater("no token for the plugin yet")
        server, name = self._target.server, self._target.server_name
        wanted = plan.kubeconfig(server, self._authority(), self._token, name)
        if files.read_whole(self._path) != wanted:
            files.make_directory(self._target.run_dir, 0o755)
            files.write_whole(self._path, wanted, self._target.mode, keep=False)
            yield f"{quoted(self._path)} written, for server {quoted(self._target.server)}"

    def _authority(self) -> bytes:
        if not self._target.ca_file:
            return b""
        text = files.read_whole(self._target.ca_file, limit=CA_MAX_BYTES, follow=True) or b""
        if b"-----BEGIN CERTIFICATE-----" not in text:
            raise IOFailure(f"no certificate of an authority in {quoted(self._target.ca_file)}")
        return text.strip() + b"\n"

    def _renew(self) -> Iterator[str]:
        """Ask for a token at half the life of the last one, less and less often if in vain."""
        now = self._clock()
        if self._asking is None and now >= self._renew_at:
            self._asking = _Asking(self._mint, now)
        if self._asking is None:
            return
        asked = self._asking
        asked.join(0 if self._token else ANSWER_S)
        if asked.is_alive() and self._clock() - asked.since < ASKING_MAX_S:
            return
        self._asking = None
        if asked.answer is None:
            self._trouble = asked.error or TryAgainLater("a token was asked for, without answer")
            LOG.warning("no new token for the plugin: %s", self._trouble.msg)
            self._renew_at = self._clock() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
            return
        self._token, life_s = asked.answer
        self._renew_at, self._ends_at = asked.since + life_s / 2, asked.since + life_s
        self._backoff_s, self._trouble = BACKOFF_FIRST_S, None
        yield f"new token for the plugin, good for {life_s:.0f} s"

    def remove(self) -> Iterator[str]:
        """Take the kubeconfig away and yield what was done. Raises IOFailure."""
        if files.remove(self._path):
            yield f"{quoted(self._path)} removed"


class _Asking(threading.Thread):
    """One question, under way since a time of the caller's clock; then its answer or its error."""

    def __init__(self, mint: Mint, since: float) -> None:
        super().__init__(name="token", daemon=True)
        self.since = since
        self.answer: tuple[str, float] | None = None
        self.error: IstioCNIError | None = None
        self._mint = mint
        self.start()

    def run(self) -> None:
        """Ask."""
        try:
            self.answer = self._mint()
        except IstioCNIError as error:
            self.error = error
        except Exception as error:  # a thread that ends in silence helps nobody
            self.error = InternalError.of(error)
