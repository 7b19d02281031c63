"""The pod of one ADD: what each answer of the API server means, and how long it may go on.

Most failures clear by themselves, and failing at once would only make the runtime build and tear
down the sandbox again; others never do, and waiting would hide them for the whole of a pod's start.
So each failure carries its own patience:

    PASSING  no connection, time-outs, 408, 429, 5xx  until the deadline, then TryAgainLater
    LAGGING  404, a former pod's object, none at all  5 s (caches lag), then PodLookupFailed
    STALE    401, a certificate that is not accepted  one more try with the kubeconfig read again
                                                      (it is renewed in place), then PodLookupFailed
                                                      or KubeconfigUnusable
    FINAL    403, redirects, any other status         PodLookupFailed at once

A redirect is refused because following it would carry the token elsewhere.
"""

from __future__ import annotations

import os
import time

from istio_cni.edge.kube import transport
from istio_cni.edge.kube.kubeconfig import load_kubeconfig
from istio_cni.errors import KubeconfigUnusable, PodLookupFailed, TryAgainLater, quoted

ATTEMPT_MAX_S = 5.0
LAG_MAX_S = 5.0
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 2.0
BACKOFF_JITTER = 0.25  # share by which a pause varies, so that nodes do not march in step

PASSING, LAGGING, STALE, FINAL = "passing", "lagging", "stale", "final"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from istio_cni.edge.kube.kubeconfig import Kubeconfig
    from istio_cni.edge.kube.response import Answer
    from istio_cni.errors import IstioCNIError

    Pod: TypeAlias = dict[str, object]
    ErrorType: TypeAlias = type[IstioCNIError]


class Failure:
    """Why one attempt brought no pod, how long that may go on, and what it is called in the end."""

    __slots__ = ("cause", "error", "hint", "origin", "patience", "retry_after_s")

    def __init__(self, patience: str, error: ErrorType, cause: str, hint: str) -> None:
        self.patience = patience
        self.error = error
        self.cause = cause
        self.hint = hint
        self.origin: Exception | None = None
        self.retry_after_s = 0.0


