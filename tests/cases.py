"""Capture configurations by name: what a person wrote, and what the pod said where that is open.

Unit tests hold the rules of each against a whole text in `unit/rules/expected`, namespace tests put
each into a kernel with both variants of iptables. Among them they meet every condition under which
the generator makes or leaves out a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from istio_cni.capture.detect import host_address, parse_resolv_conf
from istio_cni.capture.options import read_options
from istio_cni.capture.settings import Value, read_settings
from istio_cni.rules.config import CaptureConfig

V4, V6 = "10.9.0.2", "fd00:9::2"


class Case(NamedTuple):
    """Settings as `--config` takes them, or a command line and its environment.

    `addresses` and `resolv_conf` are what the pod has where a command line is to find it out.
    """

    settings: Mapping[str, Value] = {}
    arguments: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    addresses: tuple[str, ...] = (V4, V6)
    resolv_conf: str = ""

    @property
    def by_flags(self) -> bool:
        """Whether this is a command line."""
        return bool(self.arguments or self.environ)

    @property
    def config(self) -> CaptureConfig:
        """The configuration meant, complete."""
        if not self.by_flags:
            return read_settings(self.settings)
        config = read_options(self.arguments, self.environ).config
        _, ipv6 = host_address(self.addresses, dual_stack=config.dual_stack)
        if config.redirect_dns and not config.capture_all_dns:
            v4, v6 = parse_resolv_conf(self.resolv_conf)
            config = config._replace(dns_servers_v4=v4, dns_servers_v6=v6)
        return config._replace(ipv6=ipv6)


CNI: Mapping[str, Value] = {
    "INBOUND_PORTS_INCLUDE": "*",
    "INBOUND_PORTS_EXCLUDE": "15020,15021,15090",
    "OUTBOUND_IPRANGES_INCLUDE": "*",
    "OUTBOUND_PORTS_EXCLUDE": "15020",
}
"""What the plugin asks for when a pod's annotations say nothing."""
TPROXY: Mapping[str, Value] = {**CNI, "INBOUND_INTERCEPTION_MODE": "TPROXY"}
DUAL: Mapping[str, Value] = {"DUAL_STACK": True, "ENABLE_INBOUND_IPV6": True}
ALL_DNS: Mapping[str, Value] = {"REDIRECT_DNS": True, "CAPTURE_ALL_DNS": True}
RESOLV_CONF = """\
# nameserver 192.0.2.1
; nameserver 192.0.2.2
search example.com
nameserver 10.96.0.10
nameserver\t10.96.0.10
nameserver fe80::53%eth0
nameserver ::ffff:10.96.0.11
nameserver not-an-address
nameserver
nameserver FD00:9:0::53  trailing words
"""


def _flags(*arguments: str, **others: object) -> Case:
    return Case(arguments=arguments, **others)  # type: ignore[arg-type] # fields of Case


def _groups(count: int) -> str:
    return ",".join(str(3000 + number) for number in range(count))


