"""KV-cache events of vLLM and SGLang: what their ZMQ publisher sends, decoded.

Both forms that are in use: events as arrays (vLLM to 0.22, SGLang) and as maps (vLLM since then);
the batch around them, too. What is appended, and kinds of events that aren't known, is skipped.
Hashes come as bytes or as integers, signed or not; we keep their low 64 bits, which is what vLLM
itself sends when it is told to send integers.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Any, Final

import msgspec

from preheat.core.kv_events import GPU, Batch, Cleared, Event, Removed, Stored

MOST_BYTES: Final = 2_097_152
"""Of a payload. A step's events are some ten thousand tokens of five bytes."""
MOST_BLOCKS: Final = 65_536
"""Of a batch."""
MOST_BLOCK_TOKENS: Final = 16_384
"""Of a block. Those of models with state layers have some thousands."""
_LOW: Final = 2**64 - 1
_NUMBER_BYTES: Final = 8

_Hash = int | bytes
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class EventsError(Exception):
    """Not what a publisher of KV events sends. The message quotes nothing of it."""


class _Stored(msgspec.Struct):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token] | None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK_TOKENS)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    """The same, by position."""


class _Removed(msgspec.Struct):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved"):
    """The same, by position."""


class _Batch(msgspec.Struct):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class _BatchArray(_Batch, array_like=True):
    """The same, by position."""


def read_live(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Number and payload of a published message: topic, number, payload. Raises EventsError."""
    if len(frames) != 3:
        raise EventsError(f"a message of {len(frames)} frames, not 3")
    return _number(frames[1]), frames[2]


def read_replay(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Number and payload of a replay's reply: delimiter, topic, number, payload; None where it has
    ended. vLLM before #45177 (June 2026) and SGLang leave the topic out. Raises EventsError."""
    if len(frames) not in (3, 4) or frames[0]:
        raise EventsError(f"a reply of {len(frames)} frames, not an empty one and 2 or 3")
    number, payload = frames[-2:]
    if number == b"\xff" * _NUMBER_BYTES and not payload:
        return None
    return _number(number), payload


def replay_request(first: int) -> tuple[bytes, bytes]:
    """The frames that ask for all batches from this number on."""
    return b"", first.to_bytes(_NUMBER_BYTES, "big")


def read_batch(payload: bytes) -> Batch:
    """One step's events. Raises EventsError, and nothing else."""
    if len(payload) > MOST_BYTES:
        raise EventsError(f"a payload of {len(payload)} bytes; at most {MOST_BYTES} are read")
    try:
        raw = msgspec.msgpack.decode(payload)
        batch = msgspec.convert(raw, _Batch if isinstance(raw, dict) else _BatchArray)
        if not isfinite(batch.ts):
            raise EventsError("a batch without a time")
        events: list[Event] = []
        left = MOST_BLOCKS
        for one in batch.events:
            event = _event(one)
            if isinstance(event, Stored | Removed):
                left -= len(event.block_hashes)
            if event is not None:
                events.append(event)
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError) as error:
        raise EventsError(f"a payload that can't be read: {type(error).__name__}") from None
    if left < 0:
        raise EventsError(f"a batch of {MOST_BLOCKS - left} blocks; at most {MOST_BLOCKS} are read")
    return Batch(batch.ts, events, batch.data_parallel_rank or 0)


def _event(raw: Any) -> Event | None:
    """None for a kind that isn't known."""
    is_map = isinstance(raw, dict)
    match (
        raw["type"] if is_map and "type" in raw else raw[0] if isinstance(raw, list) and raw else 0
    ):
        case "BlockStored":
            return _stored(msgspec.convert(raw, _Stored if is_map else _StoredArray))
        case "BlockRemoved":
            gone = msgspec.convert(raw, _Removed if is_map else _RemovedArray)
            return Removed(_folded(gone.block_hashes), gone.medium or GPU, gone.group_idx)
        case "AllBlocksCleared":
            return Cleared()
        case str():
            return None
    raise EventsError("an event without a name")


def _stored(said: _Stored) -> Stored:
    tokens = said.token_ids or []
    if len(tokens) != len(said.block_hashes) * said.block_size:
        tokens = []  # which of them is in which block isn't said: only the place counts
    lora_name = said.lora_name or ""
    if not lora_name and said.lora_id is not None:
        lora_name = f"#{said.lora_id}"  # an adapter whose name isn't told is still not the model
    return Stored(
        block_hashes=_folded(said.block_hashes),
        parent=None if said.parent_block_hash is None else _folded([said.parent_block_hash])[0],
        token_ids=tokens,
        block_tokens=said.block_size,
        medium=said.medium or GPU,
        lora_name=lora_name,
        extra_keys=tuple(_extras(one) for one in said.extra_keys or ()),
        group=said.group_idx,
        kind=said.kv_cache_spec_kind or "",
    )


def _extras(said: Any) -> tuple[str | bytes, ...]:
    """What else counts for one block."""
    if said is None:
        return ()
    items = said if isinstance(said, list) else [said]
    return tuple(one if isinstance(one, str) else msgspec.msgpack.encode(one) for one in items)


def _folded(hashes: Sequence[_Hash]) -> list[int]:
    """Their low 64 bits."""
    return [
        (one if isinstance(one, int) else int.from_bytes(one[-_NUMBER_BYTES:], "big")) & _LOW
        for one in hashes
    ]


def _number(frame: bytes) -> int:
    number = int.from_bytes(frame, "big")
    if len(frame) != _NUMBER_BYTES or number >= 2**63:
        raise EventsError("a number that isn't one of 8 bytes")
    return number
