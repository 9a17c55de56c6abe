"""Which worker holds which prefix: against a count by brute force, and corrected by what engines say."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.core.index import PrefixIndex
from preheat.core.residency import USUAL_BLOCKS, Residency


def path(*names: int) -> list[int]:
    """Chained ids: each names all before it."""
    blocks, parent = [], 0
    for name in names:
        parent = hash((parent, name)) & (2**64 - 1)
        blocks.append(parent)
    return blocks


prompts = st.lists(st.integers(0, 2), max_size=6).map(lambda names: path(*names))
steps = st.lists(st.tuples(st.integers(0, 3), prompts, st.integers(0, 4)), max_size=40)


@given(steps, prompts)
@settings(max_examples=150, deadline=None)
def test_the_walk_finds_what_each_store_holds(
    sent: list[tuple[int, list[int], int]], asked: list[int]
) -> None:
    index = PrefixIndex()
    for worker in range(4):
        index.resized(worker, 7, 0.0)
    under_way = []
    for now, (worker, blocks, end) in enumerate(sent):
        under_way.append(index.sent(worker, blocks, float(now)))
        if end and len(under_way) >= end:
            stay = under_way.pop(random.Random(now).randrange(len(under_way)))
            if end == 1:
                index.failed(stay, float(now))
            else:
                index.ended(stay, float(now), float(end) if end == 3 else None)
    by_store = {worker: index.residency(worker).holds(asked) for worker in range(4)}
    assert index.overlaps(asked) == {worker: count for worker, count in by_store.items() if count}
    assert len(index) == len({block for worker in range(4) for block in index.residency(worker)})


def test_a_prompt_under_way_counts_at_once() -> None:
    index = PrefixIndex()
    new = path(1, 2, 3)
    stay = index.sent(5, new, 0.0)
    assert index.overlaps(path(1, 2, 9)) == {5: 2}
    index.failed(stay, 1.0)
    assert index.overlaps(new) == {}


def test_a_failure_leaves_what_was_there_before() -> None:
    index = PrefixIndex()
    index.ended(index.sent(0, path(1, 2), 0.0), 1.0, None)
    index.failed(index.sent(0, path(1, 2, 3), 2.0), 3.0)
    assert index.overlaps(path(1, 2, 3)) == {0: 2}


def test_a_worker_that_left_takes_its_blocks_along_and_its_requests_harm_nobody() -> None:
    index = PrefixIndex()
    stay = index.sent(0, path(1, 2), 0.0)
    index.sent(1, path(1), 0.0)
    index.left(0)
    assert index.overlaps(path(1, 2)) == {1: 1}
    again = index.sent(0, path(7), 1.0)
    index.ended(stay, 2.0, 0.0)
    index.failed(stay, 2.0)
    assert index.overlaps(path(7)) == {0: 1}
    index.ended(again, 3.0, None)


def test_of_a_prompt_that_is_larger_than_all_nothing_is_noted() -> None:
    index = PrefixIndex()
    index.resized(0, 2, 0.0)
    stay = index.sent(0, path(1, 2, 3), 0.0)
    assert index.overlaps(path(1, 2, 3)) == {}
    index.ended(stay, 1.0, 0.0)
    assert len(index) == 0


def filled(prompts: int, capacity_blocks: int | None = None) -> tuple[Residency, list[list[int]]]:
    residency = Residency(capacity_blocks)
    paths = [path(100 + number, 1, 2, 3, 4) for number in range(prompts)]
    for now, blocks in enumerate(paths):
        residency.sent(blocks, float(now))
        residency.ended(blocks, float(now))
    return residency, paths


def test_an_engine_that_has_less_than_hoped_is_thought_smaller() -> None:
    residency, paths = filled(20)
    gone = residency.found(5, 2.0, 5, 30.0)
    assert residency.capacity_blocks < 100
    assert gone == list(reversed(paths[0]))
    assert residency.trust == "confirmed"


def test_what_an_engine_says_it_holds_stands() -> None:
    residency, _ = filled(20, 1_000)
    assert residency.found(5, 2.0, 5, 30.0) == []
    assert residency.capacity_blocks == 1_000
    assert residency.resized(10, 31.0)
    assert len(residency) == 10


def test_an_engine_that_has_more_than_hoped_is_thought_larger() -> None:
    residency, _ = filled(1)
    residency.found(1, 4.0, 9, 0.0)
    assert residency.capacity_blocks > USUAL_BLOCKS


def test_two_that_find_nothing_mean_that_it_was_wiped() -> None:
    residency, _ = filled(20, 1_000)
    assert residency.found(5, 0.0, 5, 30.0) == []
    assert len(residency.found(4, 0.3, 5, 31.0)) == 100
    assert len(residency) == 0


@pytest.mark.parametrize("found", [-1.0, 7.5])
def test_impossible_counts_are_let_be_until_they_have_been_possible_again(found: float) -> None:
    residency, _ = filled(20)
    residency.found(5, found, 5, 30.0)
    assert residency.trust == "doubted"
    assert residency.found(5, 0.0, 5, 31.0) == []
    assert residency.found(5, 0.0, 5, 32.0) == []
    assert len(residency) == 100
    for now in range(10):
        residency.found(5, 5.0, 5, 33.0 + now)
    assert residency.trust == "confirmed"


def test_an_engine_that_has_everything_that_nobody_sent_is_doubted() -> None:
    residency, _ = filled(20)
    for now in range(8):
        residency.found(0, 6.0, 6, 40.0 + now)
    assert residency.trust == "doubted"
    assert residency.capacity_blocks >= USUAL_BLOCKS
