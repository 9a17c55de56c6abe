"""Ours: each request pays for the delay it puts on those who come after it."""

from collections.abc import Sequence
from math import exp
from typing import Final

from preheat.core.copies import Copies
from preheat.core.placing import Candidate, Placing

_EQUAL: Final = 0.01
"""Costs that differ by less are equal: what was learned isn't better known than that."""

_IDLE_S: Final = 1e-6
"""A queue of less is empty: a sum of seconds that came and went isn't exactly zero."""

_MOST_WEIGHT: Final = 1e100


class Preheat:
    """argmin of its own wait + the waits of others + the price of the memory.

    With W the seconds of work before the request at a worker, and c the seconds it adds there (load
    and miss), its own time to first token is T = W + c.

    *What a wait costs.* D(T) = T + `excess` · T · (T / mean T)²: a wait near the mean counts about
    double, and a very long one for so much more that nobody is left behind one for the mean's sake.

    *The others.* Nearly all of them can go to any worker, so it's the fleet's backlog that c adds to,
    wherever it goes: n workers with w seconds each in the mean. Until such a backlog is done k·w
    requests come to each, and wait for what is left of it, which costs V(w) = k · (integral of D from
    0 to w). So the request costs them n · (V(w + c/n) - V(w)). With k = arrival rate / (1 - load)
    and D(T) = T that is the value function of an M/G/1 queue, and the rule one step of policy
    iteration (Hyytiä, Penttinen and Aalto, EJOR 2012; they add to one queue, and we to all). But
    arrivals that can avoid a busy worker make that k too large, so k isn't computed but *learned*:
    pairs of requests that shared a worker's backlog, over the seconds of backlog, both forgotten
    over `memory_s`. So nobody sets a factor on the miss: it is near 1 on an idle fleet, and grows
    with load and with how long the others would wait. Before much was seen k is thought to be `prior` pairs in
    twice as many mean waits: else the first burst of one prefix would compute it everywhere.

    *A hot prefix.* A miss now is a hit of many later. Whoever shares a prefix can't go to any worker, so
    what a second copy costs the others is far less than above, and without more they would queue where
    the first is, whatever stands idle beside. With `copies` a worker that lacks it costs less by what a copy is
    worth there (`core.copies`). `benchmarks hot_prefixes` has what that brings.

    *The memory.* With `priced`, the blocks that must be kept, at the candidate's price of a block's
    place. Off, as it earned nothing: on the data below, 8 workers of 1 M tokens, loads 0.8 and 0.95, 8
    seeds, the price that `core.ghosts` learns changed the mean TTFT by -1.2 to +0.0 % and the hits
    by -0.4 to +0.4 %, all within their 95 % intervals (of 0.7 to 4.8 %); the p99 by -1.8 to +0.4 %, in
    one of four cells beyond its interval (synthetic, 0.95: -1.8 ± 1.2 %). At 3 M hardly anything is
    pushed out. Where memory is scarce everywhere a price weighs on misses, and k already does.
    Equals go to the one that was given the least to keep lately, so that all memories are used.

    Set: the form of D and `excess`, `memory_s`, `prior`, `_EQUAL`, `priced`; chosen on Mooncake's synthetic
    trace and the first half of its conversations, `prior` also on Weka's v8. Learned: k and the mean.
    """

    def __init__(
        self,
        *,
        memory_s: float = 300.0,
        excess: float = 1.0,
        prior: float = 1.0,
        priced: bool = False,
        copies: bool = True,
    ) -> None:
        self._memory_s = memory_s
        self._excess = excess
        self._prior = prior
        self._priced = priced
        self._copies = Copies() if copies else None
        self._ahead: dict[int, int] = {}  # how many requests each worker's present backlog has seen
        self._filled: dict[int, float] = {}  # tokens each was given to compute and keep lately
        self._token_weight = 1.0  # what one counts for now; instead of all others less
        self._delayed = 0.0  # pairs that shared a backlog
        self._backlog_s = 0.0
        self._mean_s = 0.0
        self._placed = 0.0
        self._at: float | None = None

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        self._forget(now)
        costs = self._costs(placing, candidates)
        worth_s = None
        if self._copies is not None:
            worth_s = self._copies.worth_s(placing, candidates, now)
        if worth_s is not None:
            costs = [cost - value for cost, value in zip(costs, worth_s, strict=True)]
        least = min(costs)
        most = least + _EQUAL * abs(least)
        equals = [place for place, seconds in enumerate(costs) if seconds <= most]
        place = equals[0]
        if len(equals) > 1:
            filled = self._filled.get
            place = min(equals, key=lambda at: filled(candidates[at].number, 0.0))
        self._learn(placing, candidates[place])
        if self._copies is not None and worth_s is not None:
            self._copies.sent(placing, candidates, candidates[place], now)
        return place

    def _costs(self, placing: Placing, candidates: Sequence[Candidate]) -> list[float]:
        """The class's formula, candidate by candidate, in one loop: with 64 of them each call in it
        would cost 10 µs a request."""
        workers = len(candidates)
        rate = 0.0
        seen = self._mean_s > _IDLE_S  # a mean of nothing divides by nothing
        if seen and self._backlog_s > 0.0:
            rate = (self._delayed + self._prior) / (
                self._backlog_s + 2.0 * self._prior * self._mean_s
            )
        backlog_s = sum([one.queue_s for one in candidates]) / workers
        # Before anything was learned D is the wait itself.
        excess, mean_s = (self._excess, self._mean_s) if seen else (0.0, 1.0)
        square = backlog_s * backlog_s
        before = square * (0.5 + 0.25 * excess * (backlog_s / mean_s) ** 2)
        costs = []
        known: dict[float, float] = {}  # those that hold the same, nearly all, add the same
        for one in candidates:
            adds_s = one.load_s + one.miss_s
            wait_s = one.queue_s + adds_s
            others = known.get(adds_s)
            if others is None:
                after_s = backlog_s + adds_s / workers
                after = after_s * after_s * (0.5 + 0.25 * excess * (after_s / mean_s) ** 2)
                others = known[adds_s] = workers * rate * (after - before)
            costs.append(wait_s * (1.0 + excess * (wait_s / mean_s) ** 2) + others)
        if self._priced:
            for place, one in enumerate(candidates):
                new = _new_tokens(placing, one)
                costs[place] += one.price * new / max(1, placing.block_tokens)
        return costs

    def finished(self, placing: Placing, number: int, now: float) -> None:
        """Nothing to learn here: the queue that the next request finds says it."""

    def _forget(self, now: float) -> None:
        elapsed_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        keep = exp(-elapsed_s / self._memory_s)
        self._placed *= keep
        self._delayed *= keep
        self._backlog_s *= keep
        self._token_weight /= max(keep, 1.0 / _MOST_WEIGHT)
        if self._token_weight > _MOST_WEIGHT:
            for number in self._filled:
                self._filled[number] /= self._token_weight
            self._token_weight = 1.0

    def _learn(self, placing: Placing, chosen: Candidate) -> None:
        own_s = chosen.queue_s + chosen.load_s + chosen.miss_s
        number = chosen.number
        ahead = 0 if chosen.queue_s <= _IDLE_S else self._ahead.get(number, 0)
        self._delayed += ahead
        self._backlog_s += own_s
        self._ahead[number] = ahead + 1
        new_tokens = self._token_weight * _new_tokens(placing, chosen)
        self._filled[number] = self._filled.get(number, 0.0) + new_tokens
        self._placed += 1.0
        self._mean_s += (own_s - self._mean_s) / self._placed


def _new_tokens(placing: Placing, one: Candidate) -> int:
    return max(0, placing.input_tokens - one.overlap_tokens)
