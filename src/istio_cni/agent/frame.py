"""What launcher and agent say to each other, in bytes; launcher/frame.h describes it, pure."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from istio_cni.constants import STDIN_MAX_BYTES
from istio_cni.errors import DecodingFailure

MAGIC = 0x494E4349
VERSION = 1
ENVIRONMENT_MAX_BYTES = 1 << 20
ANSWER_MAX_BYTES = STDIN_MAX_BYTES + (1 << 16)
DONE, DECLINED = 1, 2
PREFIX = "CNI_"
WAITS_S = {"ADD": 10.0, "CHECK": 5.0, "DEL": 2.0, "GC": 2.0}
"""How long the launcher waits for a verb; for any other one, `WAIT_S`."""
WAIT_S = 0.5

_REQUEST = struct.Struct("=IHH16sQII")
_REPLY = struct.Struct("=IHBB")
HEADER_BYTES = _REQUEST.size


class Header(NamedTuple):
    """How a call begins; `deadline` is an instant of CLOCK_MONOTONIC in seconds."""

    netns_error: int
    request_id: str
    deadline: float
    environment_bytes: int
    stdin_bytes: int

    def begun(self, verb: str) -> float:
        """Return when the launcher began to wait, an instant of CLOCK_MONOTONIC."""
        return self.deadline - WAITS_S.get(verb, WAIT_S)


class OtherVersion(DecodingFailure):
    """The call is of a version that is not spoken here."""


def read_header(data: bytes) -> Header:
    """Read the first bytes of a call; raises DecodingFailure with what is wrong."""
    magic, version, netns_error, request_id, deadline_ns, environment, stdin = _REQUEST.unpack(data)
    if magic != MAGIC:
        raise DecodingFailure("this is no call of the launcher")
    if version != VERSION:
        raise OtherVersion(f"version {version} is not spoken here; allowed: {VERSION}")
    if environment > ENVIRONMENT_MAX_BYTES or stdin > STDIN_MAX_BYTES:
        raise DecodingFailure(f"{environment} and {stdin} bytes are too much")
    return Header(netns_error, request_id.hex(), deadline_ns / 1e9, environment, stdin)


def read_environment(data: bytes) -> dict[str, str]:
    """Read the variables of a call; raises DecodingFailure for any that is none of the protocol."""
    variables = data.split(b"\0")
    if variables.pop():
        raise DecodingFailure("the environment does not end with a NUL")
    pairs = (os.fsdecode(variable).partition("=") for variable in reversed(variables))
    env = {name: value for name, _, value in pairs}  # of a name's values the first one counts
    if not all(name.startswith(PREFIX) for name in env):
        raise DecodingFailure(f"the environment has variables without {PREFIX}")
    return env


def reply(kind: int, status: int, content: bytes) -> bytes:
    """Write an answer: DONE with stdout and exit status, or DECLINED with the reason."""
    return _REPLY.pack(len(content), VERSION, kind, status) + content
