"""Our netlink messages against the kernel, with `ip`, `nft` and pyroute2 as witnesses."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from istio_cni.edge.netlink import (
    WHOLE_MARK,
    Address,
    LocalRoute,
    Nftables,
    PolicyRule,
    Route,
    legacy_tables,
    messages,
    namespace_cookie,
    nft_tables,
    sweep_empty_tables,
    tables,
)
from istio_cni.errors import ProgrammingFailed, TryAgainLater
from namespaces import call_inside, enter, inside

pytestmark = pytest.mark.netns

MARK, TABLE, PRIORITY = 1337, 133, 31337
FAMILIES = pytest.mark.parametrize("family", [4, 6])


@contextmanager
def route_in(path: str) -> Iterator[Route]:
    """Open a Route inside a namespace, on a thread that ends, and hand it to this one."""
    opened: list[Route] = []

    def open_there() -> None:
        enter(path)
        opened.append(Route())

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    with opened[0] as route:
        yield route


def capture_rule(family: int) -> PolicyRule:
    """Make the rule that TPROXY needs."""
    return PolicyRule(family, PRIORITY, MARK, WHOLE_MARK, TABLE)


def ip_json(path: str, *args: str) -> list[dict[str, Any]]:
    """Run `ip -j` in a namespace and read what it prints."""
    listed: list[dict[str, Any]] = json.loads(inside(path, ["ip", "-j", *args]) or "[]")
    return listed


def add_interfaces(path: str) -> None:
    """Make eth0, which is up, and its peer, which is down."""
    inside(path, ["ip", "link", "add", "eth0", "type", "veth", "peer", "down0"])
    inside(path, ["ip", "link", "set", "eth0", "up"])


def add_addresses(path: str) -> None:
    """Give three interfaces all kinds of addresses."""
    add_interfaces(path)
    for interface, address in (
        ("eth0", "10.1.2.3/24"),
        ("eth0", "10.1.2.4/24"),
        ("down0", "192.168.7.1/30"),
        ("eth0", "2001:db8::1/64"),
        ("down0", "fd00::ffff:10.0.0.1/128"),
        ("lo", "::ffff:10.0.0.9/128"),
    ):
        inside(path, ["ip", "addr", "add", address, "dev", interface])
    inside(path, ["ip", "addr", "add", "10.9.0.1", "peer", "10.9.0.2/32", "dev", "eth0"])
    inside(path, ["ip", "addr", "add", "fd09::1", "peer", "fd09::2/128", "dev", "eth0"])


# -- addresses -------------------------------------------------------------------------------------


def test_addresses_are_those_ip_shows(netns: str) -> None:
    """Own addresses, not peers', of all interfaces, up or down, in order within an interface."""
    add_addresses(netns)
    with route_in(netns) as route:
        found = route.addresses()
    names = {4: "inet", 6: "inet6"}
    for link in ip_json(netns, "addr"):
        shown = [(one["family"], one["local"]) for one in link["addr_info"]]
        ours = [(names[one.family], one.address) for one in found if one.ifindex == link["ifindex"]]
        assert ours == shown
    assert any(one[:3] == (4, "10.1.2.3", 24) for one in found)
    assert Address(6, "::1", 128, 1) in found


def test_addresses_are_in_the_order_of_the_kernels_list(netns: str) -> None:
    """IPv4 comes first, then IPv6, each by interface: pyroute2 sees the same list."""
    add_addresses(netns)

    def by_pyroute2() -> list[tuple[str, int, int]]:
        from pyroute2 import IPRoute

        with IPRoute() as oracle:
            return [
                (one.get("IFA_LOCAL") or one.get("IFA_ADDRESS"), one["prefixlen"], one["index"])
                for one in oracle.get_addr()
            ]

    with route_in(netns) as route:
        found = route.addresses()
    assert [one[1:] for one in found] == call_inside(netns, by_pyroute2)
    assert [one.family for one in found] == sorted(one.family for one in found)


