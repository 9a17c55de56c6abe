"""Restarts, deploys, lost machines, new machines: what they cost, and what each arm wins back.

Each arm is the same trace through the same fleet; at the event the memory of a worker is lost
and an arm fills it again. What is lost is the prefill done in the next quarter of an hour beyond
that of the run in which nothing happens; below zero the arm was better than that.
"""

from collections.abc import Callable, Mapping, Sequence
from math import fsum
from typing import Final, Literal

import msgspec

from preheat.core.ramp import Ramp
from preheat.core.routing import RoutingPolicy
from preheat.core.spread import percentile
from preheat.errors import ConfigError
from preheat.replay.fleet import Fleet, FleetSpec, Run, run
from preheat.replay.headroom.warmth import Arm, Place, Warmed
from preheat.replay.measures import ttfts
from preheat.replay.worker import Job
from preheat.traces.arrival import Arrival

LOST_WITHIN_S: Final = 900.0
_SPEED_SPAN_S: Final = 28_800.0
WINDOWS_S: Final = (60.0, 300.0, 900.0)


Copies = Literal["any", "disk", "none"]


class Event(msgspec.Struct, frozen=True):
    """What happens to whom, and how long after the event's time: (seconds, worker) each. A worker
    of that number that isn't there joins. `copies` says what of the memory can be had again: all, what
    is on disk (a machine without power), or nothing (KV of another version of the model, or where
    nothing is lost). In a `steady` state and in a `peak` nothing is lost, and memory may be warmed just
    before; in a peak requests come half as fast again for five minutes. `can_ramp`: others can serve
    what who comes back isn't given."""

    name: str
    losses: tuple[tuple[float, int], ...]
    kind: Literal["steady", "loss", "join", "peak"] = "loss"
    copies: Copies = "any"
    can_ramp: bool = False

    @property
    def span_s(self) -> float:
        """From its first to its last loss."""
        return self.losses[-1][0] - self.losses[0][0]


def events(workers: int, pace_s: float = 60.0) -> list[Event]:
    """Nothing at all; one restarts; one after the other (a rolling deploy, of which the next is up
    before the one before it stops, so that none is missing); all at once (power); a switch of the
    model's version; one joins; a peak."""
    everyone, is_fleet = range(workers), workers > 1
    at_once = tuple((0.0, i) for i in everyone)
    made = [Event("steady state", at_once, "steady", "none")]
    made.append(Event("one restarts", ((0.0, 0),), can_ramp=is_fleet))
    if is_fleet:
        rolling = tuple((i * pace_s, i) for i in everyone)
        made.append(Event("rolling deploy", rolling, can_ramp=True))
        made.append(Event("all lose power", at_once, copies="disk"))
        made.append(Event("version switch", at_once, copies="none"))
    made.append(Event("scale-out, one joins", ((0.0, workers),), "join", can_ramp=is_fleet))
    made.append(Event("peak of 1.5", at_once, "peak", "none"))
    return made


class Aftermath(msgspec.Struct, frozen=True):
    """One arm at one switch time. Seconds of prefill lost and spent; TTFTs of the requests that
    came within each of `WINDOWS_S` after the event, and of those between its first loss and five
    minutes after its last."""

    arm: str
    switched_at: float
    lost_s: float
    spent_s: float
    ttfts_s: Mapping[float, Sequence[float]]
    until_over_s: Sequence[float]
    curve: Sequence[tuple[float, float, float]]
    """By minute from five before: (minute, p95 TTFT, share of prompt tokens found)."""


