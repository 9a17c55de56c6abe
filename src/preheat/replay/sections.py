"""A report's sections on the trace itself, and on one memory: hits by size, the price of room."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from preheat.core import eviction
from preheat.core.costs import ServiceModel
from preheat.core.hold_leaves import HoldLeaves
from preheat.core.prefix import LeafLru, LeafOrder, LeafPolicy, PrefixStore
from preheat.replay import report
from preheat.replay.granularity import full_paths
from preheat.replay.keys import hits
from preheat.replay.orders import Clairvoyant
from preheat.replay.pool import serve, total
from preheat.replay.price import price_curve
from preheat.replay.report import PriceCurve
from preheat.replay.verdict import gap_closed, rough_tokens
from preheat.traces.arrival import Trace

Progress = Callable[[str], None]

FEWEST_BLOCKS: Final = 100
"""Distinct ones: below, a percent of them is no block, and curves say nothing."""
SHARES: Final = (0.01, 0.02, 0.05, 0.10, 0.25)
"""Of the distinct blocks, or keys: the capacities that curves are drawn at."""
_RENEW_REQUESTS: Final = 4
"""J's values may be so many requests old in curves: a third of the time, and hits within 0.3 points of the
exact ones on Mooncake's chats."""
_ROLES: Final[Mapping[str, report.Role]] = {
    "lru": "baseline",
    "belady": "bound",
    "infinite": "bound",
    "j": "ours",
}
KEY_POLICIES: Final = ("lru", "sieve", "s3fifo", "wtinylfu", "gdsf")


def trace_section(trace: Trace) -> report.Trace:
    """What was replayed."""
    ones = trace.arrivals
    sessions = {one.session for one in ones if one.session}
    return report.Trace(
        name=Path(trace.name).name,
        format=trace.format,
        requests=len(ones),
        sessions=len(sessions) or None,
        span_s=ones[-1].at - ones[0].at,
        input_tokens=sum(max(0, one.input_tokens) for one in ones),
        output_tokens=sum(max(0, one.output_tokens) for one in ones),
        block_tokens=trace.block_tokens,
        skipped_lines=trace.skipped,
        rules=trace.rules,
    )


def capacity_tasks(
    trace: Trace, service: ServiceModel, policies: Iterable[str]
) -> dict[tuple[str, int], Callable[[], float]]:
    """Simulations of one memory for all: the token hit ratio of each order at each capacity. None
    where the trace has too few blocks."""
    distinct = distinct_blocks(trace)
    if distinct < FEWEST_BLOCKS:
        return {}
    tasks: dict[tuple[str, int], Callable[[], float]] = {}
    for blocks in sorted({max(1, round(share * distinct)) for share in SHARES}, reverse=True):
        for name in (*policies, "belady", "lru"):
            tasks[name, blocks] = partial(_hit_ratio, trace, service, name, blocks)
    tasks["infinite", distinct] = partial(_hit_ratio, trace, service, "lru", distinct)
    return tasks


def bound_task(trace: Trace, service: ServiceModel) -> Callable[[], float]:
    """GPU-seconds of prefill with one endless memory for all."""
    return partial(_endless_s, trace, service)


def _endless_s(trace: Trace, service: ServiceModel) -> float:
    store = PrefixStore(distinct_blocks(trace), LeafLru())
    served = serve(trace.arrivals, trace.block_tokens, service, store)
    return total(served, lambda one: one.prefill_s)


def distinct_blocks(trace: Trace) -> int:
    """How many full blocks the trace's prompts have."""
    return len({block for path in full_paths(trace) for block in path})


def repeats_note(trace: Trace) -> str:
    """What stands for curves where there are too few blocks."""
    seen = Counter(block for path in full_paths(trace) for block in path)
    room = sum(times > 1 for times in seen.values()) * trace.block_tokens
    if not room:
        return "No full block of a prompt comes twice."
    return f"Everything that repeats fits in {rough_tokens(room)} tokens of memory: no hit curves."


def price_task(trace: Trace, service: ServiceModel) -> Callable[[], PriceCurve]:
    """The price of a place in one memory for a tenth of the distinct blocks, over time."""
    blocks = max(1, distinct_blocks(trace) // 10)
    return partial(price_curve, trace, service, blocks, _RENEW_REQUESTS)


def capacity_section(trace: Trace, ratios: Mapping[tuple[str, int], float]) -> report.Capacity:
    """What came of `capacity_tasks`: curves between LRU and Belady."""
    sizes = sorted({blocks for name, blocks in ratios if name == "lru"})
    endless = next(ratio for (name, _), ratio in ratios.items() if name == "infinite")
    names = dict.fromkeys(("lru", "belady", *(name for name, _ in ratios)))
    curves = {name: [ratios.get((name, blocks), endless) for blocks in sizes] for name in names}
    return report.Capacity(
        curves=tuple(
            report.HitCurve(
                policy=name,
                role=_ROLES.get(name, "other"),
                capacity_blocks=tuple(sizes),
                capacity_tokens=tuple(blocks * trace.block_tokens for blocks in sizes),
                hit_token_ratio=tuple(found),
                gap_closed_share=(
                    None
                    if name == "infinite"
                    else gap_closed(found, curves["lru"], curves["belady"])
                ),
            )
            for name, found in curves.items()
        ),
        notes=("An order other than LRU only where the engine allows it: docs/levers.md.",),
    )


def _hit_ratio(trace: Trace, service: ServiceModel, name: str, blocks: int) -> float:
    tokens = trace.block_tokens
    store = PrefixStore(blocks, _order(trace, service, name, blocks))
    served = serve(trace.arrivals, tokens, service, store)
    asked = sum(max(0, one.input_tokens) for one in trace.arrivals)
    return tokens * sum(one.cached for one in served) / max(1, asked)


def _order(trace: Trace, service: ServiceModel, name: str, blocks: int) -> LeafOrder:
    if name == "lru":
        return LeafLru()
    if name == "belady":
        return Clairvoyant(full_paths(trace), blocks)
    if name == "j":
        return HoldLeaves(renew_requests=_RENEW_REQUESTS)
    tokens = trace.block_tokens

    def cost_s(place: int) -> float:
        return service.prefill_s(tokens, place * tokens)

    return LeafPolicy(eviction.POLICIES[name](), block_tokens=tokens, cost_s=cost_s)


def keys_section(trace: Trace, policies: Iterable[str], progress: Progress) -> report.Table:
    """Object hit ratios of a stream of keys, by policy and capacity."""
    keys = [one.key for one in trace.arrivals if one.key >= 0]
    sizes = [max(1, one.size_bytes) for one in trace.arrivals if one.key >= 0]
    without = len(trace.arrivals) - len(keys)
    held = dict(zip(keys, sizes, strict=True))
    total = sum(held.values())
    rows = []
    for name in policies:
        row: list[str | float] = [name]
        for share in SHARES:
            progress(f"{name} at {share:.0%}")
            room = max(*sizes, round(share * total))
            row.append(hits(eviction.POLICIES[name](), keys, sizes, None, room).object_hit_ratio)
        rows.append(tuple(row))
    endless = 1 - len(held) / len(keys)
    rows.append(("infinite", *[endless] * len(SHARES)))
    return report.Table(
        title="Object hit ratio by capacity",
        note=f"Of {len(held):,} distinct keys, {total:,} bytes in all."
        + (f" {without:,} requests have no key and are left out." if without else ""),
        columns=("policy", *(f"{share:.0%}" for share in SHARES)),
        rows=tuple(rows),
    )
