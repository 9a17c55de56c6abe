"""Which keys were seen, and how often, in memory that doesn't grow."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from core_parts import key_of
from preheat.core.sketch import CountMin, RotatingBloom


def test_a_key_is_new_once() -> None:
    bloom = RotatingBloom(100)
    assert not bloom.add(key_of(1))
    assert bloom.add(key_of(1))
    assert key_of(1) in bloom
    assert key_of(2) not in bloom


def test_the_last_capacity_keys_are_always_known() -> None:
    bloom = RotatingBloom(50)
    for number in range(500):
        bloom.add(key_of(number))
        assert all(key_of(recent) in bloom for recent in range(max(0, number - 49), number + 1))


def test_a_key_is_forgotten_after_twice_the_capacity() -> None:
    bloom = RotatingBloom(50)
    bloom.add(key_of("old"))
    for number in range(101):
        bloom.add(key_of(number))
    assert key_of("old") not in bloom


def test_a_key_seen_again_in_time_is_remembered_anew() -> None:
    bloom = RotatingBloom(50)
    bloom.add(key_of("kept"))
    for number in range(500):
        bloom.add(key_of(number))
        if number % 40 == 0:
            assert bloom.add(key_of("kept"))


def test_few_unseen_keys_are_taken_for_seen() -> None:
    bloom = RotatingBloom(4_096)
    for number in range(4_096):
        bloom.add(key_of(number))
    wrong = sum(key_of(("unseen", number)) in bloom for number in range(10_000))
    assert wrong / 10_000 < 0.04  # 2.4 % by the formula


def test_a_bloom_filter_does_not_grow() -> None:
    bloom = RotatingBloom(64)
    before = len(bloom._young) + len(bloom._old)
    for number in range(10_000):
        bloom.add(key_of(number))
    assert len(bloom._young) + len(bloom._old) == before


def test_a_filter_for_nothing_still_works() -> None:
    bloom = RotatingBloom(0)
    bloom.add(key_of(1))
    assert key_of(1) in bloom


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 40), max_size=300))
def test_a_count_is_never_too_low(numbers: list[int]) -> None:
    sketch = CountMin(16)
    for number in numbers:
        sketch.add(key_of(number))
    for number, count in Counter(numbers).items():
        assert sketch.estimate(key_of(number)) >= count


def test_counts_are_exact_while_there_is_room() -> None:
    sketch = CountMin(65_536)
    for number in range(100):
        for _ in range(number):
            sketch.add(key_of(number))
    assert [sketch.estimate(key_of(number)) for number in range(100)] == list(range(100))


def test_a_count_stops_at_255() -> None:
    sketch = CountMin(16)
    for _ in range(1_000):
        sketch.add(key_of(1))
    assert sketch.estimate(key_of(1)) == 255


def test_halving_ages_every_count() -> None:
    sketch = CountMin(65_536)
    for _ in range(9):
        sketch.add(key_of(1))
    sketch.halve()
    assert sketch.estimate(key_of(1)) == 4
    assert sketch.estimate(key_of(2)) == 0
