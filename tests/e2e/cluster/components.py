"""Command lines of the cluster's components, in the order in which they start."""

from __future__ import annotations

from pathlib import Path

from .addresses import API_URL, NODE_ADDRESSES, NODE_NAME, POD_RANGES, SERVICE_RANGES
from .configs import USR

ETCD = "http://127.0.0.1:2379"
READY_URL = f"{API_URL}/readyz"


def containerd(state: Path) -> list[str]:
    """Return containerd's command line."""
    return ["containerd", "-c", f"{state}/etc/containerd.toml"]


def etcd(state: Path) -> list[str]:
    """Return etcd's command line; what it stores need not survive."""
    return [
        "etcd",
        f"--data-dir={state}/etcd",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver(state: Path, programs: Path) -> list[str]:
    """Return the API server's command line."""
    pki = state / "pki"
    return [
        f"{programs}/kube-apiserver",
        f"--etcd-servers={ETCD}",
        "--secure-port=6443",
        "--bind-address=::",
        f"--advertise-address={NODE_ADDRESSES[0]}",
        f"--service-cluster-ip-range={','.join(SERVICE_RANGES)}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-client-certificate={pki}/admin.crt",
        f"--kubelet-client-key={pki}/admin.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--allow-privileged=true",
    ]


def controller_manager(state: Path, programs: Path) -> list[str]:
    """Return the controller manager's command line."""
    pki = state / "pki"
    return [
        f"{programs}/kube-controller-manager",
        *_kubeconfigs(state, "kcm"),
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--allocate-node-cidrs=true",
        f"--cluster-cidr={','.join(POD_RANGES)}",
        "--node-cidr-mask-size-ipv4=24",
        "--node-cidr-mask-size-ipv6=64",
        f"--service-cluster-ip-range={','.join(SERVICE_RANGES)}",
        "--flex-volume-plugin-dir=/var/lib/kubelet/volumeplugins",
        "--leader-elect=false",
        "--kube-api-qps=300",
        "--kube-api-burst=600",
    ]


def scheduler(state: Path, programs: Path) -> list[str]:
    """Return the scheduler's command line."""
    return [f"{programs}/kube-scheduler", *_kubeconfigs(state, "sched"), "--leader-elect=false"]


def _kubeconfigs(state: Path, user: str) -> list[str]:
    path = f"{state}/etc/{user}.kubeconfig"
    flags = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return [f"--{flag}={path}" for flag in flags]


def kubelet(state: Path, programs: Path) -> list[str]:
    """Return the kubelet's command line."""
    return [
        f"{programs}/kubelet",
        f"--config={state}/etc/kubelet.yaml",
        f"--kubeconfig={state}/etc/kubelet.kubeconfig",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={','.join(NODE_ADDRESSES)}",
    ]


def kube_proxy(state: Path, programs: Path, *, iptables: bool) -> list[str]:
    """Return kube-proxy's command line.

    It needs nft, and sees the machine's programs where the node has none, as if out of an image.
    """
    command = [f"{programs}/kube-proxy", f"--config={state}/etc/proxy.yaml"]
    if iptables:
        return command
    uncover = f'umount -l /{USR} && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", uncover, "sh", *command]
