"""The outside, one thing a module: namespaces, iptables, netlink, the API server, files."""
