"""Tables of one memory: hits by its size, and by where prompts are cut."""

from collections.abc import Callable, Generator
from functools import partial
from typing import Final

from preheat.core.prefix import LeafLru, PrefixStore
from preheat.replay.granularity import Cut, cuts, effect, full_paths
from preheat.replay.headroom.finding import Finding
from preheat.replay.headroom.wanted import Progress, Wanted, simulated
from preheat.replay.orders import Clairvoyant
from preheat.replay.pool import serve
from preheat.replay.report import Table
from preheat.traces.arrival import Trace

LEAST_BLOCKS: Final = 100
"""With fewer distinct ones the smallest capacity, a hundredth of them, wouldn't be one block."""


def capacities(
    trace: Trace, wanted: Wanted, progress: Progress
) -> Generator[Table, None, tuple[Finding, ...]]:
    """Hits of one memory against its size: the engine's LRU, Belady, endless."""
    distinct = distinct_blocks(trace)
    tokens = distinct * trace.block_tokens
    all_of_it = f"{distinct:,} distinct blocks, {tokens:,} tokens"
    shares = wanted.capacity_shares if distinct >= LEAST_BLOCKS else ()
    sizes = {share: round(share * distinct) for share in shares}
    tasks: dict[str, Callable[[], float]] = {"endless": partial(_hits, trace, wanted, distinct)}
    for share, blocks in sizes.items():
        tasks[f"lru {share}"] = partial(_hits, trace, wanted, blocks)
        tasks[f"belady {share}"] = partial(_hits, trace, wanted, blocks, knows=True)
    hits = simulated(tasks, progress, "capacity")
    endless = hits["endless"]
    rooms = {share: hits[f"belady {share}"] - hits[f"lru {share}"] for share in shares}
    rows = [
        (
            f"{share:.0%}",
            blocks * trace.block_tokens / 1e6,
            hits[f"lru {share}"],
            hits[f"belady {share}"],
            endless,
            rooms[share] * 100,
        )
        for share, blocks in sizes.items()
    ]
    yield Table(
        title="Block hit ratio of one memory, by its size",
        note="Full blocks of prompts; each request is over before the next begins.",
        columns=("capacity, of distinct", "M tokens", "LRU", "Belady", "endless", "room, points"),
        rows=tuple(rows or [("all of it", tokens / 1e6, endless, endless, endless, 0.0)]),
        verdict="" if rows else f"Everything fits: {all_of_it}.",
    )
    return (_room_finding(rooms, endless, all_of_it, is_little=tokens <= min(wanted.alone_tokens)),)


def _room_finding(
    rooms: dict[float, float], endless: float, all_of_it: str, *, is_little: bool
) -> Finding:
    if endless == 0.0:
        nothing = f"nothing comes back: no prompt begins as one before it did ({all_of_it})"
        return Finding("capacity", 0.0, nothing)
    if not rooms or is_little:
        return Finding("capacity", 0.0, f"everything fits: {all_of_it}", fits=True)
    at = max(rooms, key=lambda share: rooms[share])
    numbers = (
        f"a perfect order finds {rooms[at] * 100:.1f} points more than LRU (memory for {at:.0%} of"
        f" {all_of_it}); endless memory finds {endless:.0%}"
    )
    return Finding("capacity", rooms[at], numbers)


def distinct_blocks(trace: Trace) -> int:
    """Full blocks of prompts, each once."""
    return len({block for path in full_paths(trace) for block in path})


def capacity_runs(trace: Trace, wanted: Wanted) -> int:
    """Simulations of `capacities`."""
    is_large = distinct_blocks(trace) >= LEAST_BLOCKS
    return 1 + (2 * len(wanted.capacity_shares) if is_large else 0)


def _hits(trace: Trace, wanted: Wanted, blocks: int, *, knows: bool = False) -> float:
    order = Clairvoyant(full_paths(trace), blocks) if knows else LeafLru()
    served = serve(trace.arrivals, trace.block_tokens, wanted.service, PrefixStore(blocks, order))
    return sum(one.cached for one in served) / max(1, sum(one.full for one in served))


def granularities(
    trace: Trace, wanted: Wanted, progress: Progress
) -> Generator[Table, None, tuple[Finding, ...]]:
    """Where prompts are cut: hits, and how many blocks there are to keep books of."""
    distinct = distinct_blocks(trace)
    sizes = [max(1, round(share * distinct)) for share in wanted.granularity_shares]
    rows = [_cut_row(trace, make(), sizes, progress) for make in cuts(trace)]
    yield Table(
        title=f"Granularity: blocks of {trace.block_tokens} tokens, cut otherwise",
        note="Hit ratio by tokens of full blocks under LRU, by the memory's share of what is distinct.",
        columns=(
            "cut",
            "distinct blocks",
            *(f"{share:.0%}" for share in wanted.granularity_shares),
        ),
        rows=tuple((name, objects, *ratios) for name, objects, ratios in rows),
    )
    (_, objects, own), *_, (_, fewer, branch) = rows
    middle = (len(sizes) - 1) // 2
    best = max(ratios[middle] for _, _, ratios in rows)
    numbers = (
        f"no cut finds more than {(best - own[middle]) * 100:.1f} points beyond the trace's own;"
        f" cut where reuse branches, {fewer / max(1, objects):.0%} of the blocks to keep books of"
        f" find {round((branch[middle] - own[middle]) * 100, 1) + 0.0:+.1f} points"
    )
    return (Finding("granularity", best - own[middle], numbers),)


def _cut_row(
    trace: Trace, cut: Cut, sizes: list[int], progress: Progress
) -> tuple[str, int, list[float]]:
    asked = sum(len(path) for path in full_paths(trace))
    ratios = []
    for blocks in sizes:
        ratios.append(effect(trace, cut, asked, blocks).hit / max(1, asked))
        progress(f"granularity {cut.name}, {blocks:,} blocks")
    return cut.name, len(cut.sizes), ratios
