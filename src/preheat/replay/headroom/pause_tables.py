"""Tables of what one memory keeps: by its size, across pauses, and for new sessions."""

from collections.abc import Iterator, Sequence
from math import fsum
from typing import Final

from preheat.core.prefix import LeafLru, LeafOrder, PrefixStore
from preheat.core.spread import spread_of
from preheat.replay.granularity import cuts, effect, full_paths
from preheat.replay.headroom.pauses import Kept, Sitting, arms, keep
from preheat.replay.headroom.wanted import Progress, Wanted
from preheat.replay.orders import Clairvoyant
from preheat.replay.pool import serve
from preheat.replay.report import Table
from preheat.traces.arrival import Trace

CAPACITY_SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.25)


def capacities(trace: Trace, wanted: Wanted, progress: Progress) -> Table:
    """Hits of one memory against its size: the engine's LRU, Belady, endless."""
    paths = full_paths(trace)
    distinct = len({block for path in paths for block in path})
    rows = []
    for share in CAPACITY_SHARES:
        blocks = max(1, round(share * distinct))
        progress(f"capacity {share:.0%} of {distinct} blocks")
        lru = _hits(trace, wanted, blocks, LeafLru())
        belady = _hits(trace, wanted, blocks, Clairvoyant(paths, blocks))
        endless = _hits(trace, wanted, distinct, LeafLru())
        room = (belady - lru) * 100
        tokens = blocks * trace.block_tokens
        rows.append((f"{share:.0%}", tokens / 1e6, lru, belady, endless, room))
    return Table(
        title="Block hit ratio of one memory, by its size",
        note="Full blocks of prompts; each request is over before the next begins.",
        columns=("capacity, of distinct", "M tokens", "LRU", "Belady", "endless", "room, points"),
        rows=tuple(rows),
    )


def _hits(trace: Trace, wanted: Wanted, blocks: int, order: LeafOrder) -> float:
    store = PrefixStore(blocks, order)
    served = serve(trace.arrivals, trace.block_tokens, wanted.service, store)
    return sum(one.cached for one in served) / max(1, sum(one.full for one in served))


def pauses(trace: Trace, wanted: Wanted, progress: Progress) -> Iterator[Table]:
    """What is lost while sessions wait, arm by arm: a table for each capacity."""
    sessions = wanted.open_sessions or 1.0
    sizes = wanted.session_tokens if wanted.open_sessions else wanted.alone_tokens
    counted = wanted.warm_up_s
    sitting = Sitting(trace.arrivals, trace.block_tokens, sessions, counted, wanted.service)
    for tokens in sizes:
        kept = []
        for arm in arms(trace.block_tokens, sessions):
            if wanted.open_sessions is None and ("over" in arm.name or "192" in arm.name):
                continue  # without sessions there is nothing to be over, and no size for each
            progress(f"pauses, {tokens:,} tokens: {arm.name}")
            kept.append(keep(sitting, arm, tokens))
        what = "an open session" if wanted.open_sessions else "in all"
        yield _pause_table(f"Pauses: {tokens / 1000:g} k tokens of KV {what}", kept)


def _pause_table(title: str, kept: Sequence[Kept]) -> Table:
    rows = []
    for one in kept:
        ttft = spread_of(one.ttfts_s)
        share = one.lost_s / max(1e-9, one.served_s)
        rows.append(
            (one.arm, one.served_s, one.lost_s, share, ttft.mean, ttft.p50, ttft.p95, ttft.p99)
        )
    return Table(
        title=title,
        note="Seconds of prefill a day and session; service TTFT: loading and computing, no queue.",
        columns=(
            "arm",
            "served s",
            "lost s",
            "lost, of served",
            "TTFT mean s",
            "p50 s",
            "p95 s",
            "p99 s",
        ),
        rows=tuple(rows),
    )


def trunks(trace: Trace, wanted: Wanted, progress: Progress) -> Table:
    """First requests of sessions: how much of what they share with others is in memory."""
    sessions = wanted.open_sessions or 1.0
    firsts = {number for number, one in enumerate(trace.arrivals) if one.turn == 0}
    rows = []
    for tokens in wanted.session_tokens:
        progress(f"trunks, {tokens:,} tokens")
        blocks = int(tokens * sessions) // trace.block_tokens
        store = PrefixStore(blocks, LeafLru())
        served = serve(trace.arrivals, trace.block_tokens, wanted.service, store)
        counted = [one for one in served if one.at >= wanted.warm_up_s]
        chosen = [
            one
            for number, one in enumerate(served)
            if number in firsts and one.at >= wanted.warm_up_s
        ]
        known = sum(one.known for one in chosen)
        now, warm = (
            spread_of([one.ttft_s for one in chosen]),
            spread_of([one.ttft_s - one.lost_s for one in chosen]),
        )
        lost = fsum(one.lost_s for one in chosen)
        rows.append(
            (
                f"{tokens / 1000:g} k",
                sum(one.cached for one in chosen) / max(1, known),
                lost / fsum(one.prefill_s for one in counted),
                now.p50,
                warm.p50,
                now.p95,
                warm.p95,
            )
        )
    return Table(
        title="Trunks: the first request of each session",
        note="Now, and if every block that was ever computed were there.",
        columns=(
            "tokens a session",
            "trunk in memory",
            "lost, of served",
            "p50 s now",
            "p50 s warm",
            "p95 s now",
            "p95 s warm",
        ),
        rows=tuple(rows),
    )


def granularities(trace: Trace, wanted: Wanted, progress: Progress) -> Table:
    """Where prompts are cut: hits, and how many blocks there are to keep books of."""
    paths = full_paths(trace)
    asked = sum(len(path) for path in paths)
    distinct = len({block for path in paths for block in path})
    sizes = [max(1, round(share * distinct)) for share in wanted.granularity_shares]
    rows: list[tuple[str | float, ...]] = []
    for make in cuts(trace):
        cut = make()
        ratios = []
        for blocks in sizes:
            progress(f"granularity {cut.name}, {blocks:,} blocks")
            ratios.append(effect(trace, cut, asked, blocks).hit / max(1, asked))
        rows.append((cut.name, len(cut.sizes), *ratios))
    return Table(
        title=f"Granularity: blocks of {trace.block_tokens} tokens, cut otherwise",
        note="Hit ratio by tokens of full blocks under LRU, by the memory's share of what is distinct.",
        columns=(
            "cut",
            "distinct blocks",
            *(f"{share:.0%}" for share in wanted.granularity_shares),
        ),
        rows=tuple(rows),
    )
