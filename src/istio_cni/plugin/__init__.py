"""The CNI plugin `istio-cni`: look the pod up, decide, program, answer."""
