"""The usual pauses of each kind, learned from prompts that return."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.pauses import Pauses


def near(pause_s: float) -> object:
    """Within a bin, a quarter of an octave."""
    return pytest.approx(pause_s, rel=0.25)


def returned(pauses: Pauses, kind: str, *lasted_s: float, first: int = 0) -> None:
    """Sessions that pause once each."""
    for number, pause_s in enumerate(lasted_s, first):
        pauses.ended((number,), kind, 0.0)
        pauses.came((number, -1 - number), pause_s)


def test_before_anything_returned_nothing_is_usual() -> None:
    pauses = Pauses()
    assert pauses.usual_s("tool-call") == 0.0
    assert pauses.ended((1, 2), "", 5.0) == 0.0
    pauses.came((1, 3), 6.0)  # goes on otherwise: the whole prompt didn't return
    pauses.came((), 6.0)
    assert pauses.usual_s("") == 0.0
    assert pauses.ended((), "", 7.0) == 0.0


def test_kinds_are_told_apart_as_far_as_they_are_known() -> None:
    pauses = Pauses()
    returned(pauses, "tool-call", *[4.1] * 100)
    assert pauses.usual_s("tool-call") == near(4.1)
    assert pauses.usual_s("") == near(4.1)  # nothing is known of it: as all
    returned(pauses, "", *[410.0] * 5, first=100)
    assert pauses.usual_s("") == near(4.1)  # too few
    returned(pauses, "", *[410.0] * 95, first=105)
    assert pauses.usual_s("tool-call") == near(4.1)
    assert pauses.usual_s("") == near(410.0)


def test_only_what_differs_from_all_others_makes_a_difference() -> None:
    pauses = Pauses()
    returned(pauses, "", 3.0, 70.0, 0.2, 8.0)
    assert pauses.ended((70,), "", 0.0) == pytest.approx(0.0)
    returned(pauses, "tool-call", *[2.0] * 50)
    returned(pauses, "", *[200.0] * 50, first=50)
    assert pauses.ended((70,), "", 0.0) > 20.0
    assert pauses.ended((71,), "tool-call", 0.0) < 0.0


def test_a_return_ends_one_pause_once() -> None:
    pauses = Pauses()
    pauses.ended((1, 2), "", 0.0)
    pauses.came((1, 2, 3), 10.0)
    pauses.came((1, 2, 4), 1_000.0)
    assert pauses.usual_s("") == near(10.0)


def test_a_prompt_that_is_asked_again_counts_from_its_last_answer() -> None:
    pauses = Pauses()
    pauses.ended((1,), "tool-call", 0.0)
    pauses.ended((1,), "", 90.0)
    pauses.came((1,), 100.0)
    assert pauses.usual_s("") == near(10.0)


def test_the_oldest_of_too_many_is_forgotten() -> None:
    pauses = Pauses()
    for number in range(4_097):
        pauses.ended((number,), "", 0.0)
    pauses.came((0,), 8.0)
    assert pauses.usual_s("") == 0.0
    pauses.came((1,), 8.0)
    assert pauses.usual_s("") == near(8.0)


@given(st.floats(0.5, 1e4), st.integers(0, 2**32))
def test_the_scale_of_log_logistic_pauses_is_found(scale_s: float, seed: int) -> None:
    """Drawn by inversion; within five standard errors of the logarithm, and a bin."""
    chance = random.Random(seed)
    shares = [chance.random() for _ in range(400)]
    pauses = Pauses()
    returned(pauses, "", *(scale_s * share / (1.0 - share) for share in shares))
    error = 5.0 * 2.0 / math.sqrt(400)  # of a median: 1 / (2 f √n), and f is 1/4 there
    assert abs(math.log(pauses.usual_s("") / scale_s)) < error + 0.2


def test_newer_pauses_count_more() -> None:
    pauses = Pauses()
    returned(pauses, "", *[5.0] * 2_000)
    assert pauses.usual_s("") == near(5.0)
    returned(pauses, "", *[50.0] * 1_000)
    assert pauses.usual_s("") == near(50.0)


def test_who_didnt_come_back_makes_a_return_less_likely_until_it_does() -> None:
    pauses = Pauses()
    assert pauses.returns("", 10.0) == 1.0  # nothing is known
    for number in range(30):
        pauses.ended((number,), "", 0.0)
    for number in range(10):
        pauses.came((number,), 8.0)
    assert pauses.returns("", 0.0) == 1.0  # they may yet
    pauses.ended((99,), "", 4_000.0)
    assert pauses.returns("", 0.0) == pytest.approx(11 / 31)
    assert pauses.returns("", 60.0) == pytest.approx(1 / 21)  # longer than any pause
    assert pauses.returns("tool", 60.0) == 1.0
    pauses.came((29,), 5_000.0)
    assert pauses.returns("", 60.0) == pytest.approx(2 / 21)


def test_a_kind_of_which_nobody_came_back_has_no_usual_pause() -> None:
    pauses = Pauses()
    pauses.ended((1,), "tool", 0.0)
    pauses.ended((2,), "", 4_000.0)
    assert pauses.usual_s("tool") == 0.0
