"""What a worker tells the log process: frames on a stream, and the records inside.

A frame is its length, a letter for its kind and the payload. Whatever was said of an ask once is
named by a number afterwards (`ref`), so that a hit is told in 32 bytes.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Final

import msgspec

VERSION: Final = 1
"""Of the frames, the spool and the Parquet files together."""

HELLO: Final = b"H"
"""Who speaks: a Hello. The first frame of a connection."""
ASK: Final = b"A"
"""An ask: ASK_HEAD, then an About, then its block hashes."""
STORED: Final = b"S"
"""The answer kept for an ask is another one now: STORED_HEAD."""
ROW: Final = b"R"
"""One request: ROW_HEAD, then a Row."""
HITS: Final = b"X"
"""Many hits: HITS_HEAD, then four doubles each: time, number, ref, duration."""
RESET: Final = b"0"
"""Refs below this one won't be used any more: RESET_HEAD."""

FRAME: Final = Struct("<Ic")
FACTS: Final = Struct("<hiiI")
"""Of a stored answer: HTTP status, input and output tokens (-1: unknown), bytes."""
ASK_HEAD: Final = Struct("<IH")
"""ref, bytes of the About. FACTS stand between this and the About."""
STORED_HEAD: Final = Struct("<I")
ROW_HEAD: Final = Struct("<qQIf")
"""Wall-clock time in µs, number, ref, duration in seconds."""
HITS_HEAD: Final = Struct("<d")
"""What to add to the times to get wall-clock seconds."""
RESET_HEAD: Final = Struct("<I")
LOST: Final = Struct("<I")
"""The only thing the log process ever says: so many of your rows are lost."""
HIT_BYTES: Final = 32
MOST_BYTES: Final = 16_777_216
"""Of a frame."""

NO_FACTS: Final = FACTS.pack(200, -1, -1, 0)


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """A worker. `process` begins the names of its requests, and no other process's."""

    version: int
    process: str
    worker: int
    gateway_version: str
    block_unit: str


class About(msgspec.Struct, frozen=True, array_like=True):
    """What all requests with one ask have in common, beside its blocks."""

    tenant: str
    namespace: str = ""
    model: str = ""
    path: str = ""
    key: bytes = b""
    stream: bool = False
    sampled: bool = False
    max_tokens: int | None = None
    body_bytes: int = 0
    prompt_bytes: int = 0


AS_STORED: Final = -1
"""Instead of an answer's bytes: its status and lengths are its ask's facts."""


class Row(msgspec.Struct, array_like=True):
    """What came of one request. What isn't known is None or empty.

    `fwd` and `detail` are those of Cache-Status. The last four are filled in from the request.
    """

    layer: str
    fwd: str = ""
    detail: str = ""
    status: int = 200
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    answer_bytes: int = AS_STORED
    ttft_s: float | None = None
    service_s: float | None = None
    engine_worker: str = ""
    provenance: str = "client"
    priority: int = 0
    session: bytes = b""
    tags: int = 0


HIT: Final = Row("exact", detail="exact")
"""The row of a hit that is told in columns."""


class FrameError(Exception):
    """The stream isn't one of frames: whoever sent it speaks something else."""


def facts(
    status: int, input_tokens: int | None, output_tokens: int | None, answer_bytes: int
) -> bytes:
    """FACTS, packed."""
    tokens = (
        -1 if count is None else min(count, 2**31 - 1) for count in (input_tokens, output_tokens)
    )
    return FACTS.pack(status, *tokens, min(max(answer_bytes, 0), 2**32 - 1))


def frame(kind: bytes, *parts: bytes) -> bytes:
    """One frame."""
    payload = b"".join(parts)
    return FRAME.pack(len(payload), kind) + payload


def frames(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Kind and payload of every whole frame, which are taken out of the buffer."""
    start = 0
    try:
        while len(buffer) - start >= FRAME.size:
            size, kind = FRAME.unpack_from(buffer, start)
            if size > MOST_BYTES:
                raise FrameError
            end = start + FRAME.size + size
            if end > len(buffer):
                break
            yield kind, bytes(buffer[start + FRAME.size : end])
            start = end
    finally:
        del buffer[:start]
