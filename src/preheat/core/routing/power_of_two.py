"""The less loaded of two workers drawn by chance."""

from collections.abc import Sequence

from preheat.core.chance import Chance
from preheat.core.placing import Candidate, Placing


class PowerOfTwo:
    """Mitzenmacher, IEEE TPDS 2001: two choices do most of what all choices would.

    Two different workers, by requests in flight; equal ones: the first drawn, as in SGLang's and
    vLLM's routers.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._chance = Chance(seed)

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        if len(candidates) == 1:
            return 0
        first = self._chance.below(len(candidates))
        second = (first + 1 + self._chance.below(len(candidates) - 1)) % len(candidates)
        return second if candidates[second].in_flight < candidates[first].in_flight else first

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
