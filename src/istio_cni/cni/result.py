"""The result that ADD prints: the previous plugin's, in the version that the runtime asked for.

The plugin changes nothing in a result, so the best it can do is not to touch it: a result of the
same family (0.1-0.2, 0.3-0.4, 1.x; within one only the version differs) is handed on as it came.
Between families it is taken apart into objects, which keep every key that we do not know, and put
together again. The reference refuses a result of another family, or one without version; but the
runtime hands on whatever the previous plugin printed, so both occur, and both have one obvious
reading.

A result is checked also where nothing is converted: one that the runtime cannot read must fail
here, before rules are programmed, not afterwards.
"""

from __future__ import annotations

from istio_cni.cni.request import lookup
from istio_cni.constants import SUPPORTED_VERSIONS
from istio_cni.errors import DecodingFailure, InvalidNetconf, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from istio_cni.cni.document import JSON

FLAT, CHAINED, CURRENT = "0.1-0.2", "0.3-0.4", "1.x"  # families of versions: one form of result
FAMILIES = dict(zip(SUPPORTED_VERSIONS, (FLAT,) * 2 + (CHAINED,) * 3 + (CURRENT,) * 2, strict=True))

_INTERFACE_KEYS = ("name", "mac", "sandbox", "mtu", "socketPath", "pciID")
_INTERFACE_KEYS_OF_CURRENT = ("mtu", "socketPath", "pciID")
_IP_KEYS = ("version", "address", "gateway", "interface")
_IP_KEYS_OF_ONE_FORM = ("version", "address", "interface", "ip", "routes")
_FLAT_KEYS = ("ip", "gateway", "routes")
_ROUTE_KEYS = ("dst", "gw", "mtu", "advmss", "priority", "table", "scope")
_DNS_KEYS = ("nameservers", "domain", "search", "options")
_LISTS_AND_DNS = ("cniVersion", "interfaces", "ips", "routes", "dns")
_TOP_KEYS = {
    FLAT: ("cniVersion", "ip4", "ip6", "dns"),
    CHAINED: _LISTS_AND_DNS,
    CURRENT: _LISTS_AND_DNS,
}
_OCTETS = frozenset(map(str, range(256)))
_HEX = frozenset("0123456789abcdefABCDEF")


class Parts:
    """A result of any version, taken apart; objects keep keys that we do not know."""

    __slots__ = ("dns", "interfaces", "ips", "others", "routes")

    def __init__(self, others: JSON) -> None:
        self.others = others  # keys of the result itself that we do not know
        self.interfaces: list[JSON] = []
        self.ips: list[JSON] = []  # in the form of 1.x, without `version`
        self.routes: list[JSON] = []
        self.dns: JSON = {}


def convert(prev_result: object, version: str) -> JSON:
    """Make the result to print in `version`, one of ours; `prev_result` is not altered.

    Without a previous result it says the version and nothing else. Up to 0.2.0 a result needs an
    address: without one InvalidNetconf is raised. A malformed result raises DecodingFailure.
    """
    if prev_result is None:
        prev_result = {}
    if not isinstance(prev_result, dict):
        raise _refusal("prevResult", prev_result, "an object")
    declared = _declared_version(prev_result, version)
    parts = _take_apart(prev_result, FAMILIES[declared])
    if FAMILIES[version] == FLAT and not parts.ips:
        raise InvalidNetconf(
            f"a result of cniVersion {version} needs an address, and prevResult holds none: "
            "use a cniVersion from 0.3.0 on"
        )
    if prev_result and FAMILIES[declared] == FAMILIES[version]:
        return _with_version(prev_result, version)
    return _put_together(parts, version)


def addresses(prev_result: object) -> list[str]:
    """List the addresses in a result of any version, without prefix length; skip what is odd."""
    if not isinstance(prev_result, dict):
        return []
    ips = lookup(prev_result, "ips")
    found = [
        lookup(ip, "address")
        for ip in (ips if isinstance(ips, list) else [])
        if isinstance(ip, dict)
    ]
    for key in ("ip4", "ip6"):
        flat = lookup(prev_result, key)
        if isinstance(flat, dict):
            found.append(lookup(flat, "ip"))
    return [ip.partition("/")[0] for ip in found if isinstance(ip, str) and _ip_version(ip)]


def _declared_version(result: JSON, requested: str) -> str:
    """Read the version of a result; one that says none has the requested one."""
    declared = lookup(result, "cniVersion")
    if declared is None or declared == "":
        return requested
    if not isinstance(declared, str) or declared not in FAMILIES:
        raise _refusal("prevResult.cniVersion", declared, f"one of {', '.join(SUPPORTED_VERSIONS)}")
    return declared


def _with_version(result: JSON, version: str) -> JSON:
    """Copy a result, every key in its place, and let it say `version`, once."""
    spelled = {"cniVersion" if key.lower() == "cniversion" else key: result[key] for key in result}
    if "cniVersion" not in spelled:
        return {"cniVersion": version, **result}
    spelled["cniVersion"] = version
    return spelled


