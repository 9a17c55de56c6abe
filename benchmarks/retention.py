"""How much of the room between LRU and Belady's MIN each order of leaving wins, on four traces.

Chosen on the first half of time, reported on the second. Share: Σ(hits - LRU) / Σ(Belady - LRU) over
the capacities with at least two points of room; bootstrap over blocks of two minutes. Prefix-closed
pool of full blocks of one size, leaves only, the current request pinned, and whatever is asked for
comes in. Hits are blocks of the longest cached prefix. Weka's sessions begin evenly over a day
(seed 0); what J may know of a request, and the other policies' variants, are chosen per trace by the
share on the second quarter after the first.

Beside it: `ordered` and `touched`, what can be won where the engine keeps its LRU; one row for each set
of facts J may know; and on Weka `held`, the same where running requests hold their blocks. `touched`
takes many touches a request: it bounds what touching could win and is no proposal. A ratio to a
share below 0.01 is taken to 0.01.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.report import Progress, Result, table
from benchmarks.retention_runs import Cells, Floats, Task, begin
from benchmarks.retention_runs import run as run_task
from benchmarks.retention_streams import SOURCES, load

LEAST_ROOM = 0.02
RESAMPLES = 2_000
LEAST_SHARE = 0.01
"""A ratio to less than this is taken to this: LRU's own share is nothing."""

