"""Where a prompt parts from the trunk that many share."""

from preheat.core.beginnings import Beginnings


def test_a_trunk_that_many_begin_with_is_passed_over() -> None:
    beginnings = Beginnings(share=0.1, window=20)
    own = [beginnings.own([1, 100 + i, 200 + i]) for i in range(20)]
    assert own[:2] == [1, 1]  # two of twenty may begin alike
    assert own[2:] == [100 + i for i in range(2, 20)]


def test_without_a_block_of_its_own_it_is_the_last() -> None:
    beginnings = Beginnings(share=0.0, window=20)
    assert beginnings.own([1, 2, 3]) == 3
    assert beginnings.own([]) is None


def test_a_trunk_that_nobody_begins_with_any_more_is_forgotten() -> None:
    beginnings = Beginnings(share=0.1, window=10)
    assert [beginnings.own([1, 2]) for _ in range(3)][-1] == 2
    for number in range(40):
        beginnings.own([1_000 + number])
    assert beginnings.own([1, 2]) == 1