def _take_apart(result: JSON, family: str) -> Parts:
    """Check a result of one family and take it apart; raises DecodingFailure."""
    top = _spelled(result, _TOP_KEYS[family], "prevResult")
    top.pop("cniVersion", None)
    parts = Parts(top)
    dns = top.pop("dns", None)
    if dns is not None:
        parts.dns = _spelled(dns, _DNS_KEYS, "prevResult.dns")
    if family == FLAT:
        for key in ("ip4", "ip6"):
            given = top.pop(key, None)
            if given is not None:
                flat = _spelled(given, _FLAT_KEYS, f"prevResult.{key}")
                _check_cidr(flat.get("ip"), f"prevResult.{key}.ip")
                parts.ips.append({"address": flat["ip"], **_without(flat, _IP_KEYS_OF_ONE_FORM)})
                parts.routes += _routes(flat.get("routes"), f"prevResult.{key}.routes")
        return parts
    given = top.pop("interfaces", None)
    parts.interfaces = _objects(given, _INTERFACE_KEYS, "prevResult.interfaces")
    parts.ips = _objects(top.pop("ips", None), _IP_KEYS, "prevResult.ips")
    parts.routes = _routes(top.pop("routes", None), "prevResult.routes")
    for index, ip in enumerate(parts.ips):
        _check_cidr(ip.get("address"), f"prevResult.ips[{index}].address")
        interface = ip.get("interface")
        if not isinstance(interface, int | None) or isinstance(interface, bool):
            raise _refusal(f"prevResult.ips[{index}].interface", interface, "an index")
        if family == CHAINED:
            ip.pop("version", None)  # the address itself says it
    return parts


def _put_together(parts: Parts, version: str) -> JSON:
    """Build a result of `version`; empty lists are left out, and from 1.0.0 on an empty `dns`."""
    family = FAMILIES[version]
    result: JSON = {"cniVersion": version}
    if family == FLAT:
        result |= _flat_addresses(parts)
    else:
        interfaces, ips = parts.interfaces, parts.ips
        if family == CHAINED:
            interfaces = [_without(item, _INTERFACE_KEYS_OF_CURRENT) for item in interfaces]
            ips = [{**ip, "version": _ip_version(ip["address"])} for ip in ips]
        for key, items in (("interfaces", interfaces), ("ips", ips), ("routes", parts.routes)):
            if items:
                result[key] = items
    if parts.dns or family != CURRENT:
        result["dns"] = parts.dns
    return result | _without(parts.others, _TOP_KEYS[family])  # there they would mean something


def _flat_addresses(parts: Parts) -> JSON:
    """Build `ip4` and `ip6`: the first address of each kind, with the routes of its kind."""
    found: JSON = {}
    for key, ip_version in (("ip4", "4"), ("ip6", "6")):
        ip = next((ip for ip in parts.ips if _ip_version(ip["address"]) == ip_version), None)
        if ip is None:
            continue
        routes = [
            {name: route[name] for name in ("dst", "gw") if name in route}
            for route in parts.routes
            if _ip_version(route["dst"]) == ip_version
        ]
        flat = {"ip": ip["address"], **_without(ip, _IP_KEYS_OF_ONE_FORM)}
        found[key] = flat | {"routes": routes} if routes else flat
    return found


def _spelled(value: object, keys: tuple[str, ...], where: str) -> JSON:
    """Copy an object, its known keys spelled exactly; raises DecodingFailure."""
    if not isinstance(value, dict):
        raise _refusal(where, value, "an object")
    given: JSON = value
    exact = {key.lower(): key for key in keys}
    copy: JSON = {}
    for name, item in given.items():
        key = exact.get(name.lower(), name)
        if key == name or key not in given:
            copy[key] = item
    return copy


def _objects(value: object, keys: tuple[str, ...], where: str) -> list[JSON]:
    """Copy a list of objects as `_spelled` does; null is an empty list."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise _refusal(where, value, "a list")
    return [_spelled(item, keys, f"{where}[{index}]") for index, item in enumerate(value)]


def _routes(value: object, where: str) -> list[JSON]:
    """Copy a list of routes, their destinations checked."""
    routes = _objects(value, _ROUTE_KEYS, where)
    for index, route in enumerate(routes):
        _check_cidr(route.get("dst"), f"{where}[{index}].dst")
    return routes


def _without(item: JSON, keys: tuple[str, ...]) -> JSON:
    lowered = [key.lower() for key in keys]
    return {key: value for key, value in item.items() if key.lower() not in lowered}


def _check_cidr(value: object, where: str) -> None:
    """Refuse what is no address with prefix length; host bits may be set."""
    if isinstance(value, str):
        length = value.partition("/")[2]
        limit = {"4": 32, "6": 128}.get(_ip_version(value), -1)
        if length.isascii() and length.isdigit() and len(length) <= 3 and int(length) <= limit:
            return
    raise _refusal(where, value, "an address with a prefix length")


def _ip_version(address: object) -> str:
    """Tell "4" or "6" for an address with or without prefix length, "" for anything else.

    `ipaddress` would cost each ADD four milliseconds.
    """
    text = str(address).partition("/")[0]
    if ":" not in text:
        return "4" if _is_dotted_quad(text) else ""
    head, gap, tail = text.partition("::")
    groups = [group for side in (head, tail) if side for group in side.split(":")]
    room = 8
    if groups and text.endswith(groups[-1]) and _is_dotted_quad(groups[-1]):
        groups.pop()
        room = 6
    fits = len(groups) < room if gap else len(groups) == room
    return "6" if fits and all(0 < len(g) < 5 and _HEX.issuperset(g) for g in groups) else ""


def _is_dotted_quad(text: str) -> bool:
    return text.count(".") == 3 and all(octet in _OCTETS for octet in text.split("."))


def _refusal(where: str, value: object, wanted: str) -> DecodingFailure:
    if value is None:
        return DecodingFailure(f"{where} is missing or null: it must be {wanted}")
    return DecodingFailure(f"{where} is {quoted(value)}, not {wanted}")
