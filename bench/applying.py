"""Programming a namespace, warm: our own batch against `nft -f -` of the same rules.

What the node agent does per pod, in one process with everything loaded. What it keeps of a
configuration is let go before each: the rules are made and packed anew.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence

from istio_cni.capture import apply, native
from istio_cni.capture.settings import read_settings
from istio_cni.edge import netlink, netns
from istio_cni.edge.netfilter import Netfilter
from istio_cni.rules import nftables

from . import node
from .process import BenchFailed, run

OURS, WHOLE, NFT = "apply nf_tables", "apply nf_tables, routes, lock", "apply nft -f -"
SETTINGS = {
    "INBOUND_PORTS_INCLUDE": "*",
    "INBOUND_PORTS_EXCLUDE": "15020,15021,15090",
    "OUTBOUND_IPRANGES_INCLUDE": "*",
    "OUTBOUND_PORTS_EXCLUDE": "15020",
    "DUAL_STACK": True,
    "ENABLE_INBOUND_IPV6": True,
    "BACKEND": "nftables",
}
"""What the plugin makes of a dual-stack pod without annotations."""


class Applied:
    """The same rules put into three fresh namespaces, in three ways."""

    rows = (OURS, WHOLE, NFT)
    every = 1

    def __init__(self, place: node.Node) -> None:
        self._node = place
        self._config = read_settings(SETTINGS)
        self._nft = shutil.which("nft", path=node.PATH) or ""
        self._ways: Sequence[Callable[[], object]] = (self._batch, self._program, self._text)
        self._netns: list[str] = []
        self._turn = 0

    def prepare(self) -> None:
        """Make the namespaces; those of the round before go."""
        if self._netns:
            self._node.retire(self._netns)
        self._netns = self._node.new_pods(len(self.rows))

    def measure(self, *, prove: bool = False) -> Sequence[float]:
        """Program each, in an order that moves on; `prove` looks whether they hold the same."""
        self._turn += 1
        samples = dict.fromkeys(self.rows, 0.0)
        numbers = [(self._turn + step) % len(self.rows) for step in range(len(self.rows))]
        for number in numbers:
            samples[self.rows[number]] = self._timed(self._ways[number], self._netns[number])
        if prove and len({node.native_rules(path) for path in self._netns}) != 1:
            raise BenchFailed("our batch and nft do not make the same rules")
        return [samples[row] for row in self.rows]

    def _timed(self, way: Callable[[], object], path: str) -> float:
        descriptor = netns.open_netns(path)
        native.compile_rules.cache_clear()  # type: ignore[attr-defined] # as functools has it
        try:
            started = time.perf_counter()
            with netns.visiting(descriptor):
                spawned = way()
            return spawned if isinstance(spawned, float) else time.perf_counter() - started
        finally:
            os.close(descriptor)

    def _batch(self) -> None:
        with netlink.Ruleset() as kernel:
            kernel.commit(native.compile_rules(self._config).fresh)

    def _program(self) -> None:
        net, choice = Netfilter(deadline=time.monotonic() + 5), apply.Choice(apply.NFTABLES, "")
        apply.program(net, self._config, lambda _level, _text: None, choice)

    def _text(self) -> float:
        wanted = native.compile_rules(self._config)
        text = nftables.render_complete(wanted.tables, wanted.comment)
        outcome = run([self._nft, "-f", "-"], {"PATH": node.PATH}, text.encode())
        if outcome.status != 0:
            raise BenchFailed(f"nft: {outcome.stderr.decode(errors='replace').strip()}")
        return outcome.took_s
