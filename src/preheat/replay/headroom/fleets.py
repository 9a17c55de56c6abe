"""The fleets of the study, and routing rules on them."""

from collections.abc import Iterator
from typing import Final

from preheat.core.routing import POLICIES, RoutingPolicy
from preheat.replay.fleet import Fleet, FleetSpec, run
from preheat.replay.headroom.events import speed_for
from preheat.replay.headroom.wanted import Progress, Wanted
from preheat.replay.measures import measures_of
from preheat.replay.report import Table
from preheat.replay.worker import WorkerSpec
from preheat.traces.arrival import Trace

REFERENCE: Final = "cost"
"""The rule that sets a fleet's speed: queue and own miss, the miss counted twice (headroom, 4)."""


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


def routing(trace: Trace, wanted: Wanted, progress: Progress) -> Iterator[Table]:
    """Every rule at the speed at which the reference runs at the first of the loads."""
    for tokens in wanted.worker_tokens:
        spec = fleet_of(wanted, trace, wanted.workers, tokens)
        load = wanted.loads[0]
        progress(f"routing, {tokens / 1e6:g} M: the speed")
        speed = speed_for(
            trace.arrivals, trace.block_tokens, spec, reference, load, warm_s=wanted.warm_up_s
        )
        shared = FleetSpec(spec.worker, spec.service, spec.workers, is_shared=True)
        fleets = [(name, Fleet(spec, POLICIES[name]())) for name in POLICIES]
        fleets.append(("bound: one shared cache", Fleet(shared, POLICIES["least_loaded"]())))
        rows = []
        for name, fleet in fleets:
            progress(f"routing, {tokens / 1e6:g} M: {name}")
            made = run(trace.arrivals, trace.block_tokens, fleet, speed=speed)
            found = measures_of(
                made,
                spec.workers,
                start=wanted.warm_up_s / speed,
            )
            ttft = found.ttft
            rows.append(
                (
                    name,
                    found.prefill_share,
                    found.hit_token_ratio,
                    found.work_max_mean_ratio,
                    ttft.mean,
                    ttft.p50,
                    ttft.p95,
                    ttft.p99,
                )
            )
        yield Table(
            title=f"Routing: {wanted.workers} x {tokens / 1e6:g} M tokens, load {load:g}",
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
            rows=tuple(rows),
        )
