"""DualMap: two workers for a prefix, and the better of them."""

from collections.abc import Sequence

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
        self._hot_share = hot_share
        self._window = window
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._seen = 0

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        hashed = mix(self._key(placing))
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

    def _key(self, placing: Placing) -> int:
        """The last block of the prefix that is hashed."""
        if self._seen >= 2 * self._window:
            self._old, self._young = self._young, {}
            self._seen = self._window
        self._seen += 1
        most = self._hot_share * max(self._seen, self._window)
        for block in placing.blocks:
            self._young[block] = self._young.get(block, 0) + 1
            if self._young[block] + self._old.get(block, 0) <= most:
                return block
        return placing.blocks[-1] if placing.blocks else -1
