"""Independent tasks on several cores: the same results as one after the other."""

import os
from functools import partial

import pytest

from preheat.replay import side_by_side
from preheat.replay.side_by_side import each


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def fail() -> tuple[int, int]:
    raise ValueError("the third one is bad")


@pytest.mark.parametrize("cores", [1, 3])
def test_results_come_under_their_names_in_their_order(
    monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(side_by_side, "_cores", lambda: cores)
    told: list[str] = []
    found = each({f"n{i}": partial(square, i) for i in range(9)}, told.append)
    assert [(name, result[0]) for name, result in found.items()] == [
        (f"n{i}", i * i) for i in range(9)
    ]
    elsewhere = {pid for _, pid in found.values()} - {os.getpid()}
    assert bool(elsewhere) == (cores > 1)
    assert told[-1] == "9 of 9 simulations"
    assert each({}, told.append) == {}


@pytest.mark.parametrize("cores", [1, 2])
def test_what_a_task_raises_is_raised_here(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(side_by_side, "_cores", lambda: cores)
    with pytest.raises(ValueError, match="third"):
        each({1: partial(square, 1), 2: partial(square, 2), 3: fail}, lambda _: None)
    assert side_by_side._tasks == []
