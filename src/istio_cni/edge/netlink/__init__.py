"""The kernel over netlink: addresses, policy rules, routes, tables of packet filters.

Starting `ip` or `nft` costs milliseconds a call and needs them on the node; importing pyroute2
costs more than all the rest of a pod's ADD. The few messages needed are small, so they are packed
by hand, and pyroute2 is what the tests compare with.

A netlink socket belongs for ever to the network namespace of the thread that opened it: open it
inside, then use it from anywhere. The functions here open one of their own for the moment.
"""

from istio_cni.edge.netlink.messages import namespace_cookie, wait_for_packets
from istio_cni.edge.netlink.route import (
    LOOPBACK_INDEX,
    WHOLE_MARK,
    Address,
    LocalRoute,
    PolicyRule,
    Route,
)
from istio_cni.edge.netlink.ruleset import Ruleset, Unsettled
from istio_cni.edge.netlink.tables import (
    IPTABLES_TABLES,
    Listed,
    Nftables,
    NoNftables,
    legacy_tables,
    nft_tables,
    sweep_empty_tables,
)

__all__ = [
    "IPTABLES_TABLES",
    "LOOPBACK_INDEX",
    "WHOLE_MARK",
    "Address",
    "Listed",
    "LocalRoute",
    "Nftables",
    "NoNftables",
    "PolicyRule",
    "Route",
    "Ruleset",
    "Unsettled",
    "legacy_tables",
    "namespace_cookie",
    "nft_tables",
    "sweep_empty_tables",
    "wait_for_packets",
]
