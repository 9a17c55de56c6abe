"""A service model from what a request log says of an engine: how long, for how many tokens.

Requests share an engine's steps, so a request's seconds aren't for its own tokens alone. What the
engine did when is reconstructed first (`timeline`). Then each request gives two equations: the
seconds to its first token, and from there to its last, are what was done meanwhile times the
prices, found by least squares without negatives. A few rounds settle both. An equation's weight is
one over its expected time, so that slow moments count by their share and the totals stay true. An
answer that came in one piece, streamed or not, doesn't tell when its first token came: it is only
counted as work that was done beside the others.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from preheat.core.costs import (
    Errors,
    ServiceModel,
    Timing,
    cost_s,
    decode_row,
    model_of,
    prefill_row,
)
from preheat.core.least_squares import NonNegative
from preheat.errors import ConfigError
from preheat.replay.timeline import NOTHING, Busy, Equation, Served, Timeline
from preheat.traces.own_log import columns_of
from preheat.traces.reading import sources_of

__all__ = ["Fitted", "Served", "fit", "fit_points", "fit_times", "served_in", "served_of"]

_LEAST_ROWS: Final = 10
_LEAST_JUDGED: Final = 15
_FITTED_SHARE: Final = 2 / 3
_MOST_ROWS: Final = 4_000
"""More don't make five prices better, and older ones tell of the engine as it was."""
_LEAST_S: Final = 1e-3
_ROUNDS: Final = 6
_SLOWDOWNS: Final = tuple(0.05 * step for step in range(17))
"""What is tried: up to 1.8 times as long where another works."""


class LogRow(Protocol):
    """A row of our own request log (`preheat.traces.own.Logged`)."""

    @property
    def at_us(self) -> int: ...
    @property
    def layer(self) -> str: ...
    @property
    def fields(self) -> dict[str, Any]: ...


def served_of(rows: Iterable[LogRow]) -> list[Served]:
    """The answers of engines among these rows, whose times and tokens are all known. The log has a
    `ttft_s` of those that weren't streamed, too: their head's."""
    served = []
    for row in rows:
        about = row.fields
        told = [about[name] for name in ("ttft_s", "service_s", "input_tokens", "output_tokens")]
        if row.layer == "forward" and about["status"] == 200 and None not in told:
            ttft_s, service_s, input_tokens, output_tokens = told
            served.append(
                Served(
                    about["engine_worker"] or "",
                    row.at_us / 1e6,
                    ttft_s if about["stream"] else None,
                    service_s,
                    input_tokens,
                    about["cached_tokens"] or 0,
                    output_tokens,
                    about["cached_tokens"] is not None,
                )
            )
    return served


_COLUMNS: Final = (
    *("layer", "stream", "status", "engine_worker", "ttft_s", "service_s"),
    *("input_tokens", "cached_tokens", "output_tokens"),
)


class _Row(NamedTuple):
    at_us: int
    layer: str
    fields: dict[str, Any]


def served_in(paths: Sequence[Path]) -> list[Served]:
    """The same of request logs, files or folders that hold them; of nothing but the columns that
    are needed. Needs the extra `log`."""
    found = columns_of(sources_of(paths), _COLUMNS)
    return served_of(_Row(at_us, row["layer"], row) for at_us, row in found)


class Fitted(msgspec.Struct, frozen=True):
    """The model, how well it tells the times it was made of, and how many requests those were.

    `slowdown` is by what share a step takes longer for each other worker that works meanwhile, if
    all are on one host. Of `untold` of them nobody said what was cached: they count as computed
    whole, and if they weren't, a token comes out too cheap.
    """

    model: ServiceModel
    ttft: Errors
    decode: Errors
    requests: int
    slowdown: float = 0.0
    untold: int = 0

    def __str__(self) -> str:
        lines = [f"{self.requests} requests; error as a share, p50 / p90 / p99"]
        if self.slowdown:
            lines[0] = f"a step takes {self.slowdown:.0%} longer beside another; {lines[0]}"
        if self.untold:
            lines.append(
                f"{self.untold} of them don't say what was cached (vLLM: --enable-prompt-tokens-details): "
                "if anything was, a token costs more than is told here"
            )
        for name, errors in (("first token", self.ttft), ("decoding", self.decode)):
            told = f"{errors.p50:.3f} / {errors.p90:.3f} / {errors.p99:.3f}"
            lines.append(f"{name}: {told if errors.count else 'no answer is longer than a token'}")
        return "\n".join(lines)


def fit(served: Sequence[Served], *, batch_tokens: int = 0, is_one_host: bool = False) -> Fitted:
    """The prices that tell these requests' times best. `batch_tokens` is into what pieces the
    engine cuts a prompt; 0: it doesn't. Workers of one host share its memory, and may slow each
    other: by how much is fitted, too. Raises ConfigError for fewer than ten streamed answers."""
    _check_enough(len(_streamed(served)))
    crowds = _crowds(served)
    tried = _SLOWDOWNS if is_one_host and len(crowds) > 1 else (0.0,)
    return min(
        (_fit(crowds, batch_tokens, slowdown) for slowdown in tried), key=lambda one: one[0]
    )[1]


