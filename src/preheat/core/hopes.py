"""Blocks of requests that are, or just were, under way."""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final

TOLD_S: Final = 2.0
"""Events are on their way for a step of the engine and a queue; llm-d waits as long for them."""
UNTOLD_S: Final = 120.0
"""Where they can't be relied upon. Dynamo's routers hold without events for as long."""


class Hopes:
    """What is thought to be at a worker because it was sent there, until the worker says so itself."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._flying: dict[int, int] = {}  # how many requests use it
        self._until: dict[int, float] = {}
        self._ends: list[tuple[float, int, Sequence[int]]] = []
        self._number = count()

    def __contains__(self, block: int) -> bool:
        return block in self._flying or block in self._until

    def __iter__(self) -> Iterator[int]:
        return iter([*self._flying, *(one for one in self._until if one not in self._flying)])

    def sent(self, blocks: Sequence[int], known: int) -> bool:
        """A request is under way. False where that would be too many; unless all of it is known."""
        flying = self._flying
        if known < len(blocks) and len(flying) + len(blocks) - known > self._most_blocks:
            return False
        for block in blocks:
            flying[block] = flying.get(block, 0) + 1
        return True

    def ended(self, blocks: Sequence[int], now: float, *, is_told: bool) -> None:
        """It was answered: its blocks are there for some time."""
        until = now + (TOLD_S if is_told else UNTOLD_S)
        for block in blocks:
            self._land(block)
            self._until[block] = max(until, self._until.get(block, until))
        heappush(self._ends, (until, next(self._number), blocks))

    def failed(self, blocks: Sequence[int]) -> list[int]:
        """It wasn't. Returns what isn't hoped for any more."""
        for block in blocks:
            self._land(block)
        return [block for block in blocks if block not in self]

    def over(self, now: float) -> list[int]:
        """Those whose time is over, or for which there is no room."""
        gone = []
        while self._ends and (self._ends[0][0] <= now or len(self._until) > self._most_blocks):
            ended, _, blocks = heappop(self._ends)
            for block in blocks:
                if self._until.get(block, ended + 1.0) <= ended:
                    del self._until[block]
                    gone.append(block)
        return [block for block in gone if block not in self._flying]

    def told(self, block: int) -> None:
        """The worker has spoken of it itself; what runs may still bring it."""
        self._until.pop(block, None)

    def cleared(self) -> list[int]:
        """Nothing is there but what runs. Returns the others."""
        gone = [block for block in self._until if block not in self._flying]
        self._until.clear()
        self._ends.clear()
        return gone

    def _land(self, block: int) -> None:
        left = self._flying[block] - 1
        if left:
            self._flying[block] = left
        else:
            del self._flying[block]
