"""The events that a flight got, as far back as it can keep them."""

from collections import deque
from typing import Any, Final, Self

import msgspec

from preheat.wire import openai
from preheat.wire.sse import data_of

_PIECE_BYTES: Final = 160  # what an event costs beside its bytes


class Piece(msgspec.Struct, gc=False, eq=False):
    """One event of a stream: its bytes, and what must be known of them to hand them on.

    `is_common`: it is no chunk, and yet everybody gets it, as it is. `tells_usage`: its chunk has a
    usage field; `is_usage`: it tells nothing else. The chunk itself isn't kept: eight megabytes of
    events would be sixty of objects.
    """

    raw: bytes
    is_chunk: bool = False
    is_common: bool = False
    tells_usage: bool = False
    is_usage: bool = False
    _rest: bytes | None = None

    @classmethod
    def of(cls, raw: bytes, chunk: dict[str, Any]) -> Self:
        """The event of this chunk."""
        tells_usage = "usage" in chunk
        is_usage = tells_usage and bool(chunk["usage"]) and not chunk.get("choices")
        return cls(raw, is_chunk=True, tells_usage=tells_usage, is_usage=is_usage)

    def chunk(self) -> dict[str, Any]:
        """Its chunk, decoded again."""
        return openai.decode(data_of(self.raw) or b"{}")

    def rest(self) -> bytes:
        """The chunk without its first brace, id, time and usage; made once for all listeners."""
        if self._rest is None:
            dropped = ("id", "created") if self.is_usage else ("id", "created", "usage")
            kept = {k: v for k, v in self.chunk().items() if k not in dropped}
            self._rest = openai.encode(kept)[1:]
        return self._rest


class Buffer:
    """The last events of a stream, numbered from its first one on."""

    __slots__ = ("_limit_bytes", "_pieces", "_size_bytes", "end", "start")

    def __init__(self, limit_bytes: int) -> None:
        self.start = 0  # the first event that is still there
        self.end = 0  # the one that is still to come
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._pieces: deque[Piece] = deque()

    def __getitem__(self, position: int) -> Piece:
        """The event of this number."""
        return self._pieces[position - self.start]

    def has_room(self, size_bytes: int) -> bool:
        """Whether an event of this size would leave it within its limit."""
        return self._size_bytes + size_bytes + _PIECE_BYTES <= self._limit_bytes

    def add(self, piece: Piece) -> bool:
        """The next event, and whether it is still within its limit."""
        self._pieces.append(piece)
        self.end += 1
        self._size_bytes += len(piece.raw) + _PIECE_BYTES
        return self._size_bytes <= self._limit_bytes

    def shrink(self) -> None:
        """Forget the oldest events beyond the limit, but never the last one."""
        while self._size_bytes > self._limit_bytes and len(self._pieces) > 1:
            self._size_bytes -= len(self._pieces.popleft().raw) + _PIECE_BYTES
            self.start += 1
