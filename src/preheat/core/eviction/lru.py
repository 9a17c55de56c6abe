"""Least recently used: the yardstick, and what most engines do."""

from collections import OrderedDict
from typing import ClassVar, Generic, TypeVar

from preheat.core.types import PLAIN, Traits

K = TypeVar("K")


class Lru(Generic[K]):
    """Oldest use first."""

    keeps_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._order[key] = None

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        del self._order[key]

    def victim(self, now: float) -> K:
        for key in self._order:
            return key
        raise LookupError("no entry to evict")

    def __len__(self) -> int:
        return len(self._order)
