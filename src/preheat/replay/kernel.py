"""Discrete events: what happens when, in order of time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Kernel:
    """A heap of things to do. Those of one moment are done in the order they were planned in.

    >>> kernel, seen = Kernel(), []
    >>> for at in (2.0, 1.0):
    ...     kernel.plan(at, seen.append, at)
    >>> kernel.run()
    >>> seen, kernel.now
    ([1.0, 2.0], 2.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._planned = 0

    def plan(self, at: float, do: Callable[[Any], None], what: Any) -> None:
        """Call `do(what)` at that moment; not in the past."""
        self._planned += 1
        heappush(self._heap, (max(at, self.now), self._planned, do, what))

    def run(self, until: float = float("inf")) -> None:
        """Do everything up to and including that moment."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, do, what = heappop(heap)
            do(what)
        if until < float("inf"):
            self.now = until
