"""A trace becomes a report: which levers would have saved what."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from preheat import __version__
from preheat.core import eviction
from preheat.errors import ConfigError
from preheat.replay import arms, report, sections
from preheat.replay.fitting import Fitted
from preheat.replay.measures import Measures, measures_of
from preheat.replay.side_by_side import each
from preheat.replay.verdict import Fleet, nothing_served, summary_of, without_prompts
from preheat.replay.whatif import Setup, try_out
from preheat.traces.arrival import Trace

BASELINE = "round robin, no response cache"
TOGETHER = "all together"
ROUTING, TIER, ANSWERS = "routing", "tier read on demand", "response cache"
Progress = Callable[[str], None]


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a trace. `setup` is the baseline's fleet; `ours` the routing rule that is put
    in the place of its rule, `tier_tokens` a worker the tier, `exact_ttl_s` the response cache.
    `fitted` is where the setup's service model came from, if that was this trace."""

    setup: Setup = Setup()
    fitted: Fitted | None = None
    ours: str = "preheat"
    tier_tokens: int = 4_000_000
    exact_ttl_s: float = 3_600.0
    policies: tuple[str, ...] = ("j",)
    slo_ttft_s: float = 2.0
    rate: report.Rate | None = None
    command: str = ""


def replay(trace: Trace, asked: Questions, progress: Progress) -> report.Report:
    """All that the trace can tell: of prefixes where it has blocks, of keys where it has them, of
    queues where it has lengths and times. Raises ConfigError where it has nothing of these."""
    keyed = sum(one.key >= 0 for one in trace.arrivals)
    has_lengths = any(one.input_tokens > 0 for one in trace.arrivals)
    if not keyed and not has_lengths:
        raise ConfigError(
            f"{trace.name}: neither lengths, blocks nor keys in it: there is nothing to replay"
        )
    made = report.Report(
        preheat_version=__version__,
        rate=asked.rate,
        trace=sections.trace_section(trace),
        settings=_settings(trace, asked),
        cautions=tuple(_cautions(trace, asked.fitted, has_lengths=has_lengths)),
    )
    if trace.block_tokens or has_lengths:
        made = _with_fleet(trace, asked, made, progress)
    elif keyed:
        known = tuple(name for name in sections.KEY_POLICIES if name in eviction.POLICIES)
        table = sections.keys_section(trace, known, progress)
        settings = report.Settings(workers=0, command=asked.command)  # no engine was simulated
        made = msgspec.structs.replace(made, headroom=(table,), settings=settings)
    return made


def _with_fleet(
    trace: Trace, asked: Questions, made: report.Report, progress: Progress
) -> report.Report:
    levers = _levers(trace, asked)
    setups = _setups(asked, levers)
    routings = {name: msgspec.structs.replace(asked.setup, routing=name) for name in arms.RULES}
    routings.setdefault(asked.ours, msgspec.structs.replace(asked.setup, routing=asked.ours))
    around: dict[str, Callable[[], arms.Curve]] = {}
    cells: dict[tuple[str, int], Callable[[], float]] = {}
    tasks: dict[Hashable, Callable[[], Any]] = {}  # the longest first: cores end together
    price = None
    if trace.block_tokens:
        cells = sections.capacity_tasks(trace, asked.setup.service, asked.policies)
        tasks.update(cells.items())
        if cells:
            price = tasks["price"] = sections.price_task(trace, asked.setup.service)
        if trace.times != "order":
            routed = msgspec.structs.replace(asked.setup, routing=asked.ours)
            around = arms.event_tasks(trace, routed)
            tasks.update(around.items())
        if ANSWERS not in levers:
            tasks["bound"] = sections.bound_task(trace, asked.setup.service)
    for one in sorted({*setups.values(), *routings.values()}, key=repr):
        tasks[one] = partial(_measured, trace, one, asked.slo_ttft_s)
    found = each(tasks, progress)
    runs = {name: found[one] for name, one in setups.items()}
    made = msgspec.structs.replace(made, cautions=(*_refused(runs[BASELINE]), *made.cautions))
    changes: dict[str, object] = {}
    base = runs[BASELINE]
    if base.refused == base.requests:
        around = {}
        changes["summary"] = nothing_served(base.requests, asked.setup.worker_tokens, BASELINE)
    else:
        bound_s = None if base.refused else found.get("bound")
        made = _with_savings(trace, asked, made, runs, bound_s)
        routed_runs = {name: found[one] for name, one in routings.items()}
        changes["balance"] = arms.balance_section(routed_runs, asked.ours, trace)
    if around:
        changes["events"] = (arms.event_section({name: found[name] for name in around}),)
    if cells:
        ratios = {name: found[name] for name in cells}
        changes["capacity"] = sections.capacity_section(trace, ratios)
    if price is not None:
        changes["price"] = report.Price(curves=(found["price"],))
    return msgspec.structs.replace(made, **changes)


