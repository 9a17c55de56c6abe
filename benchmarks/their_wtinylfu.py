"""Our W-TinyLFU with what libCacheSim 0.3.5 does otherwise than the paper, to compare the rest.

- Its sketch is a counting Bloom filter without the paper's conservative update: ten counters a key out of
  14.4 for each entry of the main part, 32 bits each, found by XXH64. With more keys than that it
  is wrong often, and differently for every hash: hit ratios move by points for that alone.
- It counts newcomers and hits in the main part, not hits in the window, and counts the window's last once more
  whenever that stands against the main part's.
- It halves after 32 hits in the main part for each byte of it.
- A candidate that is admitted goes to the lowest segment that has room, the protected one, too.
- It knows its capacity.
"""

from __future__ import annotations

from math import ceil, log

from preheat.core.eviction.wtinylfu import WTinyLfu

_WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1
_SEEDS = 0x12345678, 0x12344321


class TheirWTinyLfu(WTinyLfu[int]):
    """For objects of one byte named by numbers."""

    def __init__(self, capacity: int) -> None:
        super().__init__(count_window_hits=False)
        main = capacity - int(capacity * 0.01)
        self._probation_room = main // 5
        self._protected_room = main * 4 // 5
        self._halves_after = 32 * main
        self._counts = CountingBloom(main)  # type: ignore[assignment]  # the same four verbs

    def victim(self, now: float) -> int:
        victim = super().victim(now)
        if victim in self._window:
            self._counts.add(victim)
        return victim

    def _count(self, key: int) -> None:
        self._counts.add(key)
        if key not in self._window:
            self._counted += 1
            if self._counted >= self._halves_after:
                self._counts.halve()
                self._counted = 0

    def _admit(self, key: int) -> None:
        del self._window[key]
        self._window_bytes -= 1
        full = len(self._probation) >= self._probation_room
        if full and len(self._protected) < self._protected_room:
            self._protected[key] = None
            self._protected_bytes += 1
        else:
            self._probation[key] = None
        self._counts.add(key)


class CountingBloom:
    """As dimensioned there for one wrong answer in a thousand."""

    def __init__(self, entries: int) -> None:
        counters_an_entry = -log(0.001) / log(2) ** 2
        self._hashes = ceil(log(2) * counters_an_entry)
        self._counters = [0] * max(ceil(counters_an_entry * entries), 2 * self._hashes)
        self._cells: dict[int, list[int]] = {}

    def widen(self, entries: int) -> None:
        """It can't."""

    def add(self, key: int) -> None:
        for cell in self._cells_of(key):
            self._counters[cell] += 1

    def of(self, key: int) -> int:
        return min(self._counters[cell] for cell in self._cells_of(key))

    def halve(self) -> None:
        self._counters = [count >> 1 for count in self._counters]

    def _cells_of(self, key: int) -> list[int]:
        cells = self._cells.get(key)
        if cells is None:
            first, step = (xxh64(key, seed) & _HALF for seed in _SEEDS)
            room = len(self._counters)
            cells = [(first + n * step & _HALF) % room for n in range(self._hashes)]
            self._cells[key] = cells
        return cells


def xxh64(number: int, seed: int) -> int:
    """XXH64 of eight bytes, as its specification (Collet, xxHash 0.8) has it.

    >>> hex(xxh64(0, 0))
    '0x34c96acdcadb1bbb'
    """
    word = (seed + 0x27D4EB2F165667C5 + 8) & _WORD
    word ^= _turned(number * 0xC2B2AE3D27D4EB4F & _WORD, 31) * 0x9E3779B185EBCA87 & _WORD
    word = (_turned(word, 27) * 0x9E3779B185EBCA87 + 0x85EBCA77C2B2AE63) & _WORD
    word = (word ^ word >> 33) * 0xC2B2AE3D27D4EB4F & _WORD
    word = (word ^ word >> 29) * 0x165667B19E3779F9 & _WORD
    return word ^ word >> 32


def _turned(word: int, bits: int) -> int:
    return (word << bits | word >> 64 - bits) & _WORD
