"""Every event on every fleet: what came of each arm, at each load and switch time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import exp, fsum, log
from statistics import median
from typing import Final, Literal

import msgspec

from preheat.core.spread import Spread, spread_of
from preheat.errors import ConfigError
from preheat.replay.fleet import FleetSpec
from preheat.replay.headroom.events import Aftermath, Event, Study, events, speed_for
from preheat.replay.headroom.fleets import fleet_of, reference
from preheat.replay.headroom.ladder import NOTHING, ladder
from preheat.replay.headroom.pauses import DAY_S
from preheat.replay.headroom.wanted import Progress, Wanted, simulated
from preheat.traces.arrival import Arrival, Trace

KEPT: Final = "kept: nothing happens"

ByArm = Mapping[str, Sequence[Sequence[Aftermath]]]


class Outcome(msgspec.Struct, frozen=True):
    """One event on one fleet. `by_arm`: for each load, what came at each switch time. `day_s`: GPU-
    seconds of prefill of a day in which nothing happens, at the first load."""

    event: Event
    fleet: str
    by_arm: ByArm
    loads: tuple[float, ...]
    day_s: float
    span_s: float

    def net_s(self, arm: str, price: float = 1.0) -> float:
        """GPU-seconds an event that the arm saves, less what it spends, each second of that at
        `price` of one saved."""
        lost, spent = self.seconds(arm)
        return self.seconds(NOTHING)[0] - lost - price * spent

    def seconds(self, arm: str) -> tuple[float, float]:
        """Lost and spent, the mean of the switch times at the first load."""
        first = self.by_arm[arm][0]
        return _mean([one.lost_s for one in first]), _mean([one.spent_s for one in first])

    def times_kept(self, arm: str, window_s: float | None) -> float | None:
        """p95 by that of the run in which nothing happens, at the last load."""
        return _times_kept(self.by_arm[arm][-1], self.by_arm[KEPT][-1], window_s)

    def typical_s(
        self, arm: str, window_s: float | None, place: Literal["p50", "p95", "p99"] = "p95"
    ) -> float | None:
        """The median over the switch times of each one's percentile, at the last load."""
        spreads = (_spread(one, window_s) for one in self.by_arm[arm][-1])
        found = [wait for one in spreads if (wait := getattr(one, place)) is not None]
        return median(found) if found else None

    def curve(self, arm: str) -> list[tuple[float, float, float]]:
        """By minute (minute, p95 TTFT, share of prompt tokens found), at the last load: of the
        switch times the median."""
        points: dict[float, list[tuple[float, float, float]]] = {}
        for one in self.by_arm[arm][-1]:
            for point in one.curve:
                points.setdefault(point[0], []).append(point)
        return [
            (minute, median(one[1] for one in found), median(one[2] for one in found))
            for minute, found in sorted(points.items())
        ]


def planned(wanted: Wanted) -> list[tuple[int, int, list[Event]]]:
    """Every fleet's workers, memory and events."""
    fleets = [(1, tokens) for tokens in wanted.alone_tokens if wanted.events_alone]
    fleets += [(wanted.workers, tokens) for tokens in wanted.worker_tokens]
    return [
        (
            workers,
            tokens,
            [
                event
                for event in events(workers)
                # What one that joins a single one does is mostly halving its load.
                if (workers > 1 or event.kind != "join")
                and (not wanted.only_events or event.name in wanted.only_events)
            ],
        )
        for workers, tokens in fleets
    ]


def event_runs(trace: Trace, wanted: Wanted) -> int:
    """Simulations of all events; a search for a speed counts as one."""
    times = len(wanted.loads) * wanted.switches
    return sum(
        len(wanted.loads) + times * sum(_runs(trace, event) for event in chosen)
        for _, _, chosen in planned(wanted)
    )


