"""The demo itself: three pods start, one is captured, and connections prove it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from . import node, rules
from .chain import JSON, Answer, Attachment, Chain
from .node import EXCLUDED, OUTSIDE, Netns
from .process import DemoFailed, signals_held
from .show import Show
from .traffic import LOOPBACK, Heard, Server, ask, endpoint, start_server

EXAMPLES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFLIST = os.path.join(EXAMPLES, "net.d", "10-demo.conflist")
PODS = os.path.join(EXAMPLES, "pods")
NAMESPACE = "shop"

APP, PROXY, ROOT = 1000, 1337, 0
USERS = {APP: "app", PROXY: "proxy", ROOT: "outside"}
OUTBOUND, INBOUND, DNS = 15001, 15006, 15053  # the proxy's listeners
OUTSIDE_SERVER = Server("outside", ROOT, tcp=(53, 80, 5432), udp=(53,))
APP_SERVER = Server("app", APP, tcp=(8080, 9090))
PROXY_SERVER = Server("proxy", PROXY, tcp=(OUTBOUND, INBOUND), transparent=True)
DNS_SERVER = Server("proxy", PROXY, (DNS,), (DNS,), address=LOOPBACK, transparent=True)

COLUMN = 47  # where the answers to connections stand
# rules that say most about the capture, of those that iptables-save prints
TELLING = ("-A PREROUTING", "-A OUTPUT", "--to-ports", "5432", "9090", "198.51")
INBOUND_JUMP = "PREROUTING -p tcp -j ISTIO_INBOUND"
KNOWN_FIELDS = {"time", "level", "scope", "msg", "verb", "container_id", "ifname", "netns", "pod"}


class Pod(NamedTuple):
    """A pod that a runtime is about to start: its namespace, and what a CNI call says of it."""

    netns: Netns
    attachment: Attachment

    @property
    def name(self) -> str:
        """Its namespace and name, as kubectl writes them."""
        return f"{self.attachment.pod_namespace}/{self.attachment.pod_name}"


class Way(NamedTuple):
    """A connection to try: from where, as whom, to where, and which server must answer it."""

    netns: Netns
    uid: int
    address: str
    port: int
    expected: tuple[str, int]
    protocol: str = "TCP"
    why: str = ""


class World(NamedTuple):
    """What all parts of the story share."""

    show: Show
    families: tuple[int, ...]
    chain: Chain
    outside: Netns


def tell(show: Show, undo: ExitStack, search_path: str, families: tuple[int, ...]) -> None:
    """Do everything, in five parts; what must be undone afterwards goes to `undo`."""
    _introduce(show, families)
    node.become_node()
    chain = Chain(_conflist(_directory(undo), families), search_path)
    world = World(show, families, chain, node.attach_outside(undo, families))
    start_server(OUTSIDE_SERVER, world.outside.descriptor, families, undo)

    web, batch, typo = (_new_pod(undo, name) for name in ("web", "batch", "typo"))
    result = _start_pods(world, web, batch, typo)
    for server in (APP_SERVER, PROXY_SERVER, DNS_SERVER):
        start_server(server, web.netns.descriptor, families, undo)
    _show_rules(world, web)
    _connect(world, web, batch, _addresses(result))
    _tamper(world, web, result)
    _remove(world, web, result)


def _introduce(show: Show, families: Sequence[int]) -> None:
    show.heading("A node, three pods and the world outside, in network namespaces of their own")
    show.note("chain: bridge, host-local and istio-cni, as examples/net.d/10-demo.conflist says")
    show.note("pods: examples/pods; their objects come from there, not from an API server")
    show.note(
        "proxy: no Envoy, but a small server of the demo that runs as Envoy would, as uid 1337 on "
        "ports 15001, 15006 and 15053, and tells where each connection was going (SO_ORIGINAL_DST)"
    )
    if 6 not in families:
        show.note("IPv6 is disabled on this machine: IPv4 only")


def _directory(undo: ExitStack) -> str:
    """Make the directory for what a node keeps under /var."""
    with signals_held():
        directory = tempfile.mkdtemp(prefix="istio-cni-demo-")
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _conflist(directory: str, families: Sequence[int]) -> JSON:
    """Read the configuration list, its paths replaced by this run's own."""
    with open(CONFLIST, encoding="utf-8") as file:
        conflist: JSON = json.load(file)
    match conflist:
        case {"plugins": [{"ipam": dict(ipam)}, dict(ours)]}:
            ipam["dataDir"] = os.path.join(directory, "networks")
            ours["cni_agent_run_dir"] = os.path.join(directory, "istio-cni")
            ours["pod_source"] = f"manifests:{PODS}"
            if 6 not in families:
                ipam["ranges"], ipam["routes"] = ipam["ranges"][:1], ipam["routes"][:1]
    return conflist


