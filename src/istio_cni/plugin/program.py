"""Capture of one pod: a record, the work inside its namespace, the record completed.

Everything here costs a captured pod only. Where programs of iptables are to be started, the work
runs in a child process that is inside the namespace; where nf_tables is all there is, this thread
goes there itself, and finds out in passing if it is not. What is found there (addresses, tools)
comes back with the report.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from istio_cni.capture import apply
from istio_cni.capture.settings import read_settings
from istio_cni.edge import netns as namespaces
from istio_cni.edge.netfilter import Netfilter
from istio_cni.errors import InternalError, Interrupted, IOFailure
from istio_cni.plugin import work
from istio_cni.plugin.attachments import Attachment
from istio_cni.plugin.work import CLEAN_UP, COMPARE, COMPARE_ANY, PROGRAM, Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.cni.request import Request
    from istio_cni.plugin.attachments import Attachments
    from istio_cni.plugin.host import Host
    from istio_cni.rules.config import CaptureConfig


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
    host.confirm()
    record, former = _record(request, pod_uid, netns), None
    others: list[Attachment] = []
    if attachments is not None:
        for other in attachments.of_container(request.container_id):
            if other.ifname == request.ifname:
                former = other
            elif other.inode == record.inode and other.made_rules:
                others.append(other)
        record.made_rules = not others
        attachments.write(record)
    try:
        choice = _choose(host, netns, config, deadline)
        answer = _inside(host, netns, Task(PROGRAM, request.netns, deadline, choice, config))
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


def _choose(host: Host, netns: int, config: CaptureConfig, deadline: float) -> apply.Choice:
    """Return the back end that a configuration names, else the one that is chosen in place."""
    named = apply.by_name(config)
    if named is not None:
        return named
    foreign = namespaces.is_foreign(netns)
    with namespaces.visiting(netns):
        net = Netfilter(deadline=deadline)
        return apply.choose(net, config, host.node_backend, foreign=foreign)


def _inside(host: Host, netns: int, task: Task) -> dict[str, object]:
    """Work in a namespace with the task's back end.

    nf_tables is programmed by this thread, unless the host has others that are less in demand, or
    iptables turns out to have tables there: its programs are started by another process.
    """
    answer: object = None
    if task.choice.name == apply.NFTABLES:
        answer = _in_passing(host, netns, task._replace(in_passing=True))
    if answer is None:
        answer = host.run_inside(task, netns)
    if not isinstance(answer, dict):
        raise InternalError(f"unexpected report {answer!r}")
    return answer


def _in_passing(host: Host, netns: int, task: Task) -> object:
    """Have a task done that needs no programs; None if it does, and then nothing was changed."""
    answer = host.run_elsewhere(task, netns)
    if answer is not None:
        return answer
    confirm = host.confirm if host.may_be_left else None
    with namespaces.visiting(netns):
        return work.run(task, namespaces.Inside(host.log.write), confirm)


def _recorded(backend: str) -> apply.Choice:
    return apply.Choice(backend, "recorded")


def undo(host: Host, path: str, pinned: int | OSError, record: Attachment, deadline: float) -> bool:
    """Remove our objects from a namespace if it is the record's; tell whether it was."""
    netns = namespaces.open_netns(path, pinned)
    try:
        if namespaces.identity(netns) != record.inode or host.is_node_s(netns):
            return False
        task = Task(CLEAN_UP, path, deadline, _recorded(record.backend), cookie=record.cookie)
        return _inside(host, netns, task)["undone"] is True
    finally:
        os.close(netns)


def difference(host: Host, record: Attachment, netns: int, deadline: float) -> str:
    """Return the first thing in which a namespace differs from a record; "" if nothing does."""
    if not record.settings:
        return "programming it was never finished"
    config = read_settings(record.settings, lambda setting: setting.key)
    choice, variants = _recorded(record.backend), tuple(record.variants.items())
    task = Task(COMPARE, record.netns, deadline, choice, config, record.cookie, variants)
    return str(_inside(host, netns, task)["difference"])


def derived_difference(host: Host, config: CaptureConfig, netns: int, deadline: float) -> str:
    """Return in what a namespace differs from a configuration, whatever holds our rules there."""
    task = Task(COMPARE_ANY, "", deadline, _recorded(apply.NFTABLES), config)
    return str(_inside(host, netns, task)["difference"])
