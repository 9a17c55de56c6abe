"""Any worker, by chance."""

from collections.abc import Sequence

from preheat.core.placing import Candidate, Placing


class Random:
    """Uniform, from its own seed: the same requests are placed alike in every run.

    The numbers are CPython's hash of (seed, count), which mixes integers and isn't salted.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._drawn = 0

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        self._drawn += 1
        return hash((self._seed, self._drawn)) % len(candidates)

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
