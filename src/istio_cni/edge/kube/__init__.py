"""The API server, as far as one ADD needs it: a single GET of a single pod.

The official client takes 270 ms to import, which every captured pod would pay on a node without
agent. A GET needs a kubeconfig (`kubeconfig`), one bounded HTTPS exchange (`transport`) and a rule
for what each answer means (`lookup`); the standard library has the rest. Nothing of that is
imported before the first call, since most calls of the plugin are decided without asking anyone.
"""

from __future__ import annotations

from istio_cni.edge.kube.kubeconfig import Kubeconfig, load_kubeconfig
from istio_cni.edge.kube.lookup import fetch_pod

__all__ = ["Kubeconfig", "fetch_pod", "load_kubeconfig"]
