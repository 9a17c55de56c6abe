"""The percentiles are numbers that were seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.spread import Spread, percentile, spread_of

NUMBERS = st.lists(st.floats(0, 1e6), min_size=1, max_size=300).map(sorted)


@given(NUMBERS, st.integers(0, 100))
def test_a_percentile_is_the_least_number_that_so_many_do_not_exceed(
    ordered: list[float], percent: int
) -> None:
    value = percentile(ordered, percent)
    assert value in ordered
    assert sum(one <= value for one in ordered) * 100 >= percent * len(ordered)
    below = [one for one in ordered if one < value]
    assert not below or len(below) * 100 < percent * len(ordered)


@pytest.mark.parametrize(("percent", "rank"), [(50, 50), (90, 90), (99, 99), (99.9, 100), (1, 1)])
def test_of_a_hundred_numbers_the_percentile_is_the_one_of_that_rank(
    percent: float, rank: int
) -> None:
    assert percentile(range(1, 101), percent) == rank


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs numbers"):
        percentile([], 50)


def test_the_spread_of_nothing_says_so() -> None:
    assert spread_of([]) == Spread(0)


def test_the_spread_takes_numbers_in_any_order() -> None:
    assert spread_of([3.0, 1.0, 2.0]) == Spread(3, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0)
