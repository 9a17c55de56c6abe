"""The worker that would have the first token out first."""

from collections.abc import Sequence

from preheat.core.placing import Candidate, Placing


class Cost:
    """argmin of queue + load from a lower tier + factor · own miss, in seconds.

    With factor 1 it is the selfish rule, and Mooncake's (Qin et al., FAST 2025, section 6): each
    request goes where its own first token comes soonest, whatever its miss does to the others.
    A larger factor prices that by hand; `preheat` learns it. Equals go to the one with fewer
    requests in flight.
    """

    def __init__(self, *, factor: float = 1.0) -> None:
        self._factor = factor

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        def seconds(place: int) -> tuple[float, int]:
            one = candidates[place]
            return one.queue_s + one.load_s + self._factor * one.miss_s, one.in_flight

        return min(range(len(candidates)), key=seconds)

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
