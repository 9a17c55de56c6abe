"""J, the hold value: what keeping an object saves for what keeping it costs, learned from lives.

An object's *life* lasts from one use to the next. Of an object that has been idle for `a` seconds,

    J(a) = max over τ of  E[uses within τ | idle for a] · cost_s / (size_bytes · E[time held within τ | idle for a])

is in seconds saved per byte·second: who has the smallest goes, and the J at which objects go is the
price of memory (μ). The maximising τ is how long it pays to wait. Objects of one class (its `kind`,
and how often it was used) share one law, a life table over ages in quarter octaves: of the lives that
reached a bin, how many ended there by a use. With S the survival, h the hazard of a bin of width w,

    J(a) = max over b of  Σ S·h / Σ S·w·(1 - h/2)      (sums over bins from a's to b).

That is a Gittins index for "the next use or giving up" (Gittins, JRSS B 1979), the hit density of
Beckmann, Chen and Cidon (LHD, NSDI 2018) with the best stopping time instead of the end of life. LFU
falls out for constant hazards, LRU for one class with falling ones, GDSF for rates times cost by size.

Differences to LHD: lives that are still open, or were lost sight of, count as censored (Kaplan and
Meier, JASA 1958; here the actuarial form); thin classes lean on thicker ones.
"""

from collections.abc import Iterable
from typing import Final

from preheat.core.life_table import (
    BINS,
    EDGES,
    age_bin,
    between,
    curve,
    delayed,
    fade,
    fades,
    hazards,
    rests,
    steepest,
    use_level,
)

_PRICE_WEIGHT: Final = 0.01
"""A price that follows the last few hundred evictions."""


