"""From a server's steps to the index: in pieces, bounded, and told of what is amiss."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from preheat import config, wiring
from preheat.core.kv_events import Batch, Cleared, Joined, Moved, Restarted, Step, Stored
from preheat.core.kv_names import KvNames
from preheat.core.router import Ask, Router
from preheat.core.routing import POLICIES
from preheat.core.stats import UpstreamCounts
from preheat.core.tokens import token_blocks
from preheat.core.told import Change, ToldResidency
from preheat.engines.kv_ear import KvEar
from preheat.engines.kv_feed import FeedCounts, OnStep
from preheat.engines.kv_tokens import read
from preheat.errors import ConfigError
from preheat.telemetry.logs import Log

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

BLOCK = 16


class Rig:
    """An ear without a server. `run` is what its source does."""

    def __init__(self) -> None:
        self.router = Router(POLICIES["preheat"]())
        self.names = KvNames(b"secret")
        self.events: list[tuple[str, dict[str, object]]] = []
        self.counts = FeedCounts()
        self.tell: OnStep = print
        self.runs: Callable[[], None] = lambda: None
        self.ear = KvEar(1, "gpu.1", self.router, self.names, self.hear, self.note)

    def hear(self, on_step: OnStep) -> "Rig":
        self.tell = on_step
        return self

    async def run(self) -> None:
        self.runs()
        await asyncio.sleep(60)

    def note(self, event: str, fields: dict[str, object]) -> None:
        self.events.append((event, fields))

    def held(self) -> int:
        return len(self.router.index)


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Rig]:
    rig = Rig()
    task = asyncio.create_task(rig.ear.run())
    try:
        yield rig
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.002)


def stored(count: int, first: int = 0, size: int = BLOCK) -> Batch:
    tokens = list(range(first, first + count * size))
    return Batch(1.0, [Stored(range(first, first + count), None, tokens, size)])


async def test_a_long_prompt_is_taken_in_pieces_and_others_have_their_turn() -> None:
    async with listening() as rig:
        rig.tell(Joined(whole=True))
        rig.tell(stored(4_000))
        turns = 0
        while rig.held() < 4_000:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 50
        blocks = token_blocks(list(range(4_000 * BLOCK)), BLOCK, rig.names.root("", ""))
        assert rig.router.index.overlaps(blocks) == {1: 4_000}
        assert rig.router.known(1, 0.0).trust == "told"
        assert rig.events == [("kv-events-heard", {"worker": "gpu.1", "whole": True})]


@pytest.mark.parametrize(("engine", "ours", "held"), [(1, 16, 2), (16, 16, 32), (128, 128, 32)])
async def test_the_first_block_tells_how_large_they_are(engine: int, ours: int, held: int) -> None:
    async with listening() as rig:
        rig.tell(Joined(whole=True))
        await asyncio.sleep(0.02)
        assert rig.router.known(1, 0.0).trust == "estimated"
        rig.tell(stored(32, size=engine))
        await until(rig.held)
        await asyncio.sleep(0.02)
        assert (rig.names.block_tokens, rig.held()) == (ours, held)
        assert rig.router.known(1, 0.0).trust == "told"


@pytest.mark.parametrize("said", [Restarted(), Batch(9.0, [Cleared()])])
async def test_who_has_nothing_left_has_nothing_of_what_was_sent_either(said: Step) -> None:
    async with listening() as rig:
        ask = Ask("m", [7, 8, 9], 512, 4_096)
        rig.router.ended(rig.router.place(ask, [1], 0.0).ticket, None, 1.0)
        rig.tell(stored(4))
        await until(lambda: rig.held() == 7)
        rig.tell(said)
        await until(lambda: not rig.held())


async def test_a_prompt_of_an_adapter_is_looked_up_among_what_was_stored_for_it() -> None:
    async with listening() as rig:
        tokens = list(range(4 * BLOCK))
        event = Stored(range(4), None, tokens, BLOCK, lora_name="sql", extra_keys=[("sql",)] * 4)
        rig.tell(Batch(1.0, [event]))
        await until(lambda: rig.held() == 4)
        found = {}
        for model in ("sql", "tiny"):
            reading = read(json.dumps({"model": model, "prompt": tokens}).encode(), rig.names)
            assert reading is not None
            found[model] = rig.router.index.overlaps(token_blocks(tokens, BLOCK, reading.root))
        assert found == {"sql": {1: 4}, "tiny": {}}


async def test_what_comes_faster_than_it_is_taken_is_lost_and_counted() -> None:
    async with listening() as rig:
        for one in range(2_000):
            rig.tell(stored(1, first=one * BLOCK))
        assert rig.ear.counts.lost == 2_000 - 1_024
        await until(lambda: rig.held() == 1_024)
        assert rig.router.known(1, 0.0).trust == "doubted"
        assert any(event == "kv-events-lost" for event, _ in rig.events)
        rig.tell(stored(1, first=9_000_000))
        await until(lambda: rig.held() == 1_025)
        assert rig.ear.counts.lost == 2_000 - 1_024


async def test_what_waits_is_bounded_by_its_tokens_too() -> None:
    def large(number: int) -> Batch:
        names = range(number * 16_384, (number + 1) * 16_384)
        return Batch(1.0, [Stored(names, None, range(16_384 * BLOCK), BLOCK)])

    async with listening() as rig:
        for number in range(30):
            rig.tell(large(number))
        assert rig.ear.counts.lost == 30 - 16
        await until(lambda: any(event == "kv-events-lost" for event, _ in rig.events))
        rig.tell(large(30))  # there is room again
        assert rig.ear.counts.lost == 30 - 16


async def test_what_another_process_heard_is_taken_likewise() -> None:
    async with listening() as rig:
        rig.names.learn_size(16)
        rig.tell(Moved([1, 2], [], "told"))
        await until(lambda: rig.held() == 2)
        assert rig.router.known(1, 0.0).trust == "told"


@pytest.mark.parametrize("step", [stored(4), Moved([1, 2, 3, 4], [], "told")])
@pytest.mark.parametrize("place", ["residency", "index"])
async def test_a_step_that_a_defect_costs_is_doubted_and_the_next_one_heard(
    step: Step, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening() as rig:
        rig.names.learn_size(BLOCK)
        rig.tell(Joined(whole=True))
        rig.tell(step)
        await until(lambda: rig.held() == 4)
        assert rig.router.known(1, 0.0).trust == "told"
        sound_take, sound_told = ToldResidency.take, rig.router.told
        faults = [KeyError("somebody's text"), KeyError("again")]

        def take(told: ToldResidency, step: Step, now: float) -> Change:
            change = sound_take(told, step, now)
            if place == "residency" and faults:
                raise faults.pop()
            return change

        def told(worker: int, change: Change) -> None:
            if place == "index" and faults:
                raise faults.pop()
            sound_told(worker, change)

        monkeypatch.setattr(ToldResidency, "take", take)
        monkeypatch.setattr(rig.router, "told", told)
        rig.tell(stored(1, first=900 * BLOCK))
        await until(lambda: not faults)
        await asyncio.sleep(0.01)
        assert rig.router.known(1, 0.0).trust == "doubted"
        assert rig.ear.counts.lost == 1
        (said,) = [fields for event, fields in rig.events if event == "bug"]
        assert (said["worker"], said["type"]) == ("gpu.1", "KeyError")
        assert "test_kv_ear.py:" in str(said["where"])
        assert "somebody" not in str(said)
        held = rig.held()
        rig.tell(stored(2, first=9_000_000))
        await until(lambda: rig.held() >= held + 2)


@pytest.mark.parametrize(
    ("failure", "why"), [(ConfigError("no such address"), "no such address"), (KeyError(), "Key")]
)
async def test_a_source_that_fails_is_told_once_in_a_while(failure: Exception, why: str) -> None:
    def fail() -> None:
        raise failure

    async with listening() as rig:
        rig.runs = fail
        await until(lambda: rig.events)
        (event, fields), *more = rig.events
        assert (event, why in str(fields["why"]), more) == ("kv-events-refused", True, [])


async def test_without_the_extra_the_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    tree = {"urls": ["http://a:1", "http://b:1"], "kv_events": ["tcp://*:5557"]}
    settings = config.check({"engines": {"gpu": tree}})
    with (
        (tmp_path / "log").open("wb") as file,
        pytest.raises(ConfigError, match=r"engines.gpu.kv_events: KV events need pyzmq.*\[kv"),
    ):
        wiring.engine("gpu", settings.engines["gpu"], Log(file))


async def test_what_one_process_heard_for_all_counts_once() -> None:
    counts = [UpstreamCounts(events={"received": 7, "lost": 1}) for _ in range(2)]
    counts[0].add(counts[1])
    assert counts[0].events == {"received": 7, "lost": 1}
    counts[0].retire()
    assert counts[0].events == {}
