"""Every routing rule over eight workers: chats at three sizes and three loads, and coding agents.

Load is that at which plain cost-aware routing with the miss counted twice would run: the trace is sped up until
that rule computes prefill for so much of the time. Prompts are computed whole, one after the other, without
decoding (the cost model of the headroom study); requests don't wait for replies.

A cell is won where ours has the best mean and the best p99 TTFT, as means over the seeds: in
`cells_won_of_table` of all rules in the table, in `cells_won` also of `cost` with its factor set by hand
to 2, 4 and 8. Those stand beside the rules: which of them is best differs from cell to cell, and
nobody knows it beforehand.
`cells_unbeaten`: where no rule is better in either beyond the 95 % interval of the paired difference.
A seed of the chats draws when the requests of each recorded 3 s batch come; one of the agents draws
their calendar. Agents are counted after the first fifth of the hours.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product

import msgspec

from benchmarks.report import Progress, Result, table
from benchmarks.traces import agents, chats
from preheat.core.routing import POLICIES, RoutingPolicy
from preheat.replay.fleet import Fleet, FleetSpec
from preheat.replay.fleet import run as replay
from preheat.replay.headroom.events import speed_for
from preheat.replay.headroom.fleets import fleet_of, reference
from preheat.replay.headroom.wanted import Wanted
from preheat.replay.measures import measures_of
from preheat.traces.arrival import Arrival, Trace

WORKERS = 8
OURS = "preheat"
BY_HAND = (2.0, 4.0, 8.0)
CHAT_TOKENS = (1_000_000, 3_000_000, 10_000_000)
CHAT_LOADS = (0.5, 0.8, 0.95)
AGENT_TOKENS = (1_000_000, 3_000_000)
AGENT_LOADS = (0.7, 0.9)
OPEN_SESSIONS = 80.0
BATCH_S = 3.0
WARM_SHARE = 0.2
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Student's t, two-sided, by the number of seeds."""


class Cell(msgspec.Struct, frozen=True):
    """One fleet at one load on one kind of traffic."""

    kind: str
    tokens: int
    load: float

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.tokens // 1_000_000}m_{round(100 * self.load)}"


class Scores(msgspec.Struct, frozen=True):
    """What a rule came to, seed by seed. Seconds; shares of no-cache prefill and of prompt tokens; the
    busiest worker's work by the mean."""

    mean_s: list[float]
    p99_s: list[float]
    prefill_share: list[float]
    hits: list[float]
    balance: list[float]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("chats", "agents"))
    parser.add_argument("--seeds", type=int, default=5, help="of the chats (5)")
    parser.add_argument("--agent-seeds", type=int, default=2, help="of the agents (2)")
    parser.add_argument("--hours", type=float, default=30.0, help="of the agents' calendar (30)")
    parser.add_argument("--processes", type=int, default=1, help="at once (1)")
    parser.add_argument("--rules", help="a comma list, instead of all")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    wanted = options.rules.split(",") if options.rules else [*rules()]
    figures: dict[str, float] = {}
    kinds = [kind for kind in ("chats", "agents") if options.only in (None, kind)]
    for kind in kinds:
        tokens, loads = (
            (CHAT_TOKENS, CHAT_LOADS) if kind == "chats" else (AGENT_TOKENS, AGENT_LOADS)
        )
        seeds = options.seeds if kind == "chats" else options.agent_seeds
        won = [0.0] * 5
        for each, load in product(tokens, loads):
            cell = Cell(kind, each, load)
            scores = measured(cell, wanted, seeds, options, progress)
            progress.say(f"{cell.name}\n{shown(scores)}\n")
            figures |= figures_of(cell, scores)
            if OURS in scores and len(scores) > 1:
                won = [a + b for a, b in zip(won, standing(scores), strict=True)]
        if OURS in wanted and len(wanted) > 1:
            prefix = "" if kind == "chats" else "agents_"
            names = ("won", "won_of_table", "won_mean", "won_p99", "unbeaten")
            figures |= {
                f"{prefix}cells_{name}": count for name, count in zip(names, won, strict=True)
            }
    settings: dict[str, object] = {"workers": WORKERS, "rules": wanted}
    return Result(figures=figures, settings=settings)


def rules() -> dict[str, Callable[[], RoutingPolicy]]:
    """All of the table, and the plain rule with factors that a hand set."""
    by_hand = {f"cost_{factor:g}": partial(POLICIES["cost"], factor=factor) for factor in BY_HAND}
    return {**POLICIES, **by_hand}


def measured(
    cell: Cell, wanted: Sequence[str], seeds: int, options: argparse.Namespace, progress: Progress
) -> dict[str, Scores]:
    """Every rule on every seed, at the speed found with the first."""
    traffic = partial(traffic_of, cell.kind, options.hours)
    trace, warm_s = traffic(1)
    spec = fleet_of(Wanted(), trace, WORKERS, cell.tokens)
    progress.tick(f"{cell.name}: the speed")
    speed = speed_for(trace.arrivals, trace.block_tokens, spec, reference, cell.load, warm_s=warm_s)
    works = list(product(range(1, seeds + 1), wanted))
    serve = partial(served, cell.kind, options.hours, spec, speed)
    found: dict[str, Scores] = {name: Scores([], [], [], [], []) for name in wanted}
    with ProcessPoolExecutor(options.processes) as pool:
        for (seed, name), numbers in zip(works, pool.map(serve, works), strict=True):
            progress.tick(f"{cell.name}: {name}, seed {seed}")
            for column, number in zip(msgspec.structs.astuple(found[name]), numbers, strict=True):
                column.append(number)
    return found


