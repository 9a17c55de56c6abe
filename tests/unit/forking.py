"""Independent tasks on several cores: the same results as one after the other.

Forking is safe from one thread only and other tests leave some behind, so test_side_by_side.py
runs this file in a process of its own.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial

import pytest

from preheat.errors import ConfigError
from preheat.replay import side_by_side
from preheat.replay.side_by_side import each

Task = Callable[[], tuple[int, int]]


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
    tasks: dict[int, Task] = {1: partial(square, 1), 2: partial(square, 2), 3: fail}
    with pytest.raises(ValueError, match="third"):
        each(tasks, lambda _: None)
    assert not multiprocessing.active_children()


def die() -> tuple[int, int]:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    raise AssertionError


def wait_long() -> tuple[int, int]:
    threading.Event().wait(60.0)
    raise AssertionError


@pytest.mark.parametrize("first", [die, partial(os._exit, 0)])
def test_a_process_that_dies_ends_it_all(monkeypatch: pytest.MonkeyPatch, first: Task) -> None:
    monkeypatch.setattr(side_by_side, "_cores", lambda: 2)
    with pytest.raises(ConfigError, match="memory"):
        each({1: first, 2: wait_long, 3: wait_long}, lambda _: None)
    assert not multiprocessing.active_children()


def test_an_interrupt_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_cores", lambda: 3)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    tasks: dict[int, Task] = {1: partial(square, 1), 2: wait_long, 3: wait_long}
    with pytest.raises(KeyboardInterrupt):
        each(tasks, interrupt)
    assert not multiprocessing.active_children()


def test_beside_other_threads_nobody_forks() -> None:
    """A fork would keep their locks."""
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        found = each({i: partial(square, i) for i in range(3)}, lambda _: None)
    finally:
        done.set()
        other.join()
    assert {pid for _, pid in found.values()} == {os.getpid()}


def stops_at_once() -> bool:
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_the_parent_does_when_it_is_stopped_is_not_its_childrens_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_by_side, "_cores", lambda: 2)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        assert each({0: stops_at_once, 1: stops_at_once}, lambda _: None) == {0: True, 1: True}
    finally:
        signal.signal(signal.SIGTERM, before)