class Study(msgspec.Struct):
    """One fleet, one trace, one speed: the run in which nothing happens, and arms against it."""

    arrivals: Sequence[Arrival]
    block_tokens: int
    spec: FleetSpec
    policy: Callable[[], RoutingPolicy]
    speed: float
    kept: Run | None = None
    peaks: dict[float, Run] = {}

    def undisturbed(self) -> Run:
        """Nothing happens."""
        if self.kept is None:
            self.kept = self._run(Fleet(self.spec, self.policy()))
        return self.kept

    def aftermath(self, event: Event, arm_name: str, arm: Arm | None, at: float) -> Aftermath:
        """An event at a moment of simulated time; without an arm it doesn't happen."""
        kept = self.undisturbed()
        arrivals = self.arrivals
        if event.kind == "peak":
            arrivals = _peaked(arrivals, at * self.speed, 300.0 * self.speed)
        beside = self._beside(event, arrivals, at)
        if arm is None:
            return self._measure(event, arm_name, beside, beside, [], at)
        ramp = Ramp(self.policy())
        fleet = Fleet(self.spec, ramp)
        warmed: list[Warmed] = []

        def happen(number: int, fill: Arm = arm) -> None:
            warmed.append(fill(_place(fleet, ramp, number, event, kept.jobs)))

        for after_s, number in event.losses:
            fleet.kernel.plan(at + after_s, happen, number)
        return self._measure(event, arm_name, self._run(fleet, arrivals), beside, warmed, at)

    def _beside(self, event: Event, arrivals: Sequence[Arrival], at: float) -> Run:
        """What an arm is held against: the run in which nothing happens, or nobody warms for a peak."""
        if event.kind != "peak":
            return self.undisturbed()
        if at not in self.peaks:
            self.peaks[at] = self._run(Fleet(self.spec, self.policy()), arrivals)
        return self.peaks[at]

    def _run(self, fleet: Fleet, arrivals: Sequence[Arrival] | None = None) -> Run:
        chosen = self.arrivals if arrivals is None else arrivals
        return run(chosen, self.block_tokens, fleet, speed=self.speed)

    def _measure(
        self, event: Event, arm: str, made: Run, kept: Run, warmed: Sequence[Warmed], at: float
    ) -> Aftermath:
        until = at + event.span_s + LOST_WITHIN_S
        lost_s = _prefill_s(made.jobs, at, until) - _prefill_s(kept.jobs, at, until)
        spent_s = fsum(one.spent_s for one in warmed)
        waits = {window: ttfts(made.jobs, at, at + window) for window in WINDOWS_S}
        over = ttfts(made.jobs, at, at + event.span_s + 300.0)
        return Aftermath(arm, at, lost_s, spent_s, waits, over, _curve(made.jobs, at))


def _place(fleet: Fleet, ramp: Ramp, number: int, event: Event, jobs: Sequence[Job]) -> Place:
    """Does the event to the worker, and gives an arm what it may work with."""
    if event.kind == "join":
        paths = [path for worker in fleet.workers for path in worker.store.paths()]
        if number == len(fleet.workers):
            fleet.add()
        return Place(fleet, ramp, number, paths, jobs)
    store = fleet.workers[number].store
    paths = store.paths()
    if event.kind == "loss":
        store.flush()
    return Place(fleet, ramp, number, paths, [job for job in jobs if job.worker == number])


def _peaked(arrivals: Sequence[Arrival], at: float, span_s: float) -> list[Arrival]:
    """What would come in 1.5 spans after `at` comes in one, and all after it that much earlier."""
    factor = 1.5
    moved = []
    for one in arrivals:
        after = one.at - at
        if after > 0:
            sooner = at + (
                after / factor if after < factor * span_s else after - (factor - 1) * span_s
            )
            moved.append(msgspec.structs.replace(one, at=sooner))
        else:
            moved.append(one)
    return moved


def _prefill_s(jobs: Sequence[Job], start: float, end: float) -> float:
    return fsum(job.computed_s for job in jobs if start <= job.arrived_at < end)


def _curve(jobs: Sequence[Job], at: float) -> list[tuple[float, float, float]]:
    curve = []
    for minute in range(-5, 16):
        start = at + 60.0 * minute
        waits = sorted(ttfts(jobs, start, start + 60.0))
        asked = found = 0
        for job in jobs:
            if start <= job.arrived_at < start + 60.0:
                asked += job.input_tokens
                found += job.cached_tokens
        if waits:
            p95 = percentile(waits, 95)
            curve.append((float(minute), p95, found / max(1, asked)))
    return curve


def speed_for(
    arrivals: Sequence[Arrival],
    block_tokens: int,
    spec: FleetSpec,
    policy: Callable[[], RoutingPolicy],
    load: float,
    *,
    warm_s: float = 0.0,
    rounds: int = 4,
) -> float:
    """How much faster than recorded the trace must run so that this fleet, undisturbed, spends the
    share `load` of its time on prefill while requests come. Found by repeated trial: hits depend a
    little on the speed. What comes in the first `warm_s` of the trace isn't counted, and of what
    comes later eight hours suffice."""
    start = arrivals[0].at + warm_s
    part = [one for one in arrivals if one.at <= start + _SPEED_SPAN_S]
    counted = {number for number, one in enumerate(part) if one.at >= start}
    span_s = max(1e-9, part[-1].at - start)
    speed = 1.0
    for _ in range(rounds):
        made = run(part, block_tokens, Fleet(spec, policy()), speed=speed)
        busy_s = fsum(made.jobs[number].computed_s for number in counted) / spec.workers
        if not busy_s:
            raise ConfigError(
                f"no request fits into a worker of {spec.worker.capacity_blocks * block_tokens:,} tokens:"
                " give it more (--worker-tokens, --alone-tokens)"
            )
        speed *= load / (busy_s / (span_s / speed))
    return speed
