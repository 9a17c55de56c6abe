"""How long an engine takes for a request, learned from what it took."""

from typing import Final

from preheat.core.memo import Memo

_MODELS: Final = 4_096
_ENOUGH: Final = 10
_WEIGHT: Final = 0.1


class ServiceTimes:
    """A running mean of service seconds for each model. Clients choose the models' names, so their
    number is bounded."""

    def __init__(self) -> None:
        self._means: Memo[str, list[float]] = Memo(_MODELS)

    def learn(self, model: str, service_s: float) -> None:
        """One more outcome: a plain mean of the first ten, then one that forgets."""
        known = self._means[model]
        if known is None:
            self._means.put(model, [1.0, service_s])
            return
        known[0] += 1.0
        known[1] += (service_s - known[1]) * max(_WEIGHT, 1.0 / known[0])

    def expected_s(self, model: str) -> float | None:
        """The mean; None before ten outcomes."""
        known = self._means[model]
        return None if known is None or known[0] < _ENOUGH else known[1]
