"""The less loaded of two workers drawn by chance."""

from collections.abc import Sequence

from preheat.core.placing import Candidate, Placing


class PowerOfTwo:
    """Mitzenmacher, IEEE TPDS 2001: two choices do most of what all choices would.

    Two different workers, by requests in flight; equal ones: the first drawn, as in SGLang's and
    vLLM's routers. The numbers are CPython's hash of (seed, count), which mixes integers and
    isn't salted.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._drawn = 0

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        if len(candidates) == 1:
            return 0
        first = self._draw(len(candidates))
        second = (first + 1 + self._draw(len(candidates) - 1)) % len(candidates)
        return second if candidates[second].in_flight < candidates[first].in_flight else first

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass

    def _draw(self, below: int) -> int:
        self._drawn += 1
        return hash((self._seed, self._drawn)) % below
