"""A feed against a real ZeroMQ publisher that does what vLLM's does."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kv_engine import BLOCK, KvEngine, Publisher, as_arrays, as_maps, root
from preheat.core.kv_events import Batch, Joined, Lost, Restarted, Step, Stored, Sure, Unsure
from preheat.core.told import ToldResidency
from preheat.engines.kv_feed import KvFeed
from preheat.errors import ConfigError
from preheat.wire.kv_places import Meeting, meet

pytest.importorskip("zmq", reason="the extra `kv`")
pytestmark = pytest.mark.asyncio

Dialect = Callable[[Batch], bytes]


class Rig:
    """An engine that publishes, and what a feed makes of it."""

    def __init__(self, folder: Path, *, replay: bool = True, **options: Any) -> None:
        self.live = f"ipc://{folder}/live"
        self.replay = f"ipc://{folder}/replay" if replay else ""
        self.steps: list[Step] = []
        self.told = ToldResidency(block_tokens=BLOCK, root=root)
        self.feed = KvFeed(
            endpoint=self.live, replay_endpoint=self.replay, on_step=self.take, **options
        )
        self.random = Random(7)
        self.at = 100.0
        self.start_engine()

    def start_engine(self, **options: Any) -> None:
        self.engine = KvEngine(self.random, clears=0.0)  # after one, all is known again
        self.publisher = Publisher(self.live, self.replay, **options)

    def take(self, step: Step) -> None:
        self.steps.append(step)
        self.told.take(step, self.at)

    def publish(self, dialect: Dialect, count: int = 1, *, is_lost: bool = False) -> None:
        for _ in range(count):
            for _ in range(3):
                self.engine.act()
            self.at += 0.01
            self.publisher.publish(dialect(self.engine.step(self.at)), is_lost=is_lost)

    async def until(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.01)

    def agrees(self) -> bool:
        return set(self.told) == self.engine.holds() and self.told.trust == "told"

    def batches(self) -> list[float]:
        return [step.at for step in self.steps if isinstance(step, Batch)]


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[None]:
    task = asyncio.create_task(rig.feed.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        rig.publisher.close()


async def begin(rig: Rig, dialect: Dialect) -> None:
    """A subscriber that has come too late for a batch has lost it; so the first ones are repeated."""
    while not rig.batches():
        rig.publish(dialect)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("dialect", [as_arrays, as_maps])
@pytest.mark.parametrize("names_topic", [True, False])
async def test_lost_batches_are_replayed(
    tmp_path: Path, dialect: Dialect, names_topic: bool
) -> None:
    rig = Rig(tmp_path)
    rig.publisher.close()
    rig.start_engine(names_topic=names_topic)
    async with running(rig):
        await begin(rig, dialect)
        rig.publish(dialect, 20)
        rig.publish(dialect, 7, is_lost=True)
        rig.publish(dialect, 5)
        await rig.until(lambda: rig.batches()[-1:] == [pytest.approx(rig.at)])
        assert rig.agrees()
        assert rig.feed.counts.gaps >= 1
        assert rig.feed.counts.replayed >= 7
        assert (rig.feed.counts.lost, rig.feed.counts.bad) == (0, 0)
        assert rig.batches() == sorted(set(rig.batches()))


async def test_one_that_comes_late_hears_all_from_the_replay(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.publish(as_maps, 30)
    await asyncio.sleep(0.3)
    async with running(rig):
        await rig.until(rig.agrees)  # no further event is needed
        assert rig.steps[0] == Joined(whole=True)


async def test_one_that_comes_too_late_knows_that_it_does_not_know(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.publisher.close()
    rig.start_engine(buffer_steps=4)
    rig.publish(as_arrays, 30)
    await asyncio.sleep(0.3)
    async with running(rig):
        await rig.until(lambda: len(rig.batches()) == 4)
        assert rig.steps[0] == Joined(whole=False)
        assert rig.told.trust == "estimated"
        assert set(rig.told) <= rig.engine.holds()


async def test_without_replay_what_is_lost_is_doubted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replay=False)
    async with running(rig):
        await begin(rig, as_maps)
        rig.publish(as_maps, 2, is_lost=True)
        rig.publish(as_maps)
        await rig.until(lambda: Lost(2) in rig.steps)
        assert rig.told.trust == "doubted"
        assert (rig.feed.counts.gaps, rig.feed.counts.lost) == (1, 2)


@pytest.mark.parametrize("replay", [True, False])
async def test_a_restart_is_noticed(tmp_path: Path, replay: bool) -> None:
    rig = Rig(tmp_path, replay=replay)
    async with running(rig):
        await begin(rig, as_maps)
        rig.publish(as_maps, 10)
        await rig.until(lambda: rig.batches()[-1:] == [pytest.approx(rig.at)])
        rig.publisher.close()
        await rig.until(lambda: Unsure() in rig.steps)
        assert rig.told.trust == "doubted"
        rig.steps.clear()
        rig.start_engine()
        async with asyncio.timeout(10):
            while not (Restarted() in rig.steps and rig.batches()):
                rig.publish(as_maps)
                await asyncio.sleep(0.05)
        await rig.until(lambda: rig.batches()[-1:] == [pytest.approx(rig.at)])
        assert set(rig.told) <= rig.engine.holds()
        if replay:
            assert rig.agrees()


async def test_a_connection_that_broke_and_lost_nothing_is_trusted_again(tmp_path: Path) -> None:
    """The publisher stays; what is between goes away, and comes back."""
    rig = Rig(tmp_path)
    async with running(rig):
        await begin(rig, as_maps)
        rig.publish(as_maps, 5)
        await rig.until(lambda: rig.batches()[-1:] == [pytest.approx(rig.at)])
        rig.publisher.interrupt()
        await rig.until(lambda: Unsure() in rig.steps)
        rig.publish(as_maps, 3)
        await rig.until(lambda: Sure() in rig.steps)
        await rig.until(rig.agrees)
        assert Restarted() not in rig.steps
        assert rig.feed.counts.lost == 0


async def test_a_replay_that_never_answers_is_given_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replay_step_s=0.2)
    rig.publisher.close()
    rig.publisher = Publisher(rig.live)  # nobody listens at the other address
    async with running(rig):
        await begin(rig, as_maps)
        rig.publish(as_maps, 2, is_lost=True)
        rig.publish(as_maps, 3)
        await rig.until(lambda: rig.batches()[-1:] == [pytest.approx(rig.at)])
        assert rig.told.trust == "doubted"
        assert rig.feed.counts.replays <= 2


async def test_what_cannot_be_read_is_counted_and_doubted(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with running(rig):
        await begin(rig, as_maps)
        rig.publisher.publish(b"\xc1")
        rig.publish(as_maps)
        await rig.until(lambda: rig.batches()[-1:] == [pytest.approx(rig.at)])
        assert rig.feed.counts.bad == 1
        assert rig.told.trust == "doubted"


async def test_a_publisher_that_connects_is_waited_for(tmp_path: Path, free_port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port}"
    rig = Rig(tmp_path)
    rig.feed = KvFeed(
        endpoint=endpoint, replay_endpoint=rig.replay, on_step=rig.take, topic="kv", host="ignored"
    )
    rig.publisher.close()
    rig.publisher = Publisher(endpoint, rig.replay, binds=False)
    async with running(rig):
        await begin(rig, as_arrays)
        rig.publish(as_arrays, 5)
        await rig.until(rig.agrees)
        second = KvFeed(endpoint=endpoint, on_step=rig.take)
        with pytest.raises(ConfigError, match="can't listen at"):
            await second.run()


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def test_where_to_meet() -> None:
    assert meet("tcp://*:5557", "10.0.0.7", 2) == Meeting("tcp://10.0.0.7:5559", binds=False)
    assert meet("tcp://[::]:5557", "fe80::1") == Meeting("tcp://[fe80::1]:5557", binds=False)
    assert meet("tcp://10.0.0.1:5557", "e", 1) == Meeting("tcp://10.0.0.1:5558", binds=True)
    assert meet("ipc:///run/kv", "e") == Meeting("ipc:///run/kv", binds=False)


@pytest.mark.parametrize(
    "endpoint",
    ["", "5557", "tcp://*", "tcp://*:x", "tcp://*:70000", "ipc://", "inproc://kv", "udp://*:1"],
)
async def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="isn't an endpoint"):
        meet(endpoint, "e")


async def test_a_missing_pyzmq_is_named() -> None:
    program = (
        "import sys; sys.modules['zmq'] = None\n"
        "from preheat.engines.kv_feed import KvFeed\n"
        "from preheat.errors import ConfigError\n"
        "try: KvFeed(endpoint='tcp://*:5557', on_step=print)\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert "preheat[kv]" in done.stdout


@pytest.mark.parametrize("is_replay", [False, True])
async def test_large_batches_let_everybody_else_have_their_turn(
    tmp_path: Path, is_replay: bool
) -> None:
    turn = 0

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    rig = Rig(tmp_path)
    turns: list[int] = []
    rig.feed = KvFeed(
        endpoint=rig.live, replay_endpoint=rig.replay, on_step=lambda _: turns.append(turn)
    )
    try:
        if is_replay:  # of those before the first that is heard
            for number in range(20):
                rig.publisher.publish(as_arrays(_large(number)))
        async with running(rig):
            beside = asyncio.create_task(others())
            await asyncio.sleep(0.3)
            for number in range(20, 40):
                rig.publisher.publish(as_arrays(_large(number)))
            await rig.until(lambda: len(turns) > (40 if is_replay else 20))
            beside.cancel()
        assert len(set(turns)) > len(turns) / 3
    finally:
        rig.publisher.close()


def _large(number: int) -> Batch:
    """Of some 400 KB."""
    tokens = [60_000] * (25_600 * BLOCK)
    return Batch(float(number), [Stored(range(25_600), None, tokens, BLOCK)])
