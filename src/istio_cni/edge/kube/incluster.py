"""The credentials of our own pod, as the official client wants them.

The kubelet rotates the token and, now and then, the authority: whoever asks the server reads both
anew. The client's own way to refresh a token would put the file's text back as it is, line end
included, so it is switched off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import kubernetes.client
from kubernetes.config.config_exception import ConfigException
from kubernetes.config.incluster_config import InClusterConfigLoader

from istio_cni.errors import KubeconfigUnusable, quoted


def configuration(credentials_dir: str, env: Mapping[str, str]) -> kubernetes.client.Configuration:
    """Read `token` and `ca.crt` of a directory; `env` has KUBERNETES_SERVICE_HOST and _PORT.

    Raises KubeconfigUnusable when they are missing or cannot be sent; it never shows them.
    """
    found = kubernetes.client.Configuration()
    try:
        loader = InClusterConfigLoader(  # type: ignore[no-untyped-call] # no types there
            token_filename=os.path.join(credentials_dir, "token"),
            cert_filename=os.path.join(credentials_dir, "ca.crt"),
            try_refresh_token=False,
            environ=env,
        )
        loader.load_and_set(found)  # type: ignore[no-untyped-call] # likewise
    except UnicodeError:  # its text quotes what it chokes on
        raise _unusable(credentials_dir, "not UTF-8") from None
    except (ConfigException, OSError, ValueError) as error:
        raise _unusable(credentials_dir, quoted(str(error))) from error
    for kind, text in found.api_key.items():
        credential = text.strip()
        if not (credential.isascii() and credential.isprintable()):
            raise KubeconfigUnusable(
                f"this pod's token in {quoted(credentials_dir)} is none: not one line of ASCII"
            )
        found.api_key[kind] = credential
    found.proxy = None  # the environment's is not for traffic inside the cluster
    found.retries = False  # we come back by ourselves
    return found


def _unusable(credentials_dir: str, why: str) -> KubeconfigUnusable:
    where = quoted(credentials_dir)
    return KubeconfigUnusable(f"this pod's credentials in {where} cannot be used: {why}")
