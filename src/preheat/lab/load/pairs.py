"""The same requests twice, undisturbed and with cold starts: what these cost, request by request."""

import random
from array import array
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, fsum, inf, isnan, nan
from typing import Final, NamedTuple

import msgspec

from preheat.core.spread import Spread, spread_of
from preheat.lab.load.exchange import Outcome
from preheat.lab.load.summary import Summary

MINUTE_S: Final = 60.0
MINUTES: Final = 10
"""How many after a cold start are told one by one."""
BLOCK_S: Final = 5.0
"""Requests of so many seconds are drawn together: those that come together share a queue."""
LEAST_BLOCKS: Final = 8
"""With fewer of them there is no interval."""
_DRAWS: Final = 1_000
_LEAST_DRAWS: Final = 100
_MOST_STEPS: Final = 20_000_000
"""Draws times pairs: more would take many seconds."""
_EDGES: Final = (0.025, 0.975)


class Estimate(msgspec.Struct, frozen=True):
    """A number and its 95 % interval, by bootstrap over blocks of `BLOCK_S` seconds."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class Window(msgspec.Struct, frozen=True):
    """Requests that were due from `from_s` on and before `to_s`. Of those that both runs answered: TTFT in
    both, and the difference of each, positive where the run with cold starts was slower."""

    from_s: float
    to_s: float | None
    pairs: int
    warm_only: int
    cold_only: int
    warm_ttft_s: Spread
    cold_ttft_s: Spread
    median_s: Estimate
    mean_s: Estimate
    p95_s: Estimate


class ColdStart(msgspec.Struct, frozen=True):
    """What was run at one moment, and the minutes after it, until the next cold start; `later` is what
    comes after the last of these minutes."""

    at_s: float
    commands: list[str]
    minutes: list[Window]
    later: Window | None


class Paired(msgspec.Struct, frozen=True):
    """`before` is a check: nothing had happened yet, so its differences are the noise of the comparison."""

    before: Window
    after: Window
    cold_starts: list[ColdStart]


class PairedSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What `--paired --json` prints; None: the load was interrupted before that."""

    warm: Summary
    cold: Summary | None = None
    paired: Paired | None = None
    warnings: list[str] = []


class Times:
    """When each request of a run was due and its TTFT, by its number; NaN where there is none. 16 bytes a
    request."""

    def __init__(self) -> None:
        self.due_s, self.ttft_s = array("d"), array("d")

    def note(self, outcome: Outcome) -> None:
        """One that has ended, in any order."""
        missing = outcome.number + 1 - len(self.due_s)
        if missing > 0:
            for numbers in (self.due_s, self.ttft_s):
                numbers.extend([nan] * missing)
        self.due_s[outcome.number] = outcome.at_s
        self.ttft_s[outcome.number] = nan if outcome.ttft_s is None else outcome.ttft_s


class _Pair(NamedTuple):
    """One request; NaN where a run has no whole answer to it."""

    due_s: float
    warm_s: float
    cold_s: float


def paired(warm: Times, cold: Times, cold_starts: Sequence[tuple[float, str]]) -> Paired:
    """What both runs tell together; cold starts (at least one) are (seconds, command), as for the plan."""
    both = [
        _Pair(due_s, warm_s, cold_s)
        for due_s, warm_s, cold_s in zip(warm.due_s, warm.ttft_s, cold.ttft_s, strict=False)
        if not isnan(due_s)
    ]
    commands: dict[float, list[str]] = {}
    for at_s, command in sorted(cold_starts):
        commands.setdefault(at_s, []).append(command)
    first_s = min(commands)
    return Paired(
        _window(both, 0.0, first_s),
        _window(both, first_s, inf),
        [
            _cold_start(both, commands[at_s], at_s, next_s)
            for at_s, next_s in pairwise([*commands, inf])
        ],
    )


def warnings_of(warm: Summary, cold: Summary) -> list[str]:
    """What makes the runs another thing than the same requests in the same state."""
    more = cold.layers.get("exact", 0) - warm.layers.get("exact", 0)
    if more > 0:
        return [
            f"{more} more answers of the second run came from a cache of answers, as the first one had "
            'filled it; give the requests the header "Cache-Control": "no-store", or empty it --before'
        ]
    return []


def _cold_start(
    both: Sequence[_Pair], commands: list[str], at_s: float, next_s: float
) -> ColdStart:
    last_s = max((one.due_s for one in both), default=at_s)
    minutes: list[Window] = []
    from_s = at_s
    while from_s < next_s and from_s <= last_s and len(minutes) < MINUTES:
        minutes.append(_window(both, from_s, min(next_s, from_s + MINUTE_S)))
        from_s += MINUTE_S
    has_later = from_s < next_s and from_s <= last_s
    return ColdStart(at_s, commands, minutes, _window(both, from_s, next_s) if has_later else None)


def _window(both: Sequence[_Pair], from_s: float, to_s: float) -> Window:
    inside = [one for one in both if from_s <= one.due_s < to_s]
    answered = [one for one in inside if not isnan(one.warm_s) and not isnan(one.cold_s)]
    median, mean, p95 = _estimates(answered)
    return Window(
        from_s,
        None if to_s == inf else to_s,
        len(answered),
        sum(isnan(one.cold_s) and not isnan(one.warm_s) for one in inside),
        sum(isnan(one.warm_s) and not isnan(one.cold_s) for one in inside),
        spread_of([one.warm_s for one in answered]),
        spread_of([one.cold_s for one in answered]),
        median,
        mean,
        p95,
    )


def _estimates(answered: Sequence[_Pair]) -> tuple[Estimate, Estimate, Estimate]:
    """Of the differences: median, mean and 95th percentile (nearest-rank)."""
    if not answered:
        return Estimate(), Estimate(), Estimate()
    numbers: dict[int, int] = {}  # of blocks that have requests, in order
    ordered = sorted(
        (one.cold_s - one.warm_s, numbers.setdefault(int(one.due_s / BLOCK_S), len(numbers)))
        for one in answered
    )
    blocks = len(numbers)
    told = _of(ordered, [1] * blocks)
    if blocks < LEAST_BLOCKS:
        return Estimate(told[0]), Estimate(told[1]), Estimate(told[2])
    chance = random.Random(0)
    draws = max(_LEAST_DRAWS, min(_DRAWS, _MOST_STEPS // len(ordered)))
    drawn = []
    for _ in range(draws):
        weights = [0] * blocks
        for block in chance.choices(range(blocks), k=blocks):
            weights[block] += 1
        drawn.append(_of(ordered, weights))
    median, mean, p95 = (
        Estimate(value, *(sorted(column)[int(edge * draws)] for edge in _EDGES))
        for value, column in zip(told, zip(*drawn, strict=True), strict=True)
    )
    return median, mean, p95


def _of(ordered: Sequence[tuple[float, int]], weights: Sequence[int]) -> tuple[float, float, float]:
    """Median, mean and 95th percentile of sorted differences, each as often as its block was drawn."""
    total = sum(weights[block] for _, block in ordered)
    mean = fsum(value * weights[block] for value, block in ordered) / total
    ranks = [ceil(percent * total / 100) for percent in (50, 95)]
    found: list[float] = []
    passed = 0
    for value, block in ordered:
        passed += weights[block]
        while len(found) < len(ranks) and passed >= ranks[len(found)]:
            found.append(value)
    return found[0], mean, found[1]