def change_while_listing(path: str, changes: int) -> tuple[list[Address], int]:
    """List many addresses while others come and go between two pieces of the kernel's list."""
    lines = (f"addr add 10.{n >> 8}.{n & 255}.1/32 dev lo" for n in range(1500))
    inside(path, ["ip", "-batch", "-"], stdin="\n".join(lines))

    def listing() -> tuple[list[Address], int]:
        made = 0
        receive = socket.socket.recvfrom
        with Route() as route, Route() as other:

            def then_change(
                this: socket.socket, size: int, how: int
            ) -> tuple[bytes, tuple[int, int]]:
                nonlocal made
                answer = receive(this, size, how)
                if this.fileno() == route._socket.fileno() and made < changes:  # noqa: SLF001
                    made += 1
                    other.add_loopback_address(4, f"172.16.0.{made}", 32)
                return answer

            socket.socket.recvfrom = then_change  # type: ignore[method-assign, assignment]
            return list(route.addresses()), made

    return call_inside(path, listing)


def test_interrupted_list_is_read_again(netns: str) -> None:
    """A change while the kernel writes the list leads to a second, consistent one."""
    found, made = change_while_listing(netns, changes=1)
    assert made == 1
    assert len(found) == len(set(found)) == 1500 + 1 + 2
    assert Address(4, "172.16.0.1", 32, 1) in found


def test_list_that_never_holds_still_is_an_error(netns: str) -> None:
    """After five interrupted lists there is an error that says so, not a half-true list."""
    with pytest.raises(TryAgainLater, match="the list changed each of 5 times"):
        change_while_listing(netns, changes=1000)


@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_list_after_an_interrupt_is_whole(netns: str, pieces: int) -> None:
    """Whoever takes back what was begun may list on a socket whose last list was not read out."""
    lines = (f"addr add 10.{n >> 8}.{n & 255}.1/32 dev lo" for n in range(1500))
    inside(netns, ["ip", "-batch", "-"], stdin="\n".join(lines))

    def listing() -> tuple[Address, ...]:
        receive, left = socket.socket.recvfrom, pieces

        def interrupted(this: socket.socket, size: int, how: int) -> tuple[bytes, tuple[int, int]]:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return receive(this, size, how)

        with Route() as route:
            socket.socket.recvfrom = interrupted  # type: ignore[method-assign, assignment]
            with pytest.raises(KeyboardInterrupt):
                route.addresses()
            socket.socket.recvfrom = receive  # type: ignore[method-assign]
            return route.addresses()

    assert len(set(call_inside(netns, listing))) == 1500 + 2


@pytest.mark.parametrize(
    ("family", "address", "length"), [(6, "::6", 128), (4, "127.0.0.6", 32), (4, "10.0.0.6", 24)]
)
def test_loopback_address_is_added_and_deleted_once(
    netns: str, family: int, address: str, length: int
) -> None:
    """The first time something is done, the second time it is not and no error either."""
    with route_in(netns) as route:
        before = route.addresses()
        assert route.add_loopback_address(family, address, length)
        assert not route.add_loopback_address(family, address, length)
        assert set(route.addresses()) - set(before) == {Address(family, address, length, 1)}
        assert family == 4 or route.has_loopback_address(address, length)
        shown = ip_json(netns, "addr", "show", "lo")[0]["addr_info"]
        inside(netns, ["ip", "addr", "del", f"{address}/{length}", "dev", "lo"])
        inside(netns, ["ip", "addr", "add", f"{address}/{length}", "dev", "lo"])
        assert ip_json(netns, "addr", "show", "lo")[0]["addr_info"] == shown
        assert route.delete_loopback_address(family, address, length)
        assert not route.delete_loopback_address(family, address, length)
        assert route.addresses() == before


