"""`install-cni`: the node agent, which so far installs the plugin and keeps it installed."""
