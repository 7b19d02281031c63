"""From ADD to DEL: what CHECK proves, what DEL undoes, and that nothing in between is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from istio_cni.constants import DEL_UNDO_TIMEOUT_S
from namespaces import inside, ip
from netns.plugin import (
    CAPABILITY,
    JSON,
    WEB,
    Node,
    Pod,
    environment,
    finish,
    give_address,
    handed_over,
    is_captured,
    manifest,
    rules,
    start,
    stdin,
)
from netns.programming import wait_until, with_binds, wrap
from waiting import wait

pytestmark = pytest.mark.netns

TRAFFIC = "traffic.sidecar.istio.io/"
NET1 = WEB._replace(ifname="net1")
DUAL_STACK: JSON = {"name": "ISTIO_DUAL_STACK", "value": "true"}
DEL_MAX_S = DEL_UNDO_TIMEOUT_S + 0.5  # the start of the process included
AT_ONCE = 8
PODS = 24
MOMENTS = 6


@pytest.fixture
def captured(node: Node, pod_netns: str) -> str:
    """Make a captured pod; return its namespace."""
    node.add_pod(env=[DUAL_STACK])
    assert node.call("ADD", pod_netns).status == 0
    assert is_captured(pod_netns, 4)
    assert is_captured(pod_netns, 6)
    return pod_netns


# -- ADD again, CHECK ------------------------------------------------------------------------------


def test_add_twice_is_add_once(node: Node, captured: str) -> None:
    """The same rules and the same record; the log says that all was in place."""
    before = rules(captured), rules(captured, 6), node.record()
    answer = node.call("ADD", captured)
    assert answer.status == 0
    assert answer.log[0]["changed"] == "nothing: all was in place"
    assert (rules(captured), rules(captured, 6), node.record()) == before


def test_check_proves_what_add_programmed_not_what_is_written_today(
    node: Node, captured: str
) -> None:
    """Annotations edited since then change nothing, and nobody is asked for them."""
    node.api.requests.clear()
    node.add_pod(annotations={f"{TRAFFIC}excludeInboundPorts": "3306"})
    assert node.call("CHECK", captured).silent
    node.api.mute = True
    assert node.call("CHECK", captured).silent
    node.kubeconfig.unlink()
    assert node.call("CHECK", captured).silent
    assert node.api.requests == []


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("iptables-nft -t nat -D ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN", "ISTIO_OUTPUT"),
        ("iptables-nft -t nat -I ISTIO_INBOUND -p tcp --dport 80 -j RETURN", "ISTIO_INBOUND"),
        ("iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT", "OUTPUT"),
        ("ip6tables-nft -t nat -F ISTIO_REDIRECT", "ISTIO_REDIRECT"),
        ("nft delete table ip nat", "iptables"),
        ("ip -6 addr del ::6/128 dev lo", "::6"),
        ("iptables-legacy -t nat -N ISTIO_OUTPUT", "legacy"),
    ],
)
def test_check_names_what_was_tampered_with(
    node: Node, captured: str, command: str, named: str
) -> None:
    """Code 107 and the first difference; ADD mends it, and then CHECK is content."""
    inside(captured, command.split())
    answer = node.call("CHECK", captured)
    assert (answer.status, answer.code) == (1, 107)
    assert named in answer.msg
    assert node.call("ADD", captured).status == 0
    assert node.call("CHECK", captured).silent


def test_check_without_record_never_blames_the_rules(node: Node, captured: str) -> None:
    """What can be derived may have changed since: it is logged, with or without API server."""
    (node.attachments / "c0ffee-eth0").unlink()
    fine = node.call("CHECK", captured)
    assert (fine.silent, fine.logged("derived: captured", "warn")) == (True, True)
    inside(captured, ["iptables-nft", "-t", "nat", "-F", "ISTIO_REDIRECT"])
    gone = node.call("CHECK", captured)
    assert (gone.silent, gone.logged("derived: ", "warn")) == (True, True)
    assert gone.logged("ISTIO_REDIRECT", "warn")
    node.kubeconfig.unlink()
    blind = node.call("CHECK", captured)
    assert (blind.silent, blind.logged("none can be derived", "warn")) == (True, True)


def test_check_of_a_pod_that_was_left_alone_succeeds(node: Node, netns: str) -> None:
    """By whatever it was left alone; no namespace is needed for what needs no look-up."""
    node.add_pod(sidecar=False)
    assert node.call("ADD", netns).status == 0
    answer = node.call("CHECK", netns)
    assert (answer.silent, answer.logged("nothing to prove", "info")) == (True, True)
    system = WEB._replace(namespace="kube-system")
    assert node.call("CHECK", "/run/netns/none", system).silent
    over = node.config(runtimeConfig=handed_over())
    assert node.call("CHECK", "/run/netns/none", config=over).silent


def test_check_without_namespace_is_an_unknown_container(node: Node, captured: str) -> None:
    """Code 3: gone, or what is left of a namespace's file when it was unmounted."""
    assert node.call("CHECK", captured + "-gone").code == 3
    assert node.call("CHECK", str(node.kubeconfig)).code == 3
    (node.attachments / "c0ffee-eth0").unlink()
    assert node.call("CHECK", captured + "-gone").code == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"inode": 5}', '{"container_id": "c0ffee"}'])
