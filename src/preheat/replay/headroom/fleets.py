"""The fleets of the study, and routing rules on them."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Final

from preheat.core.routing import POLICIES, RoutingPolicy
from preheat.replay.fleet import Fleet, FleetSpec, run
from preheat.replay.headroom.events import speed_for
from preheat.replay.headroom.finding import Finding
from preheat.replay.headroom.wanted import Progress, Wanted, simulated
from preheat.replay.measures import Measures, measures_of
from preheat.replay.report import Table
from preheat.replay.worker import WorkerSpec
from preheat.traces.arrival import Trace

REFERENCE: Final = "cost"
"""The rule that sets a fleet's speed: queue and own miss, the miss counted twice (headroom, 4)."""
_BOUND: Final = "bound: one shared cache"
_MOST: Final = 0.9
"""A share that is told as "nearly all"."""


def reference() -> RoutingPolicy:
    """A new one."""
    return POLICIES[REFERENCE](factor=2.0)


def fleet_of(wanted: Wanted, trace: Trace, workers: int, tokens: int) -> FleetSpec:
    """So many equal workers of this memory."""
    blocks, of = tokens // trace.block_tokens, trace.block_tokens
    worker = (
        WorkerSpec(blocks, of)
        if wanted.decodes
        else WorkerSpec(blocks, of, step_tokens=0, step_prefills=1)
    )
    return FleetSpec(worker, wanted.service, workers)


def routing(
    trace: Trace, wanted: Wanted, progress: Progress
) -> Generator[Table, None, tuple[Finding, ...]]:
    """Every rule at the speed at which the reference runs at the first of the loads."""
    load, findings = wanted.loads[0], []
    for tokens in wanted.worker_tokens:
        spec = fleet_of(wanted, trace, wanted.workers, tokens)
        what = f"{wanted.workers} x {tokens / 1e6:g} M tokens"
        speed = speed_for(
            trace.arrivals, trace.block_tokens, spec, reference, load, warm_s=wanted.warm_up_s
        )
        progress(f"routing, {what}: the speed")
        tasks: dict[str, Callable[[], Measures]] = {
            name: partial(_measured, trace, wanted, spec, speed, name)
            for name in (*POLICIES, _BOUND)
        }
        made = simulated(tasks, progress, f"routing, {what}")
        yield Table(
            title=f"Routing: {what}, load {load:g}",
            note="Load: of the rule `cost` with its miss counted twice. Of no-cache: prefill done.",
            columns=(
                "rule",
                "of no-cache",
                "token hits",
                "busiest by mean",
                "TTFT mean s",
                "p50 s",
                "p95 s",
                "p99 s",
            ),
            rows=tuple((name, *_numbers(found)) for name, found in made.items()),
            verdict=blind_spots(trace, wanted.workers, made),
        )
        findings.append(_finding(what, made))
    return tuple(findings)


def _measured(trace: Trace, wanted: Wanted, spec: FleetSpec, speed: float, name: str) -> Measures:
    if name == _BOUND:
        shared = FleetSpec(spec.worker, spec.service, spec.workers, is_shared=True)
        fleet = Fleet(shared, POLICIES["least_loaded"]())
    else:
        fleet = Fleet(spec, POLICIES[name]())
    made = run(trace.arrivals, trace.block_tokens, fleet, speed=speed)
    return measures_of(made, spec.workers, start=wanted.warm_up_s / speed)


def _numbers(found: Measures) -> tuple[float | None, ...]:
    ttft = found.ttft
    return (
        found.prefill_share,
        found.hit_token_ratio,
        found.work_max_mean_ratio,
        ttft.mean,
        ttft.p50,
        ttft.p95,
        ttft.p99,
    )


def _finding(what: str, made: Mapping[str, Measures]) -> Finding:
    """The rule with the shortest mean TTFT, against a balancer that goes round."""
    best = min(POLICIES, key=lambda name: made[name].ttft.mean or 0.0)
    old, new = made["round_robin"], made[best]
    numbers = (
        f"{what}: best rule {best}; of no-cache prefill {new.prefill_share:.0%}, round robin"
        f" {old.prefill_share:.0%}; mean TTFT {new.ttft.mean or 0.0:.2f} s,"
        f" round robin {old.ttft.mean or 0.0:.2f} s"
    )
    share = (old.prefill_share - new.prefill_share) / max(1e-9, old.prefill_share)
    return Finding("routing", share, numbers)


def blind_spots(trace: Trace, workers: int, made: Mapping[str, Measures]) -> str:
    """Which rows say little of their rule, because the trace lacks what the rule goes by."""
    told = []
    if not any(one.session for one in trace.arrivals):
        told.append(
            "The trace names no sessions: `session` goes by what workers hold, and can't be judged."
        )
    firsts = Counter(one.blocks[0] for one in trace.arrivals if one.blocks)
    shared = firsts.most_common(1)[0][1] / len(trace.arrivals) if firsts else 0.0
    lumped = [
        f"`{name}`"
        for name in POLICIES
        if name in made and made[name].work_max_mean_ratio > _MOST * workers
    ]
    if workers > 1 and lumped and shared > _MOST:
        told.append(
            f"{shared:.0%} of the prompts begin with the same block of {trace.block_tokens} tokens, and"
            f" the trace has no text that would tell them apart: {', '.join(lumped)} sent nearly"
            " everything to one worker, and can't be judged."
        )
    return " ".join(told)
