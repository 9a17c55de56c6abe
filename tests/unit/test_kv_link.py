"""What workers and the learner say to each other, as bytes."""

import pytest

from preheat.wire.kv_link import (
    LEARNER_READS,
    MOST_BYTES,
    WORKER_READS,
    AllSent,
    Heard,
    Hello,
    Ignore,
    Join,
    LinkError,
    Listen,
    Sent,
    bodies,
    frame,
    packed,
    unpacked,
)
from preheat.wire.kv_places import KvPlace

LARGE = [2**64 - 1, 0, 7]
TO_LEARNER = [
    Join("gpu"),
    Listen("http://a", "gpu.0", KvPlace("tcp://*:1", "tcp://*:2", "a")),
    Ignore("http://a"),
    AllSent([Sent("http://a", packed(LARGE), b"")]),
]
TO_WORKER = [
    Hello(b"secret"),
    Heard("http://a", packed(LARGE), b"", "told", 16, ["sql"], {"received": 3}, is_empty=True),
]


def test_what_is_said_in_pieces_is_heard_whole() -> None:
    said = b"".join(map(frame, TO_LEARNER))
    for size in (1, 3, 7, len(said)):
        buffer, heard = bytearray(), []
        for at in range(0, len(said), size):
            buffer += said[at : at + size]
            heard += [LEARNER_READS.decode(body) for body in bodies(buffer)]
        assert (heard, bytes(buffer)) == (TO_LEARNER, b"")
    buffer = bytearray(b"".join(map(frame, TO_WORKER)))
    assert [WORKER_READS.decode(body) for body in bodies(buffer)] == TO_WORKER


def test_too_much_and_half_a_block_are_refused() -> None:
    with pytest.raises(LinkError, match="at most"):
        list(bodies(bytearray((MOST_BYTES + 1).to_bytes(4, "little"))))
    with pytest.raises(LinkError, match="whole blocks"):
        unpacked(b"1234567")
    assert unpacked(packed(LARGE)) == LARGE
