"""Names and addresses of the node and its networks.

They exist inside the node's own network namespace only, so two runs do not meet.
"""

from __future__ import annotations

NODE_NAME = "node1"
NODE_ADDRESSES = ("198.18.77.2", "fd00:77::2")
NODE_LENGTHS = ("30", "64")
GATEWAYS = ("198.18.77.1", "fd00:77::1")
OUTSIDE_ADDRESSES = ("198.18.79.1", "fd00:79::1")  # of the node, too; stand for the world outside
POD_RANGES = ("10.244.0.0/16", "fd00:10:244::/48")
NODE_POD_RANGES = ("10.244.0.0/24", "fd00:10:244::/64")
SERVICE_RANGES = ("10.96.0.0/16", "fd00:10:96::/112")
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
API_URL = f"https://{NODE_ADDRESSES[0]}:6443"
API_ADDRESSES = ("127.0.0.1", *NODE_ADDRESSES, API_SERVICE, "fd00:10:96::1")
