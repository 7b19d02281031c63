"""How a call gets to the plugin, and what a runtime passes with it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from . import node, objects
from .agent import Agent
from .process import BenchFailed, run


class Way:
    """A program to start; with `agent`, it is the launcher that asks it."""

    def __init__(self, program: str, run_dir: str, agent: Agent | None = None) -> None:
        self.program = program
        self.run_dir = run_dir
        self._agent = agent

    def call(
        self, row: str, env: Mapping[str, str], stdin: bytes, *, silent: bool, prove: bool = False
    ) -> float:
        """Call once; return the seconds. Raises BenchFailed unless it succeeds.

        With `prove`, also unless it was the agent that did it.
        """
        outcome = run([self.program], env, stdin)
        if outcome.status != 0 or bool(outcome.stdout) == silent:
            said = (outcome.stdout + outcome.stderr).decode(errors="replace").strip()
            raise BenchFailed(f"{row}: exit status {outcome.status}: {said or 'no answer'}")
        self.count(1, prove=prove)
        return outcome.took_s

    def count(self, calls: int, *, prove: bool) -> None:
        """Note that calls went this way; with `prove`, see whether the agent has done them."""
        if self._agent is not None:
            self._agent.calls += calls
            if prove:
                self._agent.expect()


def environment(verb: str, netns: str, pod: objects.Name) -> dict[str, str]:
    """Make a call's environment, as containerd does."""
    return {
        "PATH": node.PATH,
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": netns.rpartition("/")[2],
        "CNI_NETNS": netns,
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": pod.arguments,
        "CNI_PATH": "/opt/cni/bin",
    }


def configuration(run_dir: str, number: int | None = 0, **keys: object) -> bytes:
    """Make the network configuration, as the last plugin of a chain gets it.

    With the annotations of the pod of this number handed over, unless it is None.
    """
    interface = {"name": "eth0", "mac": "02:00:00:00:00:05", "sandbox": "/var/run/netns/cni"}
    pod = {} if number is None else objects.handed_over(objects.pod(number))
    document = {
        "cniVersion": "1.0.0",
        "name": "k8s-pod-network",
        "type": "istio-cni",
        "plugin_log_level": "info",
        "cni_agent_run_dir": run_dir,
        "ambient_enabled": False,
        "exclude_namespaces": ["kube-system"],
        "pod_namespace": objects.AGENT_NAMESPACE,
        "native_nftables": False,
        "enable_ambient_detection_retry": False,
        "prevResult": {
            "cniVersion": "1.0.0",
            "interfaces": [interface],
            "ips": [{"address": address, "interface": 0} for address in node.ADDRESSES],
        },
        **({"runtimeConfig": {"io.kubernetes.cri.pod-annotations": pod}} if pod else {}),
        **keys,
    }
    return json.dumps(document).encode()
