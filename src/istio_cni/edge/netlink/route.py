"""Addresses, policy rules and routes: rtnetlink, as far as capture needs it.

TPROXY needs a policy rule and a route that deliver marked packets to this host, IPv6 capture an
additional address on `lo`, and whether there is IPv6 to capture shows in the pod's addresses.
Integers are in host order here. Additions and deletions say whether they changed anything, so that
whoever fails later can take back exactly what was done.

Source: include/uapi/linux/rtnetlink.h, if_addr.h, fib_rules.h
"""

from __future__ import annotations

import errno
import socket
import struct
from collections import namedtuple
from fcntl import ioctl

from istio_cni.edge.netlink.messages import (
    CREATE,
    CREATE_NEW,
    DUMP,
    Netlink,
    Refused,
    refusal,
)
from istio_cni.rules.netlink import attribute, attributes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

LOOPBACK_INDEX = 1  # `lo` has it in every namespace: net/core/dev.c relies on it
WHOLE_MARK = 0xFFFFFFFF  # mask of a policy rule that compares all bits

_NEWLINK = 16
_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_NEWRULE, _DELRULE, _GETRULE = 32, 33, 34
_LINK = struct.Struct("=BBHiII")  # family, -, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, dst, src, tos, table, protocol, scope, type, flags
_RULE = struct.Struct("=BBBBBBBBI")  # family, dst, src, tos, table, -, -, action, flags
_NAMED = struct.Struct("=16sH22x")  # struct ifreq: name, flags
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_OIF, _RTA_TABLE = 4, 15
_PROTOCOL_ANY, _PROTOCOL_BOOT = 0, 3
_SCOPE_GLOBAL, _SCOPE_HOST, _SCOPE_ANY = 0, 254, 255
_TYPE_LOCAL = 2
_TABLE_LOCAL = 255
_FRA_PRIORITY, _FRA_MARK, _FRA_TABLE, _FRA_MASK = 6, 10, 15, 16
_FRA_NAMED = (_FRA_PRIORITY, _FRA_MARK, _FRA_TABLE, _FRA_MASK)
_FRA_DEFAULTS = ((14, b"\xff\xff\xff\xff"), (21, b"\0"))  # no prefix suppressed, no protocol given
_WHOLE_MASK = attribute(_FRA_MASK, struct.pack("=I", WHOLE_MARK))
_PLAIN_RULE = _RULE.pack(0, 0, 0, 0, 0, 0, 0, 1, 0)  # action 1: look up the table

_AF = {4: int(socket.AF_INET), 6: int(socket.AF_INET6)}
_FAMILY = {number: family for family, number in _AF.items()}
_BOTH = 0  # AF_UNSPEC
_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EOPNOTSUPP)


class Address(namedtuple("Address", ("family", "address", "prefix_length", "ifindex"))):
    """An interface's own address: `family` is 4 or 6, `address` its canonical text."""

    __slots__ = ()
    family: int
    address: str
    prefix_length: int
    ifindex: int


class PolicyRule(
    namedtuple(
        "PolicyRule", ("family", "priority", "mark", "mask", "table", "rest"), defaults=(b"",)
    )
):
    """`ip rule … priority PRIORITY fwmark MARK/MASK lookup TABLE`, `family` being 4 or 6.

    `rest` is empty for a rule that says no more than this. Otherwise it is all else that the kernel
    says of it, in its own form, so that a listed rule can be deleted, and put back, exactly.
    """

    __slots__ = ()
    family: int
    priority: int
    mark: int
    mask: int
    table: int
    rest: bytes


class LocalRoute(namedtuple("LocalRoute", ("family", "table"))):
    """`ip route … local default dev lo table TABLE`: what is looked up there is for this host."""

    __slots__ = ()
    family: int
    table: int


