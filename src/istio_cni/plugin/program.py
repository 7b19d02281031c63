"""Capture of one pod: a record, the work inside its namespace, the record completed.

Everything here costs a captured pod only. Where programs of iptables are to be started, the work
runs in a child process that is inside the namespace; where nf_tables is all there is, this thread
goes there itself. What is found there (addresses, tools) comes back with the report.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from istio_cni import constants
from istio_cni.capture import apply, detect
from istio_cni.capture.settings import read_settings, to_settings
from istio_cni.edge import netlink
from istio_cni.edge import netns as namespaces
from istio_cni.edge.netfilter import Netfilter
from istio_cni.errors import InternalError, Interrupted, IOFailure
from istio_cni.plugin.attachments import Attachment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from istio_cni.cni.request import Request
    from istio_cni.edge.netns import Inside
    from istio_cni.plugin.attachments import Attachments
    from istio_cni.plugin.host import Host
    from istio_cni.rules.config import CaptureConfig

    Log = Callable[[str, str], None]


def capture(
    host: Host,
    request: Request,
    config: CaptureConfig,
    pod_uid: str,
    pinned: int | OSError,
    attachments: Attachments,
    deadline: float,
) -> apply.Report:
    """Make a pod's namespace hold a configuration, or leave it as it was and raise.

    `pinned` is a descriptor of the namespace that was checked when the call began. A run dir that
    cannot be written costs CHECK and DEL their record, not the pod its start.
    """
    netns = namespaces.open_netns(request.netns, pinned)
    try:
        with ExitStack() as stack:
            records: Attachments | None = attachments
            try:
                stack.enter_context(attachments.lock(request.container_id, deadline))
            except IOFailure as error:
                host.log.warn(f"no record of this attachment: {error.msg}")
                records = None
            return _capture_recorded(host, request, config, pod_uid, netns, records, deadline)
    finally:
        os.close(netns)


def _capture_recorded(
    host: Host,
    request: Request,
    config: CaptureConfig,
    pod_uid: str,
    netns: int,
    attachments: Attachments | None,
    deadline: float,
) -> apply.Report:
    record, former = _record(request, pod_uid, netns), None
    others: list[Attachment] = []
    if attachments is not None:
        former = attachments.read(request.container_id, request.ifname)
        others = [
            other
            for other in attachments.of_container(request.container_id)
            if other.ifname != request.ifname and other.inode == record.inode and other.made_rules
        ]
        record.made_rules = not others
        attachments.write(record)
    try:
        foreign = namespaces.is_foreign(netns)
        answer = _inside(
            host,
            netns,
            request.netns,
            lambda net: apply.choose(net, config, foreign=foreign),
            deadline,
            lambda inside, net, choice: _program(inside, net, config, choice),
        )
    except Interrupted:
        raise  # the record stays, so that DEL undoes what is there
    except Exception:
        if attachments is not None and former is None:
            attachments.remove(request.container_id, request.ifname)
        elif attachments is not None and former is not None:
            attachments.write(former)
        raise
    _complete(record, answer)
    if attachments is not None:
        attachments.write(record)
        for other in others:  # the maker of the rules answers for them as they are now
            _complete(other, answer)
            attachments.write(other)
    changed, reason = _strings(answer.get("changed")), str(answer.get("reason"))
    return apply.Report(record.variants, changed, record.backend, reason)


def _record(request: Request, pod_uid: str, netns: int) -> Attachment:
    return Attachment(
        request.container_id,
        request.ifname,
        network=request.name,
        netns=request.netns,
        inode=namespaces.identity(netns),
        pod=f"{request.pod_namespace}/{request.pod_name}",
        pod_uid=pod_uid,
    )


def _complete(record: Attachment, answer: dict[str, object]) -> None:
    settings, variants, cookie = answer["settings"], answer["variants"], answer["cookie"]
    if not (isinstance(settings, dict) and isinstance(variants, dict) and isinstance(cookie, int)):
        raise InternalError(f"unexpected report {answer!r}")
    record.settings, record.variants, record.cookie = settings, variants, cookie
    record.backend = str(answer["backend"])


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _inside(
    host: Host,
    netns: int,
    path: str,
    choose: Callable[[Netfilter], apply.Choice],
    deadline: float,
    work: Callable[[Inside, Netfilter, apply.Choice], dict[str, object]],
) -> dict[str, object]:
    """Choose a back end in the namespace, and work there; in a child if it starts programs.

    Part of the time is kept for a roll-back.
    """

    def run(inside: Inside, choice: apply.Choice) -> dict[str, object]:
        left = deadline - time.monotonic()
        net = Netfilter(
            deadline=deadline - min(constants.ROLLBACK_RESERVE_S, left / 2),
            rollback_deadline=deadline - left / 20,  # and the time to tell
            lock_file=host.lock_file(path, netns),
            shadow_lock=inside.shadow_lock,
            may_commit=host.may_commit,
        )
        return work(inside, net, choice)

    with namespaces.visiting(netns):
        choice = choose(Netfilter(deadline=deadline))
        if not apply.may_start_programs(choice.name):
            return run(namespaces.Inside(host.log.write), choice)
    answer = namespaces.run_inside(
        lambda inside: run(inside, choice), netns, deadline=deadline, log=host.log.write
    )
    if not isinstance(answer, dict):
        raise InternalError(f"unexpected report {answer!r}")
    return answer


def _by(backend: str) -> Callable[[Netfilter], apply.Choice]:
    """Choose a back end that is known already."""
    return lambda _: apply.Choice(backend, "recorded")


def _program(
    inside: Inside, net: Netfilter, config: CaptureConfig, choice: apply.Choice
) -> dict[str, object]:
    config = _with_families(config, inside.log)
    report = apply.program(net, config, inside.log, choice)
    return {
        "settings": to_settings(config),
        **report._asdict(),
        "cookie": netlink.namespace_cookie(),
    }


def _with_families(config: CaptureConfig, log: Log) -> CaptureConfig:
    """Decide by the pod's own addresses whether IPv6 is captured; tell if some of it is not."""
    with netlink.Route() as route:
        addresses = [there.address for there in route.addresses()]
    _, ipv6 = detect.host_address(addresses, dual_stack=config.dual_stack)
    if not ipv6 and detect.host_address(addresses, dual_stack=True)[1]:
        log(
            "warn",
            "IPv6 is not captured: the pod's first address is IPv4; "
            "ISTIO_DUAL_STACK on the proxy captures both",
        )
    return config._replace(ipv6=ipv6)


