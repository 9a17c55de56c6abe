"""What our own rule promises: it learns what a second of work costs the others."""

import random
from copy import deepcopy

from preheat.core.placing import Candidate, Placing
from preheat.core.routing.preheat import Preheat

REQUEST = Placing(1_024, (), 512)


def pair(queues_s: tuple[float, float], misses_s: tuple[float, float]) -> list[Candidate]:
    """Two workers: the first holds the prompt, the second is free."""
    return [
        Candidate(
            number, queue_s=queue_s, miss_s=miss_s, overlap_tokens=1_024 if number == 0 else 0
        )
        for number, (queue_s, miss_s) in enumerate(zip(queues_s, misses_s, strict=True))
    ]


def served(load: float, seed: int = 0, requests: int = 3_000) -> tuple[Preheat, float]:
    """The rule after a while of equal requests without any reuse on four workers at this load."""
    policy, rng = Preheat(), random.Random(seed)
    free_at = [0.0] * 4
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(4 * load)
        fleet = [
            Candidate(number, queue_s=max(0.0, at - now), miss_s=1.0)
            for number, at in enumerate(free_at)
        ]
        place = policy.choose(REQUEST, fleet, now)
        free_at[place] = max(now, free_at[place]) + 1.0
    return policy, now


def longest_wait_s(load: float, others_s: tuple[float, ...] = ()) -> float:
    """How long it lets a request wait for the worker that would save it one second of computing,
    where one is free, and others have so much to do."""
    learned, now = served(load)
    others = [
        Candidate(number, queue_s=queue_s, miss_s=1.0)
        for number, queue_s in enumerate(others_s, start=2)
    ]
    for tenths in range(1, 200):
        fleet = [*pair((tenths / 10, 0.0), (0.0, 1.0)), *others]
        if deepcopy(learned).choose(REQUEST, fleet, now) != 0:
            return tenths / 10
    return 20.0


def test_before_it_has_seen_anything_it_is_selfish() -> None:
    assert Preheat().choose(REQUEST, pair((0.9, 0.0), (0.0, 1.0)), 0.0) == 0
    assert Preheat().choose(REQUEST, pair((1.1, 0.0), (0.0, 1.0)), 0.0) == 1


def test_the_busier_the_fleet_the_longer_a_miss_is_avoided() -> None:
    idle, busy, full = (longest_wait_s(load) for load in (0.05, 0.8, 0.95))
    assert 1.0 <= idle <= 1.2
    assert idle < busy < full


def test_a_queue_of_rounding_errors_is_empty() -> None:
    """What a worker's queue holds is a sum that came and went. Requests that never meet share no
    backlog, whatever is left of it; then nobody would be delayed by a miss."""
    policies = [Preheat(), Preheat()]
    for policy, dust_s in zip(policies, (0.0, 1e-12), strict=True):
        for step in range(200):
            policy.choose(REQUEST, [Candidate(0, queue_s=dust_s, miss_s=1.0)], 10.0 * step)
        fleet = pair((0.9, 0.0), (0.0, 1.0))
        assert policy.choose(REQUEST, fleet, 2_000.0) == 0
        fleet = pair((1.2, 0.0), (0.0, 1.0))
        assert policy.choose(REQUEST, fleet, 2_010.0) == 1


def test_the_busier_the_others_the_longer_a_miss_is_avoided() -> None:
    """Others could go to the free worker too, so they are who a miss on it delays."""
    assert longest_wait_s(0.8, (1.0, 1.0)) < longest_wait_s(0.8, (4.0, 4.0))


def test_what_it_has_learned_it_forgets() -> None:
    policy, now = served(0.95)
    waits = pair((1.3, 0.0), (0.0, 1.0))
    assert policy.choose(REQUEST, waits, now) == 0
    policy, now = served(0.95)
    for step in range(1_000):
        policy.choose(
            REQUEST, [Candidate(number, miss_s=1.0) for number in range(4)], now + 10 * step
        )
    assert policy.choose(REQUEST, waits, now + 10_000) == 1


def test_it_spreads_equal_requests_over_idle_memories() -> None:
    policy = Preheat()
    fleet = [Candidate(number, miss_s=0.1) for number in range(5)]
    chosen = [policy.choose(REQUEST, fleet, float(now)) for now in range(10)]
    assert sorted(chosen[:5]) == sorted(chosen[5:]) == [0, 1, 2, 3, 4]


def test_memory_has_its_price_where_it_is_asked_for() -> None:
    fleet = pair((1.0, 0.0), (0.0, 0.9))
    assert Preheat(priced=True).choose(REQUEST, fleet, 0.0) == 1
    fleet[1].price = 0.06  # for two blocks
    assert Preheat(priced=True).choose(REQUEST, fleet, 0.0) == 0
    assert Preheat().choose(REQUEST, fleet, 0.0) == 1


def test_a_long_wait_counts_for_more_than_its_length() -> None:
    """Ten equal requests make the mean 1 s; then 4 s weigh 68, and 4.5 s weigh 96."""
    fleet = [Candidate(0, miss_s=1.0)]
    plain = Preheat(excess=0.0, priced=True, prior=0.0)
    with_excess = Preheat(priced=True, prior=0.0)
    for policy in (plain, with_excess):
        for step in range(10):
            policy.choose(REQUEST, fleet, 2.0 * step)
    asked = pair((4.0, 0.0), (0.0, 4.5))
    asked[1].price = -0.9  # a premium that outweighs the half second, but not the excess
    assert plain.choose(REQUEST, asked, 20.0) == 1
    asked[1].price = 0.0
    asked[0].price = 0.0
    assert with_excess.choose(REQUEST, asked, 20.0) == 0


def test_a_clock_that_stands_or_goes_back_breaks_nothing() -> None:
    policy = Preheat()
    for now in (5.0, 5.0, 3.0, 5.0):
        assert policy.choose(REQUEST, pair((0.0, 0.0), (0.0, 1.0)), now) == 0
