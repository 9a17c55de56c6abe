"""The seeds' "SemanticLRU", as they wrote it, with its faults: a baseline, not a recommendation."""

from math import log2
from typing import ClassVar, Final, Generic, TypeVar

from preheat.core.ranking import Ranking
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")

_DECAY_AN_HOUR: Final = 0.97
_HALF_LIFE_S: Final = -3_600.0 / log2(_DECAY_AN_HOUR)


class SemanticLruAsWritten(Generic[K]):
    """Score = uses · 0.97^(hours since the entry was written); the lowest leaves.

    Its faults, kept here and mended in `semantic_lru`: 0.97 an hour halves in 22.8 hours, where reuse
    is a matter of minutes, so that it is LFU in all but name; freshness counts from the writing, so
    that use doesn't keep an entry fresh; cost and size don't count; nothing in it is semantic, and its
    `OrderedDict` is never asked for an order. The seeds leave ties open: the one used longest ago leaves.

    Fading keeps the order of scores, so they are compared as log2(uses) + time of writing in half-lives.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._uses: dict[K, int] = {}
        self._written_at: dict[K, float] = {}
        self._ranking: Ranking[K] = Ranking()

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._uses[key] = 0
        self._written_at[key] = now
        self.touch(key, now)

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._uses[key] = uses = self._uses[key] + 1
        self._ranking.place(key, log2(uses) + self._written_at[key] / _HALF_LIFE_S)

    def remove(self, key: K) -> None:
        del self._uses[key], self._written_at[key]
        self._ranking.remove(key)

    def victim(self, now: float) -> K:
        return self._ranking.lowest()

    def __len__(self) -> int:
        return len(self._uses)
