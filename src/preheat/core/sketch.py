"""Which keys were seen, and how often, in memory that doesn't grow.

Both take a `Key`, whose 128 bits are uniformly distributed: its bytes are the hash.
"""

from preheat.core.types import Key

_HALVED = bytes(count // 2 for count in range(256))


class RotatingBloom:
    """Has this key been seen lately? Two Bloom filters: when the young one is full it grows old.

    A key is remembered for at least `capacity` and at most twice as many further keys. With 8
    bits a key and 4 probes about 2.4 % of unseen keys are taken for seen while one filter is
    full (Bloom, CACM 1970), at most twice that with both.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = max(1, capacity)
        self._bits = max(64, 1 << (self._capacity * 8 - 1).bit_length())
        self._young = bytearray(self._bits // 8)
        self._old = bytearray(self._bits // 8)
        self._count = 0

    def __contains__(self, key: Key) -> bool:
        probes = self._probes(key)
        return _all_set(self._young, probes) or _all_set(self._old, probes)

    def add(self, key: Key) -> bool:
        """Remember the key; say whether it had been there."""
        probes = self._probes(key)
        if _all_set(self._young, probes):
            return True
        known = _all_set(self._old, probes)
        if self._count >= self._capacity:
            self.rotate()
        for probe in probes:
            self._young[probe >> 3] |= 1 << (probe & 7)
        self._count += 1
        return known

    def rotate(self) -> None:
        """Forget what is old; what is young grows old."""
        self._old, self._young = self._young, bytearray(self._bits // 8)
        self._count = 0

    def _probes(self, key: Key) -> tuple[int, int, int, int]:
        mask = self._bits - 1
        word = int.from_bytes(key, "little")
        return word & mask, (word >> 32) & mask, (word >> 64) & mask, (word >> 96) & mask


def _all_set(bits: bytearray, probes: tuple[int, int, int, int]) -> bool:
    return all(bits[probe >> 3] & (1 << (probe & 7)) for probe in probes)


class CountMin:
    """How often was this key seen? Never too low but for ageing (Cormode and Muthukrishnan, 2005).

    Four rows of 8-bit counters. `halve` ages them all at once, as TinyLFU does (Einziger et
    al., ACM ToS 2017), so that yesterday's favourites lose to today's.
    """

    def __init__(self, width: int = 65_536) -> None:
        self._mask = (1 << max(4, (width - 1).bit_length())) - 1
        self._rows = tuple(bytearray(self._mask + 1) for _ in range(4))

    def add(self, key: Key) -> None:
        for row, cell in zip(self._rows, self._cells(key), strict=True):
            if row[cell] < 255:
                row[cell] += 1

    def estimate(self, key: Key) -> int:
        return min(row[cell] for row, cell in zip(self._rows, self._cells(key), strict=True))

    def halve(self) -> None:
        self._rows = tuple(row.translate(_HALVED) for row in self._rows)

    def _cells(self, key: Key) -> tuple[int, int, int, int]:
        mask = self._mask
        word = int.from_bytes(key, "big")
        return word & mask, (word >> 32) & mask, (word >> 64) & mask, (word >> 96) & mask