def test_refused_address_says_why(netns: str) -> None:
    """The message names the address and has the kernel's reason."""
    with route_in(netns) as route, pytest.raises(ProgrammingFailed) as refused:
        route.add_loopback_address(4, "10.0.0.1", 33)
    assert refused.value.msg.startswith("adding the address 10.0.0.1/33 to lo: Invalid argument")
    inside(netns, ["sysctl", "-qw", "net.ipv6.conf.lo.disable_ipv6=1"])
    with route_in(netns) as route, pytest.raises(ProgrammingFailed, match=r"::6/128.*denied"):
        route.add_loopback_address(6, "::6", 128)


# -- loopback and routes ---------------------------------------------------------------------------


def test_loopback_goes_down_and_up(netns: str) -> None:
    """Setting a state twice is setting it once."""
    with route_in(netns) as route:
        assert route.loopback_is_up()
        for up in (False, False, True, True):
            route.set_loopback(up)
            assert route.loopback_is_up() is up
            assert ("UP" in ip_json(netns, "link", "show", "lo")[0]["flags"]) is up


def test_ipv6_route_needs_loopback_up(netns: str) -> None:
    """With `lo` down the route is refused with a reason; bringing it up is the cure."""
    with route_in(netns) as route:
        route.set_loopback(False)
        with pytest.raises(ProgrammingFailed) as refused:
            route.add_local_route(LocalRoute(6, TABLE))
        doing = "adding the IPv6 route local default dev lo table 133"
        assert refused.value.msg.startswith(f"{doing}: Network is down")
        route.set_loopback(True)
        assert route.add_local_route(LocalRoute(6, TABLE))


@FAMILIES
@pytest.mark.parametrize("table", [TABLE, 254, 70000])
def test_local_route_is_added_and_deleted_once(netns: str, family: int, table: int) -> None:
    """The route is the one that `ip route add local default dev lo table T` makes."""
    wanted = LocalRoute(family, table)
    command = ["ip", f"-{family}", "route"]
    what = ["local", "default", "dev", "lo", "table", str(table)]
    with route_in(netns) as route:
        assert route.local_routes(family) == ()
        assert route.add_local_route(wanted)
        assert not route.add_local_route(wanted)
        assert route.local_routes(family) == (wanted,)
        assert route.local_routes(10 - family) == ()
        ours = inside(netns, [*command, "show", "table", str(table)])
        assert route.delete_local_route(wanted)
        assert not route.delete_local_route(wanted)
        assert route.local_routes(family) == ()
        inside(netns, [*command, "add", *what])
        assert inside(netns, [*command, "show", "table", str(table)]) == ours
        assert not route.add_local_route(wanted)
        assert route.delete_local_route(wanted)
        assert inside(netns, [*command, "show", "table", str(table)], check=False) == ""


