"""What publishers of KV events send: both dialects, every odd form, and nothing but one error."""

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_engine import KvEngine, as_arrays, as_maps
from preheat.core.kv_events import Batch, Cleared, Removed, Stored
from preheat.wire.kv_events import (
    MOST_BLOCKS,
    MOST_BYTES,
    EventsError,
    read_batch,
    read_live,
    read_replay,
    replay_request,
)

pack = msgspec.msgpack.encode


def only(event: Any) -> Any:
    (read,) = read_batch(pack([1.0, [event]])).events
    return read


@pytest.mark.parametrize("dialect", [as_arrays, as_maps])
def test_both_dialects_say_the_same(dialect: Any) -> None:
    engine = KvEngine(Random(1))
    for _ in range(200):
        engine.act()
    batch = engine.step(12.5)
    kinds = {type(one) for one in batch.events}
    assert kinds == {Stored, Removed, Cleared}
    read = read_batch(dialect(batch))
    group = 0 if dialect is as_maps else None
    kind = "full_attention" if dialect is as_maps else ""
    expected = [
        msgspec.structs.replace(
            one, group=group, **({"kind": kind} if isinstance(one, Stored) else {})
        )
        if not isinstance(one, Cleared)
        else one
        for one in batch.events
    ]
    assert read == Batch(12.5, expected)


def test_a_hash_is_its_low_64_bits_however_it_is_spelled() -> None:
    name = 0xFEDCBA9876543210
    spelled = [name, name - 2**64, b"\x01" * 24 + name.to_bytes(8, "big"), name.to_bytes(8, "big")]
    assert only(["BlockRemoved", spelled]) == Removed([name] * 4)


def test_all_that_a_block_is_made_of_is_read() -> None:
    event = [
        "BlockStored", [1, 2], b"\0" * 31 + b"\x09", [5, 6, 7, 8], 2, 3, "CPU", "tuned",
        [["tuned", "salt"], [["image", 4]], None], 1, "sliding_window", 512, "newer",
    ]  # fmt: skip
    assert only(event) == Stored(
        [1, 2], 9, [5, 6, 7, 8], 2, "CPU", "tuned",
        (("tuned", "salt"), (pack(["image", 4]),), ()), 1, "sliding_window",
    )  # fmt: skip


def test_an_adapter_without_a_name_is_not_the_model() -> None:
    assert only(["BlockStored", [1], None, [5, 6], 2, 3]).lora_name == "#3"
    assert only(["BlockStored", [1], None, [5, 6], 2, None]).lora_name == ""


@pytest.mark.parametrize("tokens", [[], None, [1], [1, 2, 3]])
def test_tokens_that_do_not_fill_the_blocks_are_none(tokens: Any) -> None:
    stored = only(["BlockStored", [1], 4, tokens, 2])
    assert (stored.block_hashes, stored.parent, list(stored.token_ids)) == ([1], 4, [])


def test_what_is_not_known_is_skipped() -> None:
    events = [["LoadStat", 1, 2, 3, 4, 0, None], {"type": "New", "x": 1}, ["AllBlocksCleared", "x"]]
    assert read_batch(pack([1.0, events, 3, "newer"])) == Batch(1.0, [Cleared()], 3)
    assert read_batch(pack({"ts": 2, "events": events, "newer": 1})) == Batch(2.0, [Cleared()])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 5_000,
        pack(None),
        pack([1.0]),
        pack([1.0, 5]),
        pack(["late", []]),
        pack([float("nan"), []]),
        pack([float("inf"), []]),
        pack([1.0, [[]]]),
        pack([1.0, [{}]]),
        pack([1.0, [7]]),
        pack([1.0, [["BlockStored"]]]),
        pack([1.0, [["BlockStored", [1], None, [1], 0]]]),
        pack([1.0, [["BlockStored", [1], None, [1] * 16_385, 16_385]]]),
        pack([1.0, [["BlockStored", [1], None, [-1], 1]]]),
        pack([1.0, [["BlockStored", [1], None, [2**32], 1]]]),
        pack([1.0, [["BlockStored", [1.5], None, [1], 1]]]),
        pack([1.0, [["BlockStored", [True], None, [1], 1]]]),
        pack([1.0, [["BlockRemoved", None]]]),
        pack([1.0, [["BlockRemoved", list(range(MOST_BLOCKS + 1))]]]),
        pack([1.0, [], 0, b"x" * MOST_BYTES]),
    ],
)
def test_what_cannot_be_read_is_one_error(payload: bytes) -> None:
    with pytest.raises(EventsError):
        read_batch(payload)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=12)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "type", "events"]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(["type", "ts", "events", "block_hashes", "token_ids"]), inner
        )
    ),
    max_leaves=30,
)


@given(values | st.tuples(st.floats(), st.lists(values, max_size=4)))
@settings(max_examples=400, deadline=None)
def test_any_value_is_read_or_one_error(value: Any) -> None:
    read_or_refuse(pack(value))


@given(st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_read_or_one_error(payload: bytes) -> None:
    read_or_refuse(payload)


@given(st.integers(0, 10**9), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_damaged_batch_is_read_or_one_error(seed: int, is_map: bool) -> None:
    random = Random(seed)
    engine = KvEngine(random)
    for _ in range(20):
        engine.act()
    payload = bytearray((as_maps if is_map else as_arrays)(engine.step(1.0)))
    for _ in range(random.randrange(1, 4)):
        payload[random.randrange(len(payload))] = random.randrange(256)
    read_or_refuse(bytes(payload[: random.randrange(1, len(payload) + 1)]))


def read_or_refuse(payload: bytes) -> None:
    try:
        batch = read_batch(payload)
    except EventsError:
        return
    for event in batch.events:
        if isinstance(event, Stored):
            whole = len(event.block_hashes) * event.block_tokens
            assert len(event.token_ids) in {0, whole}
        if not isinstance(event, Cleared):
            assert all(0 <= name < 2**64 for name in event.block_hashes)


def test_frames() -> None:
    seven = (7).to_bytes(8, "big")
    assert read_live([b"kv@pod", seven, b"p"]) == (7, b"p")
    assert read_replay([b"", seven, b"p"]) == (7, b"p")
    assert read_replay([b"", b"\xff" * 8, b""]) is None
    assert read_replay([b"", b"kv@pod", seven, b"p"]) == (7, b"p")
    assert read_replay([b"", b"", b"\xff" * 8, b""]) is None
    assert replay_request(7) == (b"", seven)


@pytest.mark.parametrize(
    "frames", [[], [b"kv", b"p"], [b"kv", b"\0" * 7, b"p"], [b"kv", b"\xff" * 8, b"p"], [b""] * 4]
)
def test_frames_that_are_none(frames: list[bytes]) -> None:
    with pytest.raises(EventsError):
        read_live(frames)
    with pytest.raises(EventsError):
        read_replay([b"", *frames])