def _new_pod(undo: ExitStack, name: str) -> Pod:
    netns = node.new_netns(undo)
    return Pod(netns, Attachment(uuid.uuid4().hex, netns.path, NAMESPACE, name))


# -- 1 ---------------------------------------------------------------------------------------------


def _start_pods(world: World, web: Pod, batch: Pod, typo: Pod) -> JSON:
    """Run ADD for each pod; return the result that the captured one got."""
    show = world.show
    show.heading("1. The runtime starts three pods: ADD")
    answer = _add(world, web)
    show.check(web.name, _decision(answer).startswith("captured"), _decision(answer))
    addresses = _addresses(answer.document)
    if set(addresses) != set(world.families):
        raise DemoFailed(f"{web.name} has not started: there is nothing more to show")
    show.note(f"{web.name} is {' and '.join(addresses.values())}")
    result = answer.document
    answer = _add(world, batch)
    show.check(batch.name, _decision(answer).startswith("not captured"), _decision(answer))
    _check_no_rules(world, batch)
    answer = _add(world, typo)
    refused = answer.plugin == "istio-cni" and answer.document.get("code") == 105
    show.check(f"{typo.name} is refused", refused, _decision(answer))
    _check_no_rules(world, typo)
    return result


def _add(world: World, pod: Pod) -> Answer:
    """Run ADD; return the last plugin's answer and pass its warnings on."""
    answer = world.chain.add(pod.attachment)
    for line in answer.log:
        if line.get("level") == "warn":
            world.show.note(f"{pod.name}: warning: {line.get('msg')}")
    return answer


def _decision(answer: Answer) -> str:
    """Say what came of an ADD: the error, or the last line that the plugin logged."""
    return answer.error or (_log_text(answer.log[-1]) if answer.log else "nothing was logged")


def _log_text(line: JSON) -> str:
    """Shorten a log line to its message and what is not known anyway."""
    more = [f"{key} {value}" for key, value in line.items() if key not in KNOWN_FIELDS]
    return str(line.get("msg")) + (f" ({'; '.join(more)})" if more else "")


def _check_no_rules(world: World, pod: Pod) -> None:
    found = [line for family in world.families for line in rules.read(pod.netns, family).lines]
    world.show.check(f"{pod.name} has no rules", not found, "; ".join(found))


def _addresses(result: JSON) -> dict[int, str]:
    """Return the pod's address by family from a CNI result."""
    found = {}
    match result:
        case {"ips": list(ips)}:
            for entry in ips:
                address = str(entry["address"]).partition("/")[0]
                found[6 if ":" in address else 4] = address
    return found


# -- 2 ---------------------------------------------------------------------------------------------


def _show_rules(world: World, pod: Pod) -> None:
    world.show.heading(f"2. The rules of {pod.name}, as programmed")
    for family in world.families:
        program, lines = rules.read(pod.netns, family)
        told = [line for line in lines if any(word in line for word in TELLING)]
        world.show.check(f"IPv{family}, by {program}-save", bool(lines), f"{len(lines)} rules")
        if family == 4:
            world.show.listing((*told, f"… and {len(lines) - len(told)} more"))


# -- 3 ---------------------------------------------------------------------------------------------


