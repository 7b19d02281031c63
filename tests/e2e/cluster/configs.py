"""Configuration files of the node's components, and the first process of its namespaces.

Each setting that differs from a default is there because the default would reach out of the
namespaces, or would need what a test machine has not: cgroup v1 hierarchies that are the machine's,
no AppArmor, kernel settings that only the whole machine has.
"""

from __future__ import annotations

import json
from pathlib import Path

from .addresses import (
    DNS_SERVICE,
    GATEWAYS,
    NODE_ADDRESSES,
    NODE_LENGTHS,
    NODE_NAME,
    NODE_POD_RANGES,
    OUTSIDE_ADDRESSES,
    POD_RANGES,
)

PAUSE_IMAGE = "e2e/pause:1"
STATIC_PODS = "/etc/kubernetes/manifests"
CONFLIST = "/etc/cni/net.d/10-e2e.conflist"
COVERED = ("etc", "opt", "var")  # what the node writes there, the machine does not see
USR = "usr"  # covered, too, on a node that is to lack some of them
PACKET_FILTERS = ("*tables*", "nft")  # iptables-nft-restore, xtables-legacy-multi, ebtables, …
SYSCTLS = {  # what the kubelet would set, for the whole machine
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def containerd(*, modern: bool) -> str:
    """Return containerd's configuration, in the version of its own configuration's format."""
    if modern:
        return (
            "version = 3\n"
            "[plugins.'io.containerd.cri.v1.images'.pinned_images]\n"
            f'  sandbox = "docker.io/{PAUSE_IMAGE}"\n'
            "[plugins.'io.containerd.cri.v1.runtime']\n"
            "  restrict_oom_score_adj = true\n"
            "  disable_apparmor = true\n"
        )
    return (
        "version = 2\n"
        '[plugins."io.containerd.grpc.v1.cri"]\n'
        f'  sandbox_image = "docker.io/{PAUSE_IMAGE}"\n'
        "  restrict_oom_score_adj = true\n"
        "  disable_apparmor = true\n"
    )


def kubelet(state: Path, cgroup: str) -> str:
    """Return the kubelet's configuration, which it would misread if it began with a brace."""
    eviction = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available",
                "imagefs.inodesFree")  # fmt: skip
    pki = state / "pki"
    return "# configuration\n" + json.dumps(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cgroup}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki / "kubelet.crt"),
            "tlsPrivateKeyFile": str(pki / "kubelet.key"),
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "failSwapOn": False,
            "protectKernelDefaults": True,
            "volumePluginDir": "/var/lib/kubelet/volumeplugins",
            "enforceNodeAllocatable": [],
            "resolvConf": "",
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "4s",
            "staticPodPath": STATIC_PODS,
            "fileCheckFrequency": "1s",
            "syncFrequency": "5s",
            "evictionHard": dict.fromkeys(eviction, "0%"),
        }
    )


def kube_proxy(state: Path) -> str:
    """Return kube-proxy's configuration."""
    return "# configuration\n" + json.dumps(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": str(state / "etc" / "proxy.kubeconfig")},
            "clusterCIDR": ",".join(POD_RANGES),
            "hostnameOverride": NODE_NAME,
            "nodeIPOverride": list(NODE_ADDRESSES),
            "conntrack": {"maxPerCore": 0, "min": 0},
        }
    )


def conflist(*, iptables: bool, modern: bool) -> str:
    """Return the configuration of the network that pods get without us.

    From CNI 1.1 on the runtime asks for STATUS, with which a plugin can make the node NotReady.
    """
    version = "1.1.0" if modern else "1.0.0"
    plugins = network(iptables=iptables)
    return json.dumps({"cniVersion": version, "name": "e2e", "plugins": plugins})


def network(*, iptables: bool) -> list[dict[str, object]]:
    """Return the plugins of a pod's network: a bridge, dual stack.

    Masquerading and ports of the host need iptables, and are left out where there is none.
    """
    ipam = {
        "type": "host-local",
        "dataDir": "/run/cni-ipam",
        "ranges": [[{"subnet": subnet}] for subnet in NODE_POD_RANGES],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": iptables,
        "hairpinMode": True,
        "ipam": ipam,
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True}
    return [bridge, portmap] if iptables else [bridge]


def first_process(state: Path, plugins: Path, *, iptables: bool) -> str:
    """Return the shell script that furnishes the namespaces, then reaps orphans as their pid 1.

    `plugins` is where the standard CNI plugins are. Without `iptables` no program of a packet
    filter is on the node, nft included.
    """
    ready, overlays = state / "init.ready", state / "ov"
    covered = COVERED if iptables else (*COVERED, USR)
    removed = " ".join(
        f"/{USR}/{directory}/{name}"
        for directory in ("bin", "sbin", "local/bin", "local/sbin")
        for name in PACKET_FILTERS
    )
    sysctls = "".join(
        f"f=/run/sysctl.{name.replace('/', '_')}; echo {value} > $f\n"
        f"mount --bind $f /proc/sys/{name}\n"
        for name, value in SYSCTLS.items()
    )
    near = "".join(
        f"ip addr add {address}/{length} dev eth0 {nodad}\nip addr add {outside} dev lo {nodad}\n"
        f"ip {family} route add default via {gateway} dev eth0\n"
        for address, length, outside, gateway, nodad, family in zip(
            NODE_ADDRESSES,
            NODE_LENGTHS,
            OUTSIDE_ADDRESSES,
            GATEWAYS,
            ("", "nodad"),
            ("-4", "-6"),
            strict=True,
        )
    )
    return f"""set -e
mount --make-rprivate /
mkdir -p {state}/cgsave {state}/containerd {state}/kubelet
mount --rbind /sys/fs/cgroup {state}/cgsave
umount -R -l /sys  # a sysfs of this network namespace, with the machine's cgroups
mount -t sysfs sysfs /sys
mount --rbind {state}/cgsave /sys/fs/cgroup
umount -R -l {state}/cgsave
for d in {" ".join(covered)}; do
  mkdir -p {overlays}/$d/u {overlays}/$d/w
  mount -t overlay overlay -o lowerdir=/$d,upperdir={overlays}/$d/u,workdir={overlays}/$d/w /$d
done
{"" if iptables else f"rm -f {removed}"}
umount -R -l /run 2>/dev/null || true
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/netns /run/lock /etc/cni/net.d /opt/cni/bin /var/lib/containerd /var/lib/kubelet
mkdir -p /var/log/pods {STATIC_PODS}
rm -rf /etc/cni/net.d/* /opt/cni/bin/*
mkdir /run/proc  # whole, without which the kernel lets no other user namespace have one
mount -t proc proc /run/proc
{sysctls}mount --bind {state}/containerd /var/lib/containerd
mount --bind {state}/kubelet /var/lib/kubelet
mount --make-rshared /
hostname {NODE_NAME}
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0
ip link set lo up
ip link add eth0 type veth peer name uplink
ip link set uplink up
ip link set eth0 up
{near}cp -a {plugins}/. /opt/cni/bin/
touch {ready}
while :; do sleep 86400 & wait; done
"""
