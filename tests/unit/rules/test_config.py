"""What people may write into each kind of value, and how what they may not is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from istio_cni.errors import InvalidParameter, quoted
from istio_cni.rules import config as grammar
from istio_cni.rules.config import ALL, CaptureConfig
from istio_cni.rules.model import Family, PortRange

Parse = Callable[[str, str], object]
WHERE = "excludeInterfaces"

REFUSED_EVERYWHERE = [" ", ",", " , ,", "8080\n", "\n", "8080\r", "eth1\x1b[2J", "10.0.0.0/8\n"]
LISTS: list[Parse] = [
    grammar.parse_ports,
    grammar.parse_ranges,
    grammar.parse_strict_interfaces,
    grammar.parse_interfaces,
    grammar.parse_owners,
]
SELECTIONS: list[Parse] = [
    grammar.parse_port_selection,
    grammar.parse_range_selection,
    grammar.parse_group_selection,
]


def refusal(parse: Parse, text: str) -> str:
    """Return the message with which a value is refused."""
    with pytest.raises(InvalidParameter) as caught:
        parse(text, WHERE)
    return str(caught.value)


def ports(*numbers: int) -> tuple[PortRange, ...]:
    """Return single ports."""
    return tuple(PortRange(number, number) for number in numbers)


@pytest.mark.parametrize("parse", [*LISTS, *SELECTIONS])
@pytest.mark.parametrize("text", REFUSED_EVERYWHERE)
def test_blanks_and_control_characters_are_no_item(parse: Parse, text: str) -> None:
    """Neither blanks alone nor a line break beside an item pass: both would break rule text."""
    message = refusal(parse, text)
    assert message.startswith(f"{WHERE}: ")
    assert message.isprintable()


@pytest.mark.parametrize("parse", [*LISTS, *SELECTIONS])
def test_the_empty_text_is_the_empty_list(parse: Parse) -> None:
    """Present but empty means none, whatever a default may be."""
    assert parse("", WHERE) == ()


@pytest.mark.parametrize("parse", SELECTIONS)
def test_a_star_selects_all(parse: Parse) -> None:
    """Blanks around it do not matter; it is no item of a list."""
    assert parse("*", WHERE) == parse(" * ", WHERE) == ALL
    for text in ("*,*", "**", "*\n"):
        item = text.partition(",")[0]
        assert refusal(parse, text).startswith(f"{WHERE}: {quoted(item)} is not allowed; ")


@pytest.mark.parametrize("parse", LISTS)
def test_a_star_is_refused_where_nothing_can_be_selected(parse: Parse) -> None:
    """Exclude lists name their items."""
    assert refusal(parse, "*").startswith(f'{WHERE}: "*" is not allowed; allowed: ')


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("8080", ports(8080)),
        ("8080,", ports(8080)),
        (",8080", ports(8080)),
        (" 8080 , 15020", ports(8080, 15020)),
        ("\t8080", ports(8080)),
        ("8080,15020,8080, 8080", ports(8080, 15020)),
        ("0,65535", ports(0, 65535)),
        ("080", ports(80)),
        ("10000-10100,9090", (PortRange(10000, 10100), *ports(9090))),
        ("80 - 90", (PortRange(80, 90),)),
        ("80-80,80", ports(80)),
        ("0-65535", (PortRange(0, 65535),)),
    ],
)
def test_ports(text: str, meant: tuple[PortRange, ...]) -> None:
    """Items are trimmed, ranges kept, duplicates dropped in first-seen order."""
    assert grammar.parse_ports(text, WHERE) == meant
    assert grammar.parse_port_selection(text, WHERE) == meant


@pytest.mark.parametrize(
    "item",
    [
        "http",
        "65536",
        "-1",
        "+80",
        "8 0",
        "80-",
        "-80",
        "80-90-100",
        "20000-10000",
        "0-70000",
        "8e1",
    ],
)
def test_ports_refused(item: str) -> None:
    """Names, signs, reversed and too large ranges are refused by name, the good ones left out."""
    message = refusal(grammar.parse_ports, f"22,{item},443")
    assert message == f"{WHERE}: {quoted(item)} is not allowed; allowed: {grammar.PORT_LIST}"


def test_iptables_writes_port_ranges_with_a_colon() -> None:
    """The command line takes both spellings, annotations the dash only."""
    meant = (PortRange(8000, 8100), *ports(9090))
    assert grammar.parse_ports("8000:8100,9090", WHERE, colon=True) == meant
    assert grammar.parse_ports("8000-8100,9090", WHERE, colon=True) == meant
    assert '"8000:8100"' in refusal(grammar.parse_ports, "8000:8100")
    for text in ("80:", ":80", "90:80", "80:90-100", "80:90:100"):
        with pytest.raises(InvalidParameter):
            grammar.parse_ports(text, WHERE, colon=True)


@pytest.mark.parametrize("text", ["0", "65536", "", "http", "15001,", "15001\n", "0x3a99", "-1"])
def test_a_port_to_listen_on_is_one_number(text: str) -> None:
    """Listeners need a real port."""
    assert refusal(grammar.parse_port, text) == (
        f"{WHERE}: {quoted(text)} is not allowed; allowed: a port 1-65535"
    )


def test_a_port_to_listen_on() -> None:
    """Decimal, blanks around it do not matter."""
    assert grammar.parse_port(" 15001 ", WHERE) == 15001


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10.0.0.0/8", ("10.0.0.0/8",)),
        ("10.1.2.3/8", ("10.1.2.3/8",)),
        (" 10.0.0.0/8 ,, fd00::/8", ("10.0.0.0/8", "fd00::/8")),
        ("FD00:0:0::1/8,fd00::1/8", ("fd00::1/8",)),
        ("0.0.0.0/0,::/0", ("0.0.0.0/0", "::/0")),
        ("::ffff:10.0.0.0/104", ("::ffff:10.0.0.0/104",)),
        ("::ffff:a00:0/104", ("::ffff:10.0.0.0/104",)),
    ],
)
def test_ranges(text: str, meant: tuple[str, ...]) -> None:
    """Host bits are kept; IPv6 is written canonically, the same by every Python."""
    assert grammar.parse_ranges(text, WHERE) == meant
    assert grammar.parse_range_selection(text, WHERE) == meant


@pytest.mark.parametrize(
    "item",
    [
        *("10.0.0.0", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/08", "10.0.0.0/+8", "10.0.0.0/8/8"),
        *("10.0.0/8", "010.0.0.0/8", "10.0.0.0/255.0.0.0", "fd00::/129", "fe80::1%eth0/64"),
        *("example.com/8", "/8", "10.0.0.0 /8", "10.0.0.0/ 8"),
    ],
)
def test_ranges_refused(item: str) -> None:
    """Only an address and a decimal length make a range."""
    message = refusal(grammar.parse_ranges, f"10.0.0.0/8,{item}")
    assert message == f"{WHERE}: {quoted(item)} is not allowed; allowed: {grammar.CIDR_LIST}"


def test_a_mapped_range_is_ipv6() -> None:
    """It can only match IPv6 packets."""
    assert grammar.family_of("::ffff:10.0.0.0/104") is Family.V6
    assert grammar.family_of("10.0.0.0/8") is Family.V4


@pytest.mark.parametrize(
    ("prefix", "loopback"),
    [
        *(("127.0.0.0/8", True), ("127.255.0.1/32", True), ("::1/128", True), ("::1/64", True)),
        *(("::ffff:127.0.0.1/128", True), ("::ffff:10.0.0.1/128", False)),
        *(("0.0.0.0/0", False), ("::/0", False), ("10.0.0.0/8", False)),
    ],
)
def test_what_counts_as_a_loopback_range(prefix: str, loopback: bool) -> None:
    """The address part decides, not what the range covers."""
    assert grammar.is_loopback(prefix) is loopback


@pytest.mark.parametrize("parse", [grammar.parse_strict_interfaces, grammar.parse_interfaces])
def test_interfaces(parse: Parse) -> None:
    """Letters, digits and `_`, `.`, `-` up to the kernel's length."""
    assert parse("eth0, net-2.100 ,eth0,a,abcdefghijklmno", WHERE) == (
        *("eth0", "net-2.100", "a", "abcdefghijklmno"),
    )