def undo(host: Host, path: str, pinned: int | OSError, record: Attachment, deadline: float) -> bool:
    """Remove our objects from a namespace if it is the record's; tell whether it was."""
    netns = namespaces.open_netns(path, pinned)
    try:
        if namespaces.identity(netns) != record.inode or host.is_node_s(netns):
            return False

        def clean(inside: Inside, net: Netfilter, _: apply.Choice) -> dict[str, object]:
            if record.cookie and netlink.namespace_cookie() != record.cookie:
                return {"undone": False}
            apply.clean_up(net, inside.log)
            return {"undone": True}

        answer = _inside(host, netns, path, _by(record.backend), deadline, clean)
        return answer["undone"] is True
    finally:
        os.close(netns)


def difference(host: Host, record: Attachment, netns: int, deadline: float) -> str:
    """Return the first thing in which a namespace differs from a record; "" if nothing does."""
    if not record.settings:
        return "programming it was never finished"

    def compare(_: Inside, net: Netfilter, choice: apply.Choice) -> dict[str, object]:
        if record.cookie and netlink.namespace_cookie() != record.cookie:
            return {"difference": "this is another network namespace than ADD programmed"}
        config = read_settings(record.settings, lambda setting: setting.key)
        return {"difference": apply.check(net, config, choice.name, record.variants)}

    answer = _inside(host, netns, record.netns, _by(record.backend), deadline, compare)
    return str(answer["difference"])


def derived_difference(host: Host, config: CaptureConfig, netns: int, deadline: float) -> str:
    """Return in what a namespace differs from a configuration, whatever holds our rules there."""

    def compare(inside: Inside, net: Netfilter, _: apply.Choice) -> dict[str, object]:
        wanted = _with_families(config, inside.log)
        return {"difference": apply.check(net, wanted, *apply.holders(net))}

    answer = _inside(host, netns, "", _by(apply.NFTABLES), deadline, compare)
    return str(answer["difference"])
