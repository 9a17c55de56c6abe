"""W-TinyLFU: newcomers pass a small window, and stay only if they were asked for more often."""

from collections import OrderedDict
from typing import ClassVar, Final, Generic, TypeVar

from preheat.core.types import PLAIN, Traits

K = TypeVar("K")

_ODD: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""One odd multiplier a row, with bits that look like chance: multiplicative hashing takes the top
bits of the product (Dietzfelbinger et al., "A reliable randomized algorithm for the closest-pair
problem", 1997)."""

_WORD: Final = (1 << 64) - 1
_FIRST_BITS: Final = 6
_CELLS_AN_ENTRY: Final = 4
_HALVED: Final = bytes(count // 2 for count in range(256))


class WTinyLfu(Generic[K]):
    """Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM ToS
    2017, section 4: a window of `window_share` of the cache under LRU; the main part under
    segmented LRU, `protected_share` of it for those used since they came there. When the cache is
    full the window's last stands against the main part's last, and the one asked for less often
    leaves; on a draw the newcomer does.

    How often is counted in a sketch that is halved after `sample` requests for each entry held.
    Counts stop at `most_counted`: 15 in the paper's 4 bits. We leave the paper's doorkeeper out,
    since the sketch has room enough: four rows of four cells an entry. Without `count_window_hits` a
    burst that the window takes says nothing about later, as in libCacheSim; the paper counts all.

    A policy isn't told the capacity: shares are taken of what is held when a victim is asked for. An
    entry's past outlives it on purpose. Keys that are neither numbers nor bytes are counted by
    `hash()`, which differs from process to process for strings.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(
        self,
        *,
        window_share: float = 0.01,
        protected_share: float = 0.8,
        sample: int = 10,
        most_counted: int = 15,
        count_window_hits: bool = True,
    ) -> None:
        self._window_share = window_share
        self._protected_share = protected_share
        self._sample = sample
        self._counts = _Counts(most_counted)
        self._counted = 0
        self._count_window_hits = count_window_hits
        self._size_bytes: dict[K, int] = {}
        self._window: OrderedDict[K, None] = OrderedDict()
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()
        self._window_bytes = 0
        self._protected_bytes = 0
        self._held_bytes = 0
        self._beaten: K | None = None

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._size_bytes[key] = size_bytes
        self._held_bytes += size_bytes
        self._window[key] = None
        self._window_bytes += size_bytes
        self._counts.widen(len(self._size_bytes))
        self._count(key)

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        if key in self._window:
            self._window.move_to_end(key)
            if self._count_window_hits:
                self._count(key)
            return
        self._count(key)
        if key in self._protected:
            self._protected.move_to_end(key)
        else:
            del self._probation[key]
            self._protect(key)

    def remove(self, key: K) -> None:
        size_bytes = self._size_bytes.pop(key)
        self._held_bytes -= size_bytes
        if key in self._window:
            del self._window[key]
            self._window_bytes -= size_bytes
        elif key in self._protected:
            del self._protected[key]
            self._protected_bytes -= size_bytes
        else:
            del self._probation[key]
        if key == self._beaten:
            self._beaten = None
            if self._window:
                self._admit(next(iter(self._window)))

    def victim(self, now: float) -> K:
        self._beaten = None
        most_bytes = self._held_bytes - int(self._held_bytes * self._window_share)
        while self._window:
            candidate = next(iter(self._window))
            main_bytes = self._held_bytes - self._window_bytes
            if main_bytes + self._size_bytes[candidate] > most_bytes and main_bytes:
                rival = self._main_last()
                if self._counts.of(candidate) <= self._counts.of(rival):
                    return candidate
                self._beaten = rival
                return rival
            self._admit(candidate)
        return self._main_last()

    def __len__(self) -> int:
        return len(self._size_bytes)

    def _count(self, key: K) -> None:
        self._counts.add(key)
        self._counted += 1
        if self._counted >= self._sample * len(self._size_bytes):
            self._counts.halve()
            self._counted = 0

    def _admit(self, key: K) -> None:
        """From the window into the main part, on probation."""
        del self._window[key]
        self._window_bytes -= self._size_bytes[key]
        self._probation[key] = None

    def _protect(self, key: K) -> None:
        """Into the protected part; those used longest ago go back on probation for it."""
        self._protected[key] = None
        self._protected_bytes += self._size_bytes[key]
        most_bytes = (self._held_bytes - self._window_bytes) * self._protected_share
        while self._protected_bytes > most_bytes and len(self._protected) > 1:
            back, _ = self._protected.popitem(last=False)
            self._protected_bytes -= self._size_bytes[back]
            self._probation[back] = None

    def _main_last(self) -> K:
        for key in self._probation or self._protected:
            return key
        raise LookupError("no entry to evict")


class _Counts:
    """A count-min sketch with conservative update (Estan and Varghese, SIGCOMM 2002): never too low
    but for halving and the limit."""

    def __init__(self, most: int) -> None:
        self._most = min(most, 255)
        self._shift = 64 - _FIRST_BITS
        self._rows = [bytearray(1 << _FIRST_BITS) for _ in _ODD]

    def widen(self, entries: int) -> None:
        """Room for so many entries; what was counted stays: a cell becomes two with its count."""
        while 1 << (64 - self._shift) < _CELLS_AN_ENTRY * entries:
            self._shift -= 1
            self._rows = [bytearray(n for n in row for _ in "ab") for row in self._rows]

    def add(self, key: object) -> None:
        cells = self._cells(key)
        least = min(row[cell] for row, cell in zip(self._rows, cells, strict=True))
        if least < self._most:
            for row, cell in zip(self._rows, cells, strict=True):
                if row[cell] == least:
                    row[cell] = least + 1

    def of(self, key: object) -> int:
        return min(row[cell] for row, cell in zip(self._rows, self._cells(key), strict=True))

    def halve(self) -> None:
        self._rows = [row.translate(_HALVED) for row in self._rows]

    def _cells(self, key: object) -> list[int]:
        if isinstance(key, int):
            word = key
        else:
            word = int.from_bytes(key[:8], "big") if isinstance(key, bytes) else hash(key)
        word ^= word >> 32
        shift = self._shift
        return [(word * odd & _WORD) >> shift for odd in _ODD]
