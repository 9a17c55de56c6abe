"""Keys in order of a number that changes: what every policy that scores its entries stands on."""

import heapq
from typing import Final, Generic, TypeVar

K = TypeVar("K")

_SLACK: Final = 64
"""Overtaken places that are kept at least, so that a small ranking isn't rebuilt all the time."""


class Ranking(Generic[K]):
    """The lowest first; among equals the one that was placed longest ago.

    A binary heap. A key that moves leaves its old place behind, to be passed over when it comes up;
    once such places are more than half, the heap is built anew. So a move costs O(log n) on average,
    and the room is at most twice what the keys need.
    """

    def __init__(self) -> None:
        self._places: dict[K, tuple[float, int, K]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._moves = 0

    def place(self, key: K, priority: float) -> None:
        """Put the key there, wherever it was before."""
        self._moves += 1
        place = (priority, self._moves, key)
        self._places[key] = place
        heapq.heappush(self._heap, place)
        if len(self._heap) > 2 * len(self._places) + _SLACK:
            self._heap = list(self._places.values())
            heapq.heapify(self._heap)

    def remove(self, key: K) -> float:
        """Take the key out; the priority it had."""
        priority = self._places.pop(key)[0]
        if len(self._heap) > 2 * len(self._places) + _SLACK:
            self._heap = list(self._places.values())
            heapq.heapify(self._heap)
        return priority

    def lowest(self) -> K:
        """Who is lowest. Raises LookupError when nobody is placed."""
        heap, places = self._heap, self._places
        while heap:
            key = heap[0][2]
            if places.get(key) is heap[0]:
                return key
            heapq.heappop(heap)
        raise LookupError("no entry to evict")

    def __len__(self) -> int:
        return len(self._places)