def test_a_record_that_cannot_be_read_is_none(node: Node, captured: str, content: str) -> None:
    """CHECK derives, a second ADD writes it anew, and DEL has nothing to go by."""
    path = node.attachments / "c0ffee-eth0"
    path.write_text(content)
    assert node.call("CHECK", captured).logged("no record", "warn")
    assert node.call("DEL", captured).silent
    assert is_captured(captured)
    assert node.call("ADD", captured).status == 0
    assert node.call("CHECK", captured).silent


def test_a_record_of_a_later_version_is_read(node: Node, captured: str) -> None:
    """After a downgrade, keys that only the later version knows are passed over."""
    path = node.attachments / "c0ffee-eth0"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"from_the_future": 1}))
    assert node.call("CHECK", captured).stderr == ""
    assert node.call("DEL", captured).silent
    assert not is_captured(captured)


def test_a_directory_in_a_record_s_place_is_no_obstacle(node: Node, captured: str) -> None:
    """Nothing of what root may have done to the run dir fails a call with a fault of ours."""
    (node.attachments / "c0ffee-net9").mkdir()
    (node.attachments / "c0ffee-eth0").unlink()
    (node.attachments / "c0ffee-eth0").mkdir()
    for verb in ("CHECK", "ADD", "DEL"):
        answer = node.call(verb, captured)
        assert answer.status == 0
        assert answer.logged("records of attachments", "warn")


# -- DEL -------------------------------------------------------------------------------------------


def test_del_undoes_and_may_be_repeated(node: Node, captured: str) -> None:
    """No rule, no address, no record is left; the second one finds nothing to do."""
    first = node.call("DEL", captured)
    assert (first.silent, first.logged("capture undone", "info")) == (True, True)
    assert (rules(captured), rules(captured, 6), node.records) == ([], [], [])
    assert "::6/128" not in inside(captured, ["ip", "-6", "addr", "show", "lo"])
    again = node.call("DEL", captured)
    assert (again.silent, again.stderr) == (True, "")


def test_del_of_a_pod_that_was_left_alone_is_quiet(node: Node, netns: str) -> None:
    """Nothing is written, not even a lock."""
    node.add_pod(sidecar=False)
    assert node.call("ADD", netns).status == 0
    answer = node.call("DEL", netns)
    assert (answer.silent, answer.stderr) == (True, "")
    assert not node.attachments.exists()