def outcomes(trace: Trace, wanted: Wanted, progress: Progress) -> Iterator[Outcome]:
    """Every event on a single worker of each size, and on the fleet."""
    for workers, tokens, chosen in planned(wanted):
        spec = fleet_of(wanted, trace, workers, tokens)
        name = f"{workers} x {tokens / 1e6:g} M tokens"
        searches: dict[str, Callable[[], float]] = {
            f"{load}": partial(
                speed_for,
                trace.arrivals,
                trace.block_tokens,
                spec,
                reference,
                load,
                warm_s=wanted.warm_up_s,
            )
            for load in wanted.loads
        }
        found = simulated(searches, progress, f"{name}: the speed for each load")
        speeds = {load: found[f"{load}"] for load in wanted.loads}
        for event in chosen:
            yield _outcome(trace, wanted, spec, event, name, speeds, progress)


def _outcome(
    trace: Trace,
    wanted: Wanted,
    spec: FleetSpec,
    event: Event,
    name: str,
    speeds: Mapping[float, float],
    progress: Progress,
) -> Outcome:
    tasks = {
        f"{load} {number}": partial(_moment, study, at, event, wanted.budget_s)
        for load, speed in speeds.items()
        for number, (study, at) in enumerate(_studies(trace, wanted, spec, speed))
    }
    made = list(
        simulated(tasks, progress, f"{event.name}, {name}", runs=_runs(trace, event)).values()
    )
    loads = [
        made[start : start + wanted.switches] for start in range(0, len(made), wanted.switches)
    ]
    return Outcome(
        event,
        name,
        {arm: [[one[arm] for _, one in load] for load in loads] for arm in made[0][1]},
        tuple(speeds),
        _mean([day_s for day_s, _ in loads[0]]),
        trace.arrivals[-1].at - trace.arrivals[0].at,
    )


def _runs(trace: Trace, event: Event) -> int:
    """The undisturbed run, and one for each arm."""
    return 1 + len(ladder(trace.block_tokens, event))


def _moment(
    study: Study, at: float, event: Event, budget_s: float
) -> tuple[float, dict[str, Aftermath]]:
    """All arms at one switch time, and GPU-seconds of prefill of an undisturbed day."""
    kept = study.undisturbed()
    span_s = max(1.0, kept.ended_at - min(job.arrived_at for job in kept.jobs))
    day_s = fsum(job.computed_s for job in kept.jobs) / span_s * DAY_S
    made = {KEPT: study.aftermath(event, KEPT, None, at)}
    for name, arm in ladder(study.block_tokens, event, budget_s).items():
        made[name] = study.aftermath(event, name, arm, at)
    return day_s, made


def _studies(
    trace: Trace, wanted: Wanted, spec: FleetSpec, speed: float
) -> Iterator[tuple[Study, float]]:
    """A study for each switch time, of the part of the trace around it."""
    start = wanted.warm_up_s / speed
    span_s = trace.arrivals[-1].at / speed - start
    for number in range(wanted.switches):
        at = start + span_s * (0.3 + 0.5 * number / max(1, wanted.switches - 1))
        part: list[Arrival] = [
            one
            for one in trace.arrivals
            if at - wanted.warm_s <= one.at / speed <= at + 60.0 * spec.workers + 900.0
        ]
        if not part:
            raise ConfigError(
                f"the trace has a gap around {at * speed:,.0f} s, where something was to happen: are its "
                "times in one unit?"
            )
        yield Study(part, trace.block_tokens, spec, reference, speed), at


def _spread(one: Aftermath, window_s: float | None) -> Spread:
    return spread_of(one.until_over_s if window_s is None else one.ttfts_s[window_s])


def _times_kept(
    made: Sequence[Aftermath], kept: Sequence[Aftermath], window_s: float | None
) -> float | None:
    """The geometric mean over switch times of p95 by that of the run in which nothing happens. Waits of
    all times together would say what the one in the deepest overload says."""
    logs = []
    for one, other in zip(made, kept, strict=True):
        ours, theirs = _spread(one, window_s).p95, _spread(other, window_s).p95
        if ours and theirs:
            logs.append(log(ours / theirs))
    return exp(fsum(logs) / len(logs)) if logs else None


def _mean(numbers: Sequence[float]) -> float:
    return fsum(numbers) / max(1, len(numbers))
