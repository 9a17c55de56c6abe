"""A report's sections on fleets: what each lever saved, who waited how long, how work was spread."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from preheat.core.routing import POLICIES
from preheat.core.spread import Spread
from preheat.replay import report
from preheat.replay.headroom.events import Study, events
from preheat.replay.headroom.ladder import OURS, ladder
from preheat.replay.measures import Measures
from preheat.replay.verdict import SCHEDULE_SHARE, net
from preheat.replay.whatif import Setup, fleet_spec
from preheat.traces.arrival import Trace

RULES: Final = ("round_robin", "least_loaded", "session", "smg", "cost", "preheat")
"""Routing rules that every report compares."""
SAYS_SAMPLING: Final = ("preheat", "openai")
"""Formats of traces that say which requests are greedy."""
EVENT_AT: Final = 0.6
"""Of the trace's span: when a worker restarts."""
_NEAR_SHARE: Final = 0.01
_EVENT_ARMS: Final[Mapping[str, report.Role]] = {
    "kept": "bound",
    "nothing": "baseline",
    OURS: "ours",
}


def saved_section(
    runs: Mapping[str, Measures], together: str, baseline: str, rate: report.Rate | None
) -> report.Saved:
    """GPU-seconds of prefill of each run against the baseline's."""
    base_s = runs[baseline].prefill_s
    levers = {
        name: _lever(name, one.prefill_s, base_s, rate)
        for name, one in runs.items()
        if name != baseline
    }
    whole = levers.pop(together, None)
    return report.Saved(
        baseline=baseline,
        baseline_gpu_s=base_s,
        levers=tuple(levers.values()),
        together=whole,
        no_cache_gpu_s=runs[baseline].no_cache_s,
    )


def _lever(name: str, prefill_s: float, base_s: float, rate: report.Rate | None) -> report.Lever:
    saved_s = net(base_s, prefill_s)
    is_noise = -SCHEDULE_SHARE * base_s < saved_s < 0
    return report.Lever(
        name=name,
        note="≈ 0: the same work in another schedule" if is_noise else "",
        saved_gpu_s=saved_s,
        saved_share=saved_s / max(1e-9, base_s),
        saved_money=rate.money(saved_s) if rate else None,
    )


def answers_section(found: Measures, trace: Trace) -> report.Answers:
    """What the response cache answered in its own run, and what the trace lets one conclude."""
    keyed = [one for one in trace.arrivals if one.key >= 0]
    has_lengths = any(one.output_tokens > 0 for one in trace.arrivals)
    notes = []
    if all(one.sampled for one in keyed):
        notes.append(
            "No request of this trace is greedy (temperature 0), and only greedy ones are answered "
            "from the store: so it saves nothing here."
        )
    elif trace.format not in SAYS_SAMPLING and not any(one.sampled for one in keyed):
        notes.append(
            "The trace doesn't say temperatures: repeats are counted as if all were greedy, the best case."
        )
    if found.stored + found.joined:
        notes.append("Decoding that was saved is not in the GPU-seconds: they are of prefill only.")
    return report.Answers(
        requests=found.requests,
        stored_requests=found.stored,
        joined_requests=found.joined,
        spared_output_tokens=found.spared_tokens if has_lengths else None,
        notes=tuple(notes),
    )


def latency_section(
    runs: Mapping[str, Measures], baseline: str, together: str, slo_ttft_s: float
) -> report.Latency:
    """How long the requests of each run waited."""
    roles: dict[str, report.Role] = {baseline: "baseline", together: "ours"}
    return report.Latency(
        arms=tuple(
            report.Arm(
                name=name,
                role=roles.get(name, "other"),
                ttft=_waits(found.ttft),
                service_ttft=_waits(found.service_ttft),
                goodput_per_s=found.goodput_per_s,
                goodput_share=found.goodput_share,
            )
            for name, found in runs.items()
        ),
        slo_ttft_s=slo_ttft_s,
    )