@pytest.mark.parametrize(
    ("path", "keys", "prev_result"),
    [
        ("", {}, None),
        ("/run/netns/gone", {}, None),
        ("/run/netns/gone/deeper", {}, {"cniVersion": []}),
        ("/etc/passwd", {}, "garbage"),
        ("/proc/self/ns/net", {}, [1, 2]),
        (None, {"backend": 5, "exclude_namespaces": "all", "plugin_log_level": []}, {"ips": 5}),
        (None, {"runtimeConfig": "x", "pod_source": "ftp:", "ambient_enabled": "no"}, None),
        (None, {"outbound_owner_groups": "--help", "native_nftables": 1}, None),
        (None, {"runtimeConfig": {CAPABILITY: 5}, "plugin_log_level": "shout"}, None),
    ],
)
def test_del_succeeds_whatever_it_is_given(
    node: Node, captured: str, path: str | None, keys: JSON, prev_result: object
) -> None:
    """Exit 0 and no output: anything else would keep the pod from going. The record goes."""
    node.api.mute = True
    config = node.config(**keys)
    netns = captured if path is None else path
    answer = node.call("DEL", netns, config=config, prev_result=prev_result)
    assert answer.silent
    assert answer.took_s < DEL_MAX_S
    assert node.records == []
    assert is_captured(captured) == (path is not None)  # undone where the namespace was given


def test_del_succeeds_when_the_run_dir_cannot_be_read(node: Node, captured: str) -> None:
    """A file where the directory of records should be, and no run dir at all."""
    for run_dir in (str(node.kubeconfig), "/nonexistent", str(node.run_dir) + "\0", 5):
        answer = node.call("DEL", captured, config=node.config(cni_agent_run_dir=run_dir))
        assert answer.silent
    node.attachments.rename(node.run_dir / "moved")
    node.attachments.write_text("")
    assert node.call("DEL", captured).silent
    assert is_captured(captured)


def test_del_leaves_a_namespace_alone_that_only_has_the_same_name(
    node: Node, new_netns: Callable[[], str]
) -> None:
    """Deleted and made anew, with the next pod in it: inodes come back at once, and paths do."""
    netns = new_netns()
    give_address(netns, "10.1.0.5/24")
    node.add_pod()
    assert node.call("ADD", netns).status == 0
    name = netns.rpartition("/")[2]
    ip("netns", "del", name)
    ip("netns", "add", name)
    give_address(netns, "10.1.0.6/24")
    successor = Pod("next", container_id="5eed")
    node.add_pod(successor)
    assert node.call("ADD", netns, successor).status == 0
    assert node.call("CHECK", netns).code == 107
    answer = node.call("DEL", netns)
    assert (answer.silent, answer.logged("another namespace", "info")) == (True, True)
    assert node.call("CHECK", netns, successor).silent
    assert node.records == ["5eed-eth0"]


def test_del_after_a_killed_add_leaves_the_next_pod_s_namespace_alone(
    node: Node, pod_netns: str
) -> None:
    """The record was not completed, and path and inode have been used again since."""
    node.add_pod()
    assert node.call("ADD", pod_netns).status == 0
    path = node.run_dir / "attachments" / node.records[0]
    unfinished = json.loads(path.read_text()) | {"cookie": 0, "settings": {}, "variants": {}}
    path.write_text(json.dumps(unfinished))
    successor = Pod("next", container_id="5eed")
    node.add_pod(successor)
    assert node.call("ADD", pod_netns, successor).status == 0
    answer = node.call("DEL", pod_netns)
    assert (answer.silent, answer.logged("another pod's by now", "info")) == (True, True)
    assert node.call("CHECK", pod_netns, successor).silent


@pytest.mark.in_process("what it sees of the node's files is changed for it alone")
@pytest.mark.parametrize("hanging", [["save", "restore"], ["restore"]])
def test_del_ends_in_time_when_iptables_hangs(
    node: Node, captured: str, tmp_path: Path, hanging: list[str]
) -> None:
    """The pod's deletion waits for nothing; the failure is in the log, no process stays behind."""
    programs = tmp_path / "programs"
    programs.mkdir()
    sleep = f"sleep 30.{tmp_path.stat().st_ino}"  # to be told from everybody else's
    for name in ("iptables", "ip6tables"):
        for variant in ("-nft", "-legacy", ""):
            for action in hanging:
                program = programs / f"{name}{variant}-{action}"
                program.write_text(f"#!/bin/sh\nexec {sleep}\n")
                program.chmod(0o755)
            if "save" not in hanging:
                real = f"/usr/sbin/{name}{variant}-save"
                (programs / f"{name}{variant}-save").symlink_to(real)
    script = f'mount --bind {programs} /usr/local/sbin; exec "$0"'
    answer = node.call("DEL", captured, wrapper=["unshare", "-m", "sh", "-c", script])
    assert answer.silent
    assert answer.logged("did not end within", "error")
    assert answer.took_s < DEL_MAX_S
    assert node.records == []
    left = subprocess.run(["pgrep", "-f", sleep], capture_output=True, check=False)
    assert left.stdout == b""


