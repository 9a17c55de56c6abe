"""A replay's report as text: the sentence first, then its tables, then what not to conclude."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from preheat.cli.tables import text_of, text_of_trace
from preheat.core.costs import DECODING
from preheat.replay.report import (
    Answers,
    Arm,
    Balance,
    Capacity,
    Latency,
    Lever,
    Report,
    Saved,
    Settings,
    Table,
    Waits,
)
from preheat.replay.verdict import SCHEDULE_SHARE, figure, percent, rough_tokens

Cell = str | float | int | None


def told(made: Report) -> str:
    """The whole report."""
    lines = [*_subject(made), *_sums(made)]
    lines += ["", *(f"{text_of(_aligned(table))}\n" for table in _tables(made))]
    return "\n".join([*lines, *(f"- {caution}" for caution in made.cautions)])


def _subject(made: Report) -> Iterator[str]:
    if made.trace is not None:
        yield text_of_trace(made.trace)
    if made.settings is not None and made.balance is not None:
        yield _fleet(made.settings)


def _fleet(settings: Settings) -> str:
    workers = f"{settings.workers:,} simulated worker{'s' if settings.workers != 1 else ''}"
    parts = [f"On {workers} of {settings.hbm_tokens:,} tokens (--workers, --worker-tokens)"]
    if settings.dram_tokens:
        parts.append(f"a tier of {settings.dram_tokens:,}")
    is_assumed = settings.service == msgspec.structs.asdict(DECODING)
    source = "fitted to this log" if settings.service_fit else "as given"
    parts.append("an 8B model's speeds" if is_assumed else f"speeds {source}")
    if settings.answers_ttl_s:
        parts.append(f"answers kept {settings.answers_ttl_s:,.0f} s")
    return f"{', '.join(parts)}."


def _sums(made: Report) -> Iterator[str]:
    summary, saved = made.summary, made.saved
    if summary is None:
        return
    yield ""
    yield summary.sentence
    if summary.saved_gpu_s is not None and summary.saved_share is not None:
        money = summary.saved_money
        cost = f" ({money:,.2f} {made.rate.currency})" if made.rate and money is not None else ""
        is_noise = -SCHEDULE_SHARE < summary.saved_share < 0
        seconds = "≈ 0" if is_noise else figure(abs(summary.saved_gpu_s))
        is_lost = summary.saved_share < 0 and not is_noise
        yield f"{seconds} GPU-seconds{cost} {'more than before' if is_lost else 'saved'}."
    if saved is not None and saved.no_cache_gpu_s and made.trace and made.trace.block_tokens:
        before, after = saved.no_cache_gpu_s, saved.baseline_gpu_s
        yield (
            f"The engines' own prefix caches save {percent(1 - after / before)} already: "
            f"{figure(after)} GPU-seconds of prefill, not {figure(before)}."
        )
    if made.answers is not None:
        yield _answers(made.answers)
        yield from made.answers.notes
    yield from summary.notes
    if made.balance is not None:
        yield from made.balance.notes


def _answers(answers: Answers) -> str:
    at_once = answers.stored_requests + answers.joined_requests
    of = percent(at_once / max(1, answers.requests))
    tail = ""
    if answers.spared_output_tokens is not None:
        tail = f"; {rough_tokens(answers.spared_output_tokens)} output tokens not generated"
    return (
        f"The response cache answers {at_once:,} of {answers.requests:,} requests ({of}) without an "
        f"engine, {answers.stored_requests:,} from the store and {answers.joined_requests:,} with an "
        f"equal one's answer{tail}."
    )


def _tables(made: Report) -> Iterator[Table]:
    yield from made.headroom
    if made.saved is not None or made.latency is not None:
        yield _levers(made.saved, made.latency)
    if made.balance is not None:
        yield _routing(made.balance)
    if made.capacity is not None:
        yield _curves(made.capacity)
    if made.ablation is not None and made.ablation.unit == "share":
        yield Table(
            title="What each lever adds to all the others",
            columns=("lever", "of the baseline's prefill"),
            rows=tuple((one.name, percent(one.added)) for one in made.ablation.mechanisms),
        )


def _levers(saved: Saved | None, latency: Latency | None) -> Table:
    """What each saves, and how long its requests wait; either may be unknown."""
    waits = {arm.name: arm for arm in (latency.arms if latency else ())}
    levers: dict[str, Lever | None] = dict.fromkeys(waits)
    if saved is not None:
        levers[saved.baseline] = None
        together = (saved.together,) if saved.together else ()
        levers |= {one.name: one for one in (*saved.levers, *together)}
    target = f"within {latency.slo_ttft_s:g} s" if latency and latency.slo_ttft_s else "goodput"
    columns: dict[str, Callable[[str], Cell]] = {"lever": str}
    if saved is not None:
        columns["saved GPU-s"] = lambda name: _gpu_s(levers[name])
        columns["of prefill"] = lambda name: _share(
            lever.saved_share if (lever := levers[name]) else None
        )
    if latency is not None:
        columns["TTFT mean s"] = lambda name: _waits(waits[name]).mean_s
        columns["p95 s"] = lambda name: _waits(waits[name]).p95_s
        columns["p99 s"] = lambda name: _waits(waits[name]).p99_s
        columns[target] = lambda name: _share(waits[name].goodput_share)
    return _table("Levers, each alone and all together", columns, list(levers))


def _waits(arm: Arm) -> Waits:
    return arm.ttft or Waits()


def _gpu_s(lever: Lever | None) -> str | None:
    if lever is None:
        return None
    is_noise = -SCHEDULE_SHARE < lever.saved_share < 0
    return "≈ 0" if is_noise else figure(lever.saved_gpu_s)


def _share(share: float | None) -> str | None:
    return None if share is None else percent(share)


def _routing(balance: Balance) -> Table:
    rules = {one.name: one for one in balance.rules}
    columns: dict[str, Callable[[str], Cell]] = {
        "rule": str,
        "of no-cache prefill": lambda name: _share(rules[name].prefill_share),
        "token hits": lambda name: _share(rules[name].hit_token_ratio),
        "work, max / mean": lambda name: rules[name].work_max_mean_ratio,
        "TTFT mean s": lambda name: rules[name].ttft_mean_s,
        "p99 s": lambda name: rules[name].ttft_p99_s,
    }
    return _table("Routing", columns, list(rules))


def _curves(capacity: Capacity) -> Table:
    curves = {one.policy: one for one in capacity.curves}
    sizes = capacity.curves[0].capacity_tokens
    return Table(
        title="Token hit ratio of one memory for all, by its size in tokens",
        columns=("order", *map(rough_tokens, sizes), "gap closed"),
        rows=tuple(
            (name, *map(percent, one.hit_token_ratio), _share(one.gap_closed_share))
            for name, one in curves.items()
        ),
    )


def _table(title: str, columns: dict[str, Callable[[str], Cell]], names: Sequence[str]) -> Table:
    """A row for each name; columns in which nothing is known are left out."""
    cells = {column: [cell(name) for name in names] for column, cell in columns.items()}
    known = {
        column: found for column, found in cells.items() if any(cell is not None for cell in found)
    }
    return Table(title=title, columns=tuple(known), rows=tuple(zip(*known.values(), strict=True)))


def _aligned(table: Table) -> Table:
    """The same, with figures that are told as text to the right, as numbers are."""
    first, *others = zip(table.columns, *table.rows, strict=True)
    columns = [
        [cell.rjust(max(map(len, column))) for cell in column]
        if all(isinstance(cell, str) for cell in column)
        else column
        for column in others
    ]
    head, *rows = zip(first, *columns, strict=True)
    return msgspec.structs.replace(table, columns=head, rows=tuple(rows))
