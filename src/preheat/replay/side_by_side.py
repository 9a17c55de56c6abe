"""Independent simulations on as many cores as there are."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_tasks: list[Callable[[], Any]] = []
"""What the forked processes find when they begin: nothing of a trace is copied to them."""


def each(tasks: Mapping[K, Callable[[], T]], progress: Callable[[str], None]) -> dict[K, T]:
    """The result of every task, under its name and in its order.

    Each runs in a process of its own kind, forked, so that what it reads needn't be sent; what it
    returns must be picklable and should be small. With one core, or where forking isn't safe
    (anything but Linux), one after the other. What a task raises is raised here.
    """
    cores = min(len(tasks), _cores())
    if cores < 2:
        return _one_by_one(tasks, progress)
    global _tasks  # noqa: PLW0603 - the one way to hand something to a forked process unsent
    _tasks = list(tasks.values())
    results: dict[K, T] = {}
    try:
        with multiprocessing.get_context("fork").Pool(cores) as pool:
            for name, result in zip(tasks, pool.imap(_run, range(len(_tasks))), strict=True):
                results[name] = result
                progress(f"{len(results)} of {len(tasks)} simulations")
    finally:
        _tasks = []
    return results


def _run(number: int) -> Any:
    return _tasks[number]()


def _one_by_one(tasks: Mapping[K, Callable[[], T]], progress: Callable[[str], None]) -> dict[K, T]:
    results: dict[K, T] = {}
    for name, task in tasks.items():
        results[name] = task()
        progress(f"{len(results)} of {len(tasks)} simulations")
    return results


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
