"""The prefix store against a model that does everything the long way round."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core.eviction import POLICIES
from preheat.core.prefix import LeafLru, LeafPolicy, PrefixStore

# A path is a list of small choices; a block's id is made of all of them up to it.
paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def blocks_of(path: Sequence[int]) -> list[int]:
    made, block = [], 1
    for choice in path:
        block = block * 4 + choice
        made.append(block)
    return made


class Naive:
    """Every block of a path is touched at each use, the deepest first; the oldest leaf goes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: list[int] = []  # oldest first

    def use(self, blocks: list[int]) -> tuple[int, list[int]]:
        overlap = sum(block in self.order for block in blocks)
        kept = [block for block in self.order if block not in blocks]
        missing = len(blocks) + len(kept) - self.capacity
        evicted: list[int] = []
        while len(evicted) < missing:
            parents = {block // 4 for block in [*kept, *blocks]}
            evicted.append(next(block for block in kept if block not in parents))
            kept.remove(evicted[-1])
        self.order = kept + list(reversed(blocks))
        return overlap, evicted


@settings(max_examples=200, deadline=None)
@given(st.lists(paths, max_size=60), st.integers(6, 20))
def test_lru_evicts_what_touching_every_block_would(uses: list[list[int]], capacity: int) -> None:
    store, naive = PrefixStore(capacity, LeafLru()), Naive(capacity)
    for now, path in enumerate(uses):
        blocks = blocks_of(path)
        overlap = store.overlap(blocks)
        assert store.take(blocks, 0, now)
        store.release(blocks, 0, now)
        assert (overlap, store.evicted) == naive.use(blocks)
        store.evicted.clear()
        assert len(store) == len(naive.order) <= capacity


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(paths, st.integers(0, 3), st.booleans()), max_size=60), st.integers(0, 24)
)
def test_held_blocks_stay_and_prefixes_are_whole(
    name: str, moves: list[tuple[list[int], int, bool]], capacity: int
) -> None:
    store = PrefixStore(capacity, LeafPolicy(POLICIES[name]()))
    running: list[tuple[list[int], int]] = []
    for now, (path, private, ends) in enumerate(moves):
        blocks = blocks_of(path)
        before = [*store], store.free_blocks, len(store.evicted)
        held = {block for one, _ in running for block in one}
        fits = len(held.union(blocks)) + private + sum(one[1] for one in running) <= capacity
        assert store.take(blocks, private, now) == fits
        if fits:
            running.append((blocks, private))
        else:
            assert before == ([*store], store.free_blocks, len(store.evicted))
        if ends and running:
            store.release(*running.pop(0), now)
        assert len(store) + sum(one[1] for one in running) + store.free_blocks == capacity
        assert store.free_blocks >= 0
        assert all(block in store for held, _ in running for block in held)
        assert all(block // 4 in store or block < 8 for block in store)


def test_what_does_not_fit_beside_what_is_held_is_refused() -> None:
    store = PrefixStore(4, LeafLru())
    assert store.take([1, 2, 3], 0, 0.0)
    assert not store.take([7, 8], 0, 1.0)
    assert not store.grow(2, 1.0)
    assert store.grow(1, 1.0)
    store.release([1, 2, 3], 1, 2.0)
    assert store.take([7, 8], 0, 3.0)
    assert store.evicted == [3]


def test_what_cannot_fit_pushes_nobody_out() -> None:
    store = PrefixStore(6, LeafLru())
    store.take([1, 2], 1, 0.0)
    store.take([7, 8], 0, 1.0)
    store.release([7, 8], 0, 1.0)
    assert not store.take([11, 12, 13, 14], 0, 2.0)
    assert not store.take([7, 8, 9], 1, 2.0)  # its own beginning has to stay
    assert not store.grow(4, 2.0)
    assert store.evicted == []
    assert store.overlap([7, 8]) == 2
    assert store.grow(3, 2.0)
    assert store.evicted == [8, 7]


def test_what_running_prompts_share_is_held_once() -> None:
    store = PrefixStore(6, LeafLru())
    store.take([1, 2, 3], 0, 0.0)
    store.take([1, 2, 3, 4], 0, 0.0)
    store.take([9], 0, 1.0)
    store.release([9], 0, 1.0)
    assert not store.grow(3, 2.0)
    assert store.grow(2, 2.0)
    assert store.evicted == [9]


def test_restored_blocks_push_nobody_out_and_keep_their_age() -> None:
    store = PrefixStore(3, LeafLru())
    store.take([1], 0, 10.0)
    store.release([1], 0, 10.0)
    assert store.put([5, 6, 7], used_at=4.0) == 2
    assert store.put([5, 6, 7], used_at=5.0) == 0
    assert store.take([9], 0, 11.0)
    assert store.evicted == [6]


def test_a_pool_of_a_negative_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="-1 blocks"):
        PrefixStore(-1, LeafLru())


def test_what_was_never_computed_can_be_dropped_but_not_what_others_use() -> None:
    store = PrefixStore(9, LeafLru())
    store.take([1, 2, 3, 4], 0, 0.0)
    store.take([1, 2, 8], 0, 0.0)
    store.release([1, 2, 3, 4], 0, 1.0)
    store.drop([1, 2, 3, 4], 1)
    assert list(store) == [1, 2, 8]


def test_a_request_that_is_over_at_once_leaves_its_blocks_if_they_fit() -> None:
    store = PrefixStore(3, LeafLru())
    assert [store.serve([1, 2], 0.0), store.serve([1, 2, 3], 1.0)] == [0, 2]
    assert store.serve([1, 2, 3, 4], 2.0) == 3
    assert list(store) == [1, 2, 3]
