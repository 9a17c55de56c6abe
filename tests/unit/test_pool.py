"""One memory without a queue, its lower tiers, and the order that knows what comes."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core.prefix import LeafLru, PrefixStore
from preheat.replay.orders import Clairvoyant
from preheat.replay.pool import serve, total
from preheat.replay.tiers import Tiers, TierSpec
from replay_parts import BLOCK, LINEAR, TOKEN_S, arrival


def test_what_was_lost_is_what_had_been_computed_before() -> None:
    arrivals = [
        arrival(0.0, [1, 2, 3]),
        arrival(1.0, [7, 8, 9, 10]),
        arrival(2.0, [1, 2, 3, 4]),
    ]
    served = serve(arrivals, BLOCK, LINEAR, PrefixStore(5, LeafLru()))
    last = served[-1]
    assert (last.cached, last.known, last.full) == (1, 3, 4)
    assert last.prefill_s == pytest.approx(31 * TOKEN_S)
    assert last.lost_s == pytest.approx(20 * TOKEN_S)
    assert total(served, lambda one: one.no_cache_s) == pytest.approx((31 + 41 + 41) * TOKEN_S)


@pytest.mark.parametrize("tier_blocks", [0, 1, 2, 50])
def test_memory_and_tier_lose_what_one_memory_of_their_size_would(tier_blocks: int) -> None:
    arrivals = [arrival(float(i), [i % 4 * 10 + j for j in range(3)]) for i in range(40)]
    tier = TierSpec("dram", tier_blocks, block_s=0.001)
    both = serve(arrivals, BLOCK, LINEAR, PrefixStore(5, LeafLru()), tiers=Tiers([tier]))
    one = serve(arrivals, BLOCK, LINEAR, PrefixStore(5 + tier_blocks, LeafLru()))
    assert total(both, lambda x: x.lost_s) == pytest.approx(total(one, lambda x: x.lost_s))
    assert total(both, lambda x: x.load_s) > 0 or tier_blocks < 7


def test_what_falls_out_of_one_tier_goes_to_the_next_and_comes_back_from_there() -> None:
    tiers = Tiers([TierSpec("dram", 2, 0.1), TierSpec("ssd", 3, 1.0, latency_s=5.0)])
    tiers.put([1, 2, 3, 4])
    assert (3 in tiers.all[0], 1 in tiers.all[1]) == (True, True)
    assert tiers.find([3, 2, 1, 9]).blocks == 3
    assert tiers.find([3, 2, 1, 9]).load_s == pytest.approx(0.1 + 5.0 + 2 * 1.0)
    tiers.remove([3, 2])
    assert tiers.find([3]).blocks == 0
    assert tiers.find([1]).blocks == 1


def test_a_copy_takes_nothing_in() -> None:
    tiers = Tiers([TierSpec("drained", 9, 0.1, is_copy=True), TierSpec("ssd", 9, 1.0)])
    tiers.put([5])
    assert (5 in tiers.all[0], 5 in tiers.all[1]) == (False, True)


def best_hits(paths: list[tuple[int, ...]], capacity: int) -> int:
    """The most blocks that any choice of victims could have hit: all of them are tried."""

    def go(number: int, held: frozenset[int]) -> int:
        if number == len(paths):
            return 0
        path = paths[number][:capacity]
        hits = 0
        while hits < len(path) and path[hits] in held:
            hits += 1
        rest = held - set(path)
        excess = len(path) + len(rest) - capacity
        if excess <= 0:
            return hits + go(number + 1, held | set(path))
        best = 0
        for gone in {frozenset(one) for one in permutations(sorted(rest), excess)}:
            kept = rest - gone
            if all(block // 10 in kept | set(path) or block < 10 for block in kept):
                best = max(best, go(number + 1, kept | set(path)))
        return hits + best

    return go(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), min_size=1, max_size=7),
    st.integers(2, 5),
)
def test_nothing_hits_more_than_the_clairvoyant(choices: list[list[int]], capacity: int) -> None:
    paths = []
    for one in choices:
        block, path = 0, []
        for choice in one:
            block = block * 10 + choice
            path.append(block)
        paths.append(tuple(path))
    arrivals = [arrival(float(at), path) for at, path in enumerate(paths)]
    served = serve(arrivals, BLOCK, LINEAR, PrefixStore(capacity, Clairvoyant(paths, capacity)))
    assert sum(one.cached for one in served) == best_hits(paths, capacity)


def test_what_is_said_to_be_over_leaves_first() -> None:
    store = PrefixStore(4, LeafLru())
    for at, path in enumerate([[1, 2], [3, 4]]):
        store.take(path, 0, at)
        store.release(path, 0, at)
    store.outdate([3, 4])
    store.take([9], 0, 5.0)
    store.take([8], 0, 6.0)
    assert store.evicted == [4, 3]


def test_a_flush_keeps_what_is_held_and_paths_come_newest_first() -> None:
    store = PrefixStore(9, LeafLru())
    for at, path in enumerate([[1, 2], [1, 5], [3]]):
        store.take(path, 0, at)
        if path != [1, 5]:
            store.release(path, 0, at)
    assert store.paths() == [[3], [1, 5], [1, 2]]
    store.flush()
    assert list(store) == [1, 5]
