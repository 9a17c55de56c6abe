"""A bounded memory of results that can be had again."""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(Generic[K, V]):
    """Two generations of a dict: when the young one is full it becomes the old one.

    What is used again in time moves to the young one, the rest is dropped in one piece. That
    holds between half of `capacity` and all of it, costs one or two dict lookups, and,
    unlike a linked order, gives the garbage collector nothing to walk.
    """

    def __init__(self, capacity: int) -> None:
        self._generation = max(1, capacity // 2)
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        found = self._young.get(key)
        if found is None and self._old:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
