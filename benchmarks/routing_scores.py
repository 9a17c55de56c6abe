"""What rules came to in the cells of `benchmarks routing`: who won, by how much, and how sure that is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import BenchmarkError, table
from preheat.core.routing import POLICIES

OURS = "preheat"
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Student's t, two-sided, by the number of seeds; for more than these the last, a little too wide."""


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


ByRule = dict[str, Scores]


class _Settings(msgspec.Struct):
    counted: dict[str, str]
    hours: float
    scores: dict[str, ByRule]


class _Part(msgspec.Struct):
    settings: _Settings


def cells_of(path: Path, counted: Mapping[str, str], hours: float) -> dict[str, ByRule]:
    """The cells of an earlier result, by name. BenchmarkError where it isn't one, or was made otherwise."""
    try:
        part = msgspec.json.decode(path.read_bytes(), type=_Part)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchmarkError(f"{path} isn't a result of this benchmark: {error}") from error
    if (part.settings.counted, part.settings.hours) != (counted, hours):
        raise BenchmarkError(f"{path} was made with other hours, or counted other requests")
    return part.settings.scores


def check_alike(cell: Cell, scores: ByRule, rules: Sequence[str], seeds: int) -> None:
    """BenchmarkError where an earlier cell has other rules or seeds than are wanted."""
    found = {len(one.mean_s) for one in scores.values()}
    if set(scores) != set(rules) or found != {seeds}:
        raise BenchmarkError(
            f"the earlier {cell.name} has rules {', '.join(scores)} with {sorted(found)} seeds, and"
            f" {', '.join(rules)} with {seeds} are wanted: give the same --rules and seeds"
        )


def counts_of(cells: Mapping[Cell, ByRule]) -> dict[str, float]:
    """How many cells of each kind ours won, where there are others beside it."""
    counts: dict[str, float] = {}
    for cell, scores in cells.items():
        if OURS not in scores or len(scores) < 2:
            continue
        prefix = "" if cell.kind == "chats" else f"{cell.kind}_"
        counts[f"{prefix}cells"] = counts.get(f"{prefix}cells", 0.0) + 1.0
        for name, one in standing(scores).items():
            key = f"{prefix}cells_{name}"
            counts[key] = counts.get(key, 0.0) + one
    return counts


def standing(scores: ByRule) -> dict[str, bool]:
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
    return {
        "won": mean and p99,
        "won_of_table": all(means[name] and p99s[name] for name in others if name in POLICIES),
        "won_mean": mean,
        "won_p99": p99,
        "unbeaten": unbeaten,
    }


def paired(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The mean difference, the first less the other, and half of its 95 % interval."""
    differences = [a - b for a, b in zip(ours, other, strict=True)]
    return fmean(differences), interval_of(differences)


def interval_of(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean; 0 for one value."""
    count = len(values)
    if count < 2:
        return 0.0
    return float(T_95[min(count, max(T_95))] * statistics.stdev(values) / count**0.5)


def fmean(values: Sequence[float]) -> float:
    return float(statistics.fmean(values))


def shown(scores: ByRule) -> str:
    """Best mean first; ± is half of the 95 % interval over the seeds. On the right how much longer each
    rule takes than ours, seed by seed, with that interval of the paired difference."""
    ordered = sorted(scores.items(), key=lambda pair: fmean(pair[1].mean_s))
    rows = [[name, *_cells(one), *_against(scores.get(OURS), one)] for name, one in ordered]
    head = ["rule", "mean s", "±", "p99 s", "±", "of no-cache", "hits", "busiest/mean"]
    head += ["mean - ours", "±", "p99 - ours", "±"]
    return table(rows, head=head)


def _against(ours: Scores | None, one: Scores) -> Iterator[str]:
    if ours is None or one is ours:
        yield from [""] * 4
        return
    for other, own in ((one.mean_s, ours.mean_s), (one.p99_s, ours.p99_s)):
        difference, interval = paired(other, own)
        yield f"{difference:+.3f}"
        yield f"{interval:.3f}"


def _cells(one: Scores) -> Iterator[str]:
    for values in (one.mean_s, one.p99_s):
        yield f"{fmean(values):.3f}"
        yield f"{interval_of(values):.3f}"
    for values in (one.prefill_share, one.hits, one.balance):
        yield f"{fmean(values):.3f}"


def figures_of(cell: Cell, scores: ByRule) -> dict[str, float]:
    """Ours and the best of the others; for agents the share that the bar is on."""
    made: dict[str, float] = {}
    for name in ("mean_s", "p99_s"):
        by_rule = {rule: fmean(getattr(one, name)) for rule, one in scores.items()}
        others = [value for rule, value in by_rule.items() if rule != OURS]
        if OURS in by_rule and others:
            made[f"{cell.name}_{name}"] = by_rule[OURS]
            made[f"{cell.name}_{name}_best_other"] = min(others)
    if cell.kind == "agents" and OURS in scores:
        made[f"{cell.name}_prefill_share"] = fmean(scores[OURS].prefill_share)
    return made