class Route(Netlink):
    """rtnetlink in the namespace of the thread that makes this; a context manager."""

    def __init__(self, timeout_s: float = 2.0) -> None:
        super().__init__(socket.NETLINK_ROUTE, timeout_s)

    def addresses(self) -> tuple[Address, ...]:
        """List the addresses of all interfaces, whatever their state, in the kernel's order."""
        request = _ADDRESS.pack(0, 0, 0, 0, 0)
        found = []
        for reply in self.ask("listing the addresses", _GETADDR, DUMP, request):
            family, prefix_length, _, _, ifindex = _ADDRESS.unpack_from(reply)
            said = dict(attributes(reply, _ADDRESS.size))
            own = said.get(_IFA_LOCAL) or said.get(
                _IFA_ADDRESS
            )  # with both, the latter is the peer
            if family in _FAMILY and own:
                address = socket.inet_ntop(family, own)
                found.append(Address(_FAMILY[family], address, prefix_length, ifindex))
        return tuple(found)

    def loopback_is_up(self) -> bool:
        """Say whether `lo` is up, administratively; its name is the same in every namespace, too.

        By netlink the kernel would tell all that it knows of it, a page of counters.
        """
        try:
            reply = ioctl(self.fileno(), _SIOCGIFFLAGS, _NAMED.pack(b"lo", 0))
        except OSError as error:
            raise refusal("reading the state of lo", error.errno or 0) from error
        return bool(_NAMED.unpack(reply)[1] & _IFF_UP)

    def set_loopback(self, up: bool) -> None:
        """Bring `lo` up, or down, which also removes its IPv6 addresses and routes through it."""
        body = _LINK.pack(0, 0, 0, LOOPBACK_INDEX, _IFF_UP if up else 0, _IFF_UP)
        self.ask(f"setting lo {'up' if up else 'down'}", _NEWLINK, 0, body)

    def has_loopback_address(self, address: str, prefix_length: int) -> bool:
        """Tell whether `lo` has an IPv6 address; asked by name, since a pod may have many."""
        body = _address_body(6, address, prefix_length)
        absent = (errno.EADDRNOTAVAIL, *_NO_FAMILY)
        try:
            self.ask(f"looking for the address {address} on lo", _GETADDR, 0, body)
        except Refused as refused:
            if refused.errno not in absent:
                raise
            return False
        return True

    def add_loopback_address(self, family: int, address: str, prefix_length: int) -> bool:
        """Give `lo` an address; False if it has it."""
        doing = f"adding the address {address}/{prefix_length} to lo"
        body = _address_body(family, address, prefix_length)
        return self.change(doing, _NEWADDR, CREATE_NEW, body, unless=errno.EEXIST)

    def delete_loopback_address(self, family: int, address: str, prefix_length: int) -> bool:
        """Take an address from `lo`; False if it does not have it."""
        doing = f"deleting the address {address}/{prefix_length} from lo"
        body = _address_body(family, address, prefix_length)
        return self.change(doing, _DELADDR, 0, body, unless=errno.EADDRNOTAVAIL)

    def policy_rules(self, family: int) -> tuple[PolicyRule, ...]:
        """List the policy rules of a family in order; none if the kernel lacks the family."""
        replies = self._list("listing the policy rules", _GETRULE, family)
        return tuple(_parse_rule(reply) for reply in replies)

    def marked_rules(self) -> tuple[PolicyRule, ...]:
        """List the policy rules of both families that compare a whole mark."""
        replies = self._list("listing the policy rules", _GETRULE, _BOTH)
        found = (_parse_rule(reply) for reply in replies if _WHOLE_MASK in reply)
        return tuple(rule for rule in found if rule.mask == WHOLE_MARK)

    def add_policy_rule(self, rule: PolicyRule) -> bool:
        """Add a rule; False if the very same one is there, priority included.

        This looks by itself: to the kernel a rule that says more is there already, too.
        """
        if rule in self.policy_rules(rule.family):
            return False
        self.ask(f"adding {_shown_rule(rule)}", _NEWRULE, CREATE, _rule_body(rule))
        return True

    def delete_policy_rule(self, rule: PolicyRule) -> bool:
        """Delete a rule as `policy_rules` lists it; False if it is not there.

        The kernel takes what a request leaves out for "any", and of the rules of one priority that
        fit the first one. Where that was another rule, all of this priority are made anew.
        """
        before = self._rules_beside(rule)
        if rule not in before:
            return False
        self._delete_first(rule)
        after = self._rules_beside(rule)
        if rule in after:
            for each in after:  # in their order, so that each is the first that fits
                self._delete_first(each)
            for each in before:
                if each != rule:
                    self.add_policy_rule(each)
        return True

    def _rules_beside(self, rule: PolicyRule) -> tuple[PolicyRule, ...]:
        listed = self.policy_rules(rule.family)
        return tuple(each for each in listed if each.priority == rule.priority)

    def _delete_first(self, rule: PolicyRule) -> None:
        doing = f"deleting {_shown_rule(rule)}"
        self.change(doing, _DELRULE, 0, _rule_body(rule), unless=errno.ENOENT)

    def local_routes(
        self, family: int = _BOTH, tables: Collection[int] = ()
    ) -> tuple[LocalRoute, ...]:
        """List the tables, other than `local`, by which everything is delivered to this host.

        Of these `tables` only, if any are given; other routes may be many.
        """
        replies = self._list("listing the routes", _GETROUTE, family, tables)
        routes = (_parse_route(reply) for reply in replies)
        found = dict.fromkeys(route for route in routes if route)
        return tuple(route for route in found if not tables or route.table in tables)

    def add_local_route(self, route: LocalRoute) -> bool:
        """Add a route; False if it is there. Another default route in its table is an error."""
        doing = f"adding {_shown_route(route)}"
        body = _route_body(route, _SCOPE_HOST, _PROTOCOL_BOOT)
        try:
            self.ask(doing, _NEWROUTE, CREATE_NEW, body)
        except Refused as refused:
            if refused.errno == errno.EEXIST and route in self.local_routes(route.family):
                return False
            raise
        return True

    def delete_local_route(self, route: LocalRoute) -> bool:
        """Delete a route; False if it is not there."""
        # For IPv6 the kernel compares no type, and an unreachable default is on `lo` as well.
        if route not in self.local_routes(route.family):
            return False
        doing = f"deleting {_shown_route(route)}"
        body = _route_body(route, _SCOPE_ANY, _PROTOCOL_ANY)
        return self.change(doing, _DELROUTE, 0, body, unless=errno.ESRCH)

    def _list(
        self, doing: str, kind: int, family: int, tables: Collection[int] = ()
    ) -> list[bytes]:
        """Dump the rules or routes of one family or both, those of some tables if any are given."""
        wanted = (_AF[family],) if family else tuple(_FAMILY)
        if tables and self.check_strictly():
            asked = [_number(_RTA_TABLE, each) for each in tables]
        else:
            asked = [b""]
        number = _AF.get(family, _BOTH)
        replies = [reply for one in asked for reply in self._dump(doing, kind, number, one)]
        # There are other families, and a kernel without the one that is asked for may list them.
        return [reply for reply in replies if reply[0] in wanted]

    def _dump(self, doing: str, kind: int, family: int, about: bytes) -> list[bytes]:
        request = _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0) + about  # a rule's is as long
        try:
            return self.ask(doing, kind, DUMP, request)
        except Refused as refused:
            absent = (errno.ENOENT,) if about else ()  # there is no such table
            if refused.errno not in (*_NO_FAMILY, *absent):
                raise
            return []


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def _value(raw: bytes | None) -> int:
    return int(struct.unpack("=I", raw)[0]) if raw else 0