def traffic_of(kind: str, hours: float, seed: int) -> tuple[Trace, float]:
    """A seed's arrivals, and how many of their first seconds aren't counted."""
    if kind == "agents":
        return agents(OPEN_SESSIONS, seed, hours=hours), WARM_SHARE * hours * 3_600.0
    trace = chats()
    return msgspec.structs.replace(trace, arrivals=drawn(trace.arrivals, seed)), 0.0


def drawn(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """Each arrival anywhere in its batch."""
    chance = random.Random(seed)
    moved = [
        msgspec.structs.replace(one, at=BATCH_S * (one.at // BATCH_S + chance.random()))
        for one in arrivals
    ]
    return sorted(moved, key=lambda one: one.at)


def served(
    kind: str, hours: float, spec: FleetSpec, speed: float, work: tuple[int, str]
) -> tuple[float, ...]:
    """One rule on one seed, in whatever process."""
    seed, name = work
    trace, warm_s = traffic_of(kind, hours, seed)
    made = replay(trace.arrivals, trace.block_tokens, Fleet(spec, rules()[name]()), speed=speed)
    found = measures_of(made, spec.workers, start=warm_s / speed)
    balance = found.work_max_mean_ratio
    return found.ttft.mean, found.ttft.p99, found.prefill_share, found.hit_token_ratio, balance


def standing(scores: dict[str, Scores]) -> tuple[float, ...]:
    """Of ours: whether it won both, both among the table's rules, the mean, the p99; whether none
    beats it beyond chance."""
    ours = scores[OURS]
    others = {name: one for name, one in scores.items() if name != OURS}
    means = {name: fmean(ours.mean_s) < fmean(one.mean_s) for name, one in others.items()}
    p99s = {name: fmean(ours.p99_s) < fmean(one.p99_s) for name, one in others.items()}
    unbeaten = all(
        difference - interval <= 0.0
        for one in others.values()
        for difference, interval in (
            paired(ours.mean_s, one.mean_s),
            paired(ours.p99_s, one.p99_s),
        )
    )
    mean, p99 = all(means.values()), all(p99s.values())
    of_table = all(means[name] and p99s[name] for name in others if name in POLICIES)
    return float(mean and p99), float(of_table), float(mean), float(p99), float(unbeaten)


def paired(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The mean difference, the first less the other, and half of its 95 % interval."""
    differences = [a - b for a, b in zip(ours, other, strict=True)]
    return fmean(differences), interval_of(differences)


def interval_of(values: Sequence[float]) -> float:
    count = len(values)
    if count < 2:
        return 0.0
    return float(T_95.get(count, 1.96) * statistics.stdev(values) / count**0.5)


def fmean(values: Sequence[float]) -> float:
    return float(statistics.fmean(values))


def shown(scores: dict[str, Scores]) -> str:
    """Best mean first; ± is half of the 95 % interval over the seeds. On the right how much longer each
    rule takes than ours, seed by seed, with that interval of the paired difference."""
    ordered = sorted(scores.items(), key=lambda pair: fmean(pair[1].mean_s))
    rows = [[name, *cells(one), *against(scores.get(OURS), one)] for name, one in ordered]
    head = ["rule", "mean s", "±", "p99 s", "±", "of no-cache", "hits", "busiest/mean"]
    head += ["mean - ours", "±", "p99 - ours", "±"]
    return table(rows, head=head)


def against(ours: Scores | None, one: Scores) -> Iterator[str]:
    if ours is None or one is ours:
        yield from [""] * 4
        return
    for other, own in ((one.mean_s, ours.mean_s), (one.p99_s, ours.p99_s)):
        difference, interval = paired(other, own)
        yield f"{difference:+.3f}"
        yield f"{interval:.3f}"


def cells(one: Scores) -> Iterator[str]:
    for values in (one.mean_s, one.p99_s):
        yield f"{fmean(values):.3f}"
        yield f"{interval_of(values):.3f}"
    for values in (one.prefill_share, one.hits, one.balance):
        yield f"{fmean(values):.3f}"


def figures_of(cell: Cell, scores: dict[str, Scores]) -> dict[str, float]:
    """Ours and the best of the others; for agents the shares that the issue names."""
    made: dict[str, float] = {}
    for name in ("mean_s", "p99_s"):
        by_rule = {rule: fmean(getattr(one, name)) for rule, one in scores.items()}
        others = [value for rule, value in by_rule.items() if rule != OURS]
        if OURS in by_rule and others:
            made[f"{cell.name}_{name}"] = by_rule[OURS]
            made[f"{cell.name}_{name}_best_other"] = min(others)
    if cell.kind == "agents" and OURS in scores:
        made[f"{cell.name}_prefill_share"] = fmean(scores[OURS].prefill_share)
        if (cell.tokens, cell.load) == (AGENT_TOKENS[0], AGENT_LOADS[0]):
            made["agents_prefill_share"] = fmean(scores[OURS].prefill_share)
    return made
