"""Frequency that fades, times what a miss costs, per byte: the seeds' "LFU+" set right."""

from math import inf, log2
from typing import ClassVar, Generic, TypeVar

from preheat.core.ranking import Ranking
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")


class LfuPlus(Generic[K]):
    """Worth = uses, each halved every `half_life_s`, · seconds that a hit saves / bytes.

    The idea of the seeds' "LFU+" (`lfu_plus_as_written`) is that frequency must fade and that latency
    matters. Three things are set right: a slow answer is worth more, not less; uses fade with time, so
    that they do fade; and what is compared is value per byte. That is an estimated rate of use times
    cost over size.

    Fading keeps the order of those that aren't used, so a priority is worked out at a use only:
    log2 of the worth, plus the time in half-lives. Ten minutes is the scale of reuse in chat traces.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self, *, half_life_s: float = 600.0) -> None:
        self._half_life_s = half_life_s
        self._uses: dict[K, tuple[float, float]] = {}  # faded as of when
        self._value: dict[K, float] = {}  # log2 of seconds a byte
        self._size_bytes: dict[K, int] = {}
        self._ranking: Ranking[K] = Ranking()

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._size_bytes[key] = size_bytes = max(1, size_bytes)
        self._value[key] = _log2(traits.cost_s / size_bytes)
        self._use(key, 1.0, now)

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        if traits is not None:
            self._value[key] = _log2(traits.cost_s / self._size_bytes[key])
        uses, used_at = self._uses[key]
        self._use(key, 1.0 + uses * 2.0 ** ((used_at - now) / self._half_life_s), now)

    def remove(self, key: K) -> None:
        del self._uses[key], self._value[key], self._size_bytes[key]
        self._ranking.remove(key)

    def victim(self, now: float) -> K:
        return self._ranking.lowest()

    def __len__(self) -> int:
        return len(self._uses)

    def _use(self, key: K, uses: float, now: float) -> None:
        self._uses[key] = uses, now
        self._ranking.place(key, log2(uses) + self._value[key] + now / self._half_life_s)


def _log2(value: float) -> float:
    return log2(value) if value > 0.0 else -inf
