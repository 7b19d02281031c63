"""Traffic capture for a service mesh: `istio-cni`, a CNI plugin, and `istio-iptables`."""
