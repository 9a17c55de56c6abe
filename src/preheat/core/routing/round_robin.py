"""Round robin: each worker in its turn."""

from collections.abc import Sequence

from preheat.core.placing import Candidate, Placing


class RoundRobin:
    """What a load balancer does that knows nothing: the yardstick.

    Counts like SGLang's and vLLM's routers do, over the candidates of the moment: a worker that
    leaves shifts the turns.
    """

    def __init__(self) -> None:
        self._turns = 0

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        place = self._turns % len(candidates)
        self._turns += 1
        return place

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
