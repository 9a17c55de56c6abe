"""Least recently used: the yardstick, and what most engines do."""

from collections import OrderedDict
from typing import ClassVar

from preheat.core.types import Key


class Lru:
    """Oldest use first."""

    keeps_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, size_bytes: int, now: float) -> None:
        self._order[key] = None

    def touch(self, key: Key, now: float) -> None:
        self._order.move_to_end(key)

    def remove(self, key: Key) -> None:
        del self._order[key]

    def victim(self, now: float) -> Key:
        for key in self._order:
            return key
        raise LookupError("no entry to evict")

    def __len__(self) -> int:
        return len(self._order)