@pytest.mark.parametrize("parse", [grammar.parse_strict_interfaces, grammar.parse_interfaces])
@pytest.mark.parametrize(
    "item",
    [
        *(
            "eth1 -j ACCEPT",
            "eth0;reboot",
            "abcdefghijklmnop",
            "../x",
            "eth0/1",
            "-j",
            "+",
            "!eth0",
        ),
        *('"eth0"', "eth0$x", "ethö", "eth0\x00", "."),
    ],
)
def test_interfaces_refused(parse: Parse, item: str) -> None:
    """Nothing that iptables or a shell could take for anything but a name."""
    assert refusal(parse, f"eth0,{item}").startswith(
        f"{WHERE}: {quoted(item)} is not allowed; allowed: interface names of at most 15 characters"
    )


@pytest.mark.parametrize("item", ["eth+", "9p", "veth0@if3", "_x"])
def test_only_operators_may_write_other_interface_names(item: str) -> None:
    """A pod's author must begin with a letter and cannot mean several interfaces at once."""
    assert grammar.parse_interfaces(item, WHERE) == (item,)
    assert quoted(item) in refusal(grammar.parse_strict_interfaces, item)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1337", ("1337",)),
        ("0,4294967294", ("0", "4294967294")),
        ("1000-1999", ("1000-1999",)),
        ("1000-1000,1000", ("1000",)),
        ("01337,010-020,1337", ("1337", "10-20")),
        ("java, istio-proxy ,_apt,a.b", ("java", "istio-proxy", "_apt", "a.b")),
    ],
)
def test_owners(text: str, meant: tuple[str, ...]) -> None:
    """Ids stand as iptables prints them: to it, 010 would be eight, and 5-5 comes back as 5."""
    assert grammar.parse_owners(text, WHERE) == meant
    assert grammar.parse_group_selection(text, WHERE) == meant


