"""Every store: what is in the table is tested by that."""

import asyncio
import contextlib
import hashlib
import os
import random
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_cases import SITES, Other, Site, other_process

from preheat import stores
from preheat.core.types import Epoch, Invalidation, Key
from preheat.errors import StoreError
from preheat.stores import Store

LONG = 3600.0
BOUND_S = 5.0
"""Longer than any call may take."""

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=stores.STORES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with SITES[request.param](tmp_path) as place:
        yield place


def key_of(number: int) -> Key:
    return Key(hashlib.blake2b(str(number).encode(), digest_size=16).digest())


def sealed(size: int, seed: int) -> bytes:
    """A value that shows whether it is whole."""
    body = random.Random(seed).randbytes(size)
    return hashlib.sha256(body).digest() + body


def is_whole(value: bytes) -> bool:
    return hashlib.sha256(value[32:]).digest() == value[:32]


def later(seconds: float = LONG) -> float:
    return time.time() + seconds


async def only(store: Store, key: Key) -> bytes | None:
    (value,) = await store.get([key])
    return value


async def outcome(call: Awaitable[Any]) -> Any:
    """What it returns, or the StoreError; whatever else it raises is a failure."""
    try:
        return await asyncio.wait_for(call, BOUND_S)
    except StoreError as error:
        return error


@pytest.mark.parametrize("size", [0, 1, 1_900, 2_000, 2_038, 4_096, 200_000, 4_000_000])
async def test_a_value_comes_back_as_it_was_put(site: Site, size: int) -> None:
    value = random.Random(size).randbytes(size)
    async with site.opened() as store:
        await store.put(key_of(1), value, later())
        assert await store.get([key_of(1)]) == [value]
        if store.is_immediate:
            assert store.get_now([key_of(1)]) == [value]


async def test_many_are_put_at_once_and_each_is_told_why_it_is_not_kept(site: Site) -> None:
    async with site.opened() as store:
        await store.put(key_of(1), b"old", later())
        items = [(key_of(number), b"value %d" % number, later()) for number in range(200)]
        assert await store.put_many(items) == [""] * 200
        assert await store.get([key for key, _, _ in items]) == [value for _, value, _ in items]
        assert await store.put_many([]) == []


async def test_values_come_in_the_order_of_the_keys(site: Site) -> None:
    async with site.opened() as store:
        await store.put(key_of(1), b"one", later())
        await store.put(key_of(2), b"two", later())
        keys = [key_of(2), key_of(3), key_of(1), key_of(2)]
        assert await store.get(keys) == [b"two", None, b"one", b"two"]
        assert await store.get([]) == []


async def test_the_last_put_counts_and_is_counted_once(site: Site) -> None:
    async with site.opened() as store:
        for size in (10, 100_000, 0, 3_000, 20):
            await store.put(key_of(1), b"v" * size, later(LONG + size))
        assert await only(store, key_of(1)) == b"v" * 20
        assert (await store.size()).entries == 1


async def test_deleting_twice_is_deleting_once(site: Site) -> None:
    async with site.opened() as store:
        await store.put(key_of(1), b"one", later())
        await store.put(key_of(2), b"two", later())
        for _ in range(2):
            await store.delete([key_of(1), key_of(3)])
        await store.delete([])
        assert await store.get([key_of(1), key_of(2)]) == [None, b"two"]
        assert (await store.size()).entries == 1


async def test_many_values_put_at_once_are_all_there(site: Site) -> None:
    keys = [key_of(number) for number in range(2_000)]
    async with site.opened() as store:
        await asyncio.gather(*(store.put(key, key * 20, later()) for key in keys))
        assert await store.get(keys) == [key * 20 for key in keys]
        assert (await store.size()).entries == len(keys)


