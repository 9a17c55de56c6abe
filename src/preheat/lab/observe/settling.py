"""What happened, in the order in which it did, though a log tells of a request only when it is over."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final

Act = Callable[[float], None]
"""Does what was to be done at that time."""

_MOST_WEIGHT: Final = 2_000_000
"""Of all that waits, in blocks: 80 MB."""


class Settling:
    """Keeps each event until the log is `settle_s` past it: whoever took longer is told too late, and
    then counts as if it had come at the latest time that is over. So does what there is no room for.
    """

    def __init__(self, settle_s: float, most_weight: int = _MOST_WEIGHT) -> None:
        self.now = -inf
        self.late = 0
        self._settle_s = settle_s
        self._most_weight = most_weight
        self._weight = 0
        self._newest = -inf
        self._numbers = count()
        self._heap: list[tuple[float, int, int, Act]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, act: Act, weight: int = 1) -> None:
        """Have it done in its turn."""
        heappush(self._heap, (at, next(self._numbers), weight, act))
        self._weight += weight

    def began(self, at: float, act: Act, weight: int = 1) -> None:
        """The same, of a request of the log: time has come to where it began."""
        self.late += at < self.now
        self._newest = max(self._newest, at)
        self.add(at, act, weight)

    def run(self, until: float = -inf) -> None:
        """Do all whose time has come, or would have come by `until`."""
        until = max(until, self._newest - self._settle_s)
        while self._heap and (self._heap[0][0] <= until or self._weight > self._most_weight):
            at, _, weight, act = heappop(self._heap)
            self._weight -= weight
            self.now = max(self.now, at)
            act(self.now)
