"""How long sessions pause, by what was said of them: whose slot will be missed soonest."""

from collections import OrderedDict
from collections.abc import Sequence
from math import exp, log
from typing import Final

_OPEN: Final = 4_096
"""Prompts whose return is waited for; the oldest is forgotten for a newer one."""
_BACK_OFF: Final = 20.0
"""Pauses of all kinds that a kind's mean leans on. Logarithms of log-logistic pauses spread by
π/√3, so that of 20 their mean is known to 0.4: a factor of 1.5."""
_LEAST_WEIGHT: Final = 0.002
"""The last 500 pauses of a kind count."""
_LEAST_S: Final = 0.1


class _Mean:
    """Of logarithms: a plain mean first, then one that forgets."""

    def __init__(self) -> None:
        self.count = 0.0
        self.log_s = 0.0

    def learn(self, log_s: float) -> None:
        self.count += 1.0
        self.log_s += (log_s - self.log_s) * max(_LEAST_WEIGHT, 1.0 / self.count)


class Pauses:
    """The usual pause of each kind, learned from this gateway's own sessions.

    A `kind` is whatever is known when an answer ends: that it calls a tool, what its client has said
    of the session, or nothing. There are few kinds. A pause lasts from there to the next request that begins with the
    same whole prompt, so no session has to be named; one that nobody returns from isn't counted.

    Pauses are taken for log-logistic, with the chance s / (s + t) of not being over after t: heavy tails, as in
    Weka's sessions of agents, where s, their geometric mean and median, is near 10 s behind a tool call and
    50 s or more behind other answers. Then the hazard of a return after t is 1 / (s + t), and of several
    idle slots the one with the largest s + t is the last to be missed: LRU (t alone), with a
    handicap that doesn't change while the slot is idle. `core.value` has whole life tables instead; here they did
    worse, since an order that changes with time has saved what wasn't taken after all.
    """

    def __init__(self) -> None:
        self._all = _Mean()
        self._of: dict[str, _Mean] = {}
        self._open: OrderedDict[int, tuple[str, float]] = OrderedDict()  # by the last block

    def came(self, blocks: Sequence[int], now: float) -> None:
        """A request with this prompt is there: what it goes on with has paused until now."""
        for block in reversed(blocks):
            paused = self._open.pop(block, None)
            if paused is not None:
                kind, since = paused
                log_s = log(max(_LEAST_S, now - since))
                self._all.learn(log_s)
                self._of.setdefault(kind, _Mean()).learn(log_s)
                return

    def ended(self, blocks: Sequence[int], kind: str, now: float) -> float:
        """A request with this prompt was answered. By how many seconds its usual pause is longer than
        that of all kinds together, or shorter (below 0); where there is but one, 0: that is LRU."""
        if blocks:
            self._open[blocks[-1]] = kind, now
            self._open.move_to_end(blocks[-1])
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return self.usual_s(kind) - exp(self._all.log_s) if self._all.count else 0.0

    def usual_s(self, kind: str) -> float:
        """The geometric mean of this kind's pauses."""
        own = self._of.get(kind)
        if not self._all.count:
            return 0.0
        if own is None:
            return exp(self._all.log_s)
        weighed = own.count * own.log_s + _BACK_OFF * self._all.log_s
        return exp(weighed / (own.count + _BACK_OFF))
