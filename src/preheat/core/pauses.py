"""How long sessions pause, by what was said of them: whose slot will be missed soonest."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from preheat.core.life_table import BINS, EDGES, age_bin

_OPEN: Final = 4_096
"""Prompts whose return is waited for; the oldest is forgotten for a newer one."""
_BACK_OFF: Final = 20.0
"""Pauses of all kinds that a kind leans on. Logarithms of log-logistic pauses spread by π/√3, so that
of 20 their middle is known to 0.4: a factor of 1.5."""
_MOST: Final = 1_000.0
"""Pauses of a kind that are counted before all of them count half."""
_LOST_S: Final = 3_600.0
"""Who isn't back by then is counted as lost, until it comes all the same."""


class _Lasted:
    """How many pauses lasted how long, by `core.life_table`'s bins; newer ones count more."""

    def __init__(self) -> None:
        self.count = 0.0
        self.lost = 0.0
        self.bins = [0.0] * BINS

    def learn(self, pause_s: float) -> None:
        self.bins[age_bin(pause_s)] += 1.0
        self.count += 1.0
        if self.count > _MOST:
            self.count /= 2.0
            self.lost /= 2.0
            self.bins = [count / 2.0 for count in self.bins]


class Pauses:
    """The usual pause of each kind, learned from this gateway's own sessions.

    A `kind` is whatever is known when an answer ends: that it calls a tool, what its client has said
    of the session, or nothing. There are few kinds. A pause lasts from there to the next request that begins with the
    same whole prompt, so no session has to be named; one that nobody returns from counts for the chance of
    a return only.

    Pauses are taken for log-logistic, with the chance s / (s + t) of not being over after t: heavy tails, as in
    Weka's sessions of agents, where s, the median, is 8 s behind a tool call and minutes behind other
    answers. Then the hazard of a return after t is 1 / (s + t), and of several idle slots the one
    with the largest s + t is the last to be missed: LRU (t alone), with a handicap that doesn't change while
    the slot is idle. Whole life tables (`core.value`) did worse: their order changes with time, and what was
    saved ahead then wasn't taken after all. So did geometric means instead of medians, on the first half of
    `benchmarks signals`: repeats within a second count for too much there.
    """

    def __init__(self) -> None:
        self._all = _Lasted()
        self._of: dict[str, _Lasted] = {}
        self._open: OrderedDict[int, tuple[str, float]] = OrderedDict()  # by the last block
        self._lost: OrderedDict[int, tuple[str, float]] = OrderedDict()  # of these, later

    def came(self, blocks: Sequence[int], now: float) -> None:
        """A request with this prompt is there: what it goes on with has paused until now."""
        for block in reversed(blocks):
            paused = self._open.pop(block, None) or self._found(block)
            if paused is not None:
                kind, since = paused
                self._all.learn(now - since)
                self._of.setdefault(kind, _Lasted()).learn(now - since)
                return

    def ended(self, blocks: Sequence[int], kind: str, now: float) -> float:
        """A request with this prompt was answered. By how many seconds its usual pause is longer than
        that of all kinds together, or shorter (below 0); where there is but one, 0: that is LRU."""
        if blocks:
            self._open[blocks[-1]] = kind, now
            self._open.move_to_end(blocks[-1])
            self._lose(now)
        if len(self._of) < 2 and kind in self._of:
            return 0.0
        return self.usual_s(kind) - _median(self._all.bins)

    def returns(self, kind: str, idle_s: float) -> float:
        """The chance that who has paused so long comes back at all, of those of its kind that paused as long;
        1 before any is known. Who isn't back in an hour counts as lost."""
        own = self._of.get(kind)
        if own is None:
            return 1.0
        later = sum(own.bins[age_bin(idle_s) :])
        return (later + 1.0) / (later + own.lost + 1.0)

    def _found(self, block: int) -> tuple[str, float] | None:
        """Who was counted as lost, and isn't."""
        paused = self._lost.pop(block, None)
        if paused is not None:
            of = self._of.setdefault(paused[0], _Lasted())
            of.lost = max(0.0, of.lost - 1.0)
        return paused

    def _lose(self, now: float) -> None:
        """Count whoever was waited for too long as lost, and forget who is one too many."""
        while self._open:
            block, (kind, since) = next(iter(self._open.items()))
            if now - since < _LOST_S:
                break
            del self._open[block]
            self._of.setdefault(kind, _Lasted()).lost += 1.0
            self._lost[block] = kind, since
        for waited_for in (self._open, self._lost):
            while len(waited_for) > _OPEN:
                waited_for.popitem(last=False)

    @property
    def median_s(self) -> float:
        """Of all pauses, 0 before any is known."""
        return _median(self._all.bins)

    def usual_s(self, kind: str) -> float:
        """The median of this kind's pauses, 0 before any is known."""
        own, every = self._of.get(kind), self._all
        if own is None or not every.count:
            return _median(every.bins)
        lean = _BACK_OFF / every.count
        return _median(
            [mine + lean * all_s for mine, all_s in zip(own.bins, every.bins, strict=True)]
        )


def _median(bins: Sequence[float]) -> float:
    """Between the edges of the middle one's bin, in proportion; 0 of none."""
    left = sum(bins) / 2.0
    for place, count in enumerate(bins):
        if count >= left > 0.0:
            upper = EDGES[place + 1] if place + 1 < BINS else 2.0 * EDGES[place]
            return EDGES[place] + (upper - EDGES[place]) * left / count
        left -= count
    return 0.0
