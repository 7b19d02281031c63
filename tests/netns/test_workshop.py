"""The processes that do the agent's tasks: they go on to the next task, or another one does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from istio_cni.agent import workshop
from istio_cni.agent.workshop import HANDS
from istio_cni.capture.backend import NFTABLES, Choice
from istio_cni.edge.netns.namespace import APPLY_LOCK
from istio_cni.plugin.work import CLEAN_UP, PROGRAM, Task
from istio_cni.rules.config import CaptureConfig
from launcher_agent import LIMIT, REPLY
from namespaces import call_inside, inside
from netns.agents import (
    OWN_NETNS,
    Agent,
    agent,
    call,
    connect,
    is_alive,
    is_stopped,
    opened,
    send,
)
from netns.plugin import JSON, WEB, Node, Pod, Way, environment, give_address, is_captured, stdin
from netns.test_sandbox import user_namespace_pod
from netns.ways import install
from waiting import wait

__all__ = ["agent"]  # a fixture
pytestmark = pytest.mark.netns

BACKENDS = ("nftables", "iptables")


@pytest.fixture
def served(tmp_path: Path, launcher: Path, agent: Agent) -> Node:
    """Return a node whose launcher asks the agent."""
    node = Node(tmp_path)
    node.add_pod()
    node.way = Way(install(tmp_path / "bin", launcher, agent.socket))
    return node


def processes(agent: Agent) -> list[int]:
    """Return the processes that take tasks."""
    workshop = agent.workshop()
    children = Path(f"/proc/{workshop}/task/{workshop}/children").read_text().split()
    return sorted(filter(is_alive, map(int, children)))


def hands(agent: Agent) -> list[int]:
    """Return the processes that always take tasks, once there are no others."""
    wait(lambda: len(processes(agent)) == HANDS, "all of them are there, and nobody else")
    return processes(agent)


def away(agent: Agent) -> list[int]:
    """Return those that are in another network namespace."""

    def place(process: int | str) -> str:
        with suppress(FileNotFoundError):
            return os.readlink(f"/proc/{process}/ns/net")
        return ""

    return [one for one in processes(agent) if place(one) not in ("", place("self"))]


@contextmanager
def stopped(processes: list[int]) -> Iterator[None]:
    """Have processes stopped for the time of a block; some may have been killed meanwhile."""
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    wait(lambda: all(map(is_stopped, processes)), "they stop")
    try:
        yield
    finally:
        for process in filter(is_alive, processes):
            os.kill(process, signal.SIGCONT)


def add(agent: Agent, netns: str, config: JSON, wait_s: float) -> object:
    """Call ADD as a launcher that waits so long; return the code of the error, or "declined".

    The agent itself has half of that time.
    """
    data = call(environment("ADD", netns, WEB), stdin(config), wait_s=wait_s)
    with opened(netns, OWN_NETNS) as descriptors, connect(agent.socket) as caller:
        send(caller, data, descriptors)
        answer = caller.recv(1 << 16)  # a task that nobody has taken yet holds it open
    if answer[REPLY.size - 2] == LIMIT["DECLINED"]:
        return "declined"
    return json.loads(answer[REPLY.size :]).get("code")


def test_processes_go_on_to_the_next_task(
    served: Node, agent: Agent, new_netns: Callable[[], str]
) -> None:
    """They come home from each pod, and have no more open than before."""
    before = hands(agent)
    home = {os.readlink(f"/proc/{one}/ns/net") for one in before}

    def descriptors() -> set[int]:
        return {len(os.listdir(f"/proc/{one}/fd")) for one in before}

    wait(lambda: len(descriptors()) == 1, "each has closed what it does not need")
    opened_before = descriptors()
    for number in range(3 * HANDS):
        netns = new_netns()
        give_address(netns, "10.1.0.5/24")
        pod = Pod(f"web-{number}", uid=f"u{number}", container_id=f"{number:x}")
        served.add_pod(pod)
        config = served.config(backend="iptables")
        for verb in ("ADD", "CHECK", "DEL"):
            assert served.call(verb, netns, pod, config=config).status == 0
    assert hands(agent) == before
    assert {os.readlink(f"/proc/{one}/ns/net") for one in before} == home
    assert descriptors() == opened_before


def test_a_process_that_has_ended_is_replaced(served: Node, agent: Agent, pod_netns: str) -> None:
    """And costs no pod its start."""
    config = served.config(backend="iptables")
    for victim in hands(agent):
        os.kill(victim, signal.SIGKILL)
        assert served.call("ADD", pod_netns, config=config).status == 0
        assert victim not in hands(agent)


def test_a_process_that_went_into_a_user_namespace_is_replaced(
    served: Node, agent: Agent, netns: str
) -> None:
    """There is no way back from there."""
    before = hands(agent)
    with user_namespace_pod(netns, mapped_first=True) as (path, _):
        config = served.config(backend="iptables")
        assert served.call("ADD", path, config=config).status == 0
        wait(lambda: sum(map(is_alive, before)) == HANDS - 1, "it has ended")
        assert len({*before, *hands(agent)}) == HANDS + 1
        assert served.call("CHECK", path, config=config).silent


@contextmanager
def held_apply_lock(netns: str) -> Iterator[None]:
    """Be somebody else who programs a namespace, for the time of a block."""
    code = "import socket, sys; lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM);"
    code += "lock.bind(b'\\0istio-cni/apply'); print(flush=True); sys.stdin.read()"
    command = ["nsenter", f"--net={netns}", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        yield


def test_a_process_that_hangs_is_ended_in_time(served: Node, agent: Agent, pod_netns: str) -> None:
    """Whoever asked is told, and nothing was changed; somebody else does the next task."""
    busy, *others = hands(agent)
    config = served.config(backend="iptables")

    def hang() -> None:
        """Stop it where it waits for somebody else to finish."""
        at_work = f"/proc/{busy}/ns/net"
        wait(lambda: os.readlink(at_work) != os.readlink(OWN_NETNS), "it is in the namespace")
        os.kill(busy, signal.SIGSTOP)

    with held_apply_lock(pod_netns), stopped(others):
        hanging = threading.Thread(target=hang)
        hanging.start()
        since = time.monotonic()
        assert add(agent, pod_netns, config, 2.0) == 11
        assert time.monotonic() - since < 2.0
        hanging.join()
        wait(lambda: not is_alive(busy), "it is ended")
    assert busy not in hands(agent)
    assert not is_captured(pod_netns)
    assert served.call("ADD", pod_netns, config=config).status == 0


def test_who_is_overdue_is_ended_some_time_after_that_is_seen(
    served: Node, agent: Agent, pod_netns: str
) -> None:
    """All of them may have been stopped, and take back first what they did."""
    busy, *others = hands(agent)
    config, shop = served.config(backend="iptables"), agent.workshop()
    with held_apply_lock(pod_netns), stopped(others), ExitStack() as stack:
        asking = threading.Thread(target=add, args=(agent, pod_netns, config, 1.0))
        asking.start()
        wait(lambda: away(agent) == [busy], "it waits")
        stack.enter_context(stopped([busy]))
        with stopped([shop]):
            asking.join()
            time.sleep(3.0)
        time.sleep(1.2)  # the workshop looks every second
        assert is_alive(busy)
        wait(lambda: not is_alive(busy), "it is ended", patience_s=5.0)


def test_a_task_that_nobody_takes_is_left_to_the_bundle(
    served: Node, agent: Agent, pod_netns: str
) -> None:
    """It is never done, also when somebody has time again; with nf_tables nobody needs them."""
    config = served.config(backend="iptables")
    with stopped(hands(agent)):
        assert add(agent, pod_netns, config, 2.0) == "declined"
        assert served.records == []
        native = served.config(backend="nftables")
        assert served.call("ADD", pod_netns, config=native).stderr == ""
    for verb in ("CHECK", "DEL"):
        assert served.call(verb, pod_netns, config=native).silent
    assert not is_captured(pod_netns)


def start_waiting(
    served: Node, agent: Agent, netns: str, number: int, locks: ExitStack, callers: ExitStack
) -> None:
    """Start a pod in a namespace that somebody else programs, and wait until its task waits."""
    give_address(netns, "10.1.0.5/24")
    pod = Pod(f"slow-{number}", uid=f"u{number}", container_id=f"{number:x}")
    served.add_pod(pod)
    locks.enter_context(held_apply_lock(netns))
    caller = callers.enter_context(connect(agent.socket))
    data = call(environment("ADD", netns, pod), stdin(served.config(backend="iptables")))
    with opened(netns, OWN_NETNS) as descriptors:
        send(caller, data, descriptors)
    wait(lambda: len(away(agent)) > number, "it waits")


def test_those_that_wait_are_not_waited_for(
    served: Node, agent: Agent, new_netns: Callable[[], str]
) -> None:
    """Others come and go again; a task whose caller has gone is no task any more."""
    before = hands(agent)
    config = served.config(backend="iptables")
    with ExitStack() as locks:
        with ExitStack() as callers:
            for number in range(HANDS + 1):
                start_waiting(served, agent, new_netns(), number, locks, callers)
            netns = new_netns()
            give_address(netns, "10.1.0.5/24")
            since = time.monotonic()
            answer = served.call("ADD", netns, config=config)
            assert (answer.status, answer.stderr) == (0, "")
            assert served.call("DEL", netns, config=config).silent
            assert not is_captured(netns)
            assert time.monotonic() - since < 2.0
        wait(lambda: not away(agent), "nobody waits for those who have gone", patience_s=2.0)
    assert hands(agent) == before


def test_a_user_namespace_after_a_deletion(
    served: Node, agent: Agent, new_netns: Callable[[], str]
) -> None:
    """The kernel takes a while over deletions; a thread waits for it, and is not in the way."""
    _, *others = hands(agent)
    native, programs = served.config(backend="nftables"), served.config(backend="iptables")
    pod, outside = new_netns(), new_netns()
    give_address(pod, "10.1.0.5/24")
    with user_namespace_pod(outside, mapped_first=True) as (path, _):
        assert served.call("ADD", pod, config=native).status == 0
        with stopped(others), opened(pod, OWN_NETNS) as descriptors, ExitStack() as stack:
            caller = stack.enter_context(connect(agent.socket))
            time.sleep(0.01)  # it is taken in
            stack.enter_context(connect(agent.socket))
            data = call(environment("DEL", pod, WEB), stdin(native), wait_s=2.0)
            send(caller, data, descriptors)
            remapped = Pod("remapped", uid="r", container_id="4e")
            served.add_pod(remapped)
            answer = served.call("ADD", path, remapped, config=programs)
            assert (answer.status, answer.stderr) == (0, "")
            assert caller.recv(1 << 16)[REPLY.size - 2 :] == bytes((LIMIT["DONE"], 0))


def test_a_user_namespace_is_entered_when_the_last_thread_has_ended(netns: str) -> None:
    """The kernel lets in no process that has another one."""
    script = (
        "import os, sys, threading, time\n"
        "from istio_cni.edge.netns import entry\n"
        "threading.Thread(target=time.sleep, args=(0.2,)).start()\n"
        "entry.enter(os.open(sys.argv[1], os.O_RDONLY))\n"
    )
    with user_namespace_pod(netns, mapped_first=True) as (path, _):
        subprocess.run([sys.executable, "-c", script, path], check=True, timeout=30)


def test_who_ends_while_more_are_asked_for_is_replaced(
    served: Node, agent: Agent, new_netns: Callable[[], str]
) -> None:
    """The workshop hears of both at the same moment."""
    before = hands(agent)
    config = served.config(backend="iptables")
    with ExitStack() as stack:
        for number in range(HANDS):
            start_waiting(served, agent, new_netns(), number, stack, stack)
        netns = new_netns()
        give_address(netns, "10.1.0.5/24")
        data = call(environment("ADD", netns, WEB), stdin(config))
        with opened(netns, OWN_NETNS) as descriptors, connect(agent.socket) as caller:
            with stopped([agent.workshop()]):
                for each in before[1:]:
                    os.kill(each, signal.SIGKILL)
                wait(lambda: processes(agent) == before[:1], "they have ended")
                send(caller, data, descriptors)
                time.sleep(0.1)  # it is asked for another process
            answer = caller.recv(1 << 16)
        assert answer[REPLY.size - 2 :][:2] == bytes((LIMIT["DONE"], 0)), answer
    assert len(hands(agent)) == HANDS


@pytest.mark.parametrize("others_wait", [False, True])
def test_nf_tables_is_left_to_them_while_others_wait(
    served: Node, agent: Agent, pod_netns: str, others_wait: bool
) -> None:
    """The thread that takes callers in has its own work to do; the outcome is the same."""
    hands(agent)
    config = served.config(backend="nftables")
    assert served.call("ADD", pod_netns, config=config).status == 0
    data = call(environment("DEL", pod_netns, WEB), stdin(config), wait_s=2.0)

    with opened(pod_netns, OWN_NETNS) as descriptors, connect(agent.socket) as caller:
        with held_apply_lock(pod_netns), ExitStack() as stack:
            if others_wait:
                time.sleep(0.01)  # that one is taken in, and its call is waited for
                stack.enter_context(connect(agent.socket))
            send(caller, data, descriptors)
            if others_wait:
                wait(lambda: away(agent), "one of them is there", patience_s=0.5)
            else:
                time.sleep(0.1)
                assert not away(agent)
        answer = caller.recv(1 << 16)
    assert answer[REPLY.size - 2 :] == bytes((LIMIT["DONE"], 0)), answer
    assert served.records == []
    assert "istio" not in inside(pod_netns, ["nft", "list", "tables"])


def test_the_back_end_is_found_however_long_a_start_takes(netns: str) -> None:
    """There is nobody at first who could do it; nobody else can."""
    script = (
        "import os, signal, threading\n"
        "from istio_cni.agent.workshop import TAKE_S, Workshop\n"
        "workshop = Workshop()\n"
        "os.kill(workshop._process, signal.SIGSTOP)\n"
        "workshop.begin(None)\n"
        "go_on = lambda: os.kill(workshop._process, signal.SIGCONT)\n"
        "threading.Timer(2 * TAKE_S, go_on).start()\n"
        "print(workshop.find_backend(print))\n"
        "workshop.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip().splitlines()[-1].startswith("iptables-"), done.stderr


@contextmanager
def small_shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[workshop.Workshop]:
    """Have a workshop of one process, which waits for its first task; for children only."""
    monkeypatch.setattr(workshop, "HANDS", 1)
    monkeypatch.setattr(workshop, "HANDS_MAX", 1)
    shop = workshop.Workshop()
    shop.begin(None)
    wait(lambda: shop.is_free, "its process waits")
    try:
        yield shop
    finally:
        shop.close()


def test_what_was_given_up_is_not_done_later(netns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while whoever gave it up waits for its turn to say so."""

    def give_up(shop: workshop.Workshop) -> str:
        task = Task(CLEAN_UP, netns, time.monotonic() + 10)
        held, own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), os.open(netns, os.O_RDONLY)
        held.bind(APPLY_LOCK)
        caller, _stays = socket.socketpair()

        def run(**how: Any) -> object:
            return shop.run(task, own, caller.fileno(), lambda *_: None, **how)

        first = threading.Thread(target=run)
        first.start()
        wait(lambda: not shop.is_free, "its process is busy")

        @contextmanager
        def let_go() -> Iterator[None]:
            yield
            held.close()  # from now on it can take the next task
            first.join()
            wait(lambda: shop.is_free, "it has looked for one")

        try:
            run(waiting=let_go, take_s=0.05)
        except workshop.WorkshopClosed as error:
            return error.msg
        return "it was done"

    def give_up_inside() -> str:
        with small_shop(monkeypatch) as shop:
            return give_up(shop)

    assert call_inside(netns, give_up_inside) == "nobody takes the task"


