"""When to stop asking something that keeps failing."""

import pytest

from preheat.core.breaker import Breaker, RetryBudget


def test_it_lets_everything_through_until_enough_fail_in_a_row() -> None:
    breaker = Breaker(threshold=3, open_s=10.0)
    for _ in range(2):
        breaker.failed(0.0)
        assert breaker.allows(0.0)
    assert breaker.would_allow(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.0)
    assert not breaker.would_allow(9.9)
    assert breaker.would_allow(10.0)
    assert breaker.allows(10.0)  # asking took no probe


def test_a_success_in_between_starts_the_count_anew() -> None:
    breaker = Breaker(threshold=2, open_s=10.0)
    for _ in range(10):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.allows(0.0)


def test_half_open_it_lets_one_probe_through_at_a_time() -> None:
    breaker = Breaker(threshold=1, open_s=10.0)
    breaker.failed(100.0)
    assert not breaker.allows(109.9)
    assert breaker.allows(110.0)
    assert not breaker.allows(110.0)
    assert not breaker.allows(119.9)
    assert breaker.allows(120.0)


def test_a_probe_that_fails_opens_it_for_another_while() -> None:
    breaker = Breaker(threshold=1, open_s=10.0)
    breaker.failed(0.0)
    assert breaker.allows(10.0)
    breaker.failed(15.0)
    assert not breaker.allows(24.9)
    assert breaker.retry_after_s(20.0) == 5.0


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker = Breaker(threshold=1, open_s=10.0)
    breaker.failed(0.0)
    assert breaker.allows(10.0)
    breaker.succeeded()
    assert breaker.would_allow(10.0)
    assert all(breaker.allows(10.0) for _ in range(5))


@pytest.mark.parametrize(("now", "wait_s"), [(0.0, 10.0), (4.0, 6.0), (10.0, 0.0), (50.0, 0.0)])
def test_it_tells_how_long_to_wait(now: float, wait_s: float) -> None:
    breaker = Breaker(threshold=1, open_s=10.0)
    assert breaker.retry_after_s(now) == 0.0
    breaker.failed(0.0)
    assert breaker.retry_after_s(now) == wait_s


def test_a_threshold_below_one_means_one() -> None:
    breaker = Breaker(threshold=0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.0)


def test_what_recovered_is_opened_again_by_one_failure() -> None:
    breaker = Breaker(threshold=3, open_s=10.0)
    for _ in range(3):
        breaker.failed(0.0)
    breaker.recovered()
    assert breaker.allows(1.0)
    breaker.failed(1.0)
    assert not breaker.allows(1.0)


def test_another_like_it_has_the_limits_but_not_the_failures() -> None:
    breaker = Breaker(threshold=1, open_s=10.0)
    breaker.failed(0.0)
    other = breaker.fresh()
    assert other.allows(0.0)
    other.failed(0.0)
    assert other.retry_after_s(0.0) == 10.0


def test_retries_are_a_share_of_the_requests_once_the_reserve_is_gone() -> None:
    budget = RetryBudget(0.25, 0.0)
    assert sum(budget.take(0.0) for _ in range(1_000)) == 100
    for _ in range(40):
        budget.earn()
    assert sum(budget.take(0.0) for _ in range(1_000)) == 10


def test_a_few_retries_a_second_are_always_allowed() -> None:
    budget = RetryBudget(0.01, 0.0)
    while budget.take(0.0):
        pass
    assert sum(budget.take(2.0) for _ in range(1_000)) == 10
    assert sum(budget.take(1e9) for _ in range(1_000)) == 100


def test_a_share_of_nothing_allows_no_retry() -> None:
    budget = RetryBudget(0.0, 0.0)
    budget.earn()
    assert not budget.take(0.0)
    assert not budget.take(1e9)
