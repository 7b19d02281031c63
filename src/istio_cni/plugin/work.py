"""What is done inside a pod's namespace: named tasks, since another process may have to do them.

Where nf_tables is all there is, the thread that was asked does them; where programs of iptables are
to be started, a child process, of the plugin's or of the agent's workshop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from istio_cni import constants
from istio_cni.capture import apply, detect
from istio_cni.capture.backend import once_each
from istio_cni.capture.settings import to_settings
from istio_cni.edge import netlink
from istio_cni.edge import netns as namespaces
from istio_cni.edge.netfilter import NeedsPrograms, Netfilter
from istio_cni.errors import InternalError
from istio_cni.rules.config import CaptureConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.edge.netns import Inside

PROGRAM, CLEAN_UP, COMPARE, COMPARE_ANY = "program", "clean up", "compare", "compare any"
FIND = "find"
LEFT_OUT = (
    "IPv6 is not captured: the pod's first address is IPv4; "
    "ISTIO_DUAL_STACK on the proxy captures both"
)
NOTHING = apply.Choice("", "")


class Task(NamedTuple):
    """One piece of work; `path` is the namespace's, which programs lock as a file of its own.

    `deadline` is an instant of CLOCK_MONOTONIC. The namespace must be that of `cookie`, unless that
    is 0. `variants` of iptables, each with its family's program, are what was recorded. Done
    `in_passing`, a task starts no programs, or is not done.
    """

    name: str
    path: str
    deadline: float
    choice: apply.Choice = NOTHING
    config: CaptureConfig | None = None
    cookie: int = 0
    variants: tuple[tuple[str, str], ...] = ()
    in_passing: bool = False


def run(
    task: Task,
    inside: Inside,
    may_commit: Callable[[], None] | None = None,
    *,
    prove: bool = True,
) -> dict[str, object] | None:
    """Do a task in the present namespace; part of the time is kept for a roll-back.

    None if it was to be done in passing and needs programs; nothing was changed then. The last two
    are those of `Netfilter`.
    """
    left = task.deadline - time.monotonic()
    is_removal = task.name == CLEAN_UP  # what is removed stays so
    net = Netfilter(
        deadline=task.deadline - min(constants.ROLLBACK_RESERVE_S, left / 2),
        rollback_deadline=task.deadline - left / 20,  # and the time to tell
        lock_file=task.path,
        shadow_lock=inside.shadow_lock,
        may_commit=may_commit,
        prove=prove,
        may_start_programs=not task.in_passing,
        late_s=0.0 if is_removal else constants.LATE_ROLLBACK_S,
    )
    with suppress(NeedsPrograms):
        return _WORK[task.name](task, inside, net)
    return None


def _program(task: Task, inside: Inside, net: Netfilter) -> dict[str, object]:
    config, left_out, cookie = _looked_at(_config(task))
    report = apply.program(net, config, inside.log, task.choice)
    if left_out:
        inside.log("warn", left_out)
    return {
        "settings": _settings(config),
        **report._asdict(),
        "cookie": cookie,
    }


def _clean_up(task: Task, inside: Inside, net: Netfilter) -> dict[str, object]:
    if not _is_the_same(task):
        return {"undone": False}
    apply.clean_up(net, inside.log)
    return {"undone": True}


def _compare(task: Task, _: Inside, net: Netfilter) -> dict[str, object]:
    if not _is_the_same(task):
        return {"difference": "this is another network namespace than ADD programmed"}
    variants = dict(task.variants)
    return {"difference": apply.check(net, _config(task), task.choice.name, variants)}


def _compare_any(task: Task, _: Inside, net: Netfilter) -> dict[str, object]:
    wanted = _looked_at(_config(task))[0]
    return {"difference": apply.check(net, wanted, *apply.holders(net))}


def _find(_: Task, __: Inside, net: Netfilter) -> dict[str, object]:
    """Find a variant of iptables that works, in a namespace that nobody has."""
    namespaces.leave()
    variant = apply.working_variant(net)
    return {"backend": f"{apply.IPTABLES}-{variant}" if variant else apply.NFTABLES}


_WORK = {
    PROGRAM: _program,
    CLEAN_UP: _clean_up,
    COMPARE: _compare,
    COMPARE_ANY: _compare_any,
    FIND: _find,
}


_settings = once_each(to_settings)


def _config(task: Task) -> CaptureConfig:
    if task.config is None:
        raise InternalError(f"the task {task.name} has no configuration")
    return task.config


def _is_the_same(task: Task) -> bool:
    return not task.cookie or netlink.namespace_cookie() == task.cookie


def _looked_at(config: CaptureConfig) -> tuple[CaptureConfig, str, int]:
    """Decide by the pod's own addresses whether IPv6 is captured; say if some of it is not.

    The number at last is the cookie of the namespace.
    """
    with netlink.Route() as route:
        addresses = [there.address for there in route.addresses()]
        cookie = route.cookie()
    _, ipv6 = detect.host_address(addresses, dual_stack=config.dual_stack)
    is_left_out = not ipv6 and detect.host_address(addresses, dual_stack=True)[1]
    return config._replace(ipv6=ipv6), LEFT_OUT if is_left_out else "", cookie
