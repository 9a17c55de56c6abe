"""What a worker's memory is filled with again after it was lost: the ladder from nothing to the
clairvoyant.

`restored` copies what was there, newest first, in the background. The lists compute what some
ranking names, beforehand and within a budget of seconds; they may name only what the worker has
seen. A copy on demand leaves everything where it was, in a tier that outlived the restart.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import exp
from typing import Final

import msgspec

from preheat.core.costs import ServiceModel
from preheat.core.prefix import PrefixStore
from preheat.core.ramp import Ramp
from preheat.replay.fleet import Fleet
from preheat.replay.tiers import Tier, TierSpec
from preheat.replay.worker import Job

DECAY_S: Final = 300.0
"""Of the decayed frequency: the best of those tried in algorithms.md, section 0, finding 3."""
AT_ONCE: Final = 8
"""Blocks that the background brings before it lets others read."""
AHEAD_S: Final = 900.0
"""How far the clairvoyant sees."""


class Warmed(msgspec.Struct):
    """What an arm did: GPU-seconds it computed beforehand, and blocks that came in."""

    spent_s: float = 0.0
    blocks: int = 0


class Place(msgspec.Struct, frozen=True):
    """Where an arm works: a worker whose memory has just been lost (or that has just come, or
    before a peak), the prefixes that were there (or that others have), the one used last first,
    and the jobs of the undisturbed run to rank by."""

    fleet: Fleet
    ramp: Ramp
    number: int
    paths: Sequence[Sequence[int]]
    jobs: Sequence[Job]

    @property
    def store(self) -> PrefixStore:
        """The memory to be filled."""
        return self.fleet.workers[self.number].store


Arm = Callable[[Place], Warmed]


def nothing(place: Place) -> Warmed:
    """It fills by itself."""
    return Warmed()


def restored(block_s: float) -> Arm:
    """What was there comes back in the background, newest first, at so many seconds a block."""
    return lambda place: _refill(place, block_s)


def ramped(fill: Arm) -> Arm:
    """The same, and the worker is given a growing share of the requests only."""

    def both(place: Place) -> Warmed:
        place.ramp.returned(place.number, place.fleet.kernel.now)
        return fill(place)

    return both


def on_demand(tier: str, block_s: float, *, refills: bool = False) -> Arm:
    """What was there is in a tier that outlives the restart: read when it is asked for; with
    `refills` what isn't comes back in the background as well, newest first."""

    def fill(place: Place) -> Warmed:
        capacity = place.store.capacity_blocks
        copy = Tier(TierSpec(tier, capacity, block_s, is_copy=True))
        for path in reversed(place.paths):
            copy.put(block for block in reversed(path) if block not in place.store)
        place.fleet.workers[place.number].tiers.all.insert(0, copy)
        return _refill(place, block_s, copy) if refills else Warmed()

    return fill


def computed(ranking: "Ranking", budget_s: float) -> Arm:
    """What the ranking names first is computed beforehand, within so many seconds of a GPU. It
    pushes out what is older, if there is no room."""

    def fill(place: Place) -> Warmed:
        now, spec = place.fleet.kernel.now, place.fleet.spec
        scores = ranking(place.jobs, now)
        paths = _paths(place.jobs, scores)
        warmed = Warmed()
        for block in sorted(scores, key=lambda one: (-scores[one], len(paths[one]), one)):
            path = paths[block]
            cost_s = block_cost_s(spec.service, spec.worker.block_tokens, len(path) - 1)
            if warmed.spent_s + cost_s > budget_s or warmed.blocks >= place.store.capacity_blocks:
                break
            if place.store.overlap(path) < len(path) and place.store.take(path, 0, now):
                place.store.release(path, 0, now)
                warmed.spent_s += cost_s
                warmed.blocks += 1
        place.store.evicted.clear()
        return warmed

    return fill


def _refill(place: Place, block_s: float, copy: Tier | None = None) -> Warmed:
    """Bring the prefixes in one after the other, as far as there is room, some blocks at a time: what
    requests ask for from lower tiers comes over the same channel, and must not wait long."""
    store, kernel, warmed = place.store, place.fleet.kernel, Warmed()
    worker = place.fleet.workers[place.number]
    waiting = list(reversed(place.paths))

    def bring(path: Sequence[int]) -> None:
        here = store.overlap(path)
        came = store.put(path[: here + AT_ONCE], kernel.now)
        if copy is not None:
            copy.remove(path[here : here + came])
        warmed.blocks += came
        plan()

    def plan() -> None:
        while waiting and store.free_blocks:
            path = waiting[-1]
            missing = len(path) - store.overlap(path)
            if missing:
                kernel.plan(worker.load(min(missing, AT_ONCE) * block_s), bring, path)
                return
            waiting.pop()

    plan()
    return warmed


def block_cost_s(service: ServiceModel, block_tokens: int, place: int) -> float:
    """Seconds to compute the block with so many before it."""
    return service.prefill_s(block_tokens, place * block_tokens)


# Rankings: a score for each block that was seen before `now`; a block's is never above its parent's.

Ranking = Callable[[Sequence[Job], float], Mapping[int, float]]


def by_frequency(jobs: Sequence[Job], now: float) -> Mapping[int, float]:
    """How often it was used, ever."""
    return _sums((job for job in jobs if job.arrived_at < now), lambda _: 1.0)


def by_old_frequency(jobs: Sequence[Job], now: float) -> Mapping[int, float]:
    """The same as of half the time ago: a list made in advance, as yesterday's is."""
    first = min((job.arrived_at for job in jobs), default=now)
    return by_frequency(jobs, (first + now) / 2)


def by_decayed_frequency(jobs: Sequence[Job], now: float) -> Mapping[int, float]:
    """Uses that fade with `DECAY_S`."""
    past = (job for job in jobs if job.arrived_at < now)
    return _sums(past, lambda job: exp((job.arrived_at - now) / DECAY_S))


def by_next_use(jobs: Sequence[Job], now: float) -> Mapping[int, float]:
    """How soon it will be used: what nobody can know. Only what was seen before."""
    seen = set(by_frequency(jobs, now))
    scores: dict[int, float] = {}
    for job in jobs:
        if now <= job.arrived_at < now + AHEAD_S:
            for block in job.blocks:
                if block in seen:
                    scores.setdefault(block, now - job.arrived_at)
    return scores


def _sums(jobs: Iterable[Job], weight: Callable[[Job], float]) -> dict[int, float]:
    sums: dict[int, float] = {}
    for job in jobs:
        worth = weight(job)
        for block in job.blocks:
            sums[block] = sums.get(block, 0.0) + worth
    return sums


def _paths(jobs: Sequence[Job], blocks: Mapping[int, float]) -> dict[int, Sequence[int]]:
    paths: dict[int, Sequence[int]] = {}
    for job in jobs:
        for place, block in enumerate(job.blocks):
            if block in blocks and block not in paths:
                paths[block] = job.blocks[: place + 1]
    return paths
