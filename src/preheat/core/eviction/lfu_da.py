"""LFU with dynamic ageing: uses count from the level at which the cache evicts now."""

from typing import ClassVar, Generic, TypeVar

from preheat.core.ranking import Ranking
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")


class LfuDa(Generic[K]):
    """Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating content management techniques for
    Web proxy caches", Performance Evaluation Review 2000: priority = uses + L, where L is the
    priority of the last one evicted. Whoever isn't used is overtaken by L in the end.

    An entry that leaves for another reason (expired, invalidated) doesn't raise L.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._uses: dict[K, int] = {}
        self._ranking: Ranking[K] = Ranking()
        self._level = 0.0
        self._named: K | None = None

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._uses[key] = 1
        self._ranking.place(key, self._level + 1)

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._uses[key] = uses = self._uses[key] + 1
        self._ranking.place(key, self._level + uses)

    def remove(self, key: K) -> None:
        del self._uses[key]
        priority = self._ranking.remove(key)
        if key == self._named:
            self._level = max(self._level, priority)
            self._named = None

    def victim(self, now: float) -> K:
        self._named = key = self._ranking.lowest()
        return key

    def __len__(self) -> int:
        return len(self._uses)
