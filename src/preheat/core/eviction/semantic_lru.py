"""Uses times freshness, times what a miss costs, per byte: the seeds' "SemanticLRU" set right."""

from math import inf, log2
from typing import ClassVar, Generic, TypeVar

from preheat.core.ranking import Ranking
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")


class SemanticLru(Generic[K]):
    """Worth = uses · 2^(-time since the last use / `half_life_s`) · seconds that a hit saves / bytes.

    The form is that of the seeds' "SemanticLRU" (`semantic_lru_as_written`). Set right: freshness is
    counted from the last use, it halves in minutes and not in a day, and cost and size count. Unlike in
    `lfu_plus` all uses are as fresh as the last one. There is nothing semantic in either form.

    Fading keeps the order of those that aren't used, so a priority is worked out at a use only.
    Ten minutes is the scale of reuse in chat traces.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self, *, half_life_s: float = 600.0) -> None:
        self._half_life_s = half_life_s
        self._uses: dict[K, int] = {}
        self._value: dict[K, float] = {}  # log2 of seconds a byte
        self._size_bytes: dict[K, int] = {}
        self._ranking: Ranking[K] = Ranking()

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._uses[key] = 0
        self._size_bytes[key] = max(1, size_bytes)
        self.touch(key, now, traits)

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._uses[key] = uses = self._uses[key] + 1
        if traits is not None:
            value = traits.cost_s / self._size_bytes[key]
            self._value[key] = log2(value) if value > 0.0 else -inf
        self._ranking.place(key, log2(uses) + self._value[key] + now / self._half_life_s)

    def remove(self, key: K) -> None:
        del self._uses[key], self._value[key], self._size_bytes[key]
        self._ranking.remove(key)

    def victim(self, now: float) -> K:
        return self._ranking.lowest()

    def __len__(self) -> int:
        return len(self._uses)
