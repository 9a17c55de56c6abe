"""Tables of what one memory keeps across pauses, and for new sessions."""

from collections.abc import Callable, Generator, Mapping
from functools import partial
from math import fsum

from preheat.core.prefix import LeafLru, PrefixStore
from preheat.core.spread import spread_of
from preheat.replay.headroom.finding import Finding
from preheat.replay.headroom.ladder import legend
from preheat.replay.headroom.pauses import (
    DRAM,
    FINITE,
    LEVERS,
    LRU,
    Arm,
    Kept,
    Sitting,
    arms,
    keep,
)
from preheat.replay.headroom.wanted import Progress, Wanted, simulated
from preheat.replay.pool import Service, serve
from preheat.replay.report import Table
from preheat.traces.arrival import Trace


def pauses(
    trace: Trace, wanted: Wanted, progress: Progress
) -> Generator[Table, None, tuple[Finding, ...]]:
    """What is lost while sessions wait, arm by arm: a table for each capacity."""
    sitting = Sitting(trace, wanted.open_sessions or 1.0, wanted.warm_up_s, wanted.service)
    made = {}
    for tokens in pause_sizes(wanted):
        tasks: Mapping[str, Callable[[], Kept]] = {
            arm.name: partial(keep, sitting, arm, tokens) for arm in pause_arms(trace, wanted)
        }
        made[tokens] = simulated(tasks, progress, f"pauses, {tokens:,} tokens")
        yield _pause_table(_size_of(tokens, wanted), made[tokens])
    tried = {arm.name for arm in pause_arms(trace, wanted)}
    yield legend("Pauses", {arm: lever for arm, lever in LEVERS.items() if arm in tried})
    middle = list(made)[(len(made) - 1) // 2]
    return (_pause_finding(_size_of(middle, wanted), made[middle]),)


def pause_sizes(wanted: Wanted) -> tuple[int, ...]:
    """Tokens for each open session, or in all where the trace's sessions aren't drawn."""
    return wanted.session_tokens if wanted.open_sessions else wanted.alone_tokens


def pause_arms(trace: Trace, wanted: Wanted) -> list[Arm]:
    """Those that the trace can have: without drawn sessions there is nothing to be over, and no size
    for each."""
    made = arms(trace.block_tokens, wanted.open_sessions or 1.0)
    return [
        arm
        for arm in made
        if wanted.open_sessions is not None or not ("over" in arm.name or "192" in arm.name)
    ]


def _size_of(tokens: int, wanted: Wanted) -> str:
    what = "an open session" if wanted.open_sessions else "in all"
    return f"{tokens / 1000:g} k tokens of KV {what}"


def _lost_share(one: Kept) -> float:
    return one.lost_s / max(1e-9, one.served_s)


def _pause_finding(size: str, made: Mapping[str, Kept]) -> Finding:
    lru, dram = made[LRU], made[DRAM]
    share = (lru.lost_s - dram.lost_s) / max(1e-9, lru.served_s)
    now, then = (spread_of(one.ttfts_s).mean or 0.0 for one in (lru, dram))
    finite = f", one of 192 k {_lost_share(made[FINITE]):.1%}" if FINITE in made else ""
    numbers = (
        f"{size}: LRU loses {_lost_share(lru):.1%} of the prefill; an endless DRAM tier leaves"
        f" {_lost_share(dram):.1%}{finite}; mean TTFT {now:.2f} s, with the endless one {then:.2f} s"
    )
    if lru.lost_s == 0.0:
        numbers = f"{size}: LRU loses nothing that comes back"
    return Finding("pauses", share, numbers)


def _pause_table(size: str, made: Mapping[str, Kept]) -> Table:
    rows = []
    for one in made.values():
        ttft = spread_of(one.ttfts_s)
        waits = (ttft.mean, ttft.p50, ttft.p95, ttft.p99)
        bound = "bound" if one.bound else ""
        rows.append((one.arm, one.served_s, one.lost_s, _lost_share(one), *waits, bound))
    return Table(
        title=f"Pauses: {size}",
        note=(
            "Seconds of prefill a day and session; service TTFT: loading and computing, no queue."
            " A bound knows what nobody can know."
        ),
        columns=(
            "arm",
            "served s",
            "lost s",
            "lost, of served",
            "TTFT mean s",
            "p50 s",
            "p95 s",
            "p99 s",
            "",
        ),
        rows=tuple(rows),
    )


def trunks(
    trace: Trace, wanted: Wanted, progress: Progress
) -> Generator[Table, None, tuple[Finding, ...]]:
    """First requests of sessions: how much of what they share with others is in memory."""
    tasks = {
        f"{tokens / 1000:g} k": partial(_trunk_row, trace, wanted, tokens)
        for tokens in wanted.session_tokens
    }
    rows = simulated(tasks, progress, "trunks")
    yield Table(
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
        rows=tuple((size, *row) for size, row in rows.items()),
    )
    size = list(rows)[(len(rows) - 1) // 2]
    held, lost, now, warm, *_ = rows[size]
    numbers = f"{size} tokens a session: {held:.0%} of trunks are in memory"
    if now is not None and warm is not None:
        numbers += f"; median TTFT {now:.2f} s, if all were there {warm:.2f} s"
    return (Finding("trunks", lost, numbers),)


def _trunk_row(
    trace: Trace, wanted: Wanted, tokens: int
) -> tuple[float, float, float | None, float | None, float | None, float | None]:
    """Share of the trunks in memory, share of all prefill lost, TTFTs now and with all trunks there."""
    blocks = int(tokens * (wanted.open_sessions or 1.0)) // trace.block_tokens
    store = PrefixStore(blocks, LeafLru())
    served = serve(trace.arrivals, trace.block_tokens, wanted.service, store)
    counted = [one for one in served if one.at >= wanted.warm_up_s]
    firsts: list[Service] = [
        one
        for arrival, one in zip(trace.arrivals, served, strict=True)
        if arrival.turn == 0 and one.at >= wanted.warm_up_s
    ]
    now = spread_of([one.ttft_s for one in firsts])
    warm = spread_of([one.ttft_s - one.lost_s for one in firsts])
    return (
        sum(one.cached for one in firsts) / max(1, sum(one.known for one in firsts)),
        fsum(one.lost_s for one in firsts) / max(1e-9, fsum(one.prefill_s for one in counted)),
        now.p50,
        warm.p50,
        now.p95,
        warm.p95,
    )
