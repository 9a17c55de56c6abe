"""TinyLFU's door: one-hit wonders stay out when they'd push out something used more."""

from preheat.core.sketch import CountMin, RotatingBloom
from preheat.core.types import Key


class Doorkeeper:
    """Admits whoever was asked for more often than the victim (Einziger et al., ACM ToS 2017).

    A Bloom filter takes the first sighting, a count-min sketch the further ones, so that the
    long tail of keys seen once fills no counter. After `window` sightings the counters are
    halved and the filter rotates (the paper clears it; rotating forgets more gently).
    Where there is room everybody comes in: a place that nobody wants costs nothing.
    """

    def __init__(self, window: int = 100_000) -> None:
        self._window = max(1, window)
        self._first = RotatingBloom(self._window)
        self._further = CountMin(self._window)
        self._seen = 0

    def see(self, key: Key, now: float) -> None:
        if self._first.add(key):
            self._further.add(key)
        self._seen += 1
        if self._seen >= self._window:
            self._seen = 0
            self._further.halve()
            self._first.rotate()

    def admit(self, candidate: Key, victim: Key | None, now: float) -> bool:
        return victim is None or self._frequency(candidate) > self._frequency(victim)

    def _frequency(self, key: Key) -> int:
        return self._further.estimate(key) + (key in self._first)
