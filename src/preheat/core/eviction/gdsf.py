"""Greedy-Dual-Size-Frequency: uses times cost, per byte, from the level at which it evicts now."""

from typing import ClassVar, Generic, TypeVar

from preheat.core.ranking import Ranking
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")


class Gdsf(Generic[K]):
    """Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
    Policy", HP Labs 1998: priority = L + uses · cost / size, where L is the priority of the last
    one evicted. Cost is the seconds that a hit saves.

    In the paper a newcomer's priority is set first, and if it is the lowest of all it is turned away at
    once. A policy here can't turn anybody away. So a newcomer below those who left for it comes in,
    L rises no higher than its priority, as in the paper, and it is the next to leave: the
    cache is smaller by one entry. An entry that leaves for another reason than eviction doesn't raise L.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._uses: dict[K, int] = {}
        self._worth: dict[K, float] = {}
        self._size_bytes: dict[K, int] = {}
        self._ranking: Ranking[K] = Ranking()
        self._level = 0.0
        self._evicted_at = 0.0
        self._named: K | None = None

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._uses[key] = 1
        self._size_bytes[key] = size_bytes = max(1, size_bytes)
        self._worth[key] = worth = traits.cost_s / size_bytes
        priority = self._level + worth
        self._ranking.place(key, priority)
        self._level = max(self._level, min(self._evicted_at, priority))
        self._evicted_at = 0.0

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._uses[key] = uses = self._uses[key] + 1
        if traits is not None:
            self._worth[key] = traits.cost_s / self._size_bytes[key]
        self._ranking.place(key, self._level + uses * self._worth[key])

    def remove(self, key: K) -> None:
        del self._uses[key], self._worth[key], self._size_bytes[key]
        priority = self._ranking.remove(key)
        if key == self._named:
            self._evicted_at = max(self._evicted_at, priority)
            self._named = None

    def victim(self, now: float) -> K:
        self._named = key = self._ranking.lowest()
        return key

    def __len__(self) -> int:
        return len(self._uses)
