"""Tables of restarts, deploys, machines that join, and peaks: seconds of prefill, and waits."""

from collections.abc import Generator, Iterator, Mapping
from typing import Final

from preheat.replay import report
from preheat.replay.headroom.finding import Finding
from preheat.replay.headroom.ladder import LEVERS, NOTHING, OURS, OURS_SSD, legend
from preheat.replay.headroom.outcomes import KEPT, Outcome, outcomes
from preheat.replay.headroom.pauses import DAY_S
from preheat.replay.headroom.wanted import Progress, Wanted
from preheat.replay.report import Table
from preheat.traces.arrival import Trace

EVENTS_A_DAY: Final = (1, 20)
TIMES_KEPT: Final = "times, 5 min"
WHOLE_TIMES_KEPT: Final = "times, end"
SHOWN: Final[Mapping[str, Mapping[str, str]]] = {
    "steady": {KEPT: "steady state", NOTHING: "nothing done"},
    "loss": {KEPT: "no restart", NOTHING: "memory lost"},
    "join": {KEPT: "nobody joins", NOTHING: "it joins empty"},
    "peak": {KEPT: "the peak, not warmed for", NOTHING: "nothing done"},
}
"""What the command calls the two ends of the ladder, by the event's kind."""
_DRAWN: Final[Mapping[str, report.Role]] = {
    KEPT: "bound",
    NOTHING: "baseline",
    OURS: "ours",
    OURS_SSD: "ours",
    "snapshot from SSD": "other",
    "decayed frequency, computed": "other",
    "clairvoyant, computed": "bound",
}
"""The arms that have a line on the page, and how it is drawn: more would hide each other."""
_FELT: Final = 0.01
"""A p95 that much longer is told, however few GPU-seconds it is."""


def event_part(
    trace: Trace, wanted: Wanted, progress: Progress
) -> Generator[Table | report.Event, None, tuple[Finding, ...]]:
    """Every event's two tables in words for whom the study is new, the minutes after it, who offers
    the arms, and what deploys come to."""
    findings = []
    for outcome in outcomes(trace, wanted, progress):
        yield from tables_of(outcome, SHOWN[outcome.event.kind], wanted.off_peak_price)
        yield curves_of(outcome, SHOWN[outcome.event.kind])
        if OURS in outcome.by_arm and outcome.event.name in ("one restarts", "rolling deploy"):
            findings.append(_finding(outcome))
    yield legend("Events", LEVERS)
    return tuple(findings)


def aftermaths(trace: Trace, wanted: Wanted, progress: Progress) -> Iterator[Table]:
    """The same tables, whose rows have the names of the ladder's arms."""
    for outcome in outcomes(trace, wanted, progress):
        yield from tables_of(outcome, {}, wanted.off_peak_price)


def tables_of(
    outcome: Outcome, shown: Mapping[str, str], off_peak_price: float
) -> tuple[Table, Table]:
    """Its seconds and its waits. `shown`: arms' names that are told otherwise."""
    return _seconds_table(outcome, shown, off_peak_price), _waits_table(outcome, shown)


def curves_of(outcome: Outcome, shown: Mapping[str, str]) -> report.Event:
    """The minutes around it, as the page draws them."""
    arms = []
    for arm, role in _DRAWN.items():
        curve = outcome.curve(arm) if arm in outcome.by_arm else []
        if curve:
            minutes, waits, hits = zip(*curve, strict=True)
            name = shown.get(arm, arm)
            arms.append(
                report.EventArm(
                    name=name, role=role, minute=minutes, ttft_p95_s=waits, hit_token_ratio=hits
                )
            )
    return report.Event(
        name=f"{outcome.event.name}: {outcome.fleet}",
        note=f"At load {outcome.loads[-1]:g}; of the switch times the median.",
        arms=tuple(arms),
    )


def _seconds_table(outcome: Outcome, shown: Mapping[str, str], off_peak_price: float) -> Table:
    lost_nothing, _ = outcome.seconds(NOTHING)
    rows = []
    for arm in outcome.by_arm:
        lost, spent = outcome.seconds(arm)
        percents = [100 * lost * times / max(1e-9, outcome.day_s) for times in EVENTS_A_DAY]
        payback = (lost_nothing - lost) / spent if spent else None
        is_arm = arm != KEPT
        nets = (outcome.net_s(arm, price) if is_arm else None for price in (1.0, off_peak_price))
        rows.append((shown.get(arm, arm), lost, spent, payback, *nets, *percents))
    is_short = outcome.span_s < DAY_S
    mark = "*" if is_short else ""
    note = (
        f"GPU-seconds of prefill lost and spent an event, at load {outcome.loads[0]:g}; and percent of a"
        " day's prefill lost with so many events a day. Payback: seconds saved for each one spent before."
        " Net: saved - price x spent, at the equal price 1 and off-peak, where a second spent before costs"
        f" {off_peak_price:g} of one later. No engine has every arm's lever: the last of these tables says which."
    )
    if is_short:
        note += f" * Extrapolated: the trace is {outcome.span_s / 3600.0:.1f} hours long."
    return Table(
        title=f"Seconds, {outcome.event.name}: {outcome.fleet}",
        note=note,
        columns=(
            "arm",
            "lost s",
            "spent s",
            "payback",
            "net s",
            f"net at {off_peak_price:g}",
            *(f"%, {times} a day{mark}" for times in EVENTS_A_DAY),
        ),
        rows=tuple(rows),
    )


def _waits_table(outcome: Outcome, shown: Mapping[str, str]) -> Table:
    rows = [
        (
            shown.get(arm, arm),
            outcome.typical_s(arm, 60.0),
            outcome.typical_s(arm, 300.0, "p50"),
            outcome.typical_s(arm, 300.0),
            outcome.typical_s(arm, 300.0, "p99"),
            outcome.times_kept(arm, 300.0),
            outcome.typical_s(arm, None),
            outcome.times_kept(arm, None),
        )
        for arm in outcome.by_arm
    ]
    return Table(
        title=f"{outcome.event.name}: {outcome.fleet}, TTFT",
        note=(
            f"At load {outcome.loads[-1]:g}, in seconds, of requests that came in the first minute, in five"
            " minutes, and to the end: five minutes after the last worker. Of the switch times' percentiles"
            f" the median; times: p95 by that of `{shown.get(KEPT, KEPT)}`, the geometric mean."
        ),
        columns=(
            "arm",
            "1 min p95",
            "5 min p50",
            "p95",
            "p99",
            TIMES_KEPT,
            "end p95",
            WHOLE_TIMES_KEPT,
        ),
        rows=tuple(rows),
    )


def _finding(outcome: Outcome) -> Finding:
    share = outcome.net_s(OURS) / max(1e-9, outcome.day_s)
    waits = [outcome.times_kept(arm, None) for arm in (NOTHING, OURS)]
    empty, ours = (f"{one:.2f} x" if one is not None else "unknown" for one in waits)
    numbers = (
        f"{outcome.event.name}, {outcome.fleet}, one a day: at load {outcome.loads[-1]:g} p95 TTFT"
        f" {empty} as long as without restarts, with ours {ours}; at load {outcome.loads[0]:g}"
        f" {outcome.seconds(NOTHING)[0]:,.0f} GPU-seconds a day lost, with ours"
        f" {outcome.seconds(OURS)[0]:,.0f}"
    )
    is_felt = waits[0] is not None and waits[0] > 1 + _FELT
    return Finding("events", share, numbers, is_felt=is_felt)
