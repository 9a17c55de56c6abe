"""Every routing rule over eight workers: chats at three sizes and three loads, and coding agents.

Load is that at which plain cost-aware routing with the miss counted twice would run: the trace is sped up until
that rule computes prefill for so much of the time. Prompts are computed whole, one after the other, without
decoding (the cost model of the headroom study); requests don't wait for replies.

Our rule was chosen on the first half of the chats' time, so that half only fills the memories: the load and
all figures are of requests that come in the second half. Of the agents, on which nothing was chosen, those
after the first fifth of the hours are counted. A seed of the chats draws when the requests of each recorded
3 s batch come; one of the agents draws their calendar.

A cell is won where ours has the best mean and the best p99 TTFT, as means over the seeds: in
`cells_won_of_table` of all rules in the table, in `cells_won` also of `cost` with its factor set by hand
to 2, 4 and 8. Those stand beside the rules: which of them is best differs from cell to cell, and
nobody knows it beforehand.
`cells_unbeaten`: where no rule is better in either beyond the 95 % interval of the paired difference.

Simulations run side by side on all cores that it may use. It can be had in parts: `--cells` names some, and
`--earlier` takes over the cells of results that are there already.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.routing_scores import (
    ByRule,
    Cell,
    Scores,
    cells_of,
    check_alike,
    counts_of,
    figures_of,
    fmean,
    shown,
)
from benchmarks.traces import agents, chats
from preheat.core.routing import POLICIES, RoutingPolicy
from preheat.replay.fleet import Fleet, FleetSpec
from preheat.replay.fleet import run as replay
from preheat.replay.headroom.events import speed_for
from preheat.replay.headroom.fleets import fleet_of, reference
from preheat.replay.headroom.wanted import Wanted
from preheat.replay.measures import measures_of
from preheat.replay.side_by_side import each
from preheat.traces.arrival import Arrival, Trace

WORKERS = 8
OURS = "preheat"
PRICED, ALONE = "preheat_priced", "preheat_alone"
"""Ours with the learned price of memory, which it leaves out; and without copies of hot prefixes."""
BY_HAND = (2.0, 4.0, 8.0)
CELLS = tuple(
    Cell(kind, tokens, load)
    for kind, sizes, loads in (
        ("chats", (1_000_000, 3_000_000, 10_000_000), (0.5, 0.8, 0.95)),
        ("agents", (1_000_000, 3_000_000), (0.7, 0.9)),
    )
    for tokens, load in product(sizes, loads)
)
BAR_CELL = Cell("agents", 1_000_000, 0.7)
"""Whose share of prefill is the figure `agents_prefill_share`."""
OPEN_SESSIONS = 80.0
BATCH_S = 3.0
WARM_SHARE = {"chats": 0.5, "agents": 0.2}
COUNTED = {
    "chats": "requests of the second half of the time; the first half is warm-up",
    "agents": "requests after the first fifth of the hours, which is warm-up",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("chats", "agents"))
    parser.add_argument("--cells", help=f"a comma list, instead of all: {CELLS[0].name}, …")
    parser.add_argument(
        "--earlier", action="append", default=[], help="a result: its cells are taken over"
    )
    parser.add_argument("--seeds", type=int, default=5, help="of the chats (5)")
    parser.add_argument("--agent-seeds", type=int, default=3, help="of the agents (3)")
    parser.add_argument("--hours", type=float, default=30.0, help="of the agents' calendar (30)")
    parser.add_argument(
        "--rules",
        help=f"a comma list, instead of all; {PRICED} and {ALONE} only where they are named",
    )


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    wanted = (
        options.rules.split(",")
        if options.rules
        else [one for one in rules() if one not in {PRICED, ALONE}]
    )
    unknown = set(wanted) - set(rules())
    if unknown:
        raise BenchmarkError(f"no rule {', '.join(unknown)}; there are {', '.join(rules())}")
    chosen = chosen_cells(options.cells, options.only)
    seeds = {"chats": options.seeds, "agents": options.agent_seeds}
    done = earlier(options, wanted, seeds)
    missing = [cell for cell in chosen if cell not in done]
    for kind in sorted({cell.kind for cell in missing}):
        progress.say(f"{kind}: counted are {COUNTED[kind]}")
        traffic_of(kind, options.hours, 1)  # here, so that no process has to read it again
    speeds = each(
        {cell: partial(speed_of, cell, options.hours) for cell in missing},
        lambda text: progress.tick(f"the cells' speeds: {text}"),
    )
    for cell in missing:
        done[cell] = measured(cell, speeds[cell], wanted, seeds[cell.kind], options.hours, progress)
        progress.say(f"{cell.name}\n{shown(done[cell])}\n")
    settings: dict[str, object] = {
        "workers": WORKERS,
        "rules": wanted,
        "counted": COUNTED,
        "hours": options.hours,
        "scores": {cell.name: msgspec.to_builtins(scores) for cell, scores in done.items()},
    }
    return Result(figures=all_figures(done), settings=settings)


def chosen_cells(names: str | None, only: str | None) -> list[Cell]:
    """BenchmarkError where a name is no cell's."""
    cells = [cell for cell in CELLS if only in (None, cell.kind)]
    if names is None:
        return cells
    by_name = {cell.name: cell for cell in cells}
    unknown = [name for name in names.split(",") if name not in by_name]
    if unknown:
        raise BenchmarkError(f"no cell {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def earlier(
    options: argparse.Namespace, wanted: Sequence[str], seeds: Mapping[str, int]
) -> dict[Cell, ByRule]:
    """The cells of the results that are taken over."""
    found: dict[str, ByRule] = {}
    for path in options.earlier:
        found |= cells_of(Path(path), COUNTED, options.hours)
    cells = {cell: found[cell.name] for cell in CELLS if cell.name in found}
    for cell, scores in cells.items():
        check_alike(cell, scores, wanted, seeds[cell.kind])
    return cells


