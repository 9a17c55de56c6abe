"""A report's sections on fleets: what each lever saved, who waited how long, how work was spread."""

from collections.abc import Callable, Mapping
from math import fsum
from typing import Final

import msgspec

from preheat.core.routing import POLICIES
from preheat.core.spread import Spread
from preheat.replay import report
from preheat.replay.headroom.events import OURS, Study, events, ladder
from preheat.replay.measures import measures_of
from preheat.replay.whatif import Setup, Tried, fleet_spec, try_out
from preheat.traces.arrival import Trace

Progress = Callable[[str], None]
RULES: Final = ("round_robin", "least_loaded", "session", "smg", "cost", "preheat")
"""Routing rules that every report compares."""
EVENT_AT: Final = 0.6
"""Of the trace's span: when a worker restarts."""


def saved_section(
    tried: Mapping[str, Tried], together: str, baseline: str, rate: report.Rate | None
) -> report.Saved:
    """GPU-seconds of prefill of each run against the baseline's."""
    base_s = prefill_s(tried[baseline])
    levers = {
        name: _lever(name, one, base_s, rate) for name, one in tried.items() if name != baseline
    }
    whole = levers.pop(together, None)
    any_run = tried[baseline].run
    return report.Saved(
        baseline=baseline,
        baseline_gpu_s=base_s,
        levers=tuple(levers.values()),
        together=whole,
        no_cache_gpu_s=fsum(any_run.no_cache_s),
    )


def _lever(name: str, one: Tried, base_s: float, rate: report.Rate | None) -> report.Lever:
    saved_s = base_s - prefill_s(one)
    return report.Lever(
        name=name,
        saved_gpu_s=saved_s,
        saved_share=saved_s / max(1e-9, base_s),
        saved_money=rate.money(saved_s) if rate else None,
    )


def prefill_s(one: Tried) -> float:
    """GPU-seconds of prefill."""
    return fsum(job.computed_s for job in one.run.jobs)


def latency_section(
    tried: Mapping[str, Tried], workers: int, baseline: str, together: str, slo_ttft_s: float
) -> report.Latency:
    """How long the requests of each run waited."""
    arms = []
    for name, one in tried.items():
        found = measures_of(one.run, workers, slo_ttft_s=slo_ttft_s)
        role: report.Role = (
            "baseline" if name == baseline else "ours" if name == together else "other"
        )
        arms.append(
            report.Arm(
                name=name,
                role=role,
                ttft=_waits(found.ttft),
                service_ttft=_waits(found.service_ttft),
                goodput_per_s=found.goodput_per_s,
                goodput_share=found.goodput_share,
            )
        )
    return report.Latency(arms=tuple(arms), slo_ttft_s=slo_ttft_s)


def balance_section(trace: Trace, setup: Setup, ours: str, progress: Progress) -> report.Balance:
    """Routing rules side by side, everything else as in `setup`."""
    rules = []
    for name in RULES:
        if name not in POLICIES:
            continue
        progress(f"routing by {name}")
        tried = try_out(trace, msgspec.structs.replace(setup, routing=name))
        found = measures_of(tried.run, setup.workers)
        rules.append(
            report.RoutingRule(
                name=name,
                role="ours" if name == ours else "baseline" if name == "round_robin" else "other",
                prefill_share=found.prefill_share,
                hit_token_ratio=found.hit_token_ratio,
                work_max_mean_ratio=found.work_max_mean_ratio,
                ttft_mean_s=found.ttft.mean,
                ttft_p99_s=found.ttft.p99,
            )
        )
    return report.Balance(rules=tuple(rules))


def event_section(trace: Trace, setup: Setup, progress: Progress) -> report.Event:
    """One worker restarts: the minutes around it, if its memory is lost, and if it was drained."""
    spec = fleet_spec(setup, trace.block_tokens)
    study = Study(trace.arrivals, trace.block_tokens, spec, POLICIES[setup.routing], setup.speed)
    at = (trace.arrivals[0].at + EVENT_AT * (trace.arrivals[-1].at - trace.arrivals[0].at)) / (
        setup.speed
    )
    event = events(setup.workers)[0]
    arms = ladder(trace.block_tokens)
    chosen: dict[str, report.Role] = {"kept": "bound", "nothing": "baseline", OURS: "ours"}
    drawn = []
    for name, role in chosen.items():
        progress(f"a restart: {name}")
        made = study.aftermath(event, name, arms.get(name), at)
        drawn.append(
            report.EventArm(
                name=name,
                role=role,
                minute=tuple(point[0] for point in made.curve),
                ttft_p95_s=tuple(point[1] for point in made.curve),
                hit_token_ratio=tuple(point[2] for point in made.curve),
            )
        )
    return report.Event(
        name="One worker restarts",
        note="kept: nothing happens; nothing: its memory is lost.",
        arms=tuple(drawn),
    )


def ablation_section(
    runs: Mapping[str, float], together_s: float, base_s: float
) -> report.Ablation:
    """What each mechanism added to all the others: `runs` are the GPU-seconds without it."""
    return report.Ablation(
        measure="prefill saved beyond all the others, of the baseline's",
        unit="share",
        mechanisms=tuple(
            report.Mechanism(name=name, added=(without_s - together_s) / max(1e-9, base_s))
            for name, without_s in runs.items()
        ),
    )


def _waits(spread: Spread) -> report.Waits:
    return report.Waits(mean_s=spread.mean, p50_s=spread.p50, p95_s=spread.p95, p99_s=spread.p99)