# -- several interfaces ----------------------------------------------------------------------------


def test_another_interface_never_uncaptures_a_pod(node: Node, captured: str) -> None:
    """ADD and DEL of net1 leave eth0's capture as it is, as CHECK proves for each."""
    give_address(captured, "192.168.7.5/24", interface="net1")
    before = rules(captured), rules(captured, 6)
    assert node.call("ADD", captured, NET1).status == 0
    assert node.call("CHECK", captured, NET1).silent
    assert node.call("CHECK", captured).silent
    removed = node.call("DEL", captured, NET1)
    assert (removed.silent, removed.logged("stays captured", "info")) == (True, True)
    assert (rules(captured), rules(captured, 6)) == before
    assert node.call("CHECK", captured).silent
    assert node.call("DEL", captured).silent
    assert rules(captured) == []


def test_another_interface_may_bring_the_first_ipv6_address(node: Node, netns: str) -> None:
    """Then IPv6 is captured from that moment on, and eth0's record says so, too."""
    give_address(netns, "10.1.0.5/24")
    node.add_pod(env=[DUAL_STACK])
    assert node.call("ADD", netns).status == 0
    assert not is_captured(netns, 6)
    give_address(netns, "fd00:7::5/64", interface="net1")
    assert node.call("ADD", netns, NET1).status == 0
    assert is_captured(netns, 6)
    assert node.call("CHECK", netns).silent
    inside(netns, ["ip", "link", "del", "net1"])
    assert node.call("DEL", netns, NET1).silent
    assert node.call("CHECK", netns).silent
    assert is_captured(netns, 4)


def test_the_last_interface_takes_the_rules_with_it(node: Node, captured: str) -> None:
    """In whatever order they go: eth0 made the rules, net1 answers for them afterwards."""
    assert node.call("ADD", captured, NET1).status == 0
    assert node.call("DEL", captured).silent
    assert is_captured(captured)
    assert node.call("CHECK", captured, NET1).silent
    assert node.call("ADD", captured).status == 0
    assert node.call("DEL", captured, NET1).silent
    assert node.call("CHECK", captured).silent
    assert node.call("DEL", captured).silent
    assert (rules(captured), node.records) == ([], [])


# -- killed, and many at once ----------------------------------------------------------------------


