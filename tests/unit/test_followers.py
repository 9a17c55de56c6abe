"""Requests that are held back for one that computes the same prefix."""

import asyncio
import time

import pytest

from preheat.core.router import Ask, Route, Router
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines.followers import Followers

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]


def slotted(now: float) -> Router:
    """One server with two slots: 0.1 ms a token, and 20 ms to say an answer."""
    router = Router(POLICIES["preheat"]())
    router.has_slots(0, 2)
    for number in range(40):
        at, length = now - 100.0 + number, 5 + 7 * number % 40
        ticket = router.place(ask(*range(1_000 * number, 1_000 * number + length)), [0], at).ticket
        router.began(ticket, at + 0.0128 * length)
        usage = Usage(128 * length, 1 + number % 8, 0, tells_cached=True)
        router.ended(ticket, usage, at + 0.0128 * length + 0.02)
    return router


def ask(*blocks: int) -> Ask:
    return Ask("m", blocks, 512, 512 * len(blocks))


def burst(router: Router, size: int) -> list[Route]:
    now = time.monotonic()
    return [router.place(ask(*range(60), 100 + n), [0], now) for n in range(size)]


async def test_a_follower_is_sent_when_its_leader_has_ended() -> None:
    router = slotted(time.monotonic())
    followers = Followers(router)
    leader, follower = burst(router, 2)
    assert follower.lead is not None
    held = asyncio.create_task(followers.hold(follower))
    await asyncio.sleep(0.05)
    assert not held.done()
    assert follower.ticket.stay is None
    router.ended(leader.ticket, None, time.monotonic())
    followers.ended(leader.ticket.number)
    await held
    assert follower.ticket.stay is not None
    assert follower.ticket.stay.hoped == 60


async def test_several_take_the_prefix_one_after_the_other() -> None:
    router = slotted(time.monotonic())
    followers = Followers(router)
    leader, *rest = burst(router, 4)
    order: list[int] = []

    async def follow(route: Route) -> None:
        await followers.hold(route)
        order.append(route.ticket.number)
        assert route.ticket.stay is not None
        assert route.ticket.stay.hoped == 60
        router.began(route.ticket, time.monotonic())
        await asyncio.sleep(0.02)
        router.ended(route.ticket, None, time.monotonic())
        followers.ended(route.ticket.number)

    tasks = [asyncio.create_task(follow(one)) for one in rest]
    await asyncio.sleep(0.02)
    assert not order
    router.ended(leader.ticket, None, time.monotonic())
    followers.ended(leader.ticket.number)
    await asyncio.gather(*tasks)
    assert sorted(order) == [one.ticket.number for one in rest]


async def test_a_leader_that_never_ends_is_waited_for_only_so_long() -> None:
    router = slotted(time.monotonic())
    followers = Followers(router)
    _, follower = burst(router, 2)
    assert follower.lead is not None
    began_at = time.monotonic()
    await followers.hold(follower)
    assert time.monotonic() - began_at < 2.0 * follower.lead.wait_s + 1.5
    assert follower.ticket.stay is not None


async def test_one_that_is_given_up_while_it_waits_leaves_nothing() -> None:
    router = slotted(time.monotonic())
    followers = Followers(router)
    leader, follower = burst(router, 2)
    held = asyncio.create_task(followers.hold(follower))
    await asyncio.sleep(0.02)
    held.cancel()
    await asyncio.wait([held])
    assert held.cancelled()
    router.failed(follower.ticket, time.monotonic())
    router.ended(leader.ticket, None, time.monotonic())
    followers.ended(leader.ticket.number)
    assert router.queue_s(0, time.monotonic()) == 0.0


async def test_a_leader_that_failed_sets_its_follower_free() -> None:
    router = slotted(time.monotonic())
    followers = Followers(router)
    leader, follower = burst(router, 2)
    held = asyncio.create_task(followers.hold(follower))
    await asyncio.sleep(0.02)
    router.failed(leader.ticket, time.monotonic())
    followers.ended(leader.ticket.number)
    await held
    assert follower.ticket.stay is not None
    assert follower.ticket.stay.hoped == 0, "it computes the prefix itself"
