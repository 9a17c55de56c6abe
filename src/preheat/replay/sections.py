"""A report's sections on the trace itself, and on one memory: hits by size, the price of room."""

from collections.abc import Callable, Iterable
from typing import Final

from preheat.core import eviction
from preheat.core.costs import ServiceModel
from preheat.core.prefix import LeafLru, LeafOrder, LeafPolicy, PrefixStore
from preheat.replay import report
from preheat.replay.keys import hits
from preheat.replay.orders import Clairvoyant
from preheat.replay.pool import serve
from preheat.replay.verdict import gap_closed
from preheat.traces.arrival import Trace

Progress = Callable[[str], None]

SHARES: Final = (0.01, 0.02, 0.05, 0.10, 0.25)
"""Of the distinct blocks, or keys: the capacities that curves are drawn at."""
KEY_POLICIES: Final = ("lru", "sieve", "s3fifo", "wtinylfu", "gdsf")


def trace_section(trace: Trace) -> report.Trace:
    """What was replayed."""
    ones = trace.arrivals
    sessions = {one.session for one in ones if one.session}
    return report.Trace(
        name=trace.name,
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


def capacity_section(
    trace: Trace, service: ServiceModel, policies: Iterable[str], progress: Progress
) -> report.Capacity:
    """Hits of one memory for all against its size, policy by policy, between LRU and Belady."""
    tokens = trace.block_tokens
    paths = [one.blocks[: max(0, one.input_tokens) // tokens] for one in trace.arrivals]
    distinct = len({block for path in paths for block in path})
    sizes = sorted({max(1, round(share * distinct)) for share in SHARES})
    asked = sum(max(0, one.input_tokens) for one in trace.arrivals)
    orders: dict[str, tuple[report.Role, Callable[[], LeafOrder]]] = {
        "lru": ("baseline", LeafLru),
        "belady": ("bound", lambda: Clairvoyant(paths)),
    }
    for name in policies:
        orders[name] = ("ours" if name == "j" else "other", _leaf_policy(name, tokens, service))
    ratios: dict[str, list[float]] = {}
    for name, (_, order) in orders.items():
        for blocks in sizes:
            progress(f"{name} with {blocks:,} blocks")
            served = serve(trace.arrivals, tokens, service, PrefixStore(blocks, order()))
            ratios.setdefault(name, []).append(
                tokens * sum(one.cached for one in served) / max(1, asked)
            )
    endless = serve(trace.arrivals, tokens, service, PrefixStore(distinct, LeafLru()))
    most = tokens * sum(one.cached for one in endless) / max(1, asked)
    ratios["infinite"] = [most] * len(sizes)
    return report.Capacity(
        curves=tuple(
            report.HitCurve(
                policy=name,
                role="bound" if name == "infinite" else orders[name][0],
                capacity_blocks=tuple(sizes),
                capacity_tokens=tuple(blocks * tokens for blocks in sizes),
                hit_token_ratio=tuple(found),
                gap_closed_share=(
                    None
                    if name == "infinite"
                    else gap_closed(found, ratios["lru"], ratios["belady"])
                ),
            )
            for name, found in ratios.items()
        ),
        notes=("An order other than LRU only where the engine allows it: docs/levers.md.",),
    )


def _leaf_policy(name: str, block_tokens: int, service: ServiceModel) -> Callable[[], LeafOrder]:
    def cost_s(place: int) -> float:
        return service.prefill_s(block_tokens, place * block_tokens)

    return lambda: LeafPolicy(eviction.POLICIES[name](), block_tokens=block_tokens, cost_s=cost_s)


def keys_section(trace: Trace, policies: Iterable[str], progress: Progress) -> report.Table:
    """Object hit ratios of a stream of keys, by policy and capacity."""
    keys = [one.key for one in trace.arrivals]
    sizes = [max(1, one.size_bytes) for one in trace.arrivals]
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
    endless = 1 - len(held) / max(1, len(keys))
    rows.append(("infinite", *[endless] * len(SHARES)))
    return report.Table(
        title="Object hit ratio by capacity",
        note=f"Of {len(held):,} distinct keys, {total:,} bytes in all.",
        columns=("policy", *(f"{share:.0%}" for share in SHARES)),
        rows=tuple(rows),
    )
