"""What worker processes and the learner of their machine tell each other: frames over a Unix socket.

A frame is the length of its body in four bytes, little end first, and the body in MessagePack. Blocks are
packed, 8 bytes each, in the machine's own order: both sides are on it.
"""

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final

import msgspec

from preheat.core.witness import Trust
from preheat.wire.kv_places import KvPlace

MOST_BYTES: Final = 8_388_608
"""Of a frame."""
_LENGTH: Final = Struct("<I")
_ENCODE: Final = msgspec.msgpack.Encoder().encode


class LinkError(Exception):
    """Not what the other side sends."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first word: the group of servers that this is about."""

    group: str


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Hear the events of the server at that url, which is called so in the log."""

    url: str
    name: str
    place: KvPlace


class Ignore(msgspec.Struct, frozen=True, tag=True):
    """No more."""

    url: str


class Sent(msgspec.Struct, frozen=True):
    """A prompt that went to the server at that url."""

    url: str
    blocks: bytes
    token_blocks: bytes


class AllSent(msgspec.Struct, frozen=True, tag=True):
    """In both directions: what one process has sent of late."""

    prompts: list[Sent]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The learner's first word: the secret that the names of blocks are made with."""

    secret: bytes


class Heard(msgspec.Struct, frozen=True, tag=True):
    """What came and went at one server since it was last said. `anew`: all that it holds follows, and
    nothing else is there; `is_empty`: it was restarted or cleared since. The rest is as it is now."""

    url: str
    came: bytes
    gone: bytes
    trust: Trust
    block_tokens: int
    adapters: list[str] = []
    counts: dict[str, int] = {}
    anew: bool = False
    is_empty: bool = False


ToLearner = Join | Listen | Ignore | AllSent
ToWorker = Hello | Heard | AllSent
LEARNER_READS: Final = msgspec.msgpack.Decoder(ToLearner)
WORKER_READS: Final = msgspec.msgpack.Decoder(ToWorker)


def frame(message: ToLearner | ToWorker) -> bytes:
    """A message as it is sent."""
    body = _ENCODE(message)
    return _LENGTH.pack(len(body)) + body


def bodies(buffer: bytearray) -> Iterator[bytes]:
    """Take the whole frames out of what has come. Raises LinkError."""
    while len(buffer) >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(buffer)
        if size > MOST_BYTES:
            raise LinkError(f"a frame of {size} bytes; at most {MOST_BYTES} are read")
        end = _LENGTH.size + size
        if len(buffer) < end:
            return
        body = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield body


def packed(blocks: Sequence[int]) -> bytes:
    """Blocks as bytes.

    >>> unpacked(packed([1, 2**64 - 1]))
    [1, 18446744073709551615]
    """
    return array("Q", blocks).tobytes()


def unpacked(data: bytes) -> list[int]:
    """Bytes as blocks. Raises LinkError."""
    blocks = array("Q")
    try:
        blocks.frombytes(data)
    except ValueError:
        raise LinkError(f"{len(data)} bytes aren't whole blocks") from None
    return blocks.tolist()
