"""What `preheat load` prints for people."""

from collections.abc import Iterator
from typing import Final

from preheat.core.spread import Spread
from preheat.lab.load.pairs import Estimate, Paired, PairedSummary, Window
from preheat.lab.load.summary import Summary

_LABEL: Final = 26


def table(summary: Summary) -> str:
    """The report of one run."""
    lines = [
        f"requests   {summary.requests} due in {summary.duration_s:.1f} s, {summary.sent} sent, "
        f"{summary.answered} answered ({summary.answers_per_s:.1f}/s)",
        f"good       {summary.good} ({summary.goodput_share:.1%}, {summary.goodput_per_s:.1f}/s)",
        f"tokens     {summary.input_tokens} input ({summary.cached_tokens} cached), "
        f"{summary.output_tokens} output ({summary.output_tokens_per_s:.1f}/s)",
        *_counts("errors", summary.errors | _some("unsent", summary.unsent)),
        *_counts("", _some("cut by the interruption", summary.cut)),
        *_counts("from", summary.layers),
        *_counts("detail", summary.details),
        "",
        f"{'seconds':<10} {'mean':>9} {'p50':>9} {'p90':>9} {'p95':>9} {'p99':>9} {'most':>9}",
        _row("TTFT", summary.ttft_s),
        _row("E2E", summary.e2e_s),
        _row("TPOT", summary.tpot_s),
        _row("late", summary.late_s),
    ]
    for one in summary.commands:
        how = "was ended" if one.exit_code is None else f"exit code {one.exit_code}"
        lines.append(f"at {one.at_s:g} s ran {one.command!r}: {how} after {one.took_s:.1f} s")
    lines += [f"warning: {warning}" for warning in summary.warnings]
    return "\n".join(lines)


def _some(word: str, count: int) -> dict[str, int]:
    return {word: count} if count else {}


def _counts(name: str, counts: dict[str, int]) -> list[str]:
    if not counts:
        return []
    return [f"{name:<10} " + ", ".join(f"{word} {count}" for word, count in counts.items())]


def _row(name: str, spread: Spread) -> str:
    numbers = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.most)
    return f"{name:<10} " + " ".join(
        f"{'-':>9}" if number is None else f"{number:>9.4f}" for number in numbers
    )


def paired_table(report: PairedSummary) -> str:
    """The reports of both runs, and what they tell together."""
    parts = [f"Warm run\n{table(report.warm)}"]
    if report.cold is not None:
        parts.append(f"With cold starts\n{table(report.cold)}")
    if report.paired is not None:
        parts.append("\n".join(_paired(report.paired)))
    return "\n\n".join([*parts, *(f"warning: {warning}" for warning in report.warnings)])


def _paired(paired: Paired) -> Iterator[str]:
    yield "TTFT of each request with cold starts, less that in the warm run, in seconds (95 % interval)"
    yield (
        f"{'':<{_LABEL}} {'pairs':>6} {'warm p95':>9} {'cold p95':>9}"
        f" {'median':>25} {'mean':>25} {'p95':>25}"
    )
    yield _window("before the first", paired.before)
    yield _window("from the first on", paired.after)
    for one in paired.cold_starts:
        yield f"at {one.at_s:g} s: {'; '.join(one.commands)}"
        for number, minute in enumerate(one.minutes, 1):
            yield _window(f"  minute {number}", minute)
        if one.later is not None:
            yield _window("  later", one.later)


def _window(label: str, window: Window) -> str:
    lost = window.warm_only + window.cold_only
    return (
        f"{label:<{_LABEL}} {window.pairs:>6} {_seconds(window.warm_ttft_s.p95)}"
        f" {_seconds(window.cold_ttft_s.p95)} {_estimate(window.median_s)}"
        f" {_estimate(window.mean_s)} {_estimate(window.p95_s)}"
        + (f"  {lost} answered in one run only" if lost else "")
    )


def _seconds(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:>9.4f}"


def _estimate(one: Estimate) -> str:
    if one.value is None:
        return f"{'-':>25}"
    told = f"{one.value:.3f}"
    if one.low is not None:
        told += f" ({one.low:.3f} to {one.high:.3f})"
    return f"{told:>25}"