def _address_body(family: int, address: str, prefix_length: int) -> bytes:
    packed = socket.inet_pton(_AF[family], address)
    # As `ip addr add` has it; for IPv6 the kernel finds the scope itself.
    scope = _SCOPE_HOST if family == 4 and packed[0] == 127 else _SCOPE_GLOBAL
    header = _ADDRESS.pack(_AF[family], prefix_length, 0, scope, LOOPBACK_INDEX)
    return header + attribute(_IFA_LOCAL, packed) + attribute(_IFA_ADDRESS, packed)


def _parse_rule(reply: bytes) -> PolicyRule:
    """Read a policy rule; what no other field holds and is not a default is its `rest`."""
    said = list(attributes(reply, _RULE.size))
    more = [one for one in said if one[0] not in _FRA_NAMED and one not in _FRA_DEFAULTS]
    family, dst, src, tos, _, _, _, action, flags = _RULE.unpack_from(reply)
    rest = _RULE.pack(0, dst, src, tos, 0, 0, 0, action, flags)
    rest += b"".join(attribute(kind, payload) for kind, payload in more)
    known = dict(said)
    return PolicyRule(
        _FAMILY[family],
        _value(known.get(_FRA_PRIORITY)),
        _value(known.get(_FRA_MARK)),
        _value(known.get(_FRA_MASK)),
        _value(known.get(_FRA_TABLE)),
        b"" if rest == _PLAIN_RULE else rest,
    )


def _rule_body(rule: PolicyRule) -> bytes:
    body = bytes((_AF[rule.family],)) + (rule.rest or _PLAIN_RULE)[1:]
    body += _number(_FRA_PRIORITY, rule.priority) + _number(_FRA_TABLE, rule.table)
    if rule.mark or rule.mask:
        body += _number(_FRA_MARK, rule.mark) + _number(_FRA_MASK, rule.mask)
    return body


def _shown_rule(rule: PolicyRule) -> str:
    mark = f"{rule.mark:#x}" + ("" if rule.mask == WHOLE_MARK else f"/{rule.mask:#x}")
    return f"the IPv{rule.family} policy rule {rule.priority}: fwmark {mark} lookup {rule.table}"


def _parse_route(reply: bytes) -> LocalRoute | None:
    """Read a route; None unless it is `local default dev lo` in a table other than `local`."""
    family, dst, src, _, short_table, _, _, kind, _ = _ROUTE.unpack_from(reply)
    if (dst, src, kind) != (0, 0, _TYPE_LOCAL):
        return None
    said = dict(attributes(reply, _ROUTE.size))
    table = _value(said.get(_RTA_TABLE)) or short_table  # the header has one byte for it
    if table == _TABLE_LOCAL or _value(said.get(_RTA_OIF)) != LOOPBACK_INDEX:
        return None
    return LocalRoute(_FAMILY[family], table)


def _route_body(route: LocalRoute, scope: int, protocol: int) -> bytes:
    header = _ROUTE.pack(_AF[route.family], 0, 0, 0, 0, protocol, scope, _TYPE_LOCAL, 0)
    return header + _number(_RTA_TABLE, route.table) + _number(_RTA_OIF, LOOPBACK_INDEX)


def _shown_route(route: LocalRoute) -> str:
    return f"the IPv{route.family} route local default dev lo table {route.table}"
