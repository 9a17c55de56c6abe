"""Ours: each request pays for the delay it puts on those who come after it."""

from collections.abc import Sequence
from math import exp
from typing import Final

import msgspec

from preheat.core.placing import Candidate, Placing

_OWN_SHARE: Final = 0.25
"""How much a worker's own record weighs against the fleet's: it has seen few requests. More
weight separates short from long work (as SITA does: Harchol-Balter et al., JPDC 1999), for a better
mean and a worse p99. It weighs only on what waits already: idle workers are alike, however
busy they were. Chosen on Mooncake's synthetic trace and the first half of its conversations."""

_EQUAL: Final = 0.01
"""Costs that differ by less are equal: what was learned isn't better known than that."""


class _Record(msgspec.Struct, gc=False):
    """What a worker's backlog brought upon later requests, both decayed; how many requests its
    present backlog has seen; and how many tokens it was given to compute and keep."""

    delayed: float = 0.0
    backlog_s: float = 0.0
    ahead: int = 0
    filled_tokens: float = 0.0


class Preheat:
    """argmin of own time + its excess + the delay of others + the price of the memory.

    With W the seconds of work before the request at a worker, and c the seconds it adds there (load
    and miss), its own time to first token is T = W + c.

    *The delay of others.* Whoever comes to a worker before its backlog is done waits c longer. A
    backlog of w seconds meets k·w requests in the mean, so that c more seconds delay them by
    k·c·(W + c/2) in all. With k = arrival rate / (1 - load) that is the value function of an M/G/1
    queue, and the rule one step of policy iteration (Hyytiä, Penttinen and Aalto, EJOR 2012, for
    work that differs by queue, as it does here by cache). But arrivals that can avoid a busy
    worker make that k too large, so k isn't computed but *learned*: pairs of requests that shared
    a backlog, over the seconds of backlog, both forgotten over `memory_s`. So nobody sets the
    factor on a miss: it is near 1 on an idle fleet, and grows with load and with how long the
    others would wait.

    *The excess.* T counts as T + `excess` · T² / mean T: a long wait is worse than two of half
    its length. Without it means are a little better and p99s worse. The defaults were chosen with
    `_OWN_SHARE`, on the same data.

    *The memory.* The blocks that must be kept, at the candidate's price of a block's place. Equals go
    to the one that was given the least to keep lately, so that all memories are used.
    """

    def __init__(self, *, memory_s: float = 300.0, excess: float = 2.0) -> None:
        self._memory_s = memory_s
        self._excess = excess
        self._records: dict[int, _Record] = {}
        self._mean_s = 0.0
        self._placed = 0.0
        self._at: float | None = None

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        self._forget(now)
        records = [self._records.setdefault(one.number, _Record()) for one in candidates]
        fleet_delayed = sum(one.delayed for one in records) / len(records)
        fleet_s = sum(one.backlog_s for one in records) / len(records)
        fleet_rate = fleet_delayed / fleet_s if fleet_s > 0.0 else 0.0
        rest = 1.0 - _OWN_SHARE
        mean_s = self._mean_s

        def cost(one: Candidate, record: _Record) -> float:
            adds_s = one.load_s + one.miss_s
            own_s = one.queue_s + adds_s
            backlog_s = _OWN_SHARE * record.backlog_s + rest * fleet_s
            delayed = _OWN_SHARE * record.delayed + rest * fleet_delayed
            own_rate = delayed / backlog_s if backlog_s > 0.0 else 0.0
            others_s = adds_s * (own_rate * one.queue_s + 0.5 * fleet_rate * adds_s)
            excess_s = self._excess * own_s * own_s / mean_s if mean_s > 0.0 else 0.0
            memory_s = one.price * _new_tokens(placing, one) / max(1, placing.block_tokens)
            return own_s + excess_s + others_s + memory_s

        costs = [cost(one, record) for one, record in zip(candidates, records, strict=True)]
        most = min(costs) + _EQUAL * abs(min(costs))
        equals = (at for at, seconds in enumerate(costs) if seconds <= most)
        place = min(equals, key=lambda at: records[at].filled_tokens)
        self._learn(placing, candidates[place], records[place])
        return place

    def finished(self, placing: Placing, number: int, now: float) -> None:
        """Nothing to learn here: the queue that the next request finds says it."""

    def _forget(self, now: float) -> None:
        elapsed_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        keep = exp(-elapsed_s / self._memory_s)
        self._placed *= keep
        for record in self._records.values():
            record.delayed *= keep
            record.backlog_s *= keep
            record.filled_tokens *= keep

    def _learn(self, placing: Placing, chosen: Candidate, record: _Record) -> None:
        own_s = chosen.queue_s + chosen.load_s + chosen.miss_s
        if chosen.queue_s <= 0.0:
            record.ahead = 0
        record.delayed += record.ahead
        record.backlog_s += own_s
        record.ahead += 1
        record.filled_tokens += _new_tokens(placing, chosen)
        self._placed += 1.0
        self._mean_s += (own_s - self._mean_s) / self._placed


def _new_tokens(placing: Placing, one: Candidate) -> int:
    return max(0, placing.input_tokens - one.overlap_tokens)
