"""Prompts cut otherwise: nothing hits more than the trace's own blocks do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.replay.granularity import by_branch, by_turn, cuts, effect, fixed, full_paths
from preheat.traces.arrival import Trace
from replay_parts import arrival, trace


def small() -> Trace:
    """Two sessions over a trunk of four blocks: they part after it."""
    return trace(
        [
            arrival(0.0, [1, 2, 3, 4, 10, 11], session="a"),
            arrival(1.0, [1, 2, 3, 4, 20], session="b"),
            arrival(2.0, [1, 2, 3, 4, 10, 11, 12, 13, 14], session="a"),
        ]
    )


def test_fixed_cuts_leave_over_what_does_not_fill_a_block() -> None:
    cut = fixed(full_paths(small()), 4)
    assert [len(path) for path in cut.paths] == [1, 1, 2]
    assert set(cut.sizes.values()) == {4}


def test_branches_are_cut_where_prompts_part_and_end() -> None:
    cut = by_branch(full_paths(small()))
    assert [[cut.sizes[block] for block in path] for path in cut.paths] == [
        [4, 2],
        [4, 1],
        [4, 2, 3],
    ]
    assert cut.paths[0][0] == cut.paths[1][0]
    assert effect(small(), cut, 20, 100).hit == 4 + 6


def test_turns_are_cut_where_the_session_was_and_share_no_trunk() -> None:
    cut = by_turn(small(), full_paths(small()))
    assert [[cut.sizes[block] for block in path] for path in cut.paths] == [[6], [5], [6, 3]]
    assert effect(small(), cut, 20, 100).hit == 6


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=25),
    st.integers(0, 40),
)
def test_no_cut_hits_more_than_the_finest_in_an_endless_memory(
    choices: list[list[int]], capacity: int
) -> None:
    asked = []
    for number, one in enumerate(choices):
        block, path = 1, []
        for choice in one:
            block = block * 4 + choice
            path.append(block)
        asked.append(arrival(float(number), path, session=str(number % 3)))
    of = trace(asked)
    finest, *others = [make() for make in cuts(of, (1, 2, 3))]
    total = sum(len(path) for path in finest.paths)
    most = effect(of, finest, total, 10_000).hit
    assert sum(finest.sizes[block] for path in finest.paths for block in path) == total
    for cut in others:
        assert effect(of, cut, total, 10_000).hit <= most
        assert effect(of, cut, total, capacity).hit <= effect(of, cut, total, 10_000).hit
    assert effect(of, by_branch(full_paths(of)), total, 10_000).hit == pytest.approx(most)
