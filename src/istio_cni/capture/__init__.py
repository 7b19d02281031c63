"""The program `istio-iptables`, and the applying of rules that the plugin shares with it."""
