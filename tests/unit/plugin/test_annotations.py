"""From annotations and the proxy's environment to a configuration: every row, every refusal."""

from __future__ import annotations

import time

import pytest

from istio_cni.errors import InvalidNetconf, InvalidParameter
from istio_cni.plugin import annotations
from istio_cni.plugin.annotations import ANNOTATIONS, KUBEVIRT, OTHER_KNOWN, capture_config
from istio_cni.plugin.netconf import Netconf
from istio_cni.plugin.pod import Pod
from istio_cni.rules.config import ALL, CaptureConfig
from istio_cni.rules.model import PortRange

JSON = dict[str, object]
TRAFFIC = "traffic.sidecar.istio.io/"
MODE = "sidecar.istio.io/interceptionMode"
REROUTE = "istio.io/reroute-virtual-interfaces"
IN_ORDER = (
    MODE,
    f"{TRAFFIC}includeOutboundIPRanges",
    f"{TRAFFIC}excludeOutboundIPRanges",
    f"{TRAFFIC}excludeInboundPorts",
    f"{TRAFFIC}includeInboundPorts",
    f"{TRAFFIC}excludeOutboundPorts",
    f"{TRAFFIC}includeOutboundPorts",
    f"{TRAFFIC}excludeInterfaces",
    REROUTE,
)
STATUS_PORTS = (15020, 15021, 15090)


def ports(*numbers: int) -> tuple[PortRange, ...]:
    """Make ranges of one port each."""
    return tuple(PortRange(number, number) for number in numbers)


def pod(annotations: dict[str, str] | None = None, **proxy: object) -> Pod:
    """Make a pod with a proxy container of these fields."""
    return Pod(
        {
            "metadata": {"name": "web", "namespace": "shop", "annotations": annotations or {}},
            "spec": {"containers": [{"name": "istio-proxy", **proxy}]},
        }
    )


def configure(
    annotations: dict[str, str] | None = None, netconf: JSON | None = None, **proxy: object
) -> tuple[CaptureConfig, list[str]]:
    """Return a pod's configuration and warnings."""
    return capture_config(pod(annotations, **proxy), Netconf(netconf or {}))


def refused(annotations: dict[str, str], netconf: JSON | None = None, **proxy: object) -> str:
    """Return the message with which a pod is refused."""
    with pytest.raises(InvalidParameter) as caught:
        configure(annotations, netconf, **proxy)
    assert "\n" not in caught.value.msg
    return caught.value.msg


# -- defaults, present but empty -------------------------------------------------------------------


def test_without_annotations_everything_is_captured_but_the_proxy_s_own_ports() -> None:
    """The defaults, spelled out."""
    config, warnings = configure()
    assert config == CaptureConfig(
        proxy_uids=("1337",),
        proxy_gids=("1337",),
        mode="REDIRECT",
        inbound_ports=ALL,
        inbound_ports_excluded=ports(*STATUS_PORTS),
        outbound_ports_excluded=ports(15020),
        outbound_ranges=ALL,
    )
    assert warnings == []


