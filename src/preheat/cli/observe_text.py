"""What an observer sees, as tables: for a terminal and for a page."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from preheat import __version__
from preheat.cli.tables import text_of
from preheat.replay import report
from preheat.traces.reading import printable

if TYPE_CHECKING:
    from preheat.lab.observe.sight import MissingSight, PrefixSight, ServerSight, Sight, WarmSight

Cell = str | float | int | None

_FEW: Final = 8
_MOST: Final = 40
_NAME: Final = 8


def told(sight: "Sight", *, is_short: bool = False) -> str:
    """All of it; short for a screen."""
    lines = [*_head(sight), ""]
    lines += [f"{text_of(table)}\n" for table in tables_of(sight, _FEW if is_short else _MOST)]
    if not is_short:
        lines += [f"- {caution}" for caution in sight.cautions]
    return "\n".join(lines).rstrip()


def report_of(sight: "Sight") -> report.Report:
    """As the page has it."""
    return report.Report(
        kind="live",
        preheat_version=__version__,
        trace=report.Trace(
            name=printable(sight.log),
            requests=sight.repeats.requests,
            span_s=_span_s(sight),
            input_tokens=sight.repeats.input_tokens,
            skipped_lines=sight.bad,
            rules=tuple(_head(sight)[1:]),
        ),
        headroom=tuple(tables_of(sight, _MOST)),
        cautions=tuple(sight.cautions),
    )


def _span_s(sight: "Sight") -> float:
    return (sight.at or 0.0) - (sight.first_at or 0.0)


def _head(sight: "Sight") -> list[str]:
    """The sums, a sentence each."""
    repeats, bad = sight.repeats, f", {sight.bad:,} bad lines" if sight.bad else ""
    lines = [
        f"{printable(sight.log)}: {repeats.requests:,} requests over {_span_s(sight):,.0f} s, "
        f"{repeats.input_tokens:,} prompt tokens{bad}"
    ]
    if repeats.input_tokens:
        share = repeats.repeated_tokens / repeats.input_tokens
        lines.append(
            f"{share:.0%} of the prompt tokens had stood at the beginning of an earlier prompt."
        )
    if repeats.told_input_tokens:
        lines.append(_found(sight))
    routing = sight.routing
    if routing is not None and routing.agreed + routing.differed:
        every = routing.agreed + routing.differed
        sooner_ms = 1_000.0 * routing.sooner_s / every
        lines.append(
            f"Preheat would have sent {routing.differed:,} of {every:,} requests elsewhere; first tokens "
            f"were then expected {abs(sooner_ms):,.1f} ms {'sooner' if sooner_ms >= 0 else 'later'}, "
            "in the mean over all."
        )
    return lines


def _found(sight: "Sight") -> str:
    repeats = sight.repeats
    asked = repeats.told_input_tokens
    line = (
        f"Where answers tell: {repeats.told_repeated_tokens / asked:.0%} repeated, "
        f"{repeats.told_cached_tokens / asked:.0%} found in a cache, "
        f"{repeats.again_tokens / asked:.0%} computed again"
    )
    if repeats.prefill_s:
        line += f" ({repeats.again_s:,.1f} of {repeats.prefill_s:,.1f} s of prefill)"
    ghost = sum(one.ghost_tokens for one in sight.servers)
    if len(sight.servers) > 1:
        line += f"; round robin would have found {ghost / asked:.0%}"
    return f"{line}."


def tables_of(sight: "Sight", most: int) -> Iterator[report.Table]:
    """Servers, hot prefixes, warm-ups."""
    yield report.Table(
        title="Servers",
        columns=(
            *("server", "state", "requests", "runs", "waits", "known", "holds tokens"),
            *("cached", "thought", "agreed", "its own count"),
        ),
        rows=tuple(_server(one) for one in sight.servers),
        verdict=" ".join(_amiss(sight)),
    )
    if sight.prefixes:
        rows = [_prefix(one) for one in sight.prefixes[:most]]
        more = len(sight.prefixes) - len(rows)
        yield report.Table(
            title="Hot prefixes (at least 3 sessions), and what warming them once more would do",
            columns=(
                *("prefix", "model", "tokens", "sessions", "uses/h", "held at", "lacked by"),
                *("used first", "costs s", "saves s", "pays"),
            ),
            rows=tuple(rows),
            verdict=f"{more} more aren't shown." if more > 0 else "",
        )
    if sight.warming is not None:
        yield _warming(sight.warming, most)


def _amiss(sight: "Sight") -> list[str]:
    """Why servers are down, or their events aren't heard; a few."""
    down = [f"{one.name} is down: {one.down_why}." for one in sight.servers if one.down_why]
    refused = [
        f"The events of {one.name} can't be heard: {one.events_refused}"
        for one in sight.servers
        if one.events_refused
    ]
    return [printable(one) for one in (down + refused)[:_FEW]]


def _server(one: "ServerSight") -> tuple[Cell, ...]:
    own = None
    if one.engine_input_tokens and one.engine_cached_tokens is not None:
        own = _percent(one.engine_cached_tokens, one.engine_input_tokens)
    return (
        printable(one.name),
        "down" if one.down_why else one.dialect,
        one.requests,
        one.running,
        one.waiting,
        one.trust,
        one.held_tokens,
        _percent(one.cached_tokens, one.input_tokens),
        _percent(one.thought_tokens, one.input_tokens),
        _percent(one.agreed, one.told),
        own,
    )


def _prefix(one: "PrefixSight") -> tuple[Cell, ...]:
    best = _best(one.missing)
    known = sum(share is not None for share in one.held.values())
    return (
        one.name[:_NAME],
        printable(one.model),
        one.tokens,
        one.sessions,
        round(one.uses_per_h, 1),
        f"{known - len(one.missing)} of {known}" if known else "?",
        printable(best.server) if best else "-",
        f"{best.chance:.0%}" if best else "-",
        round(best.spends_s, 3) if best else None,
        round(best.gains_s, 3) if best else None,
        ("yes" if best.pays else "no") if best else "-",
    )


def _best(missing: "Sequence[MissingSight]") -> "MissingSight | None":
    """Where it would be worth most."""
    return max(missing, key=lambda one: one.gains_s - one.spends_s, default=None)


def _warming(warming: "WarmSight", most: int) -> report.Table:
    totals = warming.totals
    rows = [
        (
            one.prefix[:_NAME],
            printable(one.server),
            one.outcome.state,
            one.outcome.computed_tokens,
            round(one.outcome.took_s, 3),
            one.outcome.proof.verdict if one.outcome.proof else "-",
            "not used yet" if one.saved_s is None else f"{one.saved_s:.3f}",
        )
        for one in warming.booked[-most:]
    ]
    return report.Table(
        title="Warm-ups, the last ones last",
        columns=("prefix", "server", "state", "computed", "took s", "proof", "saved s"),
        rows=tuple(rows),
        verdict=(
            f"{totals.tried} tried: {totals.proven} proven, {totals.refuted} refuted, {totals.unknown} "
            f"unknown, {totals.busy} found no idle moment, {totals.failed} failed. Spent "
            f"{totals.spent_s:.2f} s on {totals.computed_tokens:,} tokens; {totals.used} first uses saved "
            f"{totals.saved_s:.2f} s. {warming.left_tokens:,} tokens are left of this hour's."
        ),
    )


def _percent(part: int, whole: int) -> str | None:
    return f"{part / whole:.0%}" if whole else None
