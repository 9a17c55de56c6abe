"""Tables of restarts, deploys, machines that join, and peaks."""

from collections.abc import Iterator, Sequence
from math import exp, fsum, log
from statistics import median
from typing import Final

from preheat.core.spread import spread_of
from preheat.replay.fleet import FleetSpec
from preheat.replay.headroom.events import (
    Aftermath,
    Event,
    Study,
    events,
    ladder,
    speed_for,
)
from preheat.replay.headroom.fleets import fleet_of, reference
from preheat.replay.headroom.pauses import DAY_S
from preheat.replay.headroom.wanted import Progress, Wanted
from preheat.replay.report import Table
from preheat.traces.arrival import Arrival, Trace

EVENTS_A_DAY: Final = (1, 4, 20)
KEPT: Final = "kept: nothing happens"
TIMES_KEPT: Final = "by kept's, 5 min"
WHOLE_TIMES_KEPT: Final = "by kept's, to 5 min after"


def aftermaths(trace: Trace, wanted: Wanted, progress: Progress) -> Iterator[Table]:
    """Every event on a single worker of each size, and on the fleet: one table an event."""
    fleets = [(1, tokens) for tokens in wanted.alone_tokens]
    fleets += [(wanted.workers, tokens) for tokens in wanted.worker_tokens]
    for workers, tokens in fleets:
        spec = fleet_of(wanted, trace, workers, tokens)
        speeds = {}
        for load in wanted.loads:
            progress(f"{workers} x {tokens / 1e6:g} M: the speed for load {load:g}")
            speeds[load] = speed_for(
                trace.arrivals, trace.block_tokens, spec, reference, load, warm_s=wanted.warm_up_s
            )
        for event in events(workers):
            if workers == 1 and event.kind == "join":
                continue  # what one that joins a single one does is mostly halving its load
            yield _event_table(trace, wanted, spec, event, speeds, progress)


def _event_table(
    trace: Trace,
    wanted: Wanted,
    spec: FleetSpec,
    event: Event,
    speeds: dict[float, float],
    progress: Progress,
) -> Table:
    name = f"{spec.workers} x {spec.worker.capacity_blocks * trace.block_tokens / 1e6:.0f} M"
    rows = []
    by_arm: dict[str, list[list[Aftermath]]] = {}
    day_s = 0.0
    for place, (load, speed) in enumerate(speeds.items()):
        for study, at in _studies(trace, wanted, spec, speed):
            kept = study.undisturbed()
            span_s = max(1.0, kept.ended_at - min(job.arrived_at for job in kept.jobs))
            if place == 0:
                day_s += fsum(job.computed_s for job in kept.jobs) / span_s * DAY_S
            for arm_name, arm in (
                (KEPT, None),
                *ladder(trace.block_tokens, event.copies, wanted.budget_s).items(),
            ):
                progress(f"{name}, {event.name}, load {load:g}, at {at:,.0f} s: {arm_name}")
                made = study.aftermath(event, arm_name, arm, at)
                by_arm.setdefault(arm_name, [[] for _ in speeds])[place].append(made)
    day_s /= wanted.switches
    kept_last = by_arm[KEPT][-1]
    lost_nothing = _mean([one.lost_s for one in by_arm["nothing"][0]])
    for arm_name, loads in by_arm.items():
        first, last = loads[0], loads[-1]
        lost, spent = _mean([one.lost_s for one in first]), _mean([one.spent_s for one in first])
        rows.append(
            (
                arm_name,
                lost,
                spent,
                (lost_nothing - lost) / spent if spent else None,
                *((lost * times / day_s) for times in EVENTS_A_DAY),
                _typical(last, 60.0),
                _typical(last, 300.0),
                _times_kept(last, kept_last, 300.0),
                _typical(last, None),
                _times_kept(last, kept_last, None),
            )
        )
    low, high = wanted.loads[0], wanted.loads[-1]
    return Table(
        title=f"{event.name}: {name} tokens",
        note=(
            f"GPU-seconds of prefill lost and spent an event at load {low:g}; TTFT at {high:g}: of each switch"
            " time's p95 the median, and the geometric mean of its ratios to kept's. A"
            " payback above a price of now by then pays: at equal prices above 1."
        ),
        columns=(
            "arm",
            "lost s",
            "spent s",
            "payback",
            *(f"of a day's, {times} a day" for times in EVENTS_A_DAY),
            "p95 s, first minute",
            "p95 s, 5 min",
            TIMES_KEPT,
            "p95 s, to 5 min after",
            WHOLE_TIMES_KEPT,
        ),
        rows=tuple(rows),
    )


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
        yield Study(part, trace.block_tokens, spec, reference, speed), at


def _p95(one: Aftermath, window_s: float | None) -> float | None:
    waits = one.until_over_s if window_s is None else one.ttfts_s[window_s]
    return spread_of(waits).p95


def _typical(made: Sequence[Aftermath], window_s: float | None) -> float | None:
    """The median over switch times of each one's p95."""
    found = [p95 for one in made if (p95 := _p95(one, window_s)) is not None]
    return median(found) if found else None


def _times_kept(
    made: Sequence[Aftermath], kept: Sequence[Aftermath], window_s: float | None
) -> float | None:
    """The geometric mean over switch times of p95 by that of the run in which nothing happens. Waits of
    all times together would say what the one in the deepest overload says."""
    logs = []
    for one, other in zip(made, kept, strict=True):
        ours, theirs = _p95(one, window_s), _p95(other, window_s)
        if ours and theirs:
            logs.append(log(ours / theirs))
    return exp(fsum(logs) / len(logs)) if logs else None


def _mean(numbers: Sequence[float]) -> float:
    return fsum(numbers) / max(1, len(numbers))