def fetch_pod(
    kubeconfig_path: str,
    namespace: str,
    name: str,
    deadline: float,
    matches: Callable[[Pod], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Pod:
    """Get the pod `namespace`/`name` for which `matches` holds from the kubeconfig's API server.

    `deadline` is an instant of `clock` in seconds; nothing here waits beyond it. `matches` tells
    the pod from a former one of the same name. Raises KubeconfigUnusable (101), PodLookupFailed
    (102) and TryAgainLater (11), as the module's table says.
    """
    kubeconfig = load_kubeconfig(kubeconfig_path)
    tls = transport.tls_context(kubeconfig)
    retries = Retries(clock, deadline)
    while True:
        try:
            until = min(deadline, clock() + ATTEMPT_MAX_S)
            answer = transport.get(kubeconfig, tls, _target(namespace, name), until, clock)
            outcome = _judge(answer, kubeconfig, namespace, name, matches)
        except OSError as error:
            outcome = _unanswered(error, kubeconfig)
        if not isinstance(outcome, Failure):
            return outcome
        pause_s = retries.pause_after(outcome)
        if pause_s is None:
            pod, server = quoted(f"{namespace}/{name}"), quoted(kubeconfig.server)
            raise outcome.error(
                f"cannot look up pod {pod} at {server}: {outcome.cause} "
                f"(attempts: {retries.attempts}); {outcome.hint}"
            ) from outcome.origin
        sleep(pause_s)
        if outcome.patience == STALE:
            kubeconfig = load_kubeconfig(kubeconfig_path)
            tls = transport.tls_context(kubeconfig)


class Retries:
    """The patience that is left; asked once after each failed attempt."""

    __slots__ = ("_backoff_s", "_clock", "_deadline", "_lag_ends", "_reread", "attempts")

    def __init__(self, clock: Callable[[], float], deadline: float) -> None:
        self.attempts = 0
        self._clock = clock
        self._deadline = deadline
        self._backoff_s = BACKOFF_FIRST_S
        self._lag_ends: float | None = None
        self._reread: list[ErrorType] = []

    def pause_after(self, failure: Failure) -> float | None:
        """Return the seconds to wait before the next attempt; None if there is to be none."""
        self.attempts += 1
        now = self._clock()
        jitter = BACKOFF_JITTER * (os.urandom(1)[0] / 127.5 - 1)  # random costs an import of 5 ms
        pause_s = max(self._backoff_s * (1 + jitter), failure.retry_after_s)
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        if failure.patience == FINAL:
            return None
        if failure.patience == STALE:
            if failure.error in self._reread:  # the token and the authority may change one by one
                return None
            self._reread.append(failure.error)
        if failure.patience == LAGGING:
            if self._lag_ends is None:
                self._lag_ends = now + LAG_MAX_S
            if now >= self._lag_ends:
                return None
            pause_s = min(pause_s, self._lag_ends - now)  # the last attempt comes as the lag ends
        return pause_s if now + pause_s < self._deadline else None


def _target(namespace: str, name: str) -> str:
    """Return the pod's path on any API server; a byte that is no UTF-8 came as a surrogate."""
    from urllib.parse import quote

    parts = (quote(part.encode(errors="surrogateescape"), safe="") for part in (namespace, name))
    return "/api/v1/namespaces/{}/pods/{}".format(*parts)


def _unanswered(error: OSError, kubeconfig: Kubeconfig) -> Failure:
    """Tell a server that nobody vouches for from trouble that passes."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        failure = Failure(
            STALE,
            KubeconfigUnusable,
            f"the server's certificate is not accepted: {quoted(error.verify_message)}",
            f"the authority in kubeconfig {quoted(kubeconfig.path)} must be the server's, and the "
            "host of its URL (or tls-server-name) a name in the server's certificate",
        )
    else:
        failure = Failure(
            PASSING,
            TryAgainLater,
            quoted(error.strerror or error),
            "the runtime repeats the call; see that this node reaches the API server",
        )
    failure.origin = error
    return failure


def _judge(
    answer: Answer,
    kubeconfig: Kubeconfig,
    namespace: str,
    name: str,
    matches: Callable[[Pod], bool],
) -> Pod | Failure:
    """Return the pod that the answer holds, or what to make of its status."""
    status = answer.status
    if status == 200:
        return _judge_pod(answer.body, namespace, name, matches)
    cause = f"HTTP {status}: {_server_message(answer.body, kubeconfig.token)}"
    if status in (408, 429) or status >= 500:
        hint = "the runtime repeats the call; see how the API server does"
        failure = Failure(PASSING, TryAgainLater, cause, hint)
        if answer.retry_after.isascii() and answer.retry_after.isdigit():  # a date is not for us
            failure.retry_after_s = float(answer.retry_after)
        return failure
    shown = quoted(kubeconfig.path)
    patience, hint = FINAL, "see that the kubeconfig's server is an API server"
    if status == 401:
        patience, hint = STALE, f"renew the credentials in kubeconfig {shown}"
    elif status == 403:
        hint = f"allow the account of kubeconfig {shown} to get pods in this namespace"
    elif status == 404:
        patience, hint = LAGGING, "it was deleted meanwhile, or the kubeconfig is another cluster's"
    elif 300 <= status < 400:
        hint = "redirects are not followed: let the kubeconfig name the API server itself"
    return Failure(patience, PodLookupFailed, cause, hint)


def _judge_pod(
    body: bytes, namespace: str, name: str, matches: Callable[[Pod], bool]
) -> Pod | Failure:
    """Return the pod of a successful answer, if it is the one that was asked for."""
    import json

    problem, document = "", None
    if len(body) > transport.BODY_MAX_BYTES:
        problem = "an answer of more than 8 MiB"
    else:
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            problem = "an answer that is not JSON"
    metadata = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(metadata, dict):
        problem = problem or "JSON that is no object with metadata"
    elif document.get("kind", "Pod") != "Pod":
        problem = f"an object of kind {quoted(document.get('kind'))}"
    elif (metadata.get("namespace"), metadata.get("name")) != (namespace, name):
        other = quoted(f"{metadata.get('namespace')}/{metadata.get('name')}")
        problem = f"the object {other}"
    elif not matches(document):
        uid = quoted(metadata.get("uid"))
        cause = f"uid mismatch: the object of this name has uid {uid}, which is another pod's"
        hint = "a pod of the same name was replaced; if it lasts, recreate the pod"
        return Failure(LAGGING, PodLookupFailed, cause, hint)
    else:
        return document
    hint = "see that the kubeconfig's server is an API server"
    return Failure(LAGGING, PodLookupFailed, f"HTTP 200 with {problem} instead of the pod", hint)


def _server_message(body: bytes, token: str) -> str:
    """Quote the server: the message of a Status object, else how the body begins."""
    import json

    text = body[:4096].decode("utf-8", "replace").strip()
    try:
        document = json.loads(body)
        if isinstance(document, dict) and isinstance(document.get("message"), str):
            text = document["message"]
    except (ValueError, RecursionError):
        pass  # a proxy's page
    return quoted(text.replace(token, "<token>") if token else text)
