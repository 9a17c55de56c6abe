"""Restarts and deploys: what they lose, and p95 TTFT in the minutes after them, arm by arm.

The ratio is of p95 TTFTs of the requests that came in the five minutes after a rolling deploy began, at
load 0.9: ours by a fleet in which nothing happens, the geometric mean over the switch times. Of chats (8 x 3 M
tokens) and agents (8 x 1 M, 80 open sessions) the worse one counts.
"""

from __future__ import annotations

import argparse

from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.traces import agents, chats
from preheat.cli.headroom import text_of
from preheat.replay.headroom.event_tables import TIMES_KEPT, WHOLE_TIMES_KEPT, aftermaths
from preheat.replay.headroom.events import OURS
from preheat.replay.headroom.wanted import Wanted
from preheat.replay.report import Table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--switches", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("chats", "agents"))


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    figures: dict[str, float] = {}
    if options.only != "agents":
        wanted = Wanted(
            alone_tokens=(10_000_000,), worker_tokens=(3_000_000,), switches=options.switches
        )
        for table in aftermaths(chats(), wanted, progress.tick):
            progress.say(f"chats\n{text_of(table)}\n")
            _note(figures, "chats", table)
    if options.only != "chats":
        wanted = Wanted(
            alone_tokens=(),
            worker_tokens=(1_000_000,),
            open_sessions=80.0,
            switches=options.switches,
        )
        for table in aftermaths(agents(80.0, options.seed), wanted, progress.tick):
            progress.say(f"agents\n{text_of(table)}\n")
            _note(figures, "agents", table)
    ratios = [value for name, value in figures.items() if name.endswith("ratio_kept")]
    figures["deploy_p95_ratio_kept"] = max(ratios)
    return Result(figures=figures, settings={"switches": options.switches, "seed": options.seed})


def _note(figures: dict[str, float], trace: str, table: Table) -> None:
    if not table.title.startswith("rolling deploy"):
        return
    by_arm = {str(row[0]): row for row in table.rows}
    for column, name in ((TIMES_KEPT, ""), (WHOLE_TIMES_KEPT, "_whole")):
        place = table.columns.index(column)
        figures[f"{trace}{name}_p95_ratio_kept"] = _number(by_arm[OURS][place])
        figures[f"{trace}{name}_p95_ratio_nothing"] = _number(by_arm["nothing"][place])


def _number(cell: object) -> float:
    if not isinstance(cell, float):
        raise BenchmarkError(f"a figure is missing: {cell!r}")
    return cell