LEVELS = (1, 4)
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "lfu": [{}],
    "lfu_da": [{}],
    "s3fifo": [{}, {"promote_at": 1}, {"promote_at": 1, "small_share": 0.25}],
    "sieve": [{}],
    "wtinylfu": [{}, {"window_share": 0.2}, {"window_share": 0.5}],
    "gdsf": [{}, {"cost": "depth"}],
    "lhd": [{}, {"explore_share": 0.0}],
    "lecar": [{}],
    "t_lru": [{}, {"target_tokens": 4_096}, {"target_tokens": 16_384}],
    "lfu_plus": [{}],
    "semantic_lru": [{}],
}
AGENTS_TRACES = ("v6", "v8")
HELD = ("lru", "belady", "j")
SEEDS = ("lfu_plus", "semantic_lru")
SLOW_ON_AGENTS = ("s3fifo", "wtinylfu", "gdsf")
"""Their variants aren't tried on Weka: they lose several times the room there, and take an hour."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument(
        "--policies",
        nargs="+",
        default=[name for name in VARIANTS if name not in SEEDS],
        choices=list(VARIANTS),
    )
    parser.add_argument("--seed", type=int, default=0, help="of Weka's calendar")
    parser.add_argument("--processes", type=int, default=2)


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    with ProcessPoolExecutor(
        options.processes, initializer=begin, initargs=(options.seed,)
    ) as pool:

        def run_all(tasks: Iterable[Task]) -> list[Cells]:
            done = []
            for cells in pool.map(run_task, tasks):
                progress.say(f"{cells.task.trace}: {cells.task}")
                done.append(cells)
            return done

        traces = []
        figures: dict[str, float] = {}
        for name in options.traces:
            traces.append(_Trace(name, options.seed, options.policies, run_all))
            traces[-1].tell()
            figures |= traces[-1].figures()
    figures |= _pooled(traces)
    return Result(
        figures,
        {
            "rules": {trace.name: trace.rules for trace in traces},
            "chosen": {trace.name: trace.chosen_as_text() for trace in traces},
            "shares": {trace.name: trace.shares() for trace in traces},
            "hit_percent": {trace.name: trace.percents() for trace in traces},
            "touches": {trace.name: trace.touches for trace in traces},
        },
    )


def _share(found: Floats, lru: Floats, most: Floats, roomy: npt.NDArray[np.bool_]) -> float:
    """Of sums by capacity."""
    room = float((most - lru)[roomy].sum())
    return float((found - lru)[roomy].sum()) / room if room > 0 else 0.0


class _Trace:
    """One trace's choices on the first half and results on the second."""

    def __init__(
        self,
        name: str,
        seed: int,
        policies: Sequence[str],
        run_all: Callable[[Iterable[Task]], list[Cells]],
    ) -> None:
        self.name = name
        stream = load(name, seed)
        self.rules = stream.rules
        self.capacities = stream.capacities
        self.shares_of_distinct = stream.source.shares
        facts = [
            {"facts": facts, "levels": levels} for facts in stream.source.facts for levels in LEVELS
        ]
        self.choice = self._choose(policies, facts, run_all)
        best = {
            policy: max(tried, key=lambda one: one[0])[1] for policy, tried in self.choice.items()
        }
        self.chosen = best
        names = ["asked", "lru", "belady"]
        tasks = [Task(name, policy, {}, is_choice=False) for policy in names]
        tasks += [Task(name, policy, best[policy], is_choice=False) for policy in policies]
        tasks += [Task(name, "j", options, is_choice=False) for options in facts]
        tasks += [Task(name, "ordered", {}, is_choice=False)]
        tasks += [Task(name, "touched", best["j"], is_choice=False)]
        done = run_all(tasks)
        self.held = self._held(run_all, best["j"]["levels"]) if name in AGENTS_TRACES else []
        self.asked, self.lru, self.belady = (cells.found for cells in done[:3])
        self.others = {cells.task.policy: cells.found for cells in done[3 : 3 + len(policies)]}
        self.ablation = {str(cells.task): cells.found for cells in done if cells.task.policy == "j"}
        self.j = self.ablation[str(Task(name, "j", best["j"], is_choice=False))]
        self.levers = {cells.task.policy: cells.found for cells in done[-2:]}
        self.touches = done[-1].extra
        room = (self.belady - self.lru).sum(1) / self.asked.sum(1)
        self.roomy = room >= LEAST_ROOM
        self.best_other = max(
            {"lru": self.lru, **self.others}.items(), key=lambda item: self.share(item[1])
        )[0]

    def _choose(
        self,
        policies: Sequence[str],
        facts: list[dict[str, Any]],
        run_all: Callable[[Iterable[Task]], list[Cells]],
    ) -> dict[str, list[tuple[float, dict[str, Any]]]]:
        """The share of every variant on the second quarter of time."""
        is_slow = self.name in AGENTS_TRACES
        variants = {
            policy: VARIANTS[policy][: 1 if is_slow and policy in SLOW_ON_AGENTS else None]
            for policy in policies
        } | {"j": facts}
        tasks = [
            Task(self.name, policy, {}, is_choice=True) for policy in ("asked", "lru", "belady")
        ]
        tasks += [
            Task(self.name, policy, options, is_choice=True)
            for policy, tried in variants.items()
            for options in tried
            if len(tried) > 1
        ]
        done = run_all(tasks)
        asked, lru, most = (cells.found.sum(1) for cells in done[:3])
        roomy = (most - lru) / asked >= LEAST_ROOM
        choice: dict[str, list[tuple[float, dict[str, Any]]]] = {
            policy: [(0.0, tried[0])] for policy, tried in variants.items() if len(tried) == 1
        }
        for cells in done[3:]:
            found = _share(cells.found.sum(1), lru, most, roomy)
            choice.setdefault(cells.task.policy, []).append((found, cells.task.options))
        return choice

    def _held(self, run_all: Callable[[Iterable[Task]], list[Cells]], levels: int) -> list[Floats]:
        """LRU, Belady and J where running requests hold their blocks."""
        return [
            cells.found
            for cells in run_all(
                Task(self.name, "held", {"order": order, "levels": levels}, is_choice=False)
                for order in HELD
            )
        ]

    def held_share(self) -> float:
        lru, belady, j = (found.sum(1) for found in self.held)
        return _share(j, lru, belady, (belady - lru) / self.asked.sum(1) >= LEAST_ROOM)

    def share(self, found: Floats) -> float:
        return _share(found.sum(1), self.lru.sum(1), self.belady.sum(1), self.roomy)

    def everything(self) -> dict[str, Floats]:
        return {"lru": self.lru, "belady": self.belady, "j": self.j, **self.others, **self.levers}

    def shares(self) -> dict[str, float]:
        rows = {name: self.share(found) for name, found in self.everything().items()}
        return rows | {name: self.share(found) for name, found in self.ablation.items()}

    def percents(self) -> dict[str, list[float]]:
        asked = self.asked.sum(1)
        return {
            name: [round(float(x), 3) for x in 100 * found.sum(1) / asked]
            for name, found in (self.everything() | self.ablation).items()
        }

    def chosen_as_text(self) -> dict[str, str]:
        return {
            policy: str(Task("", policy, options, is_choice=True))
            for policy, options in self.chosen.items()
        }

    def resampled(self, found: Floats) -> Floats:
        """The share in `RESAMPLES` draws of two-minute blocks; the same draws for everyone."""
        chance = np.random.default_rng(0)
        blocks = found.shape[1]
        weights = chance.multinomial(blocks, np.full(blocks, 1 / blocks), RESAMPLES)
        gained = (found - self.lru)[self.roomy].sum(0)
        room = (self.belady - self.lru)[self.roomy].sum(0)
        return (weights @ gained) / (weights @ room)

    def figures(self) -> dict[str, float]:
        j, best = self.resampled(self.j), self.resampled(self._best())
        low, high = np.quantile(j - best, (0.025, 0.975))
        held = {f"{self.name}_held_j_share": self.held_share()} if self.held else {}
        return held | {
            f"{self.name}_j_share": self.share(self.j),
            f"{self.name}_best_other_share": self.share(self._best()),
            f"{self.name}_j_minus_best_low": float(low),
            f"{self.name}_j_minus_best_high": float(high),
        }

    def _best(self) -> Floats:
        return self.others.get(self.best_other, self.lru)

    def tell(self) -> None:
        head = [self.name, *(f"{share:.2%}" for share in self.shares_of_distinct), "share", "95 %"]
        asked = self.asked.sum(1)
        rows = []
        for name, found in (self.everything() | self.ablation).items():
            low, high = np.quantile(self.resampled(found), (0.025, 0.975))
            percents = [f"{100 * x:.2f}" for x in found.sum(1) / asked]
            rows.append([name, *percents, f"{self.share(found):.3f}", f"{low:.3f} to {high:.3f}"])
        for order, found in zip(HELD, self.held, strict=False):
            percents = [f"{100 * x:.2f}" for x in found.sum(1) / asked]
            rows.append([f"held: {order}", *percents, "", ""])
        rows.append(["capacity, blocks", *map(str, self.capacities), "", ""])
        rows.append(["counted", *("yes" if roomy else "no" for roomy in self.roomy), "", ""])
        print(table(rows, head=head), "\n", flush=True)
        print(f"chosen on the first half: {self.chosen_as_text()}")
        for policy, tried in self.choice.items():
            if len(tried) > 1:
                said = (
                    f"{Task('', policy, options, is_choice=True)} {share:.3f}"
                    for share, options in tried
                )
                print("  " + "; ".join(said))
        print(f"touches of the J-touched LRU, all capacities: {self.touches:,}\n")


def _pooled(traces: Sequence[_Trace]) -> dict[str, float]:
    """Over traces: in blocks, and with each trace's hits in points of what it asked for."""
    figures = {}
    for name, is_points in (("", False), ("_points", True)):
        scale = [1.0 / trace.asked.sum(1)[0] if is_points else 1.0 for trace in traces]
        room = sum(
            by * float((trace.belady - trace.lru)[trace.roomy].sum())
            for by, trace in zip(scale, traces, strict=True)
        )

        def share(policy: str, scale: Sequence[float] = scale, room: float = room) -> float:
            return (
                sum(
                    by * float((trace.everything()[policy] - trace.lru)[trace.roomy].sum())
                    for by, trace in zip(scale, traces, strict=True)
                )
                / room
            )

        j = share("j")
        others = {policy: share(policy) for policy in ("lru", *traces[0].others)}
        best = max(others.values())
        figures |= {
            f"pooled_j_share{name}": j,
            f"pooled_best_other_share{name}": best,
            f"gap_share_ratio{name}": j / max(best, LEAST_SHARE),
        }
        print(f"pooled{name}: j {j:.3f}; " + "; ".join(f"{k} {v:.3f}" for k, v in others.items()))
    return figures
