"""Any worker, by chance."""

from collections.abc import Sequence

from preheat.core.chance import Chance
from preheat.core.placing import Candidate, Placing


class Random:
    """Uniform, from its own seed: the same requests are placed alike in every run."""

    def __init__(self, *, seed: int = 0) -> None:
        self._chance = Chance(seed)

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        return self._chance.below(len(candidates))

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
