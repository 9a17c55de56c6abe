"""Restarts and deploys: what they lose, and p95 TTFT in the minutes after them, arm by arm.

The ratio is of p95 TTFTs of the requests that came in the five minutes after a rolling deploy began, and of
those until five minutes after its last worker, at load 0.9: ours by a fleet in which nothing happens, the
geometric mean over the switch times. The worst counts, of both and of chats (8 x 3 M tokens) and agents (8 x 1 M,
80 open sessions). `--quick` runs that event alone, all of its
arms, at load 0.9 and three switch times.
"""

from __future__ import annotations

import argparse

import msgspec

from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.traces import agents, chats
from preheat.cli.headroom import text_of
from preheat.replay.headroom.event_tables import TIMES_KEPT, WHOLE_TIMES_KEPT, aftermaths
from preheat.replay.headroom.ladder import LEVERS, NOTHING, ON_DEMAND, OURS, RAMPED, legend
from preheat.replay.headroom.wanted import Wanted
from preheat.replay.report import Table

ROLLING = "rolling deploy"
RATIOS = {
    OURS: "ratio_kept",
    ON_DEMAND: "ratio_not_ramped",
    NOTHING: "ratio_nothing",
    RAMPED: "ratio_nothing_ramped",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--switches", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("chats", "agents"))
    parser.add_argument(
        "--quick", action="store_true", help="the rolling deploy alone, load 0.9, 3 switch times"
    )


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    figures: dict[str, float] = {}
    usual = Wanted(switches=options.switches)
    if options.quick:
        usual = Wanted(only_events=(ROLLING,), loads=(0.9,), switches=3, events_alone=False)
    progress.say(text_of(legend("Events", LEVERS)))
    if options.only != "agents":
        wanted = msgspec.structs.replace(
            usual, alone_tokens=(10_000_000,), worker_tokens=(3_000_000,)
        )
        for table in aftermaths(chats(), wanted, progress.tick):
            progress.say(f"chats\n{text_of(table)}\n")
            _note(figures, "chats", table)
    if options.only != "chats":
        wanted = msgspec.structs.replace(
            usual, alone_tokens=(), worker_tokens=(1_000_000,), open_sessions=80.0
        )
        for table in aftermaths(agents(80.0, options.seed), wanted, progress.tick):
            progress.say(f"agents\n{text_of(table)}\n")
            _note(figures, "agents", table)
    ratios = [value for name, value in figures.items() if name.endswith("ratio_kept")]
    figures["deploy_p95_ratio_kept"] = max(ratios)
    settings = {"switches": usual.switches, "loads": usual.loads, "seed": options.seed}
    return Result(figures=figures, settings=settings)


def _note(figures: dict[str, float], trace: str, table: Table) -> None:
    if not table.title.startswith(ROLLING):
        return
    by_arm = {str(row[0]): row for row in table.rows}
    for column, name in ((TIMES_KEPT, ""), (WHOLE_TIMES_KEPT, "_whole")):
        place = table.columns.index(column)
        for arm, ratio in RATIOS.items():
            figures[f"{trace}{name}_p95_{ratio}"] = _number(by_arm[arm][place])


def _number(cell: object) -> float:
    if not isinstance(cell, float):
        raise BenchmarkError(f"a figure is missing: {cell!r}")
    return cell
