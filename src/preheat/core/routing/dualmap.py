"""DualMap: two workers for a prefix, and the better of them."""

from collections.abc import Sequence

from preheat.core.beginnings import Beginnings
from preheat.core.chance import mix
from preheat.core.placing import Candidate, Placing


class DualMap:
    """DualMap (arXiv 2602.06502, ICLR 2026): two hashes of a prompt's prefix name two workers; the
    one that holds more gets the request, unless its expected TTFT would break the target: then the
    one whose expected TTFT is shorter.

    The hashed prefix grows where it is hot: its last block is the first that fewer than
    `hot_share` of the last requests (at least `window`) began with (AIBrix's port of it: 0.0612 of
    200). We differ: rendezvous hashing instead of two rings; requests that wait aren't moved,
    a router can't.
    """

    def __init__(
        self, *, slo_ttft_s: float = 5.0, hot_share: float = 0.0612, window: int = 200
    ) -> None:
        self._slo_ttft_s = slo_ttft_s
        self._beginnings = Beginnings(hot_share, window)

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        own = self._beginnings.own(placing.blocks)
        hashed = mix(-1 if own is None else own)
        every = range(len(candidates))
        first = max(every, key=lambda at: mix(hashed + candidates[at].number))
        others = [at for at in every if at != first] or [first]
        second = max(others, key=lambda at: mix(hashed ^ mix(~candidates[at].number)))
        pair = (candidates[first], candidates[second])
        ttfts = [one.queue_s + one.load_s + one.miss_s for one in pair]
        held = [one.overlap_tokens for one in pair]
        if held[0] == held[1]:
            nearer = 0 if pair[0].in_flight <= pair[1].in_flight else 1
        else:
            nearer = 0 if held[0] > held[1] else 1
        if ttfts[nearer] > self._slo_ttft_s and ttfts[1 - nearer] < ttfts[nearer]:
            nearer = 1 - nearer
        return second if nearer else first

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