CASES: Mapping[str, Case] = {
    # -- worked examples --
    "appendix-a": Case(
        {**CNI, **ALL_DNS, **DUAL, "INBOUND_PORTS_EXCLUDE": "3306,15020,15021,15090"}
    ),
    "appendix-b": _flags(
        *("-p", "15001", "-z", "15006", "-u", "1337,2000", "-g", "1337", "-m", "TPROXY"),
        *("-b", "8080", "-d", "15090,15021,15020", "-c", "net1"),
        *("-i", "127.0.0.0/8,10.96.0.0/12,fd00:10::/108", "-x", "192.168.0.0/16"),
        *("--drop-invalid", "--dual-stack"),
    ),
    "appendix-c": _flags(
        *("-u", "1337", "-g", "1337", "-m", "REDIRECT", "-b", "*", "-d", "15090"),
        *("-k", "tap0,tap1", "-q", "9000", "-i", "10.0.0.0/8,2001:db8::/32"),
        *("-x", "10.1.0.0/16,2001:db8:1::/48", "--redirect-dns", "--dual-stack"),
        environ={"ISTIO_OUTBOUND_OWNER_GROUPS": "java,202"},
        resolv_conf="nameserver 10.96.0.10\n",
    ),
    "appendix-d": _flags(
        *("-u", "1337", "-g", "1337", "-i", "*", "-o", "22", "-k", "eth1,eth2"),
        environ={
            "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE": "888,ftp",
            "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR": "127.0.0.0/8",
        },
        addresses=(V4,),
    ),
    # -- defaults and families --
    "program-defaults": Case(),
    "program-defaults-dual-stack": Case(DUAL),
    "cni-defaults": Case(CNI),
    "cni-defaults-dual-stack": Case({**CNI, **DUAL}),
    "ipv6-only-pod": _flags("-u", "1337", "-i", "*", "-b", "*", addresses=(V6,)),
    "ipv4-first-without-dual-stack": _flags(
        "-u", "1337", "-i", "10.0.0.0/8,fd00::/8", "-x", "fd00:1::/32", "-b", "*"
    ),
    "init-container": _flags(
        *("-p", "15001", "-z", "15006", "-u", "1337", "-m", "REDIRECT", "-i", "*", "-x", ""),
        *("-b", "*", "-d", "15090,15021,15020", "--log_output_level=default:info"),
        addresses=(V4,),
    ),
    "inbound-list-with-everything-left-out": Case(
        {
            **DUAL,
            **ALL_DNS,
            "INBOUND_PORTS_INCLUDE": "8080,9090",
            "OUTBOUND_IPRANGES_INCLUDE": "*",
            "OUTBOUND_IPRANGES_EXCLUDE": "10.96.0.1/32,fd00:10:96::1/128",
            "EXCLUDE_INTERFACES": "net1",
            "KUBE_VIRT_INTERFACES": "vmbr0",
            "OUTBOUND_OWNER_GROUPS_EXCLUDE": "2000",
            "DROP_INVALID": True,
        }
    ),
    # -- inbound --
    "inbound-none": Case({**CNI, "INBOUND_PORTS_INCLUDE": ""}),
    "inbound-list": Case({**CNI, **DUAL, "INBOUND_PORTS_INCLUDE": "8080,9090,8080"}),
    "inbound-port-ranges": Case({**CNI, "INBOUND_PORTS_INCLUDE": "10000-10100, 9090 ,7:8"}),
    "inbound-every-port-listed": Case({**CNI, "INBOUND_PORTS_INCLUDE": "0-65535"}),
    "inbound-port-ranges-excluded": Case(
        {**CNI, "INBOUND_PORTS_EXCLUDE": "8000-8100,0,65535-65535"}
    ),
    "inbound-nothing-excluded": Case({**CNI, "INBOUND_PORTS_EXCLUDE": ""}),
    # -- TPROXY --
    "tproxy": Case(TPROXY),
    "tproxy-dual-stack": Case({**TPROXY, **DUAL}),
    "tproxy-dual-stack-outbound-ranges": Case(
        {**TPROXY, **DUAL, "OUTBOUND_IPRANGES_INCLUDE": "10.0.0.0/8,fd00::/8"}
    ),
    "tproxy-inbound-list": Case({**TPROXY, "INBOUND_PORTS_INCLUDE": "8080,9000-9100"}),
    "tproxy-inbound-none": Case({**TPROXY, **DUAL, "INBOUND_PORTS_INCLUDE": ""}),
    "tproxy-own-numbers": Case(
        {
            **TPROXY,
            "INBOUND_TPROXY_MARK": "4294967295",
            "INBOUND_TPROXY_ROUTE_TABLE": "1000",
            "INBOUND_CAPTURE_PORT": "15106",
        }
    ),
    "tproxy-excluded-interfaces": Case({**TPROXY, "EXCLUDE_INTERFACES": "net1,net2"}),
    "tproxy-dns-several-ids": Case(
        {**TPROXY, **DUAL, **ALL_DNS, "PROXY_UID": "1337,2000", "PROXY_GID": "1337,3000"}
    ),
    # -- interfaces --
    "excluded-interfaces": Case({**CNI, **DUAL, "EXCLUDE_INTERFACES": "eth1, net-2.100"}),
    "interfaces-by-prefix": Case(
        {**CNI, "EXCLUDE_INTERFACES": "eth+,veth0@if3", "KUBE_VIRT_INTERFACES": "tap+"}
    ),
    "rerouted-interfaces": Case({**CNI, **DUAL, "KUBE_VIRT_INTERFACES": "vnet0,vnet1"}),
    "rerouted-interfaces-ranges": Case(
        {
            **CNI,
            **DUAL,
            "KUBE_VIRT_INTERFACES": "vnet0,vnet1",
            "EXCLUDE_INTERFACES": "net1",
            "OUTBOUND_IPRANGES_INCLUDE": "10.0.0.0/8,fd00::/8,192.168.0.0/16",
        }
    ),
    "rerouted-interfaces-without-outbound": Case(
        {**CNI, "KUBE_VIRT_INTERFACES": "vnet0", "OUTBOUND_IPRANGES_INCLUDE": ""}
    ),
    "drop-invalid": Case({**CNI, **DUAL, "DROP_INVALID": True}),
    # -- outbound --
    "outbound-ports-excluded": Case({**CNI, **DUAL, "OUTBOUND_PORTS_EXCLUDE": "22,8000-8100,25"}),
    "outbound-ports-included": Case(
        {**CNI, "OUTBOUND_IPRANGES_INCLUDE": "", "OUTBOUND_PORTS_INCLUDE": "443,9000-9100"}
    ),
    "outbound-ranges": Case(
        {
            **CNI,
            **DUAL,
            "OUTBOUND_IPRANGES_INCLUDE": "10.1.2.3/8,2001:DB8:0::/32,172.16.0.0/12,fd00::1/8",
            "OUTBOUND_IPRANGES_EXCLUDE": "2001:db8:1::/48,10.96.0.1/32,10.244.7.9/16",
        }
    ),
    "outbound-ranges-of-the-other-family": Case(
        {**CNI, "OUTBOUND_IPRANGES_INCLUDE": "fd00::/8", "OUTBOUND_IPRANGES_EXCLUDE": "fd01::/16"}
    ),
    "outbound-everything-as-ranges": Case(
        {**CNI, **DUAL, "OUTBOUND_IPRANGES_INCLUDE": "0.0.0.0/0,::/0"}
    ),
    "outbound-loopback-of-the-other-family": Case(
        {**CNI, **DUAL, "OUTBOUND_IPRANGES_INCLUDE": "10.0.0.0/8,::1/128"}
    ),
    "outbound-loopback-mapped": Case(
        {**CNI, **DUAL, "OUTBOUND_IPRANGES_INCLUDE": "::ffff:127.0.0.0/104"}
    ),
    "wider-loopback": Case({**CNI, **DUAL, "HOST_IPV4_LOOPBACK_CIDR": "127.0.0.0/8"}),
    "own-ports": Case(
        {
            **CNI,
            "PROXY_PORT": "16001",
            "INBOUND_CAPTURE_PORT": "16006",
            "INBOUND_TUNNEL_PORT": "16008",
        }
    ),
    # -- who sends --
    "several-ids": Case({**CNI, **DUAL, "PROXY_UID": "1337,2000,1000-1999", "PROXY_GID": "0"}),
    "gid-follows-uid": Case({**CNI, "PROXY_UID": "1000,1001"}),
    "ids-by-name": Case({**CNI, "PROXY_UID": "envoy", "PROXY_GID": "mesh"}),
    "groups-included": Case({**CNI, **DUAL, "OUTBOUND_OWNER_GROUPS_INCLUDE": "java,202"}),
    "groups-included-at-the-limit": Case({**CNI, "OUTBOUND_OWNER_GROUPS_INCLUDE": _groups(49)}),
    "groups-excluded": Case({**CNI, "OUTBOUND_OWNER_GROUPS_EXCLUDE": f"ftp,{_groups(70)}"}),
    "groups-included-and-excluded": Case(
        {
            **CNI,
            "OUTBOUND_OWNER_GROUPS_INCLUDE": "202,1000-1999",
            "OUTBOUND_OWNER_GROUPS_EXCLUDE": "203",
        }
    ),
    "no-group": Case({**CNI, **ALL_DNS, "OUTBOUND_OWNER_GROUPS_INCLUDE": ""}),
    # -- DNS --
    "dns-all": Case({**CNI, **ALL_DNS}),
    "dns-all-with-loopback-range": Case(
        {**CNI, **DUAL, **ALL_DNS, "OUTBOUND_IPRANGES_INCLUDE": "127.0.0.0/8"}
    ),
    "dns-all-several-ids": Case({**CNI, **ALL_DNS, "PROXY_UID": "1337,2000"}),
    "dns-not-redirected": Case({**CNI, "CAPTURE_ALL_DNS": True, "DNS_SERVERS_V4": ["10.96.0.10"]}),
    "dns-without-servers": Case({**CNI, **DUAL, "REDIRECT_DNS": True}),
    "dns-servers-v4": Case(
        {**CNI, "REDIRECT_DNS": True, "DNS_SERVERS_V4": ["10.96.0.10", "10.96.0.11"]}
    ),
    "dns-servers-v6": Case(
        {**CNI, **DUAL, "REDIRECT_DNS": True, "DNS_SERVERS_V6": ["fd00::53", "fd00::54"]}
    ),
    "dns-servers-of-both": Case(
        {
            **CNI,
            **DUAL,
            "REDIRECT_DNS": True,
            "DNS_SERVERS_V4": ["10.96.0.10"],
            "DNS_SERVERS_V6": ["fd00::53"],
        }
    ),
    "dns-servers-v6-without-ipv6": Case(
        {**CNI, "REDIRECT_DNS": True, "DNS_SERVERS_V6": ["fd00::53"]}
    ),
    "dns-resolv-conf": _flags(
        *("-u", "1337", "-i", "*", "-b", "*", "--redirect-dns", "--dual-stack"),
        resolv_conf=RESOLV_CONF,
    ),
    "dns-resolv-conf-v6-only": _flags(
        *("-u", "1337", "-i", "*", "-b", "*"),
        environ={"ISTIO_META_DNS_CAPTURE": "true", "ISTIO_DUAL_STACK": "1"},
        resolv_conf="nameserver fd00::53\n",
    ),
    # -- all at once --
    "everything": Case(
        {
            **TPROXY,
            **DUAL,
            "INBOUND_PORTS_INCLUDE": "*",
            "INBOUND_PORTS_EXCLUDE": "15020,8000-8100",
            "OUTBOUND_IPRANGES_INCLUDE": "10.0.0.0/8,fd00::/8",
            "OUTBOUND_IPRANGES_EXCLUDE": "10.1.0.0/16,fd00:1::/32",
            "OUTBOUND_PORTS_INCLUDE": "443",
            "OUTBOUND_PORTS_EXCLUDE": "22",
            "OUTBOUND_OWNER_GROUPS_EXCLUDE": "202",
            "PROXY_UID": "1337,2000",
            "PROXY_GID": "1337,2000",
            "EXCLUDE_INTERFACES": "net1",
            "KUBE_VIRT_INTERFACES": "vnet0",
            "DROP_INVALID": True,
            "REDIRECT_DNS": True,
            "DNS_SERVERS_V4": ["10.96.0.10"],
            "DNS_SERVERS_V6": ["fd00::53"],
        }
    ),
}
