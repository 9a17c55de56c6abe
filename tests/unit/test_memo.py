"""A bounded memory of results that can be had again."""

from hypothesis import given
from hypothesis import strategies as st

from preheat.core.memo import Memo


def test_a_result_is_remembered() -> None:
    memo: Memo[str, int] = Memo(10)
    memo.put("a", 1)
    assert memo["a"] == 1
    assert memo["b"] is None


def test_asking_for_what_is_unknown_remembers_nothing() -> None:
    memo: Memo[int, int] = Memo(10)
    assert all(memo[number] is None for number in range(100))
    assert memo.size == 0


def test_what_is_used_again_outlives_what_is_not() -> None:
    memo: Memo[int, int] = Memo(10)
    memo.put(-1, -1)
    for number in range(100):
        memo.put(number, number)
        assert memo[-1] == -1
    assert memo[0] is None


def test_the_newest_half_of_its_capacity_is_always_there() -> None:
    memo: Memo[int, int] = Memo(10)
    for number in range(100):
        memo.put(number, number)
        for recent in range(max(0, number - 4), number + 1):
            assert recent in memo or recent in memo._old


def test_the_last_result_put_wins() -> None:
    memo: Memo[str, int] = Memo(2)
    memo.put("a", 1)
    memo.put("b", 2)
    memo.put("a", 3)
    assert memo["a"] == 3


def test_cleared_it_is_empty() -> None:
    memo: Memo[int, int] = Memo(4)
    for number in range(4):
        memo.put(number, number)
    memo.clear()
    assert memo.size == 0
    assert memo[3] is None


@given(st.integers(0, 8), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=200))
def test_it_never_holds_more_than_its_capacity_nor_a_wrong_result(
    capacity: int, moves: list[tuple[bool, int]]
) -> None:
    memo: Memo[int, int] = Memo(capacity)
    truth: dict[int, int] = {}
    for step, (is_put, key) in enumerate(moves):
        if is_put:
            memo.put(key, step)
            truth[key] = step
        else:
            assert memo[key] in {None, truth.get(key)}
        assert memo.size <= max(2, capacity)