@pytest.mark.parametrize(
    "item",
    [
        "4294967295",
        "-1",
        "5-",
        "-5",
        "9-1",
        "1-2-3",
        "java -j ACCEPT",
        "9lives",
        "a" * 33,
        "$x",
        "0x1",
    ],
)
def test_owners_refused(item: str) -> None:
    """The largest id is none: it means nobody to the kernel."""
    message = refusal(grammar.parse_owners, f"1337,{item}")
    assert message == f"{WHERE}: {quoted(item)} is not allowed; allowed: {grammar.OWNERS}"


def test_groups_without_number() -> None:
    """How many one rule takes is a back end's business."""
    groups = [str(number) for number in range(1000)]
    assert grammar.parse_group_selection(",".join(groups), WHERE) == tuple(groups)


@pytest.mark.parametrize("text", ["127.0.0.1/32", "127.0.0.0/8", " 127.1.2.3/16 "])
def test_loopback_cidr(text: str) -> None:
    """Any part of 127.0.0.0/8."""
    assert grammar.parse_loopback(text, WHERE) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1",
        "127.0.0.0/7",
        "10.0.0.0/8",
        "::1/128",
        "0.0.0.0/0",
        "127.0.0.0/8,127.0.0.1/32",
    ],
)
def test_loopback_cidr_refused(text: str) -> None:
    """What is no loopback must not be exempt from capture."""
    assert refusal(grammar.parse_loopback, text) == (
        f"{WHERE}: {quoted(text)} is not allowed; allowed: "
        "an IPv4 CIDR inside 127.0.0.0/8, such as 127.0.0.1/32"
    )


def test_dns_servers() -> None:
    """Addresses of either family, canonical, without zone or length."""
    assert grammar.parse_server(" FD00:0::53 ", WHERE) == "fd00::53"
    assert grammar.parse_server("::ffff:a00:1", WHERE) == "::ffff:10.0.0.1"
    for text in ("10.0.0.1/32", "fe80::1%eth0", "dns.example", "", "10.0.0.1\n"):
        assert quoted(text) in refusal(grammar.parse_server, text)


@pytest.mark.parametrize("text", ["1", "t", "T", "TRUE", "true", "True"])
def test_true(text: str) -> None:
    """Go's spellings of true."""
    assert grammar.parse_bool(text) is True


@pytest.mark.parametrize("text", ["0", "f", "F", "FALSE", "false", "False"])
def test_false(text: str) -> None:
    """Go's spellings of false."""
    assert grammar.parse_bool(text) is False


@pytest.mark.parametrize("text", ["", "yes", "no", "tRUE", " true", "2", "on"])
def test_neither_true_nor_false(text: str) -> None:
    """Everything else is no boolean."""
    assert grammar.parse_bool(text) is None


@pytest.mark.parametrize("parse", LISTS)
@pytest.mark.parametrize("text", ["x\ny/", "\x1b[31m/red", "/" + "x" * 10_000, "\u202e/"])
def test_a_refused_value_is_shown_on_one_line_and_cut(parse: Parse, text: str) -> None:
    """Neither line breaks nor terminal escapes nor kilobytes reach a log or an event."""
    message = refusal(parse, text)
    assert message.isascii() or "…" in message
    assert message.isprintable()
    assert len(message) < 600
    assert text not in message


def test_defaults_are_the_programs() -> None:
    """Without a word, chains and loop rules are made and nothing is captured."""
    config = CaptureConfig()
    assert (config.outbound_port, config.inbound_port, config.tunnel_port) == (15001, 15006, 15008)
    assert (config.proxy_uids, config.proxy_gids) == (("1337",), ("1337",))
    assert (config.tproxy_mark, config.tproxy_table) == (1337, 133)
    assert (config.inbound_ports, config.outbound_ranges) == ((), ())
    assert config.families == (Family.V4,)
    assert not config.tproxy
    assert not config.dns


@pytest.mark.parametrize(
    ("redirect", "everything", "servers", "captured"),
    [
        *((False, False, True, False), (False, True, True, False), (True, True, False, True)),
        *((True, False, True, True), (True, False, False, False)),
    ],
)
def test_when_dns_is_captured(
    redirect: bool, everything: bool, servers: bool, captured: bool
) -> None:
    """It must be asked for, and there must be a server, of whichever family."""
    for v4, v6 in ((("10.0.0.1",), ()), ((), ("fd00::1",))):
        config = CaptureConfig(
            redirect_dns=redirect,
            capture_all_dns=everything,
            dns_servers_v4=v4 if servers else (),
            dns_servers_v6=v6 if servers else (),
        )
        assert config.dns is captured


def test_when_diverted_packets_need_routes() -> None:
    """With TPROXY, and only if there is anything to capture inbound."""
    tproxy = CaptureConfig(mode="TPROXY")
    assert not tproxy.routes_inbound
    assert tproxy._replace(inbound_ports=ALL).routes_inbound
    assert tproxy._replace(inbound_ports=ports(80)).routes_inbound
    assert not CaptureConfig(inbound_ports=ALL).routes_inbound
