"""The agent's side of the frame, held against launcher/frame.h and against examples in bytes."""

from __future__ import annotations

import random
import re
import string
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from istio_cni.agent import frame
from istio_cni.errors import DecodingFailure

LAUNCHER = Path(__file__).resolve().parents[3] / "launcher"
HEADER = (LAUNCHER / "frame.h").read_text()
DEFINED = {
    "MAGIC": frame.MAGIC,
    "VERSION": frame.VERSION,
    "ENVIRONMENT_MAX": frame.ENVIRONMENT_MAX_BYTES,
    "STDIN_MAX": frame.STDIN_MAX_BYTES,
    "ANSWER_MAX": frame.ANSWER_MAX_BYTES,
    "DONE": frame.DONE,
    "DECLINED": frame.DECLINED,
    **{f"WAIT_{verb}_MS": round(1000 * wait_s) for verb, wait_s in frame.WAITS_S.items()},
    "WAIT_MS": round(1000 * frame.WAIT_S),
}
SIZES = {"uint8_t": "B", "uint16_t": "H", "uint32_t": "I", "uint64_t": "Q"}
ID = bytes(range(16))
REQUEST = (
    b"ICNI\x01\x00\x00\x00"  # magic, version, no error
    + ID
    + bytes.fromhex("00ca9a3b00000000")  # 1e9 ns
    + bytes.fromhex("0d000000" + "02000000")  # sizes
)
ROUNDS = 300


def fields(name: str) -> list[tuple[str, str]]:
    """Return the members of a structure of the header: format and name."""
    body = re.search(rf"struct {name} {{.*?\n(.*?)}};", HEADER, re.S)
    assert body is not None
    found = re.findall(r"^\s+(uint\d+_t) (\w+)(?:\[(\d+)\])?;", body[1], re.M)
    return [(f"{size}s" if size else SIZES[kind], member) for kind, member, size in found]


def request(**changes: int | bytes) -> bytes:
    """Write the head of a call, as the structure of the header says."""
    whole: dict[str, int | bytes] = {
        "magic": frame.MAGIC,
        "version": frame.VERSION,
        "netns_error": 0,
        "request_id": ID,
        "deadline_ns": 10**9,
        "environment_size": 13,
        "stdin_size": 2,
        **changes,
    }
    layout = fields("frame_request")
    values = [whole[name] for _, name in layout]
    return struct.pack("=" + "".join(size for size, _ in layout), *values)


# -- numbers and layouts ---------------------------------------------------------------------------


def test_every_number_of_the_header_is_the_agents() -> None:
    """None is missing on either side."""
    defined = re.findall(r"^#define FRAME_(\w+) (\w+)", HEADER, re.M)
    assert {name: int(value, 0) for name, value in defined} == DEFINED


def test_when_a_launcher_began_follows_from_the_deadline() -> None:
    """Each verb has a time of its own; those that the agent does not know have the shortest."""
    header = frame.read_header(request(deadline_ns=60 * 10**9))
    begun = {verb: header.begun(verb) for verb in ("ADD", "CHECK", "DEL", "GC", "STATUS", "?", "")}
    short = 60.0 - frame.WAIT_S
    waits = {verb: 60.0 - wait_s for verb, wait_s in frame.WAITS_S.items()}
    assert begun == {**waits, "STATUS": short, "?": short, "": short}


def test_the_head_of_a_call_in_bytes() -> None:
    """Each member where the example has it."""
    assert request() == REQUEST
    assert len(REQUEST) == frame.HEADER_BYTES == 40
    assert frame.read_header(REQUEST) == frame.Header(0, ID.hex(), 1.0, 13, 2)


def test_members_are_not_taken_for_one_another() -> None:
    """A value of its own in each."""
    data = request(
        netns_error=0x0102,
        request_id=b"\xff" * 16,
        deadline_ns=0x0A0B0C0D0E0F,
        environment_size=0x030405,
        stdin_size=0x060708,
    )
    deadline = 0x0A0B0C0D0E0F / 1e9
    wanted = frame.Header(0x0102, "ff" * 16, deadline, 0x030405, 0x060708)
    assert frame.read_header(data) == wanted


@pytest.mark.parametrize(
    ("kind", "status", "content", "data"),
    [
        (frame.DONE, 0, b"{}", b"\x02\x00\x00\x00\x01\x00\x01\x00{}"),
        (frame.DONE, 1, b"", b"\x00\x00\x00\x00\x01\x00\x01\x01"),
        (frame.DECLINED, 0, b"no", b"\x02\x00\x00\x00\x01\x00\x02\x00no"),
        (frame.DONE, 255, b"x" * 0x10203, b"\x03\x02\x01\x00\x01\x00\x01\xff" + b"x" * 0x10203),
    ],
)
def test_an_answer_in_bytes(kind: int, status: int, content: bytes, data: bytes) -> None:
    """Size, version, kind, status, content."""
    assert frame.reply(kind, status, content) == data
    members = [name for _, name in fields("frame_reply")]
    assert members == ["size", "version", "kind", "status"]
    assert struct.calcsize("=" + "".join(size for size, _ in fields("frame_reply"))) == 8


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("magic", [0, 0x49434E49, frame.MAGIC + 1, 0xFFFFFFFF, frame.MAGIC ^ 1])
def test_another_magic_is_no_call(magic: int) -> None:
    """A big-endian one is none either; it comes before the version."""
    for version in (frame.VERSION, 7):
        with pytest.raises(DecodingFailure, match="no call of the launcher") as failure:
            frame.read_header(request(magic=magic, version=version))
        assert not isinstance(failure.value, frame.OtherVersion)