def test_add_may_be_killed_at_any_moment(node: Node, pod_netns: str) -> None:
    """SIGKILL, then DEL as runtimes do, then ADD again: captured as if nothing had happened."""
    node.add_pod(env=[DUAL_STACK])
    whole = node.call("ADD", pod_netns)
    assert whole.status == 0
    wanted = rules(pod_netns), rules(pod_netns, 6), node.record()
    assert node.call("DEL", pod_netns).silent
    for moment in range(1, MOMENTS + 1):
        process = node.start("ADD", pod_netns)
        time.sleep(whole.took_s * moment / (MOMENTS + 1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert node.call("DEL", pod_netns).silent, moment
        wait(lambda: node.records == [], f"{moment}: an agent gives up")
        assert node.call("ADD", pod_netns).status == 0, moment
        assert node.call("CHECK", pod_netns).silent, moment
        assert (rules(pod_netns), rules(pod_netns, 6), node.record()) == wanted, moment
        assert node.records == ["c0ffee-eth0"], moment
        assert node.call("DEL", pod_netns).silent, moment
        assert (rules(pod_netns), rules(pod_netns, 6), node.records) == ([], [], []), moment


def test_a_killed_add_is_completed_by_the_next(node: Node, pod_netns: str) -> None:
    """A runtime that crashed with its plugin repeats the ADD without a DEL."""
    node.add_pod(env=[DUAL_STACK])
    record = node.attachments / "c0ffee-eth0"
    for _ in range(10):  # an agent may be done before it sees the kill
        process = node.start("ADD", pod_netns)
        deadline = time.monotonic() + 10
        while not record.exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        unfinished = node.call("CHECK", pod_netns)
        if not unfinished.silent:
            break
        assert node.call("DEL", pod_netns).silent
    assert unfinished.code == 107
    assert node.call("ADD", pod_netns).status == 0
    assert node.call("CHECK", pod_netns).silent


def test_a_stopped_add_is_undone_by_del(node: Node, pod_netns: str, tmp_path: Path) -> None:
    """If the process that programs is killed, the record stays and the error says what to do."""
    wrap(tmp_path, "ip6tables-nft-restore", ": > $HERE/second; sleep 60")
    node.add_pod(env=[DUAL_STACK])
    call = start(
        environment("ADD", pod_netns, WEB),
        stdin(node.config()),
        wrapper=with_binds({"/usr/local/sbin": tmp_path}),
    )
    wait_until((tmp_path / "second").exists, "IPv4 is programmed")
    children = Path(f"/proc/{call.pid}/task/{call.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    answer = finish(call, time.monotonic())
    assert (answer.code, "repeating the call completes" in answer.msg) == (11, True)
    assert is_captured(pod_netns)
    assert len(node.records) == 1
    assert node.call("DEL", pod_netns).silent
    assert not is_captured(pod_netns)
    assert node.records == []


def test_two_adds_for_one_container_make_one_rule_set(node: Node, pod_netns: str) -> None:
    """They should not come at once; if they do, one waits for the other."""
    node.add_pod(env=[DUAL_STACK])
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: node.call("ADD", pod_netns), range(2)))
    assert [answer.status for answer in answers] == [0, 0]
    assert len(rules(pod_netns)) == len(set(rules(pod_netns)))
    assert node.call("CHECK", pod_netns).silent
    assert node.records == ["c0ffee-eth0"]


def test_many_pods_at_once_do_not_see_each_other(node: Node, new_netns: Callable[[], str]) -> None:
    """A node that starts again: every pod gets its own rules and its own record."""
    pods = [
        Pod(f"web-{index}", uid=f"u{index}", container_id=f"{index:x}") for index in range(PODS)
    ]
    netnses = [new_netns() for _ in pods]
    for index, (pod, netns) in enumerate(zip(pods, netnses, strict=True)):
        inside(netns, ["ip", "addr", "add", f"10.1.0.{index + 1}/32", "dev", "lo"])
        node.add_pod(pod, annotations={f"{TRAFFIC}excludeInboundPorts": str(3000 + index)})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(
            pool.map(lambda pair: node.call("ADD", *pair), zip(netnses, pods, strict=True))
        )
    assert [answer.stdout for answer in answers if answer.status] == []
    assert len(node.records) == PODS
    for index, (pod, netns) in enumerate(zip(pods, netnses, strict=True)):
        mine = f"--dport {3000 + index} -j RETURN"
        text = inside(netns, ["iptables-nft-save"])
        assert mine in text
        assert text.count("-A ISTIO_INBOUND") == 6  # tunnel, its own, three of the proxy, the rest
        record = node.record(pod)
        assert record is not None
        assert (record["pod"], record["netns"]) == (f"shop/{pod.name}", netns)
        assert str(3000 + index) in str(record["settings"])
    log = (node.run_dir / "istio-cni.log").read_text().splitlines()
    assert len([json.loads(line) for line in log]) == PODS


def test_a_pod_that_changed_sides_keeps_its_record(node: Node, captured: str) -> None:
    """A repeated ADD that would leave the pod alone today takes nothing away."""
    node.api.pods[WEB.namespace, WEB.name] = manifest(WEB, sidecar=False)
    assert node.call("ADD", captured).status == 0
    assert node.call("CHECK", captured).silent
    assert node.call("DEL", captured).silent
    assert rules(captured) == []
