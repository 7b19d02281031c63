"""Tokens of another ServiceAccount, by TokenRequest through the official client.

The plugin's kubeconfig lies on the node's disk. What it holds is the token of an account that can
read pods and nothing else, and that ends within the hour; the agent's own never leaves its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import kubernetes.client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from istio_cni.edge.kube import incluster
from istio_cni.errors import KubeconfigUnusable, TryAgainLater, quoted

LIFE_S = 3600
TIMEOUT_S = 5.0


class Token(NamedTuple):
    """A token and how long it is good for, counted from when it was asked for."""

    text: str
    life_s: float


def mint(credentials_dir: str, env: Mapping[str, str], namespace: str, account: str) -> Token:
    """Return a fresh token of an account, asked for with the credentials of this pod.

    They are read each time, since both the token and the authority rotate. Raises
    KubeconfigUnusable when there are none or the server refuses, TryAgainLater when it gives no
    answer.
    """
    wanted = f"a token of ServiceAccount {quoted(f'{namespace}/{account}')}"
    spec = kubernetes.client.V1TokenRequestSpec(audiences=[], expiration_seconds=LIFE_S)
    request = kubernetes.client.AuthenticationV1TokenRequest(spec=spec)
    client = kubernetes.client.ApiClient(incluster.configuration(credentials_dir, env))
    try:
        answer = kubernetes.client.CoreV1Api(client).create_namespaced_service_account_token(
            account, namespace, request, _request_timeout=TIMEOUT_S
        )
    except ApiException as error:
        if not error.status:  # no answer at all: TLS failed
            raise TryAgainLater(f"{wanted} is not to be had: {quoted(error.reason)}") from error
        problem = f"{wanted} is refused: HTTP {error.status} {quoted(error.reason)}"
        if error.status in (408, 429) or error.status >= 500:
            raise TryAgainLater(problem) from error
        raise KubeconfigUnusable(problem) from error
    except (ValueError, TypeError, AttributeError):  # their texts quote what they choke on: tokens
        raise TryAgainLater(f"{wanted} is not to be had: the answer is none") from None
    except (HTTPError, OSError) as error:
        raise TryAgainLater(f"{wanted} is not to be had: {quoted(str(error))}") from error
    finally:
        client.rest_client.pool_manager.clear()
    status = answer.status
    if status is None or not status.token or status.expiration_timestamp is None:
        raise TryAgainLater(f"{wanted} was answered without one")
    granted_s = answer.spec.expiration_seconds if answer.spec else None
    life_s = _life_s(granted_s, status.expiration_timestamp)
    if life_s <= 0:
        raise TryAgainLater(f"{wanted} is not to be had: it would be good for {life_s:.0f} s")
    return Token(status.token, life_s)


def _life_s(granted_s: int | None, end: datetime) -> float:
    """Tell how long a token is good for; the server may grant less than it was asked for.

    Its end in this node's time may be wrong by as much as the clocks differ, so it only shortens
    what was granted, and one in the past does not count.
    """
    end = end if end.tzinfo else end.replace(tzinfo=UTC)
    left_s = (end - datetime.now(UTC)).total_seconds()
    granted_s = min(granted_s or LIFE_S, LIFE_S)
    return left_s if 0 < left_s < granted_s else float(granted_s)
