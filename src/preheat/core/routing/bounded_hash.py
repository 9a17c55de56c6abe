"""Consistent hashing of prefixes, with bounded loads."""

from collections.abc import Sequence
from math import ceil

from preheat.core.beginnings import Beginnings
from preheat.core.chance import mix
from preheat.core.placing import Candidate, Placing


class BoundedHash:
    """Mirrokni, Thorup and Zadimoghaddam, SODA 2018: a prefix has its worker, but nobody takes more
    than `bound` times the mean of the requests in flight; what doesn't fit goes to the next.

    The key is the first block that fewer than `trunk_share` of the last requests (at least
    `window`) began with: where all share a system prompt, its hash would send all to one worker.
    We differ: the order of workers for a key is by rendezvous (Thaler and Ravishankar, IEEE/ACM
    ToN 1998), which needs no ring. `bound` is that of SGLang's `prefix_hash`.
    """

    def __init__(
        self, *, bound: float = 1.25, trunk_share: float = 0.05, window: int = 1_000
    ) -> None:
        self._bound = bound
        self._beginnings = Beginnings(trunk_share, window)

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        total = sum(one.in_flight for one in candidates) + 1
        most = ceil(self._bound * total / len(candidates))
        fitting = [at for at, one in enumerate(candidates) if one.in_flight < most]
        key = self._beginnings.own(placing.blocks)
        if key is None:
            return min(fitting, key=lambda at: candidates[at].in_flight)
        return max(fitting, key=lambda at: mix(mix(key) + candidates[at].number))

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