def test_rows_stand_in_the_order_in_which_they_are_checked() -> None:
    """Which of several mistakes is reported does not depend on luck."""
    assert tuple(row.name for row in ANNOTATIONS) == IN_ORDER
    assert {row.field for row in ANNOTATIONS} <= set(CaptureConfig._fields)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("includeOutboundIPRanges", "outbound_ranges", ()),
        ("excludeOutboundIPRanges", "outbound_ranges_excluded", ()),
        ("includeInboundPorts", "inbound_ports", ()),
        ("excludeInboundPorts", "inbound_ports_excluded", ports(*STATUS_PORTS)),
        ("excludeOutboundPorts", "outbound_ports_excluded", ()),
        ("includeOutboundPorts", "outbound_ports", ()),
        ("excludeInterfaces", "excluded_interfaces", ()),
    ],
)
def test_present_but_empty_means_none_not_the_default(name: str, field: str, value: object) -> None:
    """The default is for an annotation that is absent."""
    config, warnings = configure({f"{TRAFFIC}{name}": ""})
    assert getattr(config, field) == value
    assert warnings == []


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        (MODE, "TPROXY", "mode", "TPROXY"),
        (MODE, "REDIRECT", "mode", "REDIRECT"),
        (f"{TRAFFIC}includeOutboundIPRanges", "*", "outbound_ranges", ALL),
        (f"{TRAFFIC}includeOutboundIPRanges", " * ", "outbound_ranges", ALL),
        (
            f"{TRAFFIC}includeOutboundIPRanges",
            "10.1.2.3/8, FD00:0::/8 ,10.1.2.3/8",
            "outbound_ranges",
            ("10.1.2.3/8", "fd00::/8"),
        ),
        (
            f"{TRAFFIC}excludeOutboundIPRanges",
            "192.0.2.0/24",
            "outbound_ranges_excluded",
            ("192.0.2.0/24",),
        ),
        (f"{TRAFFIC}includeInboundPorts", "*", "inbound_ports", ALL),
        (f"{TRAFFIC}includeInboundPorts", "80, 443 ,80", "inbound_ports", ports(80, 443)),
        (f"{TRAFFIC}includeInboundPorts", "8000-8100", "inbound_ports", (PortRange(8000, 8100),)),
        (f"{TRAFFIC}excludeOutboundPorts", "5555", "outbound_ports_excluded", ports(5555)),
        (f"{TRAFFIC}includeOutboundPorts", "0,65535", "outbound_ports", ports(0, 65535)),
        (f"{TRAFFIC}excludeInterfaces", "eth1, net.1_a-b", "excluded_interfaces",
         ("eth1", "net.1_a-b")),
        (REROUTE, "tap0,tap1", "reroute_interfaces", ("tap0", "tap1")),
        (KUBEVIRT, "k6t-eth0", "reroute_interfaces", ("k6t-eth0",)),
    ],
)  # fmt: skip
def test_an_annotation_sets_its_field(name: str, text: str, field: str, value: object) -> None:
    """Items are trimmed, later duplicates dropped; nothing else changes."""
    config, warnings = configure({name: text})
    plain, _ = configure()
    assert getattr(config, field) == value
    assert config._replace(**{field: getattr(plain, field)}) == plain
    assert warnings == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, STATUS_PORTS),
        ("", STATUS_PORTS),
        ("3306", (3306, *STATUS_PORTS)),
        ("15090,80", (15090, 80, 15020, 15021)),
        ("15021,15020,15090", (15021, 15020, 15090)),
    ],
)
def test_the_proxy_s_status_ports_are_never_captured(
    text: str | None, expected: tuple[int, ...]
) -> None:
    """They come after what is listed, each once."""
    name = f"{TRAFFIC}excludeInboundPorts"
    config, _ = configure({} if text is None else {name: text})
    assert config.inbound_ports_excluded == ports(*expected)


def test_an_exclusion_without_effect_is_pointed_out() -> None:
    """Where only listed inbound ports are captured, nothing needs to be excluded."""
    both = {f"{TRAFFIC}includeInboundPorts": "80", f"{TRAFFIC}excludeInboundPorts": "22"}
    _, warnings = configure(both)
    assert warnings == [
        f"{TRAFFIC}excludeInboundPorts has no effect: only listed inbound ports are captured"
    ]
    _, warnings = configure(both | {f"{TRAFFIC}excludeInboundPorts": ""})
    assert warnings == []


