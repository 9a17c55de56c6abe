"""The ramp: a worker that comes back cold is given only a growing share of the requests."""

from collections.abc import Sequence
from math import inf
from typing import Final

import msgspec

from preheat.core.placing import Candidate, Placing
from preheat.core.routing import RoutingPolicy

RAMP_S: Final = 300.0
"""At the latest it is over: by then ten million tokens are full again (algorithms.md, 2.7)."""
_ENOUGH: Final = 8
"""Requests after which a worker's own mean may end its ramp."""
_WARM: Final = 0.95
"""From this share on it is over."""
_RECENT: Final = 32
"""Requests over which the mean cost of a request is learned."""
_SAVED_UP: Final = 2.0
"""So many turns at most may be kept for later."""


class _Return(msgspec.Struct):
    """A worker that came back: when, what a request sent to it has cost, and its saved-up turns."""

    at: float
    sent: int = 0
    mean_s: float = 0.0
    turns: float = 0.0


class Ramp:
    """Any routing rule, which sees a worker that has come back only in a share r of its turns.

    r = what a request costs the others (seconds of loading and computing, in the mean) by what one
    costs this worker, at most 1: so it gets as many *seconds* of work as they do, and not as many
    requests. That is the safe ramp r(t) = rho C / (c_hit + (1 - h) dc) of algorithms.md, 2.7, with the
    others' load as rho, and with the miss cost measured. A request whose first token would be there sooner than
    anywhere else, with all that waits before it, is always let through: that is what the worker has come back for.
    (Where that was said of the request's own cost alone, it stood in long queues beside an idle server.) Over once a
    request costs hardly more than theirs.
    Where all have come back at once none is kept back: somebody must serve.
    """

    def __init__(self, rule: RoutingPolicy) -> None:
        self._rule = rule
        self._back: dict[int, _Return] = {}
        self._others_s = 0.0
        self._others = 0

    def returned(self, number: int, now: float) -> None:
        """A worker has come back, cold, or is new."""
        self._back[number] = _Return(now)

    def left(self, number: int) -> None:
        """It is no more."""
        self._back.pop(number, None)

    def is_back(self, number: int) -> bool:
        """Whether it gets a share only."""
        return number in self._back

    @property
    def is_on(self) -> bool:
        """Whether any does."""
        return bool(self._back)

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        if not self._back:
            chosen = self._rule.choose(placing, candidates, now)
            self._learn(candidates[chosen])
            return chosen
        warm = [one.queue_s + _cost_s(one) for one in candidates if one.number not in self._back]
        least_s, workers = min(warm, default=inf), len(candidates)
        free = [
            at for at, one in enumerate(candidates) if self._may_have(one, least_s, workers, now)
        ]
        free = free or list(range(workers))
        chosen = free[self._rule.choose(placing, [candidates[at] for at in free], now)]
        self._learn(candidates[chosen])
        return chosen

    def finished(self, placing: Placing, number: int, now: float) -> None:
        self._rule.finished(placing, number, now)

    def _may_have(self, one: Candidate, least_s: float, workers: int, now: float) -> bool:
        back = self._back.get(one.number)
        if back is None:
            return True
        cost_s = back.mean_s if back.sent else _cost_s(one)
        share = min(1.0, self._others_s / cost_s) if cost_s > 0 and self._others else 1.0
        if now - back.at > RAMP_S or (share >= _WARM and back.sent >= _ENOUGH):
            del self._back[one.number]
            return True
        back.turns = min(_SAVED_UP, back.turns + share / workers)
        return back.turns >= 1.0 or one.queue_s + _cost_s(one) < least_s

    def _learn(self, chosen: Candidate) -> None:
        cost_s = _cost_s(chosen)
        back = self._back.get(chosen.number)
        if back is None:
            self._others = min(_RECENT, self._others + 1)
            self._others_s += (cost_s - self._others_s) / self._others
        else:
            back.turns = max(0.0, back.turns - 1.0)
            back.sent += 1
            back.mean_s += (cost_s - back.mean_s) / min(_ENOUGH, back.sent)


def _cost_s(one: Candidate) -> float:
    return one.load_s + one.miss_s
