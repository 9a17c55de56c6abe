"""What two runs of one trace say together: windows, differences, intervals."""

import random

import pytest

from preheat.core.spread import spread_of
from preheat.lab.load.exchange import Outcome
from preheat.lab.load.pairs import LEAST_BLOCKS, MINUTES, Times, paired, warnings_of
from preheat.lab.load.summary import Summary, Tally


def times(rows: dict[int, tuple[float, float | None]]) -> Times:
    """Of each number when it was due and its TTFT; noted in an order that isn't theirs."""
    made = Times()
    for number in sorted(rows, key=lambda one: (one * 7) % 11):
        due_s, ttft_s = rows[number]
        error = "" if ttft_s is not None else "reset"
        made.note(Outcome(id="", number=number, at_s=due_s, ttft_s=ttft_s, error=error))
    return made


def test_each_request_is_compared_with_itself() -> None:
    warm = times({0: (0.0, 1.0), 1: (1.0, 0.2), 2: (2.0, 0.5), 3: (3.0, 0.1)})
    cold = times({0: (0.0, 1.1), 1: (1.0, 0.9), 2: (2.0, 0.5), 3: (3.0, 2.1)})
    told = paired(warm, cold, [(1.0, "x")])
    assert told.before.pairs == 1
    assert told.before.mean_s.value == pytest.approx(0.1)
    assert told.after.pairs == 3
    assert told.after.median_s.value == pytest.approx(0.7)
    assert told.after.mean_s.value == pytest.approx(0.9)
    assert told.after.p95_s.value == pytest.approx(2.0)
    assert told.after.warm_ttft_s == spread_of([0.2, 0.5, 0.1])
    assert told.after.cold_ttft_s.most == 2.1


def test_what_one_run_didnt_answer_is_no_pair_but_counted() -> None:
    warm = times({0: (0.0, 1.0), 1: (1.0, 1.0), 2: (2.0, None), 3: (3.0, None)})
    cold = times({0: (0.0, None), 1: (1.0, 2.0), 2: (2.0, 1.0), 3: (3.0, None)})
    after = paired(warm, cold, [(0.0, "x")]).after
    assert (after.pairs, after.warm_only, after.cold_only) == (1, 1, 1)
    assert after.mean_s.value == 1.0


def test_minutes_end_at_the_next_cold_start_and_with_the_load() -> None:
    rows = {number: (10.0 * number, 1.0) for number in range(20)}  # 0 to 190 s
    told = paired(times(rows), times(rows), [(100.0, "b"), (20.0, "a"), (20.0, "c")])
    first, second = told.cold_starts
    assert (first.at_s, first.commands) == (20.0, ["a", "c"])
    assert [(one.from_s, one.to_s, one.pairs) for one in first.minutes] == [
        (20.0, 80.0, 6),
        (80.0, 100.0, 2),
    ]
    assert [(one.from_s, one.pairs) for one in second.minutes] == [(100.0, 6), (160.0, 4)]
    assert first.later is second.later is None
    assert told.before.pairs + told.after.pairs == 20


def test_what_comes_long_after_is_told_together() -> None:
    rows = {number: (30.0 * number, 1.0) for number in range(60)}
    (start,) = paired(times(rows), times(rows), [(0.0, "x")]).cold_starts
    assert len(start.minutes) == MINUTES
    assert start.later is not None
    assert start.later.from_s == 60.0 * MINUTES
    assert sum(one.pairs for one in start.minutes) + start.later.pairs == 60


def test_without_pairs_there_is_nothing_to_tell() -> None:
    nothing = paired(times({0: (0.0, None)}), times({0: (0.0, None)}), [(5.0, "x")])
    assert nothing.after.pairs == nothing.before.pairs == 0
    assert nothing.before.mean_s.value is nothing.after.p95_s.value is None
    assert len(nothing.cold_starts[0].minutes) == 0


def test_an_interval_has_the_truth_in_it_about_as_often_as_it_says() -> None:
    """Differences of +0.3 s in the mean that requests of the same five seconds share in part."""
    inside = 0
    for seed in range(60):
        chance = random.Random(seed)
        warm, cold = {}, {}
        for block in range(24):
            shared = chance.gauss(0.3, 0.2)
            for place in range(5):
                number, due_s = 5 * block + place, 5.0 * block + place
                warm[number] = due_s, 1.0
                cold[number] = due_s, 1.0 + shared + chance.gauss(0.0, 0.1)
        mean = paired(times(warm), times(cold), [(0.0, "x")]).after.mean_s
        assert mean.low is not None
        assert mean.high is not None
        assert mean.value is not None
        assert mean.low <= mean.value <= mean.high
        inside += mean.low <= 0.3 <= mean.high
    assert 50 <= inside <= 60  # 95 % of 60 is 57


def test_too_short_a_time_has_no_interval() -> None:
    rows = {number: (5.0 * number, 1.0) for number in range(LEAST_BLOCKS - 1)}
    after = paired(times(rows), times(rows), [(0.0, "x")]).after
    assert after.mean_s.value == 0.0
    assert after.mean_s.low is after.median_s.high is None
    rows[LEAST_BLOCKS - 1] = 5.0 * LEAST_BLOCKS, 1.0
    assert paired(times(rows), times(rows), [(0.0, "x")]).after.mean_s.low == 0.0


def summary(exact: int) -> Summary:
    tally = Tally()
    for number in range(5):
        layer = "exact" if number < exact else "forward"
        tally.sent += 1
        tally.add(Outcome(id="", at_s=0.0, layer=layer, ttft_s=0.1, e2e_s=0.1))
    return tally.summary()


def test_a_second_run_that_was_answered_from_the_first_ones_answers_is_warned_of() -> None:
    assert warnings_of(summary(2), summary(2)) == []
    (warning,) = warnings_of(summary(1), summary(4))
    assert warning.startswith("3 more answers of the second run came from a cache of answers")