# -- the old name of an annotation -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotations", "interfaces"),
    [
        ({KUBEVIRT: "old0"}, ("old0",)),
        ({REROUTE: "new0"}, ("new0",)),
        ({REROUTE: "new0", KUBEVIRT: "old0"}, ("new0",)),
        ({REROUTE: "", KUBEVIRT: "old0"}, ()),
        ({REROUTE: "new0", KUBEVIRT: "not valid!"}, ("new0",)),
        ({REROUTE: "", KUBEVIRT: "not valid!"}, ()),
    ],
)
def test_the_old_name_counts_only_if_the_new_one_is_absent(
    annotations: dict[str, str], interfaces: tuple[str, ...]
) -> None:
    """Present but empty is present; then the old one is not even looked at."""
    config, warnings = configure(annotations)
    assert config.reroute_interfaces == interfaces
    assert warnings == []


def test_the_old_name_is_refused_under_its_own_name() -> None:
    """The author sees what was written."""
    assert f"annotation {KUBEVIRT}: " in refused({KUBEVIRT: "not valid!"})


# -- refusals --------------------------------------------------------------------------------------

BAD = {
    MODE: ("NONE", "redirect", "", " TPROXY"),
    f"{TRAFFIC}includeOutboundIPRanges": ("10.0.0.0", "*,10.0.0.0/8", "10.0.0.0/33", "fe80::%1/64"),
    f"{TRAFFIC}excludeOutboundIPRanges": ("*", "10.0.0.0/255.0.0.0", "10.0.0.0/08", ","),
    f"{TRAFFIC}excludeInboundPorts": ("*", "http", "65536", "-1", "80-70", "80:90", " "),
    f"{TRAFFIC}includeInboundPorts": ("*,80", "+80", "1e3", "0x50", "80;443"),
    f"{TRAFFIC}excludeOutboundPorts": ("*", "80 443", "٨٠"),
    f"{TRAFFIC}includeOutboundPorts": ("*", "80-", "-"),
    f"{TRAFFIC}excludeInterfaces": ("eth1 -j ACCEPT", "1eth", "sixteen-letters-", "eth0+", "-i"),
    REROUTE: ("*", "a/b", "a b", "é", "tap0,!"),
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts]
)
def test_a_bad_value_is_refused_with_name_item_and_what_is_allowed(name: str, text: str) -> None:
    """One line; no rule is made of it."""
    message = refused({name: text})
    assert message.startswith(f"annotation {name}: ")
    assert " is not allowed; allowed: " in message


def test_every_row_has_values_that_it_refuses() -> None:
    """The table above covers the whole of it."""
    assert set(BAD) == set(IN_ORDER)


@pytest.mark.parametrize("first", range(len(IN_ORDER)))
def test_the_first_bad_value_is_reported(first: int) -> None:
    """In the order of the rows, not of the object."""
    names = IN_ORDER[first:]
    message = refused({name: BAD[name][0] for name in reversed(names)})
    assert message.startswith(f"annotation {names[0]}: ")


def test_only_the_offending_item_is_shown() -> None:
    """Quoted, its control characters escaped, cut."""
    message = refused({f"{TRAFFIC}excludeInterfaces": "eth0,\x1b[31m\n,eth1"})
    assert r'"\u001b[31m\n"' in message
    assert "eth0" not in message
    long = refused({f"{TRAFFIC}excludeOutboundPorts": "9" * 10_000})
    assert "(10000 characters)" in long
    assert len(long) < 500


# -- unknown annotations ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (f"{TRAFFIC}excludeInboundPort", f"{TRAFFIC}excludeInboundPorts"),
        (f"{TRAFFIC}excludeinboundports", f"{TRAFFIC}excludeInboundPorts"),
        (f"{TRAFFIC}includeOutboundIpRange", f"{TRAFFIC}includeOutboundIPRanges"),
        ("sidecar.istio.io/excludeInboundPorts", f"{TRAFFIC}excludeInboundPorts"),
        (f"{TRAFFIC}interceptionMode", MODE),
        ("sidecar.istio.io/interceptionmode", MODE),
        (f"{TRAFFIC}kubevirtInterface", KUBEVIRT),
        (f"{TRAFFIC}zzz", ""),
        ("sidecar.istio.io/", ""),
    ],
)
def test_an_unknown_annotation_of_ours_is_warned_of(name: str, meant: str) -> None:
    """With the nearest known name, if any is near; strict configurations refuse it."""
    _, warnings = configure({name: "1"})
    expected = f'unknown annotation "{name}"' + (f"; did you mean {meant}?" if meant else "")
    assert warnings == [expected]
    message = refused({name: "1"}, {"strict_annotations": True})
    assert message == f"{expected} (strict_annotations is on)"


