"""The cluster's keys and certificates, by openssl: one authority, a client for each component."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .addresses import API_ADDRESSES, API_URL, NODE_ADDRESSES, NODE_NAME

CLIENTS = {  # who a component is to the API server
    "admin": "/O=system:masters/CN=admin",
    "kcm": "/CN=system:kube-controller-manager",
    "sched": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
    "kubelet": f"/O=system:nodes/CN=system:node:{NODE_NAME}",
}
KEY_USAGE = "keyUsage=critical,digitalSignature,keyEncipherment"
EXTENDED_USAGE = "extendedKeyUsage=serverAuth,clientAuth"
CA_USAGE = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
DAYS = "30"


def make(directory: Path, kubeconfigs: Path) -> None:
    """Write keys and certificates into one directory, a kubeconfig a component into another."""
    directory.mkdir()
    _key(directory, "ca")
    usage = [word for line in CA_USAGE for word in ("-addext", line)]
    subject = ["-subj", "/CN=cluster-authority"]
    _openssl(directory, "req", "-x509", "-new", "-key", "ca.key", "-days", DAYS, *subject,
             "-out", "ca.crt", *usage)  # fmt: skip
    names = [f"IP:{address}" for address in API_ADDRESSES]
    _certificate(directory, "apiserver", "/CN=kube-apiserver", ["DNS:localhost", *names])
    node = [f"DNS:{NODE_NAME}", *(f"IP:{address}" for address in NODE_ADDRESSES)]
    for name, subject_name in CLIENTS.items():
        _certificate(directory, name, subject_name, node if name == "kubelet" else [])
        (kubeconfigs / f"{name}.kubeconfig").write_text(_kubeconfig(directory, name))
    _key(directory, "sa")  # signs the tokens of ServiceAccounts
    _openssl(directory, "ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")


def _key(directory: Path, name: str) -> None:
    _openssl(
        directory, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key"
    )


def _certificate(directory: Path, name: str, subject: str, names: Sequence[str]) -> None:
    _key(directory, name)
    _openssl(directory, "req", "-new", "-key", f"{name}.key", "-subj", subject,
             "-out", f"{name}.csr")  # fmt: skip
    lines = [KEY_USAGE, EXTENDED_USAGE]
    if names:
        lines.append("subjectAltName=" + ",".join(names))
    (directory / f"{name}.ext").write_text("\n".join([*lines, ""]))
    _openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
             "-CAcreateserial", "-days", DAYS, "-extfile", f"{name}.ext",
             "-out", f"{name}.crt")  # fmt: skip


def _openssl(directory: Path, *argv: str) -> None:
    subprocess.run(["openssl", *argv], cwd=directory, check=True, capture_output=True, timeout=60)


def _kubeconfig(directory: Path, user: str) -> str:
    authority = str(directory / "ca.crt")
    client = {
        "client-certificate": str(directory / f"{user}.crt"),
        "client-key": str(directory / f"{user}.key"),
    }
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": user}}],
            "clusters": [
                {"name": "here", "cluster": {"server": API_URL, "certificate-authority": authority}}
            ],
            "users": [{"name": user, "user": client}],
        }
    )
