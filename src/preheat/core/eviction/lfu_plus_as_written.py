"""The seeds' "LFU+", as they wrote it, with its faults: a baseline, not a recommendation."""

from typing import ClassVar, Generic, TypeVar

from preheat.core.ranking import Ranking
from preheat.core.types import PLAIN, Traits

K = TypeVar("K")


class LfuPlusAsWritten(Generic[K]):
    """Heat = uses · decay(latency), the coldest leaves, among equals the one used longest ago.

    The decay is 0.98 below 5 ms, falls to 0.92 towards 100 ms and is 0.75 above. Its faults, kept
    here and mended in `lfu_plus`: what is slow to compute loses heat faster, so the costliest leave
    first; the step at 100 ms, from 0.92 to 0.75, has no reason; the factor doesn't grow with time, so nothing
    fades at all; sizes don't count. The latency is `Traits.cost_s`. The seeds' own table of heats (78.2
    and 52.4) doesn't follow from this formula, nor from any reading we found.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(self) -> None:
        self._uses: dict[K, int] = {}
        self._decay: dict[K, float] = {}
        self._ranking: Ranking[K] = Ranking()

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        self._uses[key] = 1
        self._decay[key] = decay = decay_at(traits.cost_s)
        self._ranking.place(key, decay)

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        self._uses[key] = uses = self._uses[key] + 1
        if traits is not None:
            self._decay[key] = decay_at(traits.cost_s)
        self._ranking.place(key, uses * self._decay[key])

    def remove(self, key: K) -> None:
        del self._uses[key], self._decay[key]
        self._ranking.remove(key)

    def victim(self, now: float) -> K:
        return self._ranking.lowest()

    def __len__(self) -> int:
        return len(self._uses)


def decay_at(latency_s: float) -> float:
    """The seeds' `adaptiveDecay`.

    >>> [round(decay_at(latency_s), 3) for latency_s in (0.001, 0.012, 0.087, 0.1, 0.101)]
    [0.98, 0.976, 0.928, 0.92, 0.75]
    """
    latency_ms = latency_s * 1_000.0
    if latency_ms < 5.0:
        return 0.98
    if latency_ms > 100.0:
        return 0.75
    return 0.92 + 0.06 * (100.0 - latency_ms) / 95.0
