"""Run the product's capture inside namespaces, with iptables programs that can be made to fail.

`program` and `clean_up` do what plugin and command line do, through the same child process. What a
namespace holds afterwards is read with the real programs. A wrapper is a shell script in a
directory that stands first on the search path; it calls the real program, or does not.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from istio_cni.capture import apply  # all of it, before a test changes its root
from istio_cni.capture.session import Log
from istio_cni.capture.settings import read_settings
from istio_cni.edge import netns as namespaces
from istio_cni.edge.netfilter import SEARCH_PATH, Netfilter
from istio_cni.rules.config import CaptureConfig
from namespaces import inside

CLONE_NEWNS = 0x00020000
CLI = Path(sys.executable).with_name("istio-iptables")
VARIANTS = ("nft", "legacy")
TIME_S = 20.0
DEFAULTS = {
    "INBOUND_PORTS_INCLUDE": "*",
    "INBOUND_PORTS_EXCLUDE": "15020,15021,15090",
    "OUTBOUND_IPRANGES_INCLUDE": "*",
    "OUTBOUND_PORTS_EXCLUDE": "15020",
    "ENABLE_INBOUND_IPV6": True,
}
"""What the plugin makes of a pod without annotations, in the terms of `--config`."""


def config(variant: str = "", **settings: object) -> CaptureConfig:
    """Return the defaults of a captured pod with some settings changed."""
    values = {**DEFAULTS, "FORCE_IPTABLES_BINARY": variant, **settings}
    return read_settings(values, lambda setting: setting.key)


TPROXY: dict[str, object] = {"INBOUND_INTERCEPTION_MODE": "TPROXY"}
ALL_DNS: dict[str, object] = {"REDIRECT_DNS": True, "CAPTURE_ALL_DNS": True}


class Outcome(NamedTuple):
    """What a run reported, and what it logged at which level."""

    variants: dict[str, str]
    changed: list[str]
    backend: str
    reason: str
    log: list[tuple[str, str]]

    @property
    def warnings(self) -> list[str]:
        """The warnings it logged."""
        return [text for level, text in self.log if level == "warn"]


def program(
    path: str, wanted: CaptureConfig, *, existing: str = apply.REPLACE, **how: Any
) -> Outcome:
    """Program the namespace at `path` as the plugin does; raise what the product raises."""

    def work(net: Netfilter, log: Log) -> apply.Report:
        choice = apply.choose(net, wanted)
        return apply.program(net, wanted, log, choice, existing=existing)

    return run(path, work, **how)


def clean_up(path: str, **how: Any) -> Outcome:
    """Remove everything of ours from the namespace at `path`."""
    return run(path, apply.clean_up, **how)


def check(
    path: str, wanted: CaptureConfig, variants: dict[str, str], *, only: object = SEARCH_PATH
) -> str:
    """Return the first difference that CHECK would name in the namespace at `path`."""
    native = wanted.backend == apply.NFTABLES
    backend = apply.NFTABLES if native else apply.IPTABLES

    def work(inside: namespaces.Inside) -> object:
        net = Netfilter(deadline=time.monotonic() + TIME_S, search_path=str(only))
        return apply.check(net, wanted, backend, variants)

    return str(_enter(path, work, [], TIME_S + 2, True))


def run(
    path: str,
    action: Callable[[Netfilter, Log], apply.Report],
    *,
    wrappers: object = "",
    only: object = "",
    seconds: float = TIME_S,
    rollback_s: float = 4.0,
    cni_mode: bool = True,
    sandbox: bool = True,
    lock_wait_s: int = 30,
) -> Outcome:
    """Do something with iptables in the namespace at `path`.

    `wrappers` is a directory in front of the search path, `only` one instead of it.
    """
    search_path = str(only) if only else f"{wrappers}:{SEARCH_PATH}"
    limit = time.monotonic() + seconds

    def work(inside: namespaces.Inside) -> object:
        net = Netfilter(
            deadline=limit,
            rollback_deadline=limit + rollback_s,
            search_path=search_path,
            lock_file=path if cni_mode else "",
            lock_wait_s=lock_wait_s,
            shadow_lock=inside.shadow_lock,
        )
        return action(net, inside.log)._asdict()

    log: list[tuple[str, str]] = []
    report = _enter(path, work, log, seconds + rollback_s + 0.5, sandbox)
    assert isinstance(report, dict)
    return Outcome(**report, log=log)


def _enter(
    path: str,
    work: Callable[[namespaces.Inside], object],
    log: list[tuple[str, str]],
    seconds: float,
    sandbox: bool,
) -> object:
    netns = namespaces.open_netns(path)
    try:
        return namespaces.run_inside(
            work,
            netns,
            deadline=time.monotonic() + seconds,
            log=lambda level, text: log.append((level, text)),
            sandbox=sandbox,
        )
    finally:
        os.close(netns)


# -- what is there -----------------------------------------------------------------------------

_READ = """
for program in iptables ip6tables; do
    echo "== $program nft"; $program-nft-save
    case $program in iptables) names=ip_tables_names;; *) names=ip6_tables_names;; esac
    if [ -n "$(cat /proc/net/$names)" ]; then echo "== $program legacy"; $program-legacy-save; fi