class HoldTable:
    """J by class and age, learned online with forgetting.

    A class is a `row`: `kind · levels + use_level`. Kinds are 0 … `most_kinds` less one; larger ones
    share the last. A row's hazards lean on those of all rows of its use level, and these on all, by
    `back_off` lives each.

    A life counts less by `memory` with each refresh since it *began*, whether it has ended or is still
    open: so the lives that began together keep the weights they had, and the shares of them that
    ended at each age are those of all. Weighed since their end, long lives would count for too much, and open
    ones, which don't fade, for still more: hazards of early ages would be too low.

    Where the constants come from: few classes, as LHD has them: 4 levels, one an octave of uses, and the
    last one open; of a hundred lives a hazard of a tenth is known to about a third of itself;
    a memory of a hundred refreshes is the same as saying that the last 12,800 requests of a pool
    (`HoldLeaves`) count. Little depends on them: on the first halves of Mooncake's
    traces the share of what Belady's MIN wins over LRU is 0.207 (conversation) and 0.125
    (synthetic), and with 2 or 8 levels, back-offs of 25 to 400, or memories of 0.96 to 1 between
    0.194 and 0.210, and 0.119 and 0.139. One level alone gives 0.188 and 0.157.

    A use of cost `cost_s` and size `size_bytes` multiplies J by their ratio: this table counts uses
    per second.
    """

    def __init__(
        self,
        *,
        levels: int = 4,
        back_off: float = 100.0,
        memory: float = 0.99,
        most_kinds: int = 256,  # clients may choose kinds: room is for 256 tables of some KiB
    ) -> None:
        if levels < 1 or most_kinds < 1 or back_off <= 0 or not 0 < memory <= 1:
            raise ValueError(
                "levels and most_kinds must be at least 1, back_off above 0, memory in (0, 1]"
            )
        self.levels = levels
        self._back_off = back_off
        self._memory = memory
        self._most_kinds = most_kinds
        self.refreshes = 0
        """How often it has learned anew: what a life's `began` counts in."""
        self._fades = fades(memory)
        self._uses: dict[int, list[float]] = {}
        self._ends: dict[int, list[float]] = {}
        self._over = [0.0] * BINS  # services by how long they took
        self._level_hazards: list[list[float]] = []
        self._rests = [0.0] * BINS
        self._curves: dict[int, _Curve] = {}

    def row(self, kind: int, uses: int) -> int:
        """The class of what was used so often."""
        return min(kind, self._most_kinds - 1) * self.levels + use_level(uses, self.levels)

    def end(self, row: int, age_s: float, lives: float, *, used: bool, began: int) -> None:
        """So many lives of this class ended at that age: by a use, or lost sight of. They began when
        the table had made so many `refreshes`."""
        ends = self._ends.get(row)
        if ends is None:
            ends = self._ends[row] = [0.0] * BINS
            self._uses[row] = [0.0] * BINS
        place = age_bin(age_s)
        weight = lives * fade(self._fades, self.refreshes - began)
        ends[place] += weight
        if used:
            self._uses[row][place] += weight

    def serve(self, service_s: float) -> None:
        """An answer took so long: for the rest of one that is under way."""
        self._over[age_bin(service_s)] += 1.0

    def refresh(self, open_lives: Iterable[tuple[int, float, int, int]]) -> None:
        """Learn anew. `open_lives` are all that haven't ended: their row, age, number and `began`."""
        opened: dict[int, list[float]] = {}
        for row, age_s, lives, began in open_lives:
            counts = opened.get(row)
            if counts is None:
                counts = opened[row] = [0.0] * BINS
                self.end(row, 0.0, 0.0, used=False, began=self.refreshes)
            counts[age_bin(age_s)] += lives * fade(self._fades, self.refreshes - began)
        ends = {
            row: [known + more for known, more in zip(known_ends, opened[row], strict=True)]
            if row in opened
            else known_ends
            for row, known_ends in sorted(self._ends.items())
        }
        self._learn(ends)
        rests(self._over, EDGES, self._rests)
        for counts_of in (*self._uses.values(), *self._ends.values(), self._over):
            for place, count in enumerate(counts_of):
                counts_of[place] = count * self._memory
        self.refreshes += 1

    def value(self, row: int, age_s: float) -> float:
        """J: uses per second held. 0 before the first refresh."""
        if not self._level_hazards:
            return 0.0
        return between(self._of(row).value, EDGES, age_bin(age_s), age_s)

    def hold_s(self, row: int, age_s: float) -> float:
        """τ: how much longer it pays to wait for a use, if J is above the price of its place."""
        if not self._level_hazards:
            return 0.0
        until = self._of(row).until[age_bin(age_s)]
        return max(0.0, (EDGES[until] if until < BINS else 2 * EDGES[-1]) - age_s)

    def value_under_way(self, row: int, running_s: float) -> float:
        """J of what a request that began `running_s` ago still uses: nobody asks for it again
        before its answer is there, so a life of this class begins only then."""
        if not self._level_hazards:
            return 0.0
        place = age_bin(running_s)
        known = self._of(row)
        value = known.under_way.get(place)
        if value is None:
            value = delayed(known.gained, known.held, self._rests[place])
            known.under_way[place] = value
        return value

    def _learn(self, ends: dict[int, list[float]]) -> None:
        nothing = [0.0] * BINS
        overall = [0.0] * BINS
        hazards(_sums(self._uses, ends), _sums(ends, ends), nothing, 1.0, overall)
        self._level_hazards = []
        for level in range(self.levels):
            rows = [row for row in ends if row % self.levels == level]
            out = [0.0] * BINS
            hazards(_sums(self._uses, rows), _sums(ends, rows), overall, self._back_off, out)
            self._level_hazards.append(out)
        self._curves = {row: self._curve(row, self._uses[row], ends[row]) for row in ends}

    def _of(self, row: int) -> "_Curve":
        """The class's curve: a class that nothing is known of follows its use level."""
        known = self._curves.get(row)
        if known is None:
            nothing = [0.0] * BINS
            known = self._curves[row] = self._curve(row, nothing, nothing)
        return known

    def _curve(self, row: int, uses: list[float], ends: list[float]) -> "_Curve":
        out = [0.0] * BINS
        hazards(uses, ends, self._level_hazards[row % self.levels], self._back_off, out)
        return _Curve(out)


class _Curve:
    """What a class's hazards come to."""

    def __init__(self, hazard: list[float]) -> None:
        self.gained = [0.0] * (BINS + 1)
        self.held = [0.0] * (BINS + 1)
        self.value = [0.0] * BINS
        self.until = [0] * BINS
        self.under_way: dict[int, float] = {}
        curve(hazard, EDGES, self.gained, self.held)
        steepest(self.gained, self.held, self.value, self.until, [0] * (BINS + 2))


def _sums(counts: dict[int, list[float]], rows: Iterable[int]) -> list[float]:
    """The rows added up, bin by bin, in their order."""
    totals = [0.0] * BINS
    for row in rows:
        for place, count in enumerate(counts[row]):
            totals[place] += count
    return totals


class Price:
    """μ: what a unit of memory was worth where something had to leave for want of it.

    An exponential mean over evictions of the J at which objects went; 0 as long as nobody had to.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._seen = 0

    @property
    def now(self) -> float:
        """In J's unit: seconds saved per byte·second, or uses per second for blocks of one size."""
        return self._mean

    def learn(self, value: float) -> None:
        """Somebody left at this J: a plain mean first, then one that forgets."""
        self._seen += 1
        self._mean += (value - self._mean) * max(_PRICE_WEIGHT, 1.0 / self._seen)
