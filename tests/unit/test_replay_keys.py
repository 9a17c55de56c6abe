"""A stream of keys against a policy."""

import pytest

from preheat.core.eviction import POLICIES
from preheat.core.eviction.lru import Lru
from preheat.core.types import PLAIN, Traits
from preheat.replay.keys import Result, hits, outcomes
from preheat.replay.sections import keys_section
from preheat.traces.arrival import Arrival, Trace


def test_hits_are_counted_by_number_by_bytes_and_by_seconds() -> None:
    keys = ["a", "b", "a", "c", "b", "c"]
    sizes = [1, 2, 1, 1, 2, 1]
    costs = [10.0, 1.0, 10.0, 3.0, 1.0, 3.0]
    assert list(outcomes(Lru(), keys, sizes, costs, 3)) == [0, 0, 1, 0, 0, 1]
    found = hits(Lru(), keys, sizes, costs, 3)
    assert found == Result(
        requests=6, hits=2, asked_bytes=8, hit_bytes=2, asked_s=28.0, saved_s=13.0
    )
    assert found.object_hit_ratio == 2 / 6
    assert found.byte_hit_ratio == 2 / 8
    assert found.second_hit_ratio == 13 / 28


def test_without_sizes_and_costs_all_three_are_one() -> None:
    found = hits(Lru(), [1, 2, 1, 1], None, None, 1)
    assert found.object_hit_ratio == found.byte_hit_ratio == found.second_hit_ratio == 1 / 4


def test_what_is_larger_than_the_cache_is_never_held() -> None:
    assert list(outcomes(Lru(), [1, 9, 9, 1], [1, 5, 5, 1], None, 4)) == [0, 0, 0, 1]


@pytest.mark.parametrize("capacity_bytes", [0, 5])
def test_nothing_asked_for_is_nothing(capacity_bytes: int) -> None:
    found = hits(Lru(), [], [], [], capacity_bytes)
    assert found.object_hit_ratio == found.byte_hit_ratio == found.second_hit_ratio == 0.0
    assert list(outcomes(Lru(), [1, 1], None, None, 0)) == [0, 0]


def test_a_policy_is_told_sizes_and_costs() -> None:
    told: list[tuple[object, ...]] = []

    class Listening(Lru[int]):
        def insert(self, key: int, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
            told.append(("insert", key, size_bytes, now, traits.cost_s))
            super().insert(key, size_bytes, now, traits)

        def touch(self, key: int, now: float, traits: Traits | None = None) -> None:
            told.append(("touch", key, now, traits and traits.cost_s))
            super().touch(key, now, traits)

    outcomes(Listening(), [7, 7], [3, 3], [0.5, 0.25], 3)
    assert told == [("insert", 7, 3, 0, 0.5), ("touch", 7, 1, 0.25)]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_finds_a_loop_that_fits_and_keeps_within_its_room(name: str) -> None:
    loop = list(range(20)) * 5
    assert hits(POLICIES[name](), loop, None, None, 20).hits == 80
    assert hits(POLICIES[name](), loop, [3] * 100, None, 59).hits < 80


def test_requests_without_a_key_are_not_one_key() -> None:
    asked = [Arrival(at=float(at), key=key) for at, key in enumerate([1, -1, 2, -1, 1, -1])]
    made = keys_section(Trace(name="t", format="t", arrivals=asked), ["lru"], lambda _: None)
    assert made.note == (
        "Of 2 distinct keys, 2 bytes in all. 3 requests have no key and are left out."
    )
    assert made.rows[-1][1] == pytest.approx(1 / 3)
