"""What workers and the learner say to each other, as bytes."""

import asyncio
from pathlib import Path

import pytest

from preheat.core.kv_events import Moved, Step
from preheat.core.kv_names import KvNames
from preheat.engines.kv_feed import FeedCounts
from preheat.engines.kv_link import LearnerLink
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


@pytest.mark.asyncio
@pytest.mark.timeout(20)
async def test_a_learner_of_another_version_and_a_defect_end_no_link(tmp_path: Path) -> None:
    """It counts what we don't know of and not all that we do; and whoever takes a step fails once."""
    path, steps, events = str(tmp_path / "learner.sock"), [], []
    faults, heard = [KeyError("x")], asyncio.Event()

    def on_step(step: Step) -> None:
        if isinstance(step, Moved) and step.came and faults:
            raise faults.pop()
        steps.append(step)
        if isinstance(step, Moved) and step.came:
            heard.set()

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counts = {"received": 3, "of-tomorrow": 9}
        writer.write(frame(Heard("http://a", packed([7]), b"", "told", 16, counts=counts)))
        await writer.drain()
        await heard.wait()
        writer.close()

    learner = await asyncio.start_unix_server(talk, path)
    link = LearnerLink(path, "gpu", KvNames(b""), lambda event, _: events.append(event))
    source = link.hear_at(KvPlace("tcp://*:1", "", "a"), "http://a", "gpu.0", on_step)
    hearing = asyncio.create_task(source.run())
    await asyncio.sleep(0)
    link.start(lambda *_: None)
    try:
        async with asyncio.timeout(10):
            await heard.wait()
        assert source.counts == FeedCounts(received=3)
        assert events == ["bug"]
        assert Moved([7], [], "told") in steps
    finally:
        hearing.cancel()
        await link.aclose()
        learner.close()
