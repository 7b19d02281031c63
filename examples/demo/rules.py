"""The rules of a namespace, as the iptables programs themselves print them."""

from __future__ import annotations

import shutil
from typing import NamedTuple

from .node import Netns
from .process import DemoFailed, run, succeed

PROGRAM = {4: "iptables", 6: "ip6tables"}
VARIANTS = ("", "-nft", "-legacy")  # the node's default first
OURS = "ISTIO_"


class Rules(NamedTuple):
    """Our rules of one family: the program that holds them, `table: rule` lines."""

    program: str
    lines: tuple[str, ...]


def read(netns: Netns, family: int) -> Rules:
    """Return our rules of one family, from the first iptables variant that has any."""
    for variant in VARIANTS:
        program = PROGRAM[family] + variant
        if not shutil.which(f"{program}-save"):
            continue
        done = run([f"{program}-save"], netns=netns.descriptor)
        if done.status != 0:
            raise DemoFailed(f"{program}-save: {done.stderr.strip()}")
        lines = _ours(done.stdout)
        if lines:
            return Rules(program, lines)
    return Rules(PROGRAM[family], ())


def _ours(saved: str) -> tuple[str, ...]:
    """Keep the rules that belong to our chains or lead to them."""
    table, found = "", []
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith("-A") and OURS in line:
            found.append(f"{table}: {line}")
    return tuple(found)


def delete(netns: Netns, program: str, table: str, rule: str) -> None:
    """Delete one rule, as somebody with too many rights might."""
    succeed([program, "-t", table, "-D", *rule.split()], netns=netns.descriptor)
