"""A run against a real engine as a file: what its publisher sent, and what was asked meanwhile.

JSON Lines, gzipped: how it was made, then in the order in which it happened the frames of each ZeroMQ
message (Base64) and the requests, with the tokens that the engine's own tokeniser made of them and the
cached tokens that it reported.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.kv_account import Asked


class About(msgspec.Struct, tag="about"):
    """How it was made."""

    engine: str
    command: str
    flags: list[str]
    block_tokens: int


class Heard(msgspec.Struct, tag="heard"):
    """A message; `at` here and below: seconds since the beginning."""

    at: float
    frames: list[bytes]


class Sent(msgspec.Struct, tag="sent"):
    at: float
    asked: Asked


class Answered(msgspec.Struct, tag="answered"):
    at: float
    number: int
    cached_tokens: int


class Closed(msgspec.Struct, tag="closed"):
    """Nothing more was told for some time."""

    at: float
    number: int


class Restart(msgspec.Struct, tag="restart"):
    """The engine was killed and started again."""

    at: float


Line = Heard | Sent | Answered | Closed | Restart


def write(path: Path, about: About, lines: Sequence[Line]) -> None:
    """The same bytes for the same lines."""
    text = b"\n".join(map(msgspec.json.encode, [about, *lines])) + b"\n"
    path.write_bytes(gzip.compress(text, 9, mtime=0))


def read(path: Path) -> tuple[About, list[Line]]:
    first, *rest = gzip.decompress(path.read_bytes()).splitlines()
    decode = msgspec.json.Decoder(Line).decode
    return msgspec.json.decode(first, type=About), [decode(one) for one in rest]