def _connect(world: World, web: Pod, batch: Pod, addresses: dict[int, str]) -> None:
    world.show.heading("3. Real connections, and who answers them")
    world.show.note(f"from {web.name}: app is uid {APP}, proxy is uid {PROXY}")
    for family in world.families:
        for way in _ways(world.outside, web, batch, family, addresses.get(family, "")):
            _try(world.show, way)


def _ways(outside: Netns, web: Pod, batch: Pod, family: int, address: str) -> Iterator[Way]:
    """Yield the connections of one family."""
    pod, there = web.netns, OUTSIDE[family]
    yield Way(pod, APP, there, 80, ("proxy", OUTBOUND))
    yield Way(pod, APP, there, 5432, ("outside", 5432), why="excluded port")
    yield Way(pod, APP, EXCLUDED[family], 80, ("outside", 80), why="excluded range")
    yield Way(pod, PROXY, there, 80, ("outside", 80), why="never captured")
    yield Way(outside, ROOT, address, 8080, ("proxy", INBOUND))
    yield Way(outside, ROOT, address, 9090, ("app", 9090), why="excluded port")
    for protocol in ("UDP", "TCP"):
        yield Way(pod, APP, there, 53, ("proxy", DNS), protocol, "DNS")
    yield Way(pod, PROXY, there, 53, ("outside", 53), "UDP", "its own DNS")
    yield Way(batch.netns, APP, there, 80, ("outside", 80), why=f"from {batch.name}")


def _try(show: Show, way: Way) -> None:
    """Make a connection and check who answers, and that its destination is known there."""
    to = endpoint(way.address, way.port)
    heard = ask(way.netns.descriptor, way.uid, way.protocol, way.address, way.port)
    good = False
    if isinstance(heard, Heard):
        known = "" if way.protocol == "UDP" else to
        good = (heard.who, heard.port) == way.expected and heard.meant_for == known
        found = f"{heard.who}:{heard.port}"
        if heard.who == "proxy" and heard.meant_for:
            found += f", meant for {heard.meant_for}"
    else:
        found = heard
    if not good:
        found += f"; expected {':'.join(map(str, way.expected))}"
    why = f", {way.why}" if way.why else ""
    show.check(f"{way.protocol} {USERS[way.uid]} → {to}{why}", good, found, COLUMN)


# -- 4 ---------------------------------------------------------------------------------------------


def _tamper(world: World, web: Pod, result: JSON) -> None:
    """Delete a rule, see what that does, let CHECK find it and ADD repair it."""
    show, chain = world.show, world.chain
    show.heading("4. Somebody deletes a rule: CHECK finds it, ADD repairs it")
    _check_verb(show, chain.check(web.attachment, result), "CHECK")

    chain_name, _, rule = INBOUND_JUMP.partition(" ")
    rules.delete(web.netns, rules.read(web.netns, 4).program, "nat", INBOUND_JUMP)
    show.note(f"iptables -t nat -D {INBOUND_JUMP}")
    address = _addresses(result)[4]
    inbound = Way(world.outside, ROOT, address, 8080, ("app", 8080), why="past the proxy")
    _try(show, inbound)
    answer = chain.check(web.attachment, result)
    named = answer.status != 0 and chain_name in answer.error and rule in answer.error
    show.check("CHECK fails and names the rule", named, answer.error or "no error")

    _check_verb(show, chain.repeat_last(web.attachment, result), "ADD again, of istio-cni alone")
    _check_verb(show, chain.check(web.attachment, result), "CHECK")
    _try(show, inbound._replace(expected=("proxy", INBOUND), why="captured again"))


def _check_verb(show: Show, answer: Answer, what: str) -> None:
    show.check(what, answer.status == 0, answer.error or "exit status 0")


# -- 5 ---------------------------------------------------------------------------------------------


def _remove(world: World, web: Pod, result: JSON) -> None:
    """Run DEL, twice."""
    world.show.heading(f"5. The runtime removes {web.name}: DEL")
    for what in ("DEL", "DEL again"):
        answers = world.chain.delete(web.attachment, result)
        failed = [answer.error for answer in answers if answer.status != 0]
        world.show.check(what, not failed, "; ".join(failed) or "exit status 0")
        _check_no_rules(world, web)
