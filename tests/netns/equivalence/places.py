"""Where connections go to and come from, and what is said of where they ended.

All of it is fixed: a configuration drawn by seed and number means the same only if the addresses
and ports that it captures or leaves out are the same. Each network has an address of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from netns.traffic import Arrival

Settings: TypeAlias = Mapping[str, Any]
"""A configuration in the terms of `istio-iptables --config`."""
Ending: TypeAlias = Arrival | str
"""Who took a connection, and what of it they saw; or in words how it failed."""
Endings: TypeAlias = tuple[Ending, Ending]
"""Of the same connection, first with iptables, then with nftables."""

OWN_OUTBOUND, OWN_INBOUND, NOBODY = 16001, 16006, 16106  # other listeners, and none
SECOND = {4: "10.98.0.1", 6: "fd98::1"}
POD_ON_SECOND = {4: "10.98.0.2", 6: "fd98::2"}
GUEST = {4: "10.97.0.1", 6: "fd97::1"}
POD_ON_GUEST = {4: "10.97.0.2", 6: "fd97::2"}
SERVICE = {4: "10.96.0.10", 6: "fd00:96::10"}
PUBLIC = {4: "192.0.2.7", 6: "2001:db8::7"}
STRANGER = {4: "198.51.100.9", 6: "2001:db8:9::9"}  # sends what belongs to no connection
OTHER_LOOPBACK = "127.0.0.5"
GROUP, ANOTHER = 1, 2000
