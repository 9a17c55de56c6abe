"""How a request gets its prefix: computed, loaded from a file, or left by another that computes it."""

from math import inf
from typing import Final, Literal, NamedTuple

import msgspec

from preheat.core.least_squares import NonNegative

Way = Literal["restore", "wait", "recompute"]

_KEEP: Final = 0.95
"""What an older measurement's weight shrinks by: half of all is of the last 13."""
_LEAST_S: Final = 1e-4
_WRITING: Final = 0.5


class Prospect(msgspec.Struct, frozen=True, kw_only=True):
    """What could be done for a request, in expected seconds. `inf`: that can't be done.

    `queue_s` passes before anything of it is computed, and goes on whatever is done meanwhile.
    `recompute_s` computes all that isn't in its slot now. A file is first brought to memory and
    checked, `fetch_s`, which needs no engine and hides behind the queue; then the engine loads it,
    `load_s`, and computes nothing meanwhile; `restored_rest_s` computes what the file doesn't have.
    `leader_s` from now on a running request has left the prefix in its slot; `led_rest_s` is then
    computed.
    """

    queue_s: float = 0.0
    recompute_s: float = 0.0
    fetch_s: float = 0.0
    load_s: float = inf
    restored_rest_s: float = 0.0
    leader_s: float = inf
    led_rest_s: float = 0.0


class Choice(NamedTuple):
    """The way to go, and when the first token is expected."""

    way: Way
    ttft_s: float


def quickest(prospect: Prospect) -> Choice:
    """The way with the earliest first token among those that take less of the engine than computing.

    So nothing is restored behind a long queue that would take the engine longer to load than to
    compute, though this one request wouldn't notice: the others would.

    >>> quickest(Prospect(recompute_s=5.0, fetch_s=0.5, load_s=0.1, restored_rest_s=0.2))
    Choice(way='restore', ttft_s=0.8)
    >>> quickest(Prospect(queue_s=9.0, recompute_s=1.0, fetch_s=6.0, load_s=0.5)).ttft_s
    9.5
    >>> quickest(Prospect(recompute_s=5.0, leader_s=3.0, led_rest_s=0.1)).way
    'wait'
    """
    one = prospect
    best = Choice("recompute", one.queue_s + one.recompute_s)
    if one.led_rest_s < one.recompute_s:
        waited = max(one.queue_s, one.leader_s) + one.led_rest_s
        if waited <= best.ttft_s:
            best = Choice("wait", waited)
    if one.load_s + one.restored_rest_s < one.recompute_s:
        restored = max(one.queue_s, one.fetch_s) + one.load_s + one.restored_rest_s
        if restored <= best.ttft_s:
            best = Choice("restore", restored)
    return best


def is_worth_writing(chance: float, saved_s: float, write_s: float) -> bool:
    """Whether a file is written that with this chance saves so much, when its session returns. Writing holds
    the engine up, but not always somebody who waits: it counts half.

    Half and whole were tried on the first half of `benchmarks signals`, with writing at three speeds: half was
    better than none of this or as good at each, whole was worse at one.

    >>> is_worth_writing(0.5, 2.0, 1.0), is_worth_writing(0.1, 2.0, 1.0)
    (True, False)
    """
    return chance * saved_s >= _WRITING * write_s


class Speed:
    """How long moving so many bytes takes: a latency and a rate, learned from what was measured.

    Until then it is as given. Newer measurements count more: a disk's cache fills and empties.
    """

    def __init__(self, *, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._given = (latency_s, 1.0 / bytes_per_s)
        self._fit = NonNegative(2, keep=_KEEP)

    def learn(self, size_bytes: int, took_s: float) -> None:
        """One more was moved. Relative errors count."""
        took_s = max(_LEAST_S, took_s)
        self._fit.add((1.0, float(size_bytes)), took_s, 1.0 / took_s**2)

    @property
    def latency_s(self) -> float:
        """Before the first byte."""
        return self._prices[0]

    @property
    def byte_s(self) -> float:
        """Each byte's."""
        return self._prices[1]

    def expected_s(self, size_bytes: float) -> float:
        """Moving so many bytes."""
        latency_s, byte_s = self._prices
        return latency_s + byte_s * size_bytes

    @property
    def _prices(self) -> tuple[float, float]:
        if not self._fit.rows:
            return self._given
        latency_s, byte_s = self._fit.solution()
        return latency_s, byte_s