async def test_tasks_that_write_the_same_keys_never_read_a_mixture(site: Site) -> None:
    async with site.opened() as store:

        async def use(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                key = key_of(rng.randrange(5))
                await store.put(
                    key, sealed(rng.randrange(20_000), rng.random().__hash__()), later()
                )
                value = await only(store, key)
                assert value is None or is_whole(value)
                if rng.random() < 0.2:
                    await store.delete([key])

        await asyncio.gather(*(use(seed) for seed in range(10)))


async def test_what_one_process_puts_the_other_gets(site: Site) -> None:
    with other_process(site) as other:
        async with site.opened() as store:
            await other.call("put", key_of(1), b"theirs", later())
            assert await only(store, key_of(1)) == b"theirs"
            await store.put(key_of(1), b"ours", later())
            assert await other.call("get", [key_of(1)]) == [b"ours"]
            await other.call("delete", [key_of(1)])
            assert await only(store, key_of(1)) is None


async def test_processes_that_write_the_same_keys_never_read_a_mixture(site: Site) -> None:
    async def use_other(other: Other) -> None:
        for turn in range(60):
            await other.call("put", key_of(turn % 3), sealed(turn * 900, turn), later())

    with other_process(site) as other:
        async with site.opened() as store:
            writing = asyncio.create_task(use_other(other))
            turn = 0
            while not writing.done():
                turn += 1
                await store.put(key_of(turn % 3), sealed(turn % 50 * 900, -turn), later())
                for value in await store.get([key_of(number) for number in range(3)]):
                    assert value is None or is_whole(value)
            await writing


async def test_a_value_is_forgotten_after_its_expiry_and_not_before(site: Site) -> None:
    async with site.opened() as store:
        await store.put(key_of(1), b"short", later(0.3))
        await store.put(key_of(2), b"long", later())
        await store.put(key_of(3), b"late", time.time() - 10)
        assert await store.get([key_of(1), key_of(2)]) == [b"short", b"long"]
        await asyncio.sleep(0.4)
        site.tidy()
        keys = [key_of(number) for number in (1, 2, 3)]
        assert await store.get(keys) == [None, b"long", None]


async def test_values_outlive_the_stores_that_put_them(site: Site) -> None:
    async with site.opened() as store:
        await store.put(key_of(1), b"one", later())
    async with site.opened() as store:
        assert await only(store, key_of(1)) == b"one"


async def test_closing_lets_arrive_what_was_put(site: Site) -> None:
    keys = [key_of(number) for number in range(50)]
    async with site.opened() as store:
        putting = [asyncio.create_task(store.put(key, key * 100, later())) for key in keys]
        await asyncio.sleep(0)
        await store.aclose()
        await asyncio.gather(*putting)
    async with site.opened() as store:
        assert await store.get(keys) == [key * 100 for key in keys]


async def test_a_closed_store_says_so_with_a_store_error(site: Site) -> None:
    async with site.opened() as store:
        await store.aclose()
        for call in _every_call(store):
            assert isinstance(await outcome(call), StoreError)
        if store.is_immediate:
            with pytest.raises(StoreError):
                store.get_now([key_of(1)])


async def test_while_the_store_hangs_every_call_ends_soon_and_later_all_work(site: Site) -> None:
    async with site.opened() as store:
        await store.put(key_of(1), b"one", later())
        await store.news(Epoch())
        with site.stalled():
            for _ in range(2):
                began_at = time.monotonic()
                found = await asyncio.gather(*(outcome(call) for call in _every_call(store)))
                assert any(isinstance(one, StoreError) for one in found)
                assert time.monotonic() - began_at < BOUND_S
        async with asyncio.timeout(20):
            while isinstance(await _all_of(_every_call(store)), StoreError):
                await asyncio.sleep(0.05)
        assert await only(store, key_of(9)) == b"nine"


async def _all_of(calls: list[Awaitable[Any]]) -> Any:
    """A StoreError if one of them raises one."""
    found = await asyncio.gather(*(outcome(call) for call in calls))
    return next((one for one in found if isinstance(one, StoreError)), None)


def _every_call(store: Store) -> list[Awaitable[Any]]:
    return [
        store.put(key_of(9), b"nine", later()),
        store.get([key_of(9)]),
        store.delete([key_of(8)]),
        store.size(),
        store.take(key_of(9), 1.0),
        store.renew([key_of(9)], 1.0),
        store.release([key_of(9)]),
        store.publish(Invalidation(model="m")),
        store.news(Epoch("of another board", 1)),
    ]


# Leases ---------------------------------------------------------------------------------------


async def test_one_process_at_a_time_has_the_lease(site: Site) -> None:
    with other_process(site) as other:
        async with site.opened() as store:
            assert await store.take(key_of(1), 60.0)
            assert not await other.call("take", key_of(1), 60.0)
            assert await other.call("take", key_of(2), 60.0)
            assert not await store.take(key_of(2), 60.0)
            await other.call("release", [key_of(1), key_of(2)])  # one of them is not its own
            assert not await other.call("take", key_of(1), 60.0)
            assert await store.take(key_of(2), 60.0)
            await store.release([key_of(1)])
            assert await other.call("take", key_of(1), 60.0)


async def test_of_two_processes_that_ask_at_once_one_gets_it(site: Site) -> None:
    with other_process(site) as other:
        async with site.opened() as store:
            for number in range(30):
                took = await asyncio.gather(
                    store.take(key_of(number), 60.0), other.call("take", key_of(number), 60.0)
                )
                assert sorted(took) == [False, True]


async def test_a_lease_ends_unless_it_is_renewed(site: Site) -> None:
    with other_process(site) as other:
        async with site.opened() as store:
            assert await store.take(key_of(1), 0.4)
            assert await store.take(key_of(2), 0.4)
            await store.renew([key_of(2), key_of(3)], 60.0)
            await asyncio.sleep(0.5)
            assert await other.call("take", key_of(1), 60.0)
            assert not await other.call("take", key_of(2), 60.0)
            await store.renew([key_of(1)], 60.0)  # it isn't ours any more
            await store.release([key_of(1)])
            assert not await store.take(key_of(1), 60.0)


async def test_a_killed_process_holds_up_nobody_for_long(site: Site) -> None:
    lease_s = 60.0 if site.sees_death else 1.0
    async with site.opened() as store:
        with other_process(site) as other:
            assert await other.call("take", key_of(1), lease_s)
            assert not await store.take(key_of(1), lease_s)
            other.kill()
            async with asyncio.timeout(2.0):
                while not await store.take(key_of(1), lease_s):
                    await asyncio.sleep(0.05)


# Invalidations --------------------------------------------------------------------------------

EVERYTHING = Invalidation(
    keys=frozenset([key_of(1), Key(b"\0\xff" * 8)]),
    tags=frozenset(["a", "\u00fc\U0001f525"]),
    model="m",
    namespace="",
    tenant="t",
)


async def test_invalidations_come_whole_in_order_and_once(site: Site) -> None:
    told = [Invalidation(), EVERYTHING, Invalidation(keys=frozenset([key_of(1)]))]
    with other_process(site) as other:
        async with site.opened() as store:
            before = (await store.news(Epoch())).epoch
            first = await store.publish(told[0])
            await other.call("publish", told[1])
            last = await store.publish(told[2])
            for news in (await store.news(before), await other.call("news", before)):
                assert [what for _, what in news.invalidations] == told
                numbers = [number for number, _ in news.invalidations]
                assert numbers == [first.number, first.number + 1, last.number]
                assert news.epoch == last
                assert not news.is_all
            assert not (await store.news(last)).invalidations
            assert [n for n, _ in (await store.news(first)).invalidations] == numbers[1:]


async def test_a_reader_of_nothing_or_of_another_generation_gets_all_there_is(site: Site) -> None:
    async with site.opened() as store:
        epoch = await store.publish(EVERYTHING)
        for since in (Epoch(), Epoch("of another board", epoch.number)):
            news = await store.news(since)
            assert news.is_all
            assert news.epoch == epoch
            assert [what for _, what in news.invalidations] == [EVERYTHING]


async def test_the_count_goes_on_in_the_same_generation_after_a_restart(site: Site) -> None:
    async with site.opened() as store:
        first = await store.publish(EVERYTHING)
    async with site.opened() as store:
        assert (await store.news(first)).epoch == first
        second = await store.publish(EVERYTHING)
    assert second == Epoch(first.generation, first.number + 1)


async def test_old_invalidations_are_forgotten_and_that_is_said(site: Site) -> None:
    async with site.opened() as store:
        early = await store.publish(EVERYTHING)
        for _ in range(110):
            what = Invalidation(tags=frozenset([os.urandom(4).hex()]))
            await asyncio.gather(*(store.publish(what) for _ in range(100)))
        news = await store.news(early)
        assert news.is_all
        assert news.floor > early.number
        assert 9_900 <= len(news.invalidations) <= 10_300
        numbers = [number for number, _ in news.invalidations]
        assert numbers == list(range(news.floor + 1, news.epoch.number + 1))
        with contextlib.suppress(StoreError):
            assert not (await store.news(Epoch(early.generation, news.floor))).is_all
