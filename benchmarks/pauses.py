"""Sessions that wait, return and end: what is lost of them, arm by arm (agents, one engine).

The ratio is of mean service TTFTs (loading and computing, no queue) at 64 k tokens of KV for each
open session: ours, with a DRAM tier of 192 k more, by a memory that has everything always in time.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.traces import agents, chats
from preheat.cli.headroom import text_of
from preheat.replay.headroom.pause_tables import pauses
from preheat.replay.headroom.pauses import LRU, OURS
from preheat.replay.headroom.wanted import Wanted

PERFECT = "always in time"
SIZES = (16_000, 32_000, 64_000, 96_000, 128_000, 256_000)
MEAN_TTFT = "TTFT mean s"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--open-sessions", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=3)


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    ratios: list[float] = []
    no_tier: list[float] = []
    for name in ("v6_global", "v8_local"):
        for seed in range(1, options.seeds + 1):
            trace = agents(options.open_sessions, seed, name=name)
            wanted = Wanted(open_sessions=options.open_sessions, session_tokens=SIZES)
            for table in pauses(trace, wanted, progress.tick):
                if seed == 1:
                    progress.say(f"{name}, seed {seed}\n{text_of(table)}\n")
                if name == "v6_global" and ": 64 k" in table.title:
                    place = table.columns.index(MEAN_TTFT)
                    means = {str(row[0]): _number(row[place]) for row in table.rows}
                    ratios.append(means[OURS] / means[PERFECT])
                    no_tier.append(means[LRU] / means[PERFECT])
    for table in pauses(chats(), Wanted(), progress.tick):
        progress.say(f"chats\n{text_of(table)}\n")
    return Result(
        figures={
            "pauses_ratio_perfect": statistics.mean(ratios),
            "pauses_ratio_perfect_most": max(ratios),
            "pauses_ratio_no_tier": statistics.mean(no_tier),
        },
        settings={"open_sessions": options.open_sessions, "seeds": options.seeds, "ratios": ratios},
    )


def _number(cell: object) -> float:
    if not isinstance(cell, float):
        raise BenchmarkError(f"a figure is missing: {cell!r}")
    return cell
