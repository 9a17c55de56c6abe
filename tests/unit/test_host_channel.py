"""Messages between two processes: calls, answers, and the end of the other side."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from preheat.config import check
from preheat.core.ledger import Account
from preheat.core.stats import Snapshot
from preheat.core.types import Invalidation, Key, Removed
from preheat.engines.child import Address
from preheat.errors import ConfigError
from preheat.host import messages
from preheat.host.channel import Channel, ChannelError

Heard = Callable[[Any], Awaitable[Any]]


@contextlib.asynccontextmanager
async def pair(supervisor: Heard, worker: Heard) -> AsyncIterator[tuple[Channel, Channel]]:
    ends = socket.socketpair()
    channels = (
        Channel(messages.SUPERVISOR_READS, supervisor),
        Channel(messages.WORKER_READS, worker),
    )
    for channel, end in zip(channels, ends, strict=True):
        await channel.open(end)
    readings = [asyncio.create_task(channel.run()) for channel in channels]
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()
        await asyncio.wait(readings, timeout=5)


async def nothing(message: Any) -> None:
    return None


SNAPSHOT = Snapshot(
    accounts={
        ("t", "n", "exact", "exact"): Account(requests=1, paid=5),
        ("t", "m", "exact", "exact"): Account(requests=2, paid=10**20, price_without_us=10**20),
    },
    latency={"exact": ([1, 2], 0.5)},
    words={"refused": {"no": 3}},
)


@pytest.mark.asyncio
async def test_a_call_gets_its_answer_whatever_else_is_said() -> None:
    async def worker(message: Any) -> Any:
        if isinstance(message, messages.Invalidate):
            await asyncio.sleep(0.05)
            return messages.Forgotten(Removed((Key(b"k" * 16),), 5))
        return messages.Counted.of(SNAPSHOT)

    async with pair(nothing, worker) as (supervisor, _):
        what = Invalidation(keys=frozenset({Key(b"k" * 16)}), tags=frozenset({"a"}))
        slow = asyncio.create_task(
            supervisor.call(messages.Invalidate(what, 7, dry_run=False), 2.0)
        )
        await asyncio.sleep(0)
        quick = await supervisor.call(messages.Collect(), 2.0)
        assert not slow.done()
        assert quick.snapshot == SNAPSHOT
        assert (await slow).removed == Removed((Key(b"k" * 16),), 5)


@pytest.mark.asyncio
async def test_settings_and_addresses_arrive_as_they_were() -> None:
    heard: list[Any] = []

    async def worker(message: Any) -> None:
        heard.append(message)

    settings = check(
        {
            "engines": {"up": {"urls": ["http://a:1", "http://b:1"]}},
            "l1": {"eviction": {"name": "mine:Lru", "options": {"x": [1, 2.5, "y"]}}},
            "models": {"m": {"input": 1.5}},
        }
    )
    engines = {"e": Address("http://127.0.0.1:1/v1", "key"), "down": None}
    start = messages.Start(settings, 1, 2, (5, 6), (), engines, "name", bytes(range(32)))
    async with pair(nothing, worker) as (supervisor, _):
        supervisor.tell(start)
        while not heard:
            await asyncio.sleep(0.01)
    assert heard == [start]


@pytest.mark.asyncio
async def test_what_the_other_side_cannot_do_is_an_error_here() -> None:
    async def worker(message: Any) -> Any:
        if isinstance(message, messages.Prepare):
            raise ConfigError("models.m: no")
        raise ValueError("secret text")

    async with pair(nothing, worker) as (supervisor, _):
        with pytest.raises(ChannelError, match=r"models\.m: no"):
            await supervisor.call(messages.Prepare(check({})), 2.0)
        with pytest.raises(ChannelError) as told:
            await supervisor.call(messages.Collect(), 2.0)
        assert "secret" not in str(told.value)


@pytest.mark.asyncio
async def test_a_call_without_an_answer_ends_in_time() -> None:
    async def worker(message: Any) -> None:
        await asyncio.sleep(30)

    async with pair(nothing, worker) as (supervisor, _):
        with pytest.raises(ChannelError, match="no answer within"):
            await supervisor.call(messages.Collect(), 0.05)


@pytest.mark.asyncio
async def test_calls_that_need_an_answer_over_the_same_channel_do_not_starve_it() -> None:
    """Each is answered with what a call in the other direction gives; too many are refused."""

    async def supervisor(message: Any) -> Any:
        return await ours.call(messages.Collect(), 10.0)

    async def worker(message: Any) -> Any:
        return messages.Counted.of(SNAPSHOT)

    async with pair(supervisor, worker) as (ours, theirs):
        calls = [theirs.call(messages.AskSnapshots(), 10.0) for _ in range(1_500)]
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(one, messages.Counted) for one in answers) >= 1_024
        refused = {str(one) for one in answers if not isinstance(one, messages.Counted)}
        assert refused <= {"it is asked too much at once"}
        assert (await theirs.call(messages.AskSnapshots(), 2.0)).snapshot == SNAPSHOT


@pytest.mark.asyncio
async def test_calls_past_the_limit_are_refused_at_once() -> None:
    async def worker(message: Any) -> None:
        await asyncio.sleep(30)

    async with pair(nothing, worker) as (supervisor, _):
        calls = [
            asyncio.create_task(supervisor.call(messages.Collect(), 10.0)) for _ in range(1_030)
        ]
        for task in calls[1_024:]:  # long before the others give up
            with pytest.raises(ChannelError, match="too much"):
                await asyncio.wait_for(task, 5.0)
        assert not any(task.done() for task in calls[:1_024])
        for task in calls[:1_024]:
            task.cancel()


def test_a_message_shows_no_key() -> None:
    engines = {"e": Address("http://127.0.0.1:1/v1", "engine-key")}
    start = messages.Start(check({}), 0, 1, (), (), engines, "name", b"secret-bytes")
    assert "key" not in repr(start)
    assert "secret" not in repr([start])


@pytest.mark.asyncio
async def test_the_end_of_the_other_side_ends_calls_and_the_reading() -> None:
    async def worker(message: Any) -> None:
        await asyncio.sleep(30)

    async with pair(nothing, worker) as (supervisor, other):
        calling = asyncio.create_task(supervisor.call(messages.Collect(), 10.0))
        await asyncio.sleep(0.05)
        other.close()
        with pytest.raises(ChannelError, match="gone"):
            await asyncio.wait_for(calling, 2)
        assert supervisor.is_gone
        with pytest.raises(ChannelError, match="gone"):
            await supervisor.call(messages.Collect(), 1.0)
        supervisor.tell(messages.Abort())  # nobody hears it, and nothing happens


@pytest.mark.asyncio
async def test_nonsense_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(messages.SUPERVISOR_READS, nothing)
    await channel.open(ours)
    for nonsense in (b"\xff" * 64,):
        theirs.sendall(nonsense)
    await asyncio.wait_for(channel.run(), 2)
    assert channel.is_gone
    theirs.close()


@pytest.mark.asyncio
async def test_who_never_reads_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(messages.SUPERVISOR_READS, nothing)
    await channel.open(ours)
    large = messages.Invalidate(Invalidation(tags=frozenset({"x" * 8_000_000})), 1, dry_run=False)
    for _ in range(12):
        channel.tell(large)
    assert channel.is_gone
    theirs.close()