@pytest.mark.parametrize(
    "name",
    [
        *IN_ORDER,
        KUBEVIRT,
        *sorted(OTHER_KNOWN),
        "prometheus.io/port",
        "proxy.istio.io/config",
        "status.sidecar.istio.io/port",
        "istio.io/rev",
        "example.com/traffic.sidecar.istio.io",
    ],
)
def test_what_is_known_or_not_ours_is_no_mistake(name: str) -> None:
    """Neither warned of nor refused."""
    value = {MODE: "TPROXY"}.get(name, "")
    _, warnings = configure({name: value}, {"strict_annotations": True})
    assert warnings == []


def test_status_and_inject_are_among_the_known() -> None:
    """They decide whether a pod is captured, not how."""
    assert {"sidecar.istio.io/status", "sidecar.istio.io/inject"} <= OTHER_KNOWN


def test_a_multitude_of_unknown_annotations_is_counted_not_searched() -> None:
    """An author cannot make the node work for nothing."""
    started = time.perf_counter()
    _, warnings = configure({f"{TRAFFIC}{'x' * 60}{number}": "" for number in range(5000)})
    assert time.perf_counter() - started < 2
    assert len(warnings) == 6
    assert warnings[-1] == "and 4995 more unknown annotations"


# -- the proxy's environment and ids ---------------------------------------------------------------

SWITCHES = {
    "ISTIO_META_DNS_CAPTURE": ("redirect_dns", "capture_all_dns"),
    "ISTIO_DUAL_STACK": ("dual_stack",),
    "INVALID_DROP": ("drop_invalid",),
}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(
    ("variable", "on", "warned"),
    [
        (None, False, ""),
        *[({"value": text}, True, "") for text in ("1", "t", "T", "TRUE", "true", "True")],
        *[({"value": text}, False, "") for text in ("0", "f", "F", "FALSE", "false", "False")],
        ({"value": "yes"}, False, '"yes" is not a boolean'),
        ({"value": "tRUE"}, False, '"tRUE" is not a boolean'),
        ({"value": " true"}, False, '" true" is not a boolean'),
        ({"value": ""}, False, '"" is not a boolean'),
        ({}, False, '"" is not a boolean'),
        ({"value": "\x1b[2J"}, False, r'"\u001b[2J" is not a boolean'),
        ({"valueFrom": {"fieldRef": {}}}, False, "comes from a reference"),
    ],
)
def test_a_switch_is_on_off_or_reported(
    name: str, variable: JSON | None, on: bool, warned: str
) -> None:
    """Go's booleans; anything else is off, with a warning that names it."""
    env = [] if variable is None else [{"name": name, **variable}]
    config, warnings = configure(env=env)
    assert all(getattr(config, field) is on for field in SWITCHES[name])
    others = {field for key, fields in SWITCHES.items() if key != name for field in fields}
    assert not any(getattr(config, field) for field in others)
    if warned:
        (warning,) = warnings
        assert warning.startswith(f"{name} of the proxy")
        assert warned in warning
    else:
        assert warnings == []