@pytest.mark.parametrize("version", [0, frame.VERSION + 1, 0xFFFF])
def test_another_version_is_told_from_garbage(version: int) -> None:
    """It is declined, whatever its sizes are; the message has what is spoken."""
    with pytest.raises(frame.OtherVersion, match=f"version {version} .* allowed: 1"):
        frame.read_header(request(version=version, stdin_size=0xFFFFFFFF))


@pytest.mark.parametrize(
    ("member", "limit"),
    [
        ("environment_size", frame.ENVIRONMENT_MAX_BYTES),
        ("stdin_size", frame.STDIN_MAX_BYTES),
    ],
)
def test_sizes_have_a_limit(member: str, limit: int) -> None:
    """What the launcher may send is taken, and not a byte more."""
    assert limit in frame.read_header(request(**{member: limit}))
    for size in (limit + 1, 0xFFFFFFFF):
        with pytest.raises(DecodingFailure, match=f"{size}"):
            frame.read_header(request(**{member: size}))


@pytest.mark.parametrize(
    "data",
    [
        b"CNI_COMMAND=ADD",
        b"CNI_COMMAND=ADD\0CNI_NETNS=",
        b"CNI_COMMAND=ADD\0PATH=/bin\0",
        b"PATH=/bin\0",
        b"\0",
        b"CNI_COMMAND=ADD\0\0",
        b"=x\0",
        b"cni_a=x\0",
        b" CNI_A=x\0",
        b"XCNI_A=x\0",
        b"CNI=x\0",
    ],
)
def test_variables_that_are_none_of_the_protocol_are_refused(data: bytes) -> None:
    """A NUL is missing, or the name does not begin with CNI_."""
    with pytest.raises(DecodingFailure, match="environment"):
        frame.read_environment(data)


def test_no_variables_are_no_error() -> None:
    """That the command is missing is the protocol's business."""
    assert frame.read_environment(b"") == {}


def test_values_are_taken_as_they_are() -> None:
    """With equals signs, line feeds, and bytes in no encoding."""
    data = b"CNI_ARGS=A=1;B==\0CNI_A=\n\0CNI_B=\xff\xc3\xbc\0CNI_C=\0"
    assert frame.read_environment(data) == {
        "CNI_ARGS": "A=1;B==",
        "CNI_A": "\n",
        "CNI_B": "\udcffü",
        "CNI_C": "",
    }


def test_of_equal_names_the_first_counts() -> None:
    """As for getenv(3) in the launcher, which opens CNI_NETNS, and for the plugin's process."""
    data = b"CNI_NETNS=/first\0CNI_NETNS=/second\0"
    assert frame.read_environment(data) == {"CNI_NETNS": "/first"}


# -- properties ------------------------------------------------------------------------------------


def test_what_is_packed_is_read_again() -> None:
    """Whatever a launcher may send."""
    rng = random.Random(1)  # noqa: S311 – test data
    for _ in range(ROUNDS):
        ns = rng.choice([0, 1, rng.getrandbits(50), 2**64 - 1])
        sizes = rng.randint(0, frame.ENVIRONMENT_MAX_BYTES), rng.randint(0, frame.STDIN_MAX_BYTES)
        identity, error = rng.randbytes(16), rng.randint(0, 0xFFFF)
        data = request(
            netns_error=error,
            request_id=identity,
            deadline_ns=ns,
            environment_size=sizes[0],
            stdin_size=sizes[1],
        )
        assert frame.read_header(data) == frame.Header(error, identity.hex(), ns / 1e9, *sizes)


def test_variables_are_read_again() -> None:
    """Any names after the prefix, any values without a NUL."""
    rng = random.Random(2)  # noqa: S311 – test data
    values = bytes(range(1, 256)).decode("utf-8", "surrogateescape")
    for _ in range(ROUNDS):
        env = {
            "CNI_" + "".join(rng.choices(string.ascii_letters + "_", k=rng.randint(0, 9))): "".join(
                rng.choices(values, k=rng.randint(0, 30))
            )
            for _ in range(rng.randint(0, 9))
        }
        pairs = (f"{name}={value}\0" for name, value in env.items())
        data = "".join(pairs).encode("utf-8", "surrogateescape")
        again = frame.read_environment(data)
        encoded = {name: value.encode("utf-8", "surrogateescape") for name, value in env.items()}
        assert {
            name: value.encode("utf-8", "surrogateescape") for name, value in again.items()
        } == encoded


def test_no_bytes_raise_anything_else() -> None:
    """Garbage, and good calls with a byte changed, are read or refused."""
    rng = random.Random(3)  # noqa: S311 – test data
    for _ in range(ROUNDS):
        data = bytearray(rng.choice([REQUEST, rng.randbytes(40)]))
        data[rng.randrange(40)] = rng.randrange(256)
        variables = rng.choice([b"CNI_A=1\0", rng.randbytes(20), b"CNI_B=\0" + rng.randbytes(9)])
        for read, what in ((frame.read_header, bytes(data)), (frame.read_environment, variables)):
            with suppress(DecodingFailure):
                read(what)
