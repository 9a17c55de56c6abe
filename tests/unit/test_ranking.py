"""Keys in order of a number that changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.ranking import Ranking

moves = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, 0.0, 1.0, 2.5, -3.0])))


@given(moves=moves)
def test_the_lowest_is_who_was_placed_there_first(moves: list[tuple[int, float | None]]) -> None:
    ranking: Ranking[int] = Ranking()
    plain: dict[int, float] = {}  # in the order in which they were placed
    for key, priority in moves:
        known = plain.pop(key, None)
        if priority is not None:
            ranking.place(key, priority)
            plain[key] = priority
        elif known is not None:
            assert ranking.remove(key) == known
        assert len(ranking) == len(plain)
        if plain:
            assert ranking.lowest() == min(plain, key=plain.__getitem__)
        else:
            with pytest.raises(LookupError):
                ranking.lowest()


def test_what_was_overtaken_doesnt_pile_up() -> None:
    ranking: Ranking[int] = Ranking()
    for move in range(10_000):
        ranking.place(move % 10, move)
    assert len(ranking._heap) <= 2 * 10 + 64
    for key in range(9):
        ranking.remove(key)
    assert len(ranking._heap) <= 2 * 10 + 64
    assert ranking.lowest() == 9