def _with_savings(
    trace: Trace,
    asked: Questions,
    made: report.Report,
    runs: Mapping[str, Measures],
    bound_s: float | None,
) -> report.Report:
    """Sums and waits of the levers. A trace that shows no repeats has waits only; one whose times
    are an order has none."""
    base, levers = runs[BASELINE], _levers(trace, asked)
    shown = {name: runs[name] for name in (BASELINE, *levers, TOGETHER)}
    latency = (
        arms.latency_section(shown, BASELINE, TOGETHER, asked.slo_ttft_s)
        if trace.times != "order"
        else None
    )
    if not trace.block_tokens and ANSWERS not in levers:
        summary = without_prompts(latency, BASELINE)
        return msgspec.structs.replace(made, summary=summary, latency=latency)
    saved = arms.saved_section(shown, TOGETHER, BASELINE, asked.rate)
    saved = msgspec.structs.replace(saved, bound_gpu_s=bound_s)
    without = {name: runs[f"all but {name}"].prefill_s for name in levers}
    return msgspec.structs.replace(
        made,
        saved=saved,
        summary=summary_of(
            saved,
            asked.rate,
            _notes(trace),
            fleet=Fleet(asked.setup.workers, base.span_s) if trace.times != "order" else None,
            latency=latency,
        ),
        answers=arms.answers_section(runs[ANSWERS], trace) if ANSWERS in levers else None,
        latency=latency,
        ablation=arms.ablation_section(without, runs[TOGETHER].prefill_s, saved.baseline_gpu_s),
    )


def _notes(trace: Trace) -> tuple[str, ...]:
    is_short = trace.block_tokens and sections.distinct_blocks(trace) < sections.FEWEST_BLOCKS
    return (sections.repeats_note(trace),) if is_short else ()


def _levers(trace: Trace, asked: Questions) -> dict[str, dict[str, object]]:
    """What each of them changes in the setup."""
    levers: dict[str, dict[str, object]] = {ROUTING: {"routing": asked.ours}}
    if trace.block_tokens and asked.tier_tokens:
        levers[TIER] = {"tier_tokens": asked.tier_tokens}
    if asked.exact_ttl_s and any(one.key >= 0 for one in trace.arrivals):
        levers[ANSWERS] = {"exact_ttl_s": asked.exact_ttl_s}
    return levers


def _setups(asked: Questions, levers: dict[str, dict[str, object]]) -> dict[str, Setup]:
    """None of the levers, each of them, all, all but each."""
    every = {field: value for lever in levers.values() for field, value in lever.items()}
    changes: dict[str, dict[str, object]] = {BASELINE: {}, **levers, TOGETHER: every}
    for name, change in levers.items():
        changes[f"all but {name}"] = {
            field: value for field, value in every.items() if field not in change
        }
    return {name: msgspec.structs.replace(asked.setup, **one) for name, one in changes.items()}


def _measured(trace: Trace, setup: Setup, slo_ttft_s: float) -> Measures:
    tried = try_out(trace, setup)
    return measures_of(tried.run, setup.workers, layers=tried.layers, slo_ttft_s=slo_ttft_s)


def _settings(trace: Trace, asked: Questions) -> report.Settings:
    setup, levers = asked.setup, _levers(trace, asked)
    return report.Settings(
        workers=setup.workers,
        hbm_tokens=setup.worker_tokens,
        dram_tokens=asked.tier_tokens if TIER in levers else 0,
        answers_ttl_s=asked.exact_ttl_s if ANSWERS in levers else None,
        service=msgspec.structs.asdict(setup.service),
        service_fit=_service_fit(asked.fitted) if asked.fitted else None,
        command=asked.command,
        rules=(
            f"clients: {setup.loop} loop, at {setup.speed:g} times the trace's speed",
            f"a step computes up to {setup.step_tokens:,} tokens of up to {setup.sequences} sequences",
            "what was generated isn't reused: traces don't say its blocks",
        ),
    )


def _service_fit(fitted: Fitted) -> report.ServiceFit:
    ttft, decode = fitted.ttft, fitted.decode
    return report.ServiceFit(
        requests=fitted.requests,
        ttft_error_p50_share=ttft.p50,
        ttft_error_p90_share=ttft.p90,
        decode_error_p50_share=decode.p50 if decode.count else None,
        decode_error_p90_share=decode.p90 if decode.count else None,
    )


def _cautions(trace: Trace, fitted: Fitted | None, *, has_lengths: bool) -> Iterable[str]:
    if not trace.block_tokens and not has_lengths:
        return  # keys alone: their hit ratios need neither times nor engines
    if trace.times != "measured":
        yield (
            "The times are an order only: nothing about waiting can be concluded."
            if trace.times == "order"
            else "The times follow a rule, not a clock: read waits as ratios between arms."
        )
    if trace.block_tokens:
        yield (
            "A tier needs an engine that has one. The gateway routes by what it thinks each server "
            "holds, and the replay by what it holds: routing and tier are what can be had at most."
        )
    else:
        yield "The trace has no blocks of prompts: nothing about prefixes can be concluded."
        yield "Queues are known here exactly, and to a gateway as far as it fills them itself."
    if fitted is None:
        yield "The service model is given, not fitted to this trace: compare arms, not clocks."
    else:
        yield (
            f"The service model was fitted to {fitted.requests:,} answers of this log. Half of the later "
            f"first tokens came within {fitted.ttft.p50:.0%} of what it tells, nine tenths within "
            f"{fitted.ttft.p90:.0%}."
        )


def _refused(base: Measures) -> Iterable[str]:
    if base.refused:
        yield (
            f"{base.refused} of {base.requests} requests are longer than a worker's memory, prompt and "
            "answer in whole blocks: the engines refused them."
        )
