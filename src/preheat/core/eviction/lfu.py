"""Least frequently used: whoever was used least often leaves, however long ago that was."""

from typing import ClassVar, Generic, TypeVar

from preheat.core.ranking import Ranking
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")


class Lfu(Generic[K]):
    """Fewest uses first, among equals the one used longest ago.

    Uses are counted while an entry is held, never aged: yesterday's favourite stays. That is the
    classical fault, and why this is a baseline only (`lfu_da` mends it).
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._uses: dict[K, int] = {}
        self._ranking: Ranking[K] = Ranking()

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._uses[key] = 1
        self._ranking.place(key, 1)

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._uses[key] = uses = self._uses[key] + 1
        self._ranking.place(key, uses)

    def remove(self, key: K) -> None:
        del self._uses[key]
        self._ranking.remove(key)

    def victim(self, now: float) -> K:
        return self._ranking.lowest()

    def __len__(self) -> int:
        return len(self._uses)
