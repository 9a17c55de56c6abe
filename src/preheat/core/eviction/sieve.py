"""SIEVE: a queue that is never reordered, and a hand that spares what was used since it passed."""

from array import array
from typing import ClassVar, Generic, TypeVar

from preheat.core.types import PLAIN, Traits

K = TypeVar("K")

_NONE = -1


class Sieve(Generic[K]):
    """Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024, algorithm 1.

    The hand walks from the oldest entry to the newest, clears the marks it meets and stops at
    the first entry without one. A hit only sets a mark, so it costs one byte store.

    The queue lives in flat arrays, one slot an entry: a hundred thousand linked objects would
    cost every full garbage collection milliseconds.
    """

    keeps_order: ClassVar[bool] = False

    def __init__(self) -> None:
        self._slot: dict[K, int] = {}
        self._key: list[K | None] = []
        self._newer = array("l")
        self._older = array("l")
        self._marked = bytearray()
        self._free: list[int] = []
        self._newest = _NONE
        self._oldest = _NONE
        self._hand = _NONE

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        slot = self._take_slot(key)
        self._slot[key] = slot
        self._older[slot] = self._newest
        self._newer[slot] = _NONE
        if self._newest == _NONE:
            self._oldest = slot
        else:
            self._newer[self._newest] = slot
        self._newest = slot

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._marked[self._slot[key]] = 1

    def remove(self, key: K) -> None:
        slot = self._slot.pop(key)
        newer, older = self._newer[slot], self._older[slot]
        if newer == _NONE:
            self._newest = older
        else:
            self._older[newer] = older
        if older == _NONE:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if self._hand == slot:
            self._hand = newer
        self._key[slot] = None
        self._free.append(slot)

    def victim(self, now: float) -> K:
        slot = self._oldest if self._hand == _NONE else self._hand
        if slot == _NONE:
            raise LookupError("no entry to evict")
        marked, newer = self._marked, self._newer
        while marked[slot]:
            marked[slot] = 0
            slot = newer[slot]
            if slot == _NONE:
                slot = self._oldest
        self._hand = slot
        key = self._key[slot]
        assert key is not None
        return key

    def __len__(self) -> int:
        return len(self._slot)

    def _take_slot(self, key: K) -> int:
        if self._free:
            slot = self._free.pop()
            self._key[slot] = key
            self._marked[slot] = 0
            return slot
        self._key.append(key)
        self._newer.append(_NONE)
        self._older.append(_NONE)
        self._marked.append(0)
        return len(self._key) - 1
