"""A choice among llama.cpp servers looks closely only at those that may win; it is right all the same."""

import random

import pytest

from preheat.core.router import Ask, Router
from preheat.core.routing.preheat import Preheat
from preheat.core.types import Usage

BLOCK_BYTES, BLOCK_TOKENS, TOKEN_S = 512, 128, 0.001
WORKERS = 5


def fleet(policy: Preheat) -> Router:
    router = Router(policy)
    for worker in range(WORKERS):
        router.has_slots(worker, 2)
    return router


def prompt(chance: random.Random) -> list[int]:
    """Of four families with a common beginning; a tenth of a prompt is needed to find a slot by it."""
    names = [0, chance.randrange(4), *(chance.randrange(3) for _ in range(chance.randrange(12)))]
    blocks, parent = [], 1
    for name in names:
        parent = hash((parent, name)) & (2**64 - 1)
        blocks += [parent]
    return blocks


@pytest.mark.parametrize("seed", range(8))
def test_who_was_not_looked_at_could_not_have_won(seed: int) -> None:
    chance = random.Random(seed)
    router, now = fleet(Preheat(copies=False)), 0.0
    under_way = []
    looked = 0
    for _ in range(250):
        now += 0.2 * chance.random()
        blocks = prompt(chance)
        ask = Ask("m", blocks, BLOCK_BYTES, len(blocks) * BLOCK_BYTES)
        chosen = router.choose(ask, range(WORKERS), now)[0]
        said = chosen.number, chosen.overlap_tokens, chosen.queue_s + chosen.miss_s, chosen.miss_s
        router._goes_by_seconds = False  # now all are looked at
        router.choose(ask, range(WORKERS), now)
        router._goes_by_seconds = True
        true = {
            one: (lane.candidate.queue_s + lane.candidate.miss_s, lane.candidate.miss_s)
            for one, lane in router._lanes.items()
        }
        number, overlap_tokens, seconds, miss_s = said
        assert overlap_tokens == router._lanes[number].candidate.overlap_tokens
        assert (seconds, miss_s) == true[number]
        better = [
            one
            for one, (its_s, its_miss_s) in true.items()
            if its_s < 0.99 * seconds and its_miss_s < 0.99 * miss_s
        ]
        assert better == []
        looked += len({round(its_s, 9) for its_s, _ in true.values()}) > 1
        ticket = router.place(ask, range(WORKERS), now).ticket
        router.go(ticket, now)
        router.began(ticket, now + TOKEN_S * (len(blocks) * BLOCK_TOKENS - ticket.overlap_tokens))
        under_way.append(ticket)
        while len(under_way) > chance.randrange(3, 3 * WORKERS):
            one = under_way.pop(chance.randrange(len(under_way)))
            tokens = len(one.ask.blocks) * BLOCK_TOKENS
            usage = Usage(tokens, 20, one.overlap_tokens, tells_cached=True)
            router.ended(one, usage, now + 0.1)
    assert looked > 50


def test_a_server_whose_slots_come_to_be_named_by_us_is_looked_at_no_more() -> None:
    router = fleet(Preheat(copies=False))
    long, short = [1, *range(100, 140)], [1, *range(100, 103)]
    for worker, blocks in ((0, long), (1, short)):
        ask = Ask("m", blocks, BLOCK_BYTES, len(blocks) * BLOCK_BYTES)
        ticket = router.place(ask, [worker], 0.0).ticket
        router.began(ticket, 0.1)
        router.ended(ticket, None, 0.2)
    ask = Ask("m", long, BLOCK_BYTES, len(long) * BLOCK_BYTES)
    assert router.choose(ask, [0, 1], 1.0)[0].number == 0  # the other one wasn't looked at closely
    router.has_files(1, 100_000, 2.0)
    waiting = router.place(ask, [0], 3.0).ticket
    busy = router.place(Ask("m", [], BLOCK_BYTES, 10**7), [0], 3.0).ticket
    assert router.choose(ask, [0, 1], 3.0)[0].number == 1
    router.failed(waiting, 4.0)
    router.failed(busy, 4.0)


def test_who_was_held_back_for_a_worker_that_has_left_is_noted_nowhere() -> None:
    router = Router(Preheat(copies=False))
    ask = Ask("m", range(1, 20), BLOCK_BYTES, 19 * BLOCK_BYTES)
    ticket = router.place(ask, [0], 0.0).ticket
    ticket.stay = None  # as if it were held back
    router.left(0)
    router.go(ticket, 1.0)
    router.ended(ticket, None, 2.0)
    assert len(router.index) == 0