@pytest.mark.parametrize(
    ("security", "uid", "gid"),
    [
        (None, "1337", "1337"),
        ({"runAsUser": 0, "runAsGroup": 0}, "1337", "1337"),
        ({"runAsUser": 1}, "1", "1337"),
        ({"runAsGroup": 4294967294}, "1337", "4294967294"),
        ({"runAsUser": "5", "runAsGroup": True}, "1337", "1337"),
    ],
)
def test_the_proxy_is_known_by_its_own_ids(security: object, uid: str, gid: str) -> None:
    """Each by itself; 0 and what is no number count as not given."""
    config, _ = configure(securityContext=security)
    assert (config.proxy_uids, config.proxy_gids) == ((uid,), (gid,))


@pytest.mark.parametrize(
    ("security", "where"),
    [({"runAsUser": -1}, "runAsUser"), ({"runAsGroup": 2**32 - 1}, "runAsGroup")],
)
def test_an_id_that_is_none_never_reaches_a_rule(security: JSON, where: str) -> None:
    """A manifest, unlike the API server, may hold anything."""
    assert refused({}, securityContext=security).startswith(f"{where} of the proxy: ")


# -- the network configuration ---------------------------------------------------------------------


def test_the_operator_s_keys_are_in_the_configuration() -> None:
    """Owner groups by id, the loopback range, the back end and the variant."""
    config, _ = configure(
        netconf={
            "outbound_owner_groups": "1000-1999, 42",
            "outbound_owner_groups_exclude": "7",
            "host_ipv4_loopback_cidr": "127.0.0.0/8",
            "backend": "iptables",
            "iptables_variant": "legacy",
        }
    )
    assert config.owner_groups == ("1000-1999", "42")
    assert config.owner_groups_excluded == ("7",)
    assert config.loopback_v4 == "127.0.0.0/8"
    assert (config.backend, config.iptables_variant) == ("iptables", "legacy")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("outbound_owner_groups", "java"),
        ("outbound_owner_groups", "--help"),
        ("outbound_owner_groups_exclude", "ftp"),
        ("outbound_owner_groups_exclude", "*"),
        ("host_ipv4_loopback_cidr", "10.0.0.0/8"),
        ("host_ipv4_loopback_cidr", "127.0.0.1"),
        ("host_ipv4_loopback_cidr", "::1/128"),
    ],
)
def test_a_mistake_of_the_operator_is_not_the_pod_s(key: str, value: str) -> None:
    """Code 7 and the key's name; a node's group names mean nothing in a pod."""
    with pytest.raises(InvalidNetconf, match=f"^network configuration, {key}: "):
        configure(netconf={key: value})


def test_families_are_left_open() -> None:
    """They depend on addresses, which only the namespace has."""
    config, _ = configure(env=[{"name": "ISTIO_DUAL_STACK", "value": "true"}])
    assert (config.ipv6, config.dual_stack) == (False, True)


def test_equal_pods_have_one_configuration() -> None:
    """It is worked out once; what a pod's author is told is told each time."""
    first, told = configure(env=[{"name": "INVALID_DROP", "value": "maybe"}])
    second, again = configure(env=[{"name": "INVALID_DROP", "value": "maybe"}])
    assert first is second
    assert told == again != []
    told.clear()
    assert configure(env=[{"name": "INVALID_DROP", "value": "maybe"}])[1] == again


def test_long_texts_are_not_kept() -> None:
    """Pods with long texts, each with others, must not fill the memory of who serves them."""
    name, kept = f"{TRAFFIC}excludeOutboundPorts", annotations._kept  # noqa: SLF001
    for port in range(1, annotations.KEPT + 10):
        assert configure({name: str(port)})
    before = kept.cache_info()
    assert before.currsize == annotations.KEPT
    long = ",".join(map(str, range(1, annotations.TEXT_KEPT_MAX)))
    config, _ = configure({name: long})
    assert len(config.outbound_ports_excluded) == annotations.TEXT_KEPT_MAX - 1
    assert not configure(env=[{"name": "INVALID_DROP", "value": long}])[0].drop_invalid
    assert kept.cache_info() == before