done
echo "== rules"; ip rule; ip -6 rule
echo "== routes"; for family in -4 -6; do ip $family route show table 133 2> /dev/null; done
echo "== lo"; ip -o address show dev lo
"""


def state(path: str) -> str:
    """Return all that capture may change in a namespace, in an order of its own.

    Counters and comments are left out, and empty tables of iptables-legacy: they come into being by
    mere questions and stay for good.
    """
    parts = inside(path, ["sh", "-c", f"exec 2>&1; {_READ}"]).split("== ")[1:]
    return "".join(filter(None, map(_in_order, parts)))


def _in_order(part: str) -> str:
    title, *lines = [line for line in part.splitlines() if line and line[0] != "#"]
    tables: dict[str, list[str]] = {}
    table = ""
    for line in lines:
        if line.startswith("*"):
            table = line
        tables.setdefault(table, [])
        if line.startswith(":"):
            tables[table].append(line.split(" [")[0])
        elif line not in ("COMMIT", table):
            tables[table].append(line)
    for name, held in tables.items():
        if name:
            held.sort(
                key=lambda line: (line[:1] == "-", line.split()[:2] if line[0] == "-" else line)
            )
    if "legacy" in title:
        accept = [name for name in tables if all(line[-7:] == " ACCEPT" for line in tables[name])]
        tables = {name: held for name, held in tables.items() if name not in accept}
        if not tables:
            return ""
    shown = [f"== {title}", *(line for name in sorted(tables) for line in (name, *tables[name]))]
    return "\n".join([*shown, ""])


def rules(path: str) -> str:
    """Return the part of `state` that the iptables programs print."""
    return state(path).partition("== rules")[0]


def holders(path: str) -> dict[str, str]:
    """Return in which variant our chains are, by program; two variants would be "nft+legacy"."""
    found: dict[str, str] = {}
    for part in rules(path).split("== ")[1:]:
        title, _, text = part.partition("\n")
        if "ISTIO_" in text:
            name, variant = title.split()
            found[name] = f"{found[name]}+{variant}" if name in found else variant
    return found


def restore(path: str, program: str, text: str) -> None:
    """Load restore text with a real program: what was there before the product came."""
    inside(path, [f"{program}-restore", "--noflush"], stdin=text)


# -- a node of its own -------------------------------------------------------------------------


def with_binds(binds: Mapping[str, object]) -> list[str]:
    """Return a command that runs another one with files put over those of this machine.

    `binds` says what lies over which path; only the command sees it.
    """
    mounts = [f"mount --bind {source} {target}" for target, source in binds.items()]
    script = " && ".join([*mounts, 'exec "$@"'])
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]


def bind_here(binds: Mapping[str, object]) -> None:
    """Do the same for the calling process; for children only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.check_call(["mount", "--make-rprivate", "/"])
    for target, source in binds.items():
        subprocess.check_call(["mount", "--bind", str(source), target])


# -- processes ---------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


@contextmanager
def started(function: Callable[..., object], *args: object, **how: object) -> Iterator[BaseProcess]:
    """Run a function in a process that the test may kill; it ends with the block at the latest."""
    process = FORK.Process(target=function, args=args, kwargs=how)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def residents(path: str) -> list[str]:
    """Name the processes that are in a namespace."""
    wanted, found = os.stat(path).st_ino, []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.stat(process / "ns/net").st_ino == wanted:
                found.append((process / "comm").read_text().strip())
        except OSError:
            continue  # it has ended
    return found


def wait_until(condition: Callable[[], object], what: str, limit_s: float = 10.0) -> float:
    """Wait for a condition; return how long that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"{what}: not within {limit_s:g} s"
        time.sleep(0.005)
    return time.monotonic() - started


# -- programs that fail ------------------------------------------------------------------------


def wrap(directory: os.PathLike[str] | str, name: str, script: str, real: str = "") -> None:
    """Put a wrapper of a program into a directory; `$REAL` in the script is the real one."""
    real = shutil.which(real or name) or "false"
    path = os.path.join(directory, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"#!/bin/sh\nPATH={SEARCH_PATH} REAL={real} HERE={directory}\n{script}\n")
    os.chmod(path, 0o755)


FIRST_TABLE_ONLY = """
text=$(cat)
if [ $(echo "$text" | grep -c '^COMMIT') -lt 2 ]; then echo "$text" | $REAL "$@"; exit; fi
echo "$text" | sed '/^COMMIT/q' | $REAL "$@"
"""
"""Documents of one table are loaded; of others the first table is, then comes what is appended."""