def all_figures(cells: Mapping[Cell, ByRule]) -> dict[str, float]:
    """In the order of `CELLS`, whatever they were measured in."""
    figures: dict[str, float] = {}
    for cell in CELLS:
        if cell in cells:
            figures |= figures_of(cell, cells[cell])
    if OURS in cells.get(BAR_CELL, {}):
        figures["agents_prefill_share"] = fmean(cells[BAR_CELL][OURS].prefill_share)
    return figures | counts_of(cells)


def rules() -> dict[str, Callable[[], RoutingPolicy]]:
    """All of the table, the plain rule with factors that a hand set, and ours with and without options."""
    by_hand = {f"cost_{factor:g}": partial(POLICIES["cost"], factor=factor) for factor in BY_HAND}
    ours = POLICIES[OURS]
    optional = {PRICED: partial(ours, priced=True), ALONE: partial(ours, copies=False)}
    return {**POLICIES, **by_hand, **optional}


def spec_of(cell: Cell, trace: Trace) -> FleetSpec:
    return fleet_of(Wanted(), trace, WORKERS, cell.tokens)


def speed_of(cell: Cell, hours: float) -> float:
    """At which the cell has its load, found with the first seed."""
    trace, warm_s = traffic_of(cell.kind, hours, 1)
    spec = spec_of(cell, trace)
    return speed_for(trace.arrivals, trace.block_tokens, spec, reference, cell.load, warm_s=warm_s)


def measured(
    cell: Cell, speed: float, wanted: Sequence[str], seeds: int, hours: float, progress: Progress
) -> ByRule:
    """Every rule on every seed."""
    for seed in range(1, seeds + 1):
        traffic_of(cell.kind, hours, seed)  # here, as above
    works = {
        (name, seed): partial(served, cell, hours, speed, name, seed)
        for seed, name in product(range(1, seeds + 1), wanted)
    }
    made = each(works, lambda text: progress.tick(f"{cell.name}: {text}"))
    found: ByRule = {name: Scores([], [], [], [], []) for name in wanted}
    for (name, _), numbers in made.items():
        for column, number in zip(msgspec.structs.astuple(found[name]), numbers, strict=True):
            column.append(number)
    return found


@cache
def traffic_of(kind: str, hours: float, seed: int) -> tuple[Trace, float]:
    """A seed's arrivals, and how many of their first seconds aren't counted."""
    if kind == "agents":
        return agents(OPEN_SESSIONS, seed, hours=hours), WARM_SHARE[kind] * hours * 3_600.0
    trace = chats()
    warm_s = WARM_SHARE[kind] * trace.arrivals[-1].at
    return msgspec.structs.replace(trace, arrivals=drawn(trace.arrivals, seed)), warm_s


def drawn(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """Each arrival anywhere in its batch."""
    chance = random.Random(seed)
    moved = [
        msgspec.structs.replace(one, at=BATCH_S * (one.at // BATCH_S + chance.random()))
        for one in arrivals
    ]
    return sorted(moved, key=lambda one: one.at)


def served(cell: Cell, hours: float, speed: float, name: str, seed: int) -> tuple[float, ...]:
    """One rule on one seed, in whatever process."""
    trace, warm_s = traffic_of(cell.kind, hours, seed)
    fleet = Fleet(spec_of(cell, trace), rules()[name]())
    made = replay(trace.arrivals, trace.block_tokens, fleet, speed=speed)
    found = measures_of(made, WORKERS, start=warm_s / speed)
    balance = found.work_max_mean_ratio
    return found.ttft.mean, found.ttft.p99, found.prefill_share, found.hit_token_ratio, balance
