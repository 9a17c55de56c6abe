"""What a place in a memory is worth, by what was pushed out of it and asked for again."""

import pytest

from preheat.core.ghosts import Ghosts


def flat_s(_: int) -> float:
    return 0.5


def test_nobody_has_to_leave_so_a_place_costs_nothing() -> None:
    ghosts = Ghosts(4)
    ghosts.computed([1, 2], 0, flat_s, 1.0)
    assert ghosts.price_s == 0.0


def test_the_price_is_what_was_computed_again_by_all_that_left() -> None:
    ghosts = Ghosts(8)
    ghosts.evicted([3, 2, 1, 9], 0.0)
    assert ghosts.price_s == 0.0
    ghosts.computed([1, 2, 3, 4], 1, lambda place: 1.0 + place, 0.0)
    assert ghosts.price_s == pytest.approx((2.0 + 3.0) / 4)  # 1 was found, 4 never seen
    ghosts.computed([1, 2, 3, 4], 1, lambda place: 1.0 + place, 0.0)
    assert ghosts.price_s == pytest.approx((2.0 + 3.0) / 4)  # they are back, and were counted


def test_only_as_many_are_remembered_as_it_is_told() -> None:
    ghosts = Ghosts(2)
    ghosts.evicted([1, 2], 0.0)
    ghosts.evicted([1, 3], 0.0)  # 2 is the oldest now
    assert len(ghosts) == 2
    ghosts.computed([2], 0, flat_s, 0.0)
    assert ghosts.price_s == 0.0
    ghosts.computed([1], 0, flat_s, 0.0)
    assert ghosts.price_s == pytest.approx(0.5 / 4)


def test_what_was_long_ago_weighs_less() -> None:
    ghosts = Ghosts(8, memory_s=100.0)
    ghosts.evicted([1, 2], 0.0)
    ghosts.computed([1, 2], 0, flat_s, 0.0)
    assert ghosts.price_s == pytest.approx(0.5)
    ghosts.evicted([3, 4], 1_000.0)
    assert ghosts.price_s < 0.001
    ghosts.computed([3], 0, flat_s, 1_000.0)
    assert ghosts.price_s == pytest.approx(0.25, abs=1e-3)