@pytest.mark.parametrize("strict", [True, False], ids=["the kernel filters", "it cannot"])
def test_local_routes_of_some_tables(
    netns: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that are not there have none; kernels before 4.20 list all routes."""
    if not strict:
        monkeypatch.setattr(Route, "check_strictly", lambda _: False)
    made = [LocalRoute(4, TABLE), LocalRoute(6, TABLE), LocalRoute(6, 70000), LocalRoute(4, 77)]
    with route_in(netns) as route:
        assert route.local_routes(tables=(TABLE, 77)) == ()
        for each in made:
            assert route.add_local_route(each)
        assert set(route.local_routes(tables=(TABLE, 70000, 5))) == set(made[:3])
        assert route.local_routes(6, tables=(70000, 77)) == (made[2],)
        assert set(route.local_routes()) == set(made)


@FAMILIES
def test_other_default_route_is_neither_taken_for_ours_nor_deleted(netns: str, family: int) -> None:
    """A table whose default route leads elsewhere has none of ours."""
    command = ["ip", f"-{family}", "route"]
    add_interfaces(netns)
    inside(
        netns, [*command, "add", "unreachable", "default", "table", str(TABLE), "metric", "1024"]
    )
    inside(netns, [*command, "add", "local", "default", "dev", "eth0", "table", "77"])
    with route_in(netns) as route:
        assert route.local_routes(family) == ()
        assert not route.delete_local_route(LocalRoute(family, TABLE))
        assert not route.delete_local_route(LocalRoute(family, 77))
    assert "unreachable" in inside(netns, [*command, "show", "table", str(TABLE)])


def test_default_route_that_leads_elsewhere_is_an_error(netns: str) -> None:
    """It would keep marked packets from the proxy, so it does not count as present."""
    inside(netns, ["ip", "route", "add", "unreachable", "default", "table", str(TABLE)])
    with route_in(netns) as route, pytest.raises(ProgrammingFailed, match="table 133: File exists"):
        route.add_local_route(LocalRoute(4, TABLE))


# -- policy rules ----------------------------------------------------------------------------------


@FAMILIES
def test_policy_rule_is_added_and_deleted_once(netns: str, family: int) -> None:
    """The rule is the one that `ip rule add fwmark … lookup … priority …` makes."""
    rule = capture_rule(family)
    command = ["ip", f"-{family}", "rule"]
    what = ["fwmark", str(MARK), "lookup", str(TABLE), "priority", str(PRIORITY)]
    with route_in(netns) as route:
        before = route.policy_rules(family)
        assert route.add_policy_rule(rule)
        assert not route.add_policy_rule(rule)
        assert set(route.policy_rules(family)) - set(before) == {rule}
        ours = inside(netns, ["ip", "-d", f"-{family}", "rule"])
        assert route.delete_policy_rule(rule)
        assert not route.delete_policy_rule(rule)
        inside(netns, [*command, "add", *what])
        assert inside(netns, ["ip", "-d", f"-{family}", "rule"]) == ours
        assert rule in route.policy_rules(family)
        assert not route.add_policy_rule(rule)
        assert route.delete_policy_rule(rule)
        assert route.policy_rules(family) == before


@FAMILIES
def test_policy_rules_are_those_ip_shows(netns: str, family: int) -> None:
    """Priority, mark, mask and table of all rules, in order, the kernel's own included."""
    command = ["ip", f"-{family}", "rule", "add"]
    inside(netns, [*command, "fwmark", "0x539", "lookup", "133"])  # the kernel gives a priority
    inside(netns, [*command, "fwmark", "0x10/0xf0", "lookup", "100000", "priority", "7"])
    names = {"local": 255, "main": 254, "default": 253}

    def number(shown: object) -> int:
        return names.get(str(shown)) or int(str(shown), 0)

    def shown(rule: dict[str, Any]) -> tuple[int, int, int, int]:
        mark = int(str(rule.get("fwmark", "0")), 0)
        mask = int(str(rule.get("fwmask", "0xffffffff" if mark else "0")), 0)
        return int(str(rule["priority"])), mark, mask, number(rule["table"])

    with route_in(netns) as route:
        found = route.policy_rules(family)
    assert [one[1:5] for one in found] == [
        shown(one) for one in ip_json(netns, f"-{family}", "rule")
    ]


@FAMILIES
def test_policy_rules_are_those_pyroute2_sees(netns: str, family: int) -> None:
    """The same numbers read by another implementation."""

    def by_pyroute2() -> list[tuple[int, int, int, int]]:
        from pyroute2 import IPRoute

        with IPRoute() as oracle:
            return [
                (
                    one.get("FRA_PRIORITY") or 0,
                    one.get("FRA_FWMARK") or 0,
                    one.get("FRA_FWMASK") or 0,
                    one.get("FRA_TABLE"),
                )
                for one in oracle.get_rules(family={4: 2, 6: 10}[family])
            ]

    with route_in(netns) as route:
        route.add_policy_rule(capture_rule(family))
        route.add_policy_rule(PolicyRule(family, 5, 0x10, 0xF0, 100000))
        found = route.policy_rules(family)
    assert [one[1:5] for one in found] == call_inside(netns, by_pyroute2)


@FAMILIES
@pytest.mark.parametrize(
    "selector",
    [
        ["iif", "lo", "fwmark", "1337", "lookup", "133"],
        ["not", "fwmark", "1337", "lookup", "133"],
        ["from", "SOURCE", "tos", "0x10", "fwmark", "0x539/0xfff", "lookup", "133"],
        ["uidrange", "5-7", "ipproto", "tcp", "dport", "80-90", "lookup", "133"],
        ["fwmark", "1337", "unreachable"],
        ["fwmark", "1337", "lookup", "133", "suppress_prefixlength", "0", "protocol", "9"],
    ],
)
def test_listed_rule_can_be_deleted_and_put_back_exactly(
    netns: str, family: int, selector: list[str]
) -> None:
    """Whatever else a rule says survives in `rest`, and no other rule is hit."""
    source = {4: "10.0.0.0/8", 6: "fd00::/8"}[family]
    selector = [source if word == "SOURCE" else word for word in selector]
    inside(netns, ["ip", f"-{family}", "rule", "add", *selector, "priority", "9"])
    with route_in(netns) as route:
        before = inside(netns, ["ip", "-d", f"-{family}", "rule"])
        rule = next(one for one in route.policy_rules(family) if one.priority == 9)
        assert rule.rest
        assert not route.delete_policy_rule(rule._replace(rest=b""))
        assert inside(netns, ["ip", "-d", f"-{family}", "rule"]) == before
        assert route.delete_policy_rule(rule)
        assert "9:" not in inside(netns, ["ip", f"-{family}", "rule"]).split()
        assert route.add_policy_rule(rule)
        assert inside(netns, ["ip", "-d", f"-{family}", "rule"]) == before


def test_unpermitted_change_says_what_was_being_done(netns: str) -> None:
    """An error that is no state of the kernel's objects is never taken for one."""

    def unprivileged() -> None:
        import os

        with Route() as route:
            os.setresuid(1337, 1337, 1337)
            route.add_policy_rule(capture_rule(4))

    with pytest.raises(ProgrammingFailed) as refused:
        call_inside(netns, unprivileged)
    wanted = "adding the IPv4 policy rule 31337: fwmark 0x539 lookup 133: Operation not permitted"
    assert refused.value.msg == wanted


def test_kernel_without_a_family_has_no_rules_in_it(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that the kernel does not know is an empty list, not an error."""
    from istio_cni.edge.netlink import route as route_module

    monkeypatch.setitem(route_module._AF, 6, 40)  # noqa: SLF001 - AF_VSOCK: known, without routes
    with route_in(netns) as route:
        assert route.policy_rules(6) == ()
        assert route.local_routes(6) == ()


def test_silent_kernel_is_given_up() -> None:
    """Every wait ends: here there is nothing to wait for, since nothing was asked."""
    with Route(timeout_s=0.05) as route, pytest.raises(ProgrammingFailed, match=r"within 0\.05 s"):
        list(route._receive("waiting"))  # noqa: SLF001


# -- tables ----------------------------------------------------------------------------------------


def leave_empty_table(path: str, program: str = "iptables-nft", table: str = "nat") -> None:
    """Do what a probe does: insert a rule and delete it again."""
    for action in ("-A", "-D"):
        inside(path, [program, "-t", table, action, "OUTPUT", "-p", "tcp", "-j", "ACCEPT"])


def ruleset(path: str) -> str:
    """All of nf_tables, as text."""
    return inside(path, ["nft", "list", "ruleset"])


def test_tables_are_those_nft_shows(netns: str) -> None:
    """Family and name of every table, whatever its family."""
    assert call_inside(netns, present_tables) == ()
    for family in ("ip", "ip6", "inet", "arp", "bridge", "netdev"):
        inside(netns, ["nft", "add", "table", family, f"a-{family}"])
    listed = json.loads(inside(netns, ["nft", "-j", "list", "tables"]))["nftables"]
    shown = [(one["table"]["family"], one["table"]["name"]) for one in listed if "table" in one]
    assert len(shown) == 6
    assert sorted(call_inside(netns, present_tables)) == sorted(shown)


@pytest.mark.parametrize(("program", "family"), [("iptables-nft", "ip"), ("ip6tables-nft", "ip6")])
@pytest.mark.parametrize("table", ["nat", "mangle", "raw", "filter"])
def test_table_left_by_a_probe_is_swept(netns: str, program: str, family: str, table: str) -> None:
    """What iptables-nft leaves behind vanishes, once."""
    leave_empty_table(netns, program, table)
    assert ruleset(netns) != ""
    assert call_inside(netns, sweep_empty_tables) == ((family, table),)
    assert ruleset(netns) == ""
    assert call_inside(netns, sweep_empty_tables) == ()


def test_only_candidates_are_swept(netns: str) -> None:
    """Other empty tables, and tables of other names, stay."""
    leave_empty_table(netns, table="nat")
    leave_empty_table(netns, table="raw")
    inside(netns, ["nft", "add", "table", "inet", "nat"])
    assert call_inside(netns, sweep_empty_tables, (("ip", "nat"), ("ip6", "nat"))) == (
        ("ip", "nat"),
    )
    assert call_inside(netns, present_tables) == (("ip", "raw"), ("inet", "nat"))
    assert call_inside(netns, sweep_empty_tables, ()) == ()


@pytest.mark.parametrize(
    "content",
    [
        "add rule ip nat OUTPUT counter",
        "add chain ip nat ISTIO_OUTPUT",
        "add set ip nat ports { type inet_service; }",
        "add map ip nat ports { type inet_service : verdict; }",
        "add counter ip nat seen",
        "add flowtable ip nat fast { hook ingress priority 0; }",
        "add chain ip nat own { type filter hook input priority 0; policy drop; }",
        "add chain ip nat OUTPUT { policy drop; }",
    ],
)
def test_table_that_holds_anything_stays(netns: str, content: str) -> None:
    """A rule, regular chain, set, map, object, flowtable or drop policy protects the whole."""
    leave_empty_table(netns)
    try:
        inside(netns, ["nft", content])
    except AssertionError as error:
        if "flowtable" in content and "No such file" in str(error):
            pytest.skip("needs a kernel with flowtables")
        raise
    before = ruleset(netns)
    assert call_inside(netns, sweep_empty_tables) == ()
    assert ruleset(netns) == before


def looked_then_changed_then_deleted(path: str, change: str, check_generation: bool) -> bool:
    """Put a change of somebody else between looking at `ip nat` and its deletion."""

    def run() -> bool:
        with Nftables() as nftables:
            generation = nftables.generation()
            chains = nftables.idle_chains("ip", "nat")
            assert chains == ("OUTPUT",)
            subprocess.run(["nft", change], check=True)
            since = generation if check_generation else 0
            return nftables.delete_idle("ip", "nat", chains, since)

    return call_inside(path, run)


@pytest.mark.parametrize("check_generation", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        "add rule ip nat OUTPUT counter",
        "add chain ip nat ISTIO_OUTPUT",
        "add chain ip nat INPUT { type nat hook input priority 100; }",
        "add set ip nat ports { type inet_service; }",
        "delete table ip nat",
    ],
)
def test_kernel_refuses_what_came_to_be_used(
    netns: str, change: str, check_generation: bool
) -> None:
    """What comes in between looking and deleting stops the deletion, as a whole and silently."""
    leave_empty_table(netns)
    assert not looked_then_changed_then_deleted(netns, change, check_generation)
    assert ("OUTPUT" in ruleset(netns)) is (not change.startswith("delete"))


def test_generation_protects_a_policy_that_changed(netns: str) -> None:
    """The kernel does not count a policy as a use; the generation number stands in."""
    leave_empty_table(netns)
    drop = "add chain ip nat OUTPUT { policy drop; }"
    assert not looked_then_changed_then_deleted(netns, drop, check_generation=True)
    assert "policy drop" in ruleset(netns)


def test_unchanged_table_is_deleted_with_its_generation(netns: str) -> None:
    """The check passes if nothing has changed; an unrelated change counts as one."""
    leave_empty_table(netns)
    assert not looked_then_changed_then_deleted(netns, "add table inet x", check_generation=True)
    assert looked_then_changed_then_deleted(netns, "add table inet y", check_generation=False)
    assert call_inside(netns, present_tables) == (("inet", "x"), ("inet", "y"))


def test_errors_of_one_batch_are_not_taken_for_the_nexts(netns: str) -> None:
    """Each refusal concerns its own batch, on the same socket, however many errors it had."""
    leave_empty_table(netns)

    def run() -> tuple[bool, bool]:
        with Nftables() as nftables:
            absent = ("a", "b", "c")
            return (
                nftables.delete_idle("ip", "nat", absent),
                nftables.delete_idle("ip", "nat", ("OUTPUT",)),
            )

    assert call_inside(netns, run) == (False, True)
    assert ruleset(netns) == ""


def present_tables() -> tuple[tuple[str, str], ...]:
    """Return family and name of each nf_tables table here."""
    return tuple((table.family, table.name) for table in nft_tables())


def test_kernel_without_nf_tables_has_nothing_to_sweep(netns: str) -> None:
    """Neither a netfilter netlink without nf_tables nor a kernel without either is an error."""
    leave_empty_table(netns)

    def without(name: str, number: int) -> Callable[[], tuple[object, object]]:
        def run() -> tuple[object, object]:
            setattr(tables, name, number)
            return sweep_empty_tables(), present_tables()

        return run

    assert call_inside(netns, without("NF_TABLES", 200)) == ((), ())
    assert call_inside(netns, without("_NETLINK_NETFILTER", 31)) == ((), ())
    assert call_inside(netns, present_tables) == (("ip", "nat"),)


def test_legacy_tables_are_those_instantiated(netns: str) -> None:
    """A table appears with its first use, in its family and namespace only."""
    assert call_inside(netns, legacy_tables, 4) == ()
    assert call_inside(netns, legacy_tables, 6) == ()
    inside(netns, ["iptables-legacy", "-t", "nat", "-S"])
    inside(netns, ["iptables-legacy", "-t", "mangle", "-S"])
    inside(netns, ["ip6tables-legacy", "-t", "raw", "-S"])
    assert sorted(call_inside(netns, legacy_tables, 4)) == ["mangle", "nat"]
    assert call_inside(netns, legacy_tables, 6) == ("raw",)


def test_legacy_tables_are_the_threads(netns: str) -> None:
    """A thread inside a namespace sees that one's, though the process is elsewhere."""
    inside(netns, ["iptables-legacy", "-t", "security", "-S"])
    seen: list[tuple[str, ...]] = []

    def look() -> None:
        enter(netns)
        seen.append(legacy_tables(4))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [("security",)]


# -- cookie ----------------------------------------------------------------------------------------


def test_cookie_tells_namespaces_apart(new_netns: Callable[[], str]) -> None:
    """It is stable for a namespace, differs between any two, and is 0 where it is unknown."""
    one, other = new_netns(), new_netns()
    cookies = [call_inside(path, namespace_cookie) for path in (one, one, other)]
    assert cookies[0] == cookies[1]
    assert len({*cookies, namespace_cookie(), 0}) == 4


def test_cookie_is_zero_on_old_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not know the option says so; the caller has then nothing to compare."""
    monkeypatch.setattr(messages, "_SO_NETNS_COOKIE", 9999)
    assert namespace_cookie() == 0