def balance_section(runs: Mapping[str, Measures], ours: str, trace: Trace) -> report.Balance:
    """Routing rules side by side, everything else the same; of prefixes only where the trace has
    blocks, of waits only where it has times."""
    roles: dict[str, report.Role] = {"round_robin": "baseline", ours: "ours"}
    has_prompts, has_times = trace.block_tokens > 0, trace.times != "order"
    measured = {
        name: found.prefill_s if has_prompts else found.ttft.mean for name, found in runs.items()
    }
    return report.Balance(
        rules=tuple(
            report.RoutingRule(
                name=name,
                role=roles.get(name, "other"),
                prefill_share=found.prefill_share if has_prompts else None,
                hit_token_ratio=found.hit_token_ratio if has_prompts else None,
                work_max_mean_ratio=found.work_max_mean_ratio,
                ttft_mean_s=found.ttft.mean if has_times else None,
                ttft_p99_s=found.ttft.p99 if has_times else None,
            )
            for name, found in runs.items()
        ),
        notes=_plain_rules(measured, "prefill" if has_prompts else "mean wait")
        if has_prompts or has_times
        else (),
    )


def _plain_rules(costs: Mapping[str, float | None], what: str) -> tuple[str, ...]:
    """Whether it takes a clever rule at all: what each rule costs, by name."""
    known = {name: cost for name, cost in costs.items() if cost is not None}
    plain, worst = known.get("least_loaded"), known.get("round_robin")
    if plain is None or worst is None:
        return ()
    most = (1 + _NEAR_SHARE) * min(known.values())
    if plain > most or worst <= most:
        return ()
    others = [cost for name, cost in known.items() if name != "round_robin"]
    if all(cost <= most for cost in others):
        return (f"Any rule but round robin gets this {what}, to 1%.",)
    return (f"least_loaded, a plain rule, gets the best {what}, too, to 1%.",)


Curve = Sequence[tuple[float, float, float]]


def event_tasks(trace: Trace, setup: Setup) -> dict[str, Callable[[], Curve]]:
    """One worker restarts: simulations of the minutes around it, an arm each."""
    at = (trace.arrivals[0].at + EVENT_AT * (trace.arrivals[-1].at - trace.arrivals[0].at)) / (
        setup.speed
    )
    return {name: partial(_aftermath, trace, setup, name, at) for name in _EVENT_ARMS}


def _aftermath(trace: Trace, setup: Setup, arm: str, at: float) -> Curve:
    spec = fleet_spec(setup, trace.block_tokens)
    study = Study(trace.arrivals, trace.block_tokens, spec, POLICIES[setup.routing], setup.speed)
    event = next(one for one in events(setup.workers) if one.name == "one restarts")
    return study.aftermath(event, arm, ladder(trace.block_tokens, event).get(arm), at).curve


def event_section(curves: Mapping[str, Curve]) -> report.Event:
    """What came of `event_tasks`."""
    return report.Event(
        name="One worker restarts",
        note="kept: nothing happens; nothing: its memory is lost.",
        arms=tuple(
            report.EventArm(
                name=name,
                role=_EVENT_ARMS[name],
                minute=tuple(point[0] for point in curve),
                ttft_p95_s=tuple(point[1] for point in curve),
                hit_token_ratio=tuple(point[2] for point in curve),
            )
            for name, curve in curves.items()
        ),
    )


def ablation_section(
    runs: Mapping[str, float], together_s: float, base_s: float
) -> report.Ablation:
    """What each mechanism added to all the others: `runs` are the GPU-seconds without it."""
    return report.Ablation(
        measure="prefill saved beyond all the others, of the baseline's",
        unit="share",
        mechanisms=tuple(
            report.Mechanism(name=name, added=net(without_s, together_s) / max(1e-9, base_s))
            for name, without_s in runs.items()
        ),
    )


def _waits(spread: Spread) -> report.Waits:
    return report.Waits(mean_s=spread.mean, p50_s=spread.p50, p95_s=spread.p95, p99_s=spread.p99)
