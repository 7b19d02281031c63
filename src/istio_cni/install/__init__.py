"""What `install-cni` puts on the node: the bundle, the kubeconfig, the entry in the conflist."""
