"""A bounded memory of results that can be had again."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V | None]):
    """Two generations of a dict: when the young one is full it becomes the old one.

    What is used again in time moves to the young one, the rest is dropped in one piece. That
    holds between half of `capacity` and all of it, and gives the garbage collector nothing to
    walk. It is a dict itself, so that `memo[key]` costs what a dict costs: a result, or None.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._generation = max(1, capacity // 2)
        self._old: dict[K, V | None] = {}

    def __missing__(self, key: K) -> V | None:
        found = self._old.pop(key, None)
        if found is not None:
            self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Remember this result."""
        if len(self) >= self._generation:
            self._old = dict(self)
            super().clear()
        self[key] = value

    def clear(self) -> None:
        """Forget them all."""
        super().clear()
        self._old.clear()

    @property
    def size(self) -> int:
        """How many results both generations hold."""
        return len(self) + len(self._old)
