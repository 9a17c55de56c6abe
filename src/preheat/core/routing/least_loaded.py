"""The worker with the fewest requests in flight."""

from collections.abc import Sequence

from preheat.core.placing import Candidate, Placing


class LeastLoaded:
    """Join the shortest queue (Haight, Biometrika 1958), by the count of requests, the only load a
    router sees without asking. Equals are taken in their order.
    """

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        return min(range(len(candidates)), key=lambda place: candidates[place].in_flight)

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