def test_what_is_done_in_passing_needs_no_user_namespace(
    netns: str, new_netns: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the agent's own thread; so the process comes home, and does the next task."""
    give_address(netns, "10.1.0.5/24")
    choice = Choice(NFTABLES, "a test")

    def program(shop: workshop.Workshop, path: str, *, in_passing: bool) -> object:
        until = time.monotonic() + 10
        task = Task(PROGRAM, path, until, choice, CaptureConfig(), in_passing=in_passing)
        caller, _stays = socket.socketpair()
        with opened(path) as (pod,):
            return shop.run(task, pod, caller.fileno(), lambda *_: None)

    def program_both(foreign: str) -> tuple[list[bool], bool]:
        with small_shop(monkeypatch) as shop:
            done = [
                isinstance(program(shop, path, in_passing=True), dict) for path in (foreign, netns)
            ]
            inside(netns, ["iptables-nft", "-t", "nat", "-A", "PREROUTING", "-p", "253"])
            wants_programs = program(shop, netns, in_passing=True) is None
            wait(lambda: shop.is_free, "the process waits again")
            return done, wants_programs

    with user_namespace_pod(new_netns(), mapped_first=True) as (path, _):
        assert call_inside(new_netns(), program_both, path) == ([True, True], True)
        assert "table inet istio-proxy-nat" in inside(path, ["nft", "list", "tables"])