def fit_times(served: Sequence[Served], *, batch_tokens: int = 0) -> Fitted:
    """`fit` of a log's newest requests, with errors that it hasn't seen: those of a fit to the first
    two thirds, on the last one. Raises ConfigError for fewer than 15 streamed answers, and where
    times don't tell what a prompt's token costs."""
    rows = sorted(served, key=lambda one: one.asked_at)[-_MOST_ROWS:]
    streamed = _streamed(rows)
    _check_enough(len(streamed), _LEAST_JUDGED)
    since = streamed[round(_FITTED_SHARE * len(streamed))].asked_at
    before = fit([one for one in rows if one.asked_at < since], batch_tokens=batch_tokens).model
    made = fit(rows, batch_tokens=batch_tokens)
    _check_tokens_count(streamed, made)
    firsts, rests = _equations(_crowds(rows), _prices_of(before), batch_tokens, since=since)
    return msgspec.structs.replace(
        made, ttft=_errors(firsts, _prices_of(before)), decode=_errors(rests, _prices_of(before))
    )


def _streamed(served: Sequence[Served]) -> list[Served]:
    """Those that tell when their first token came."""
    return [one for one in served if one.first_s is not None]


def _check_tokens_count(rows: Sequence[Served], made: Fitted) -> None:
    """Whether the model knows more of first tokens than their median, and has a price of a token."""
    lengths = {one.new_tokens for one in rows}
    firsts_s = [one.first_s for one in rows if one.first_s is not None]
    middle_s = median(firsts_s)
    plain = Errors.of([abs(middle_s - first_s) / max(_LEAST_S, first_s) for first_s in firsts_s])
    is_free = made.model.token_s == made.model.attention_s == 0.0
    if len(lengths) == 1 or is_free or made.ttft.p50 >= plain.p50:
        raise ConfigError(
            f"the times to the first token don't grow with what was computed for it (of {len(rows)} "
            f"requests, {min(lengths):,} to {max(lengths):,} tokens): what a token costs can't be told. "
            "Take a log with prompts of other lengths"
        )


def _crowds(served: Iterable[Served]) -> dict[str, list[Served]]:
    crowds: defaultdict[str, list[Served]] = defaultdict(list)
    for one in served:
        crowds[one.worker].append(one)
    return crowds


def _equations(
    crowds: Mapping[str, Sequence[Served]],
    prices: Sequence[float],
    batch_tokens: int,
    slowdown: float = 0.0,
    since: float = -inf,
) -> tuple[list[Equation], list[Equation]]:
    """Of first tokens and of answers, of all workers, for those who asked from then on."""
    busy = {name: Busy(crowd) for name, crowd in crowds.items()} if slowdown else {}
    firsts: list[Equation] = []
    rests: list[Equation] = []
    for name, crowd in crowds.items():
        others = [one for other, one in busy.items() if other != name]
        timeline = Timeline(crowd, prices, batch_tokens, others=others, slowdown=slowdown)
        timeline.tell(firsts, rests, since=since)
    return firsts, rests


def _fit(
    crowds: Mapping[str, Sequence[Served]], batch_tokens: int, slowdown: float
) -> tuple[float, Fitted]:
    """What is left unexplained, and the fit."""
    prices: tuple[float, ...] = NOTHING
    for _ in range(_ROUNDS):
        firsts, rests = _equations(crowds, prices, batch_tokens, slowdown)
        prices = _prices([*firsts, *rests], prices)
    left = sum(
        (cost_s(row, prices) - took_s) ** 2 / max(_LEAST_S, took_s)
        for row, took_s in (*firsts, *rests)
    )
    errors = _errors(firsts, prices), _errors(rests, prices)
    streamed = [one for crowd in crowds.values() for one in _streamed(crowd)]
    untold = sum(not one.tells_cached for one in streamed)
    return left, Fitted(model_of(prices), *errors, len(streamed), slowdown, untold)


def fit_points(points: Sequence[Timing]) -> Fitted:
    """The same from points that were measured one by one, as a profile of an engine has them.
    Raises ConfigError for fewer than ten."""
    _check_enough(len(points))
    firsts: list[Equation] = []
    rests: list[Equation] = []
    for one in points:
        if one.ttft_s is None:
            continue  # it came in one piece
        row = prefill_row(one.new_tokens, one.context_tokens, one.steps)
        firsts.append((row, one.ttft_s))
        if one.output_tokens > 1:
            context = one.new_tokens + one.context_tokens + 1
            row = decode_row(one.output_tokens - 1, context, one.sequences)
            rests.append((row, one.service_s - one.ttft_s))
    prices: tuple[float, ...] = NOTHING
    for _ in range(2):
        prices = _prices([*firsts, *rests], prices)
    return Fitted(model_of(prices), _errors(firsts, prices), _errors(rests, prices), len(points))


def _check_enough(count: int, least: int = _LEAST_ROWS) -> None:
    if count < least:
        raise ConfigError(
            f"a service model needs at least {least} answered requests that were streamed, with their "
            f"times, here are {count}; take a longer log"
        )


def _prices(rows: Sequence[Equation], before: Sequence[float]) -> tuple[float, ...]:
    least_squares = NonNegative(len(NOTHING))
    for row, took_s in rows:
        expected_s = cost_s(row, before) or took_s
        least_squares.add(row, took_s, 1.0 / max(_LEAST_S, expected_s))
    return least_squares.solution()


def _prices_of(model: ServiceModel) -> tuple[float, ...]:
    """In a row's order."""
    return model.step_s, model.token_s, model.attention_s, model.sequence_s, model.context_s


def _errors(rows: Sequence[Equation], prices: Sequence[float]) -> Errors:
    shares = [abs(cost_s(row, prices) - took_s) / max(_LEAST_S, took_s) for row, took_s in rows]
    return Errors.of(shares) if shares else Errors(0, 0.0, 0.0, 0.0)
