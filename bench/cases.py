"""What is measured: each case makes one sample of each of its rows a round.

A captured pod is one case of three rows, ADD, CHECK and DEL of the same attachment, in a namespace
that is new each time. Every call must have answered as it should, or its time would mean nothing;
that it has also done what it should is looked at before the first round that counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from . import applying, node
from .figures import FLOOR
from .process import BenchFailed, run

NAME, NAMESPACE = "web", "shop"  # the pod of node.POD
VERSION, EXCLUDED, OUTSIDE = "VERSION", "ADD excluded namespace", "ADD no sidecar"
NATIVE = "nftables"
VARIANTS = ("nft", "legacy")
BUDGETS = {
    VERSION: 1.3,
    EXCLUDED: 2.0,
    OUTSIDE: 2.0,
    **{f"ADD captured {variant}": 8.0 for variant in VARIANTS},
    f"ADD captured {NATIVE}": 6.0,
    applying.OURS: 0.4,
}
"""The ratio to its base that a row may have; those that are not here are for information."""
BASES = {applying.OURS: applying.NFT, applying.WHOLE: applying.NFT}
"""What a row is compared with, where that is not the floor."""

JSON = Mapping[str, object]


class Case(Protocol):
    """One thing to measure, round after round."""

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of its rows."""

    def prepare(self) -> None:
        """Make ready for a round, untimed."""

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Return a sample for each row, in seconds; with `prove`, see that work was done."""


class Program:
    """A program that is started with nothing and does nothing."""

    def __init__(self, row: str, path: str) -> None:
        self.rows = (row,)
        self._path = path

    def prepare(self) -> None:
        """Need nothing."""

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Start it once."""
        outcome = run([self._path], {})
        if prove and (outcome.status, outcome.stdout) != (0, b""):
            raise BenchFailed(f"{self.rows[0]} has exit status {outcome.status}")
        return (outcome.took_s,)


class Call:
    """A call of the plugin that leaves nothing behind."""

    def __init__(self, row: str, plugin: str, env: Mapping[str, str], config: JSON | None) -> None:
        self.rows = (row,)
        self._plugin = plugin
        self._env = env
        self._stdin = b"" if config is None else json.dumps(config).encode()

    def prepare(self) -> None:
        """Need nothing."""

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Call once; the answer must be a document without error."""
        return (call(self.rows[0], self._plugin, self._env, self._stdin, silent=False),)


class Captured:
    """ADD, CHECK and DEL of a captured pod: a variant of iptables, or nf_tables directly."""

    def __init__(self, variant: str, plugin: str, place: node.Node) -> None:
        self.rows = tuple(f"{verb} captured {variant}" for verb in ("ADD", "CHECK", "DEL"))
        self._variant = variant
        self._plugin = plugin
        self._node = place
        self._netns = ""
        how = {"backend": NATIVE} if variant == NATIVE else {"iptables_variant": variant}
        config = configuration(place.run_dir, **how)
        self._stdin = json.dumps(config).encode()

    def prepare(self) -> None:
        """Make the pod's namespace."""
        self._netns = self._node.new_pod()

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Call the three verbs one after the other."""
        add, check, delete = self.rows
        took = [self._call("ADD", add), self._call("CHECK", check)]
        if prove and not self._captures():
            raise BenchFailed(f"{add}: succeeds and does not capture both families")
        took.append(self._call("DEL", delete))
        if prove and "istio" in self._rules().lower():
            raise BenchFailed(f"{delete}: succeeds and leaves rules behind")
        return took

    def _captures(self) -> bool:
        rules = self._rules()
        if self._variant == NATIVE:
            return "counter jump istio-output" in rules and "ip6 daddr" in rules
        return rules.count("-A OUTPUT -j ISTIO_OUTPUT") >= 2

    def _rules(self) -> str:
        if self._variant == NATIVE:
            return node.native_rules(self._netns)
        return node.rules(self._netns, self._variant)

    def _call(self, verb: str, row: str) -> float:
        env = environment(verb, self._netns)
        return call(row, self._plugin, env, self._stdin, silent=verb != "ADD")


def call(row: str, plugin: str, env: Mapping[str, str], stdin: bytes, *, silent: bool) -> float:
    """Call the plugin once; return the seconds. Raises BenchFailed unless it succeeds."""
    outcome = run([plugin], env, stdin)
    if outcome.status != 0 or bool(outcome.stdout) == silent:
        said = (outcome.stdout + outcome.stderr).decode(errors="replace").strip()
        raise BenchFailed(f"{row}: exit status {outcome.status}: {said or 'no answer'}")
    return outcome.took_s


def cases(
    plugin: str, floor: str, static: str | None, variants: Sequence[str], place: node.Node
) -> list[Case]:
    """Return everything that can be measured here, the floor first."""
    excluded = {**environment("ADD", "/nonexistent"), "CNI_ARGS": arguments("kube-system")}
    handed_over = {
        "io.kubernetes.cri.pod-annotations": {"kubernetes.io/config.source": "api", "app": "web"}
    }
    outside = configuration(place.run_dir, runtimeConfig=handed_over)
    return [
        Program(FLOOR, floor),
        *([Program("static", static)] if static else []),
        Call(VERSION, plugin, {"CNI_COMMAND": "VERSION"}, None),
        Call(EXCLUDED, plugin, excluded, configuration(place.run_dir)),
        Call(OUTSIDE, plugin, environment("ADD", "/nonexistent"), outside),
        *(Captured(variant, plugin, place) for variant in variants),
        *([applying.Applied(place)] if NATIVE in variants else []),
    ]


def environment(verb: str, netns: str) -> dict[str, str]:
    """Make a call's environment, as containerd does."""
    return {
        "PATH": node.PATH,
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": netns.rpartition("/")[2],
        "CNI_NETNS": netns,
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": arguments(NAMESPACE),
        "CNI_PATH": "/opt/cni/bin",
    }


def arguments(namespace: str) -> str:
    """Make CNI_ARGS for the pod's name in a namespace."""
    return f"IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={NAME}"


def configuration(run_dir: str, **keys: object) -> dict[str, object]:
    """Make the network configuration, as the last plugin of a chain gets it."""
    interface = {"name": "eth0", "mac": "02:00:00:00:00:05", "sandbox": "/var/run/netns/cni"}
    return {
        "cniVersion": "1.0.0",
        "name": "k8s-pod-network",
        "type": "istio-cni",
        "cni_agent_run_dir": run_dir,
        "exclude_namespaces": ["kube-system"],
        "pod_namespace": "istio-system",
        "prevResult": {
            "cniVersion": "1.0.0",
            "interfaces": [interface],
            "ips": [{"address": address, "interface": 0} for address in node.ADDRESSES],
        },
        **keys,
    }
