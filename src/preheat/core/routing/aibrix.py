"""AIBrix's prefix-cache routing."""

from collections.abc import Sequence
from statistics import fmean, pstdev

from preheat.core.placing import Candidate, Placing


class Aibrix:
    """AIBrix's `prefix-cache` in its event mode, where it knows what workers hold.

    The load gate: if the busiest has more than `gate_factor` · (mean + 1) requests and at least
    `gate_gap` more than the idlest, only the least loaded may match. Then the longest match whose
    requests are at most mean + `deviations` standard deviations; of equals the one with fewer requests. No match at
    all, or none that may: the fewest requests. Defaults: AIBrix's (2.0, 8, 1).

    We differ: what matches is counted in whole percent, as there; equals in both are taken in
    their order instead of by chance.
    """

    def __init__(
        self, *, gate_factor: float = 2.0, gate_gap: int = 8, deviations: float = 1.0
    ) -> None:
        self._gate_factor = gate_factor
        self._gate_gap = gate_gap
        self._deviations = deviations

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        counts = [one.in_flight for one in candidates]
        mean = fmean(counts)
        matching = list(range(len(candidates)))
        uneven = max(counts) > self._gate_factor * (mean + 1.0)
        if uneven and max(counts) - min(counts) >= self._gate_gap:
            matching = [place for place in matching if counts[place] == min(counts)]
        most = mean + self._deviations * pstdev(counts)
        percent = {
            place: 100 * candidates[place].overlap_tokens // max(1, placing.input_tokens)
            for place in matching
            if candidates[place].overlap_tokens > 0 and counts[place] <= most
        }
        if not percent:
            return min(range(len(candidates)), key=counts.__getitem__)
        return max(percent, key=lambda place: (percent[place], -counts[place]))

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
