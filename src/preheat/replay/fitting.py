"""A service model from what a request log says of an engine: how long, for how many tokens.

Requests share an engine's steps, so a request's seconds aren't for its own tokens alone. What the
engine did when is reconstructed first. Between any two moments at which a request came, had its
first token or its last, it is known who waited for a prompt and who decoded: prompts are computed
one after the other, in the order of their first tokens, and all who decode get a token each step.
So each request's tokens are spread over its spans of time, by how many steps a span had at the
present prices. Then each request gives two equations: the seconds to its first token, and from there
to its last, are what was done meanwhile times the prices, found by least squares without
negatives. A few rounds settle both. An equation's weight is one over its expected time, so that
slow moments count by their share and the totals stay true.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, Protocol

import msgspec

from preheat.core.costs import (
    Errors,
    Row,
    ServiceModel,
    Timing,
    cost_s,
    decode_row,
    model_of,
    pairs,
    prefill_row,
)
from preheat.core.least_squares import NonNegative
from preheat.errors import ConfigError

_LEAST_ROWS: Final = 10
_LEAST_S: Final = 1e-3
_ROUNDS: Final = 6
_NOTHING: Final[Row] = (0.0, 0.0, 0.0, 0.0, 0.0)

Equation = tuple[Row, float]
"""What was done in a window of time, and how long that is."""


class Served(msgspec.Struct, frozen=True, gc=False):
    """One request that an engine answered, streamed: when it was asked (seconds), what it said."""

    worker: str
    asked_at: float
    ttft_s: float
    service_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def first_at(self) -> float:
        """When its first token came."""
        return self.asked_at + self.ttft_s

    @property
    def ended_at(self) -> float:
        """When its last one did."""
        return self.asked_at + self.service_s

    @property
    def new_tokens(self) -> int:
        """What was computed of its prompt."""
        return self.input_tokens - self.cached_tokens


class LogRow(Protocol):
    """A row of our own request log (`preheat.traces.own.Logged`)."""

    @property
    def at_us(self) -> int: ...
    @property
    def layer(self) -> str: ...
    @property
    def fields(self) -> dict[str, Any]: ...


def served_of(rows: Iterable[LogRow]) -> list[Served]:
    """The streamed answers of engines among these rows, whose times and tokens are all known."""
    served = []
    for row in rows:
        about = row.fields
        told = [about[name] for name in ("ttft_s", "service_s", "input_tokens", "output_tokens")]
        is_answer = row.layer == "forward" and about["stream"] and about["status"] == 200
        if is_answer and None not in told:
            ttft_s, service_s, input_tokens, output_tokens = told
            served.append(
                Served(
                    about["engine_worker"] or "",
                    row.at_us / 1e6,
                    ttft_s,
                    service_s,
                    input_tokens,
                    about["cached_tokens"] or 0,
                    output_tokens,
                )
            )
    return served


class Fitted(msgspec.Struct, frozen=True):
    """The model, how well it tells the times it was made of, and how many requests those were."""

    model: ServiceModel
    ttft: Errors
    decode: Errors
    requests: int

    def __str__(self) -> str:
        lines = [f"{self.requests} requests; error as a share, p50 / p90 / p99"]
        for name, errors in (("first token", self.ttft), ("decoding", self.decode)):
            lines.append(f"{name}: {errors.p50:.3f} / {errors.p90:.3f} / {errors.p99:.3f}")
        return "\n".join(lines)


def fit(served: Sequence[Served], *, batch_tokens: int = 0) -> Fitted:
    """The prices that tell these requests' times best. `batch_tokens` is into what pieces the
    engine cuts a prompt; 0: it doesn't. Raises ConfigError for fewer than ten requests."""
    _check_enough(len(served))
    crowds: defaultdict[str, list[Served]] = defaultdict(list)
    for one in served:
        crowds[one.worker].append(one)
    prices: tuple[float, ...] = _NOTHING
    for _ in range(_ROUNDS):
        firsts: list[Equation] = []
        rests: list[Equation] = []
        for crowd in crowds.values():
            _Timeline(crowd, prices, batch_tokens).tell(firsts, rests)
        prices = _prices([*firsts, *rests], prices)
    return Fitted(model_of(prices), _errors(firsts, prices), _errors(rests, prices), len(served))


def fit_points(points: Sequence[Timing]) -> Fitted:
    """The same from points that were measured one by one, as a profile of an engine has them.
    Raises ConfigError for fewer than ten."""
    _check_enough(len(points))
    firsts: list[Equation] = []
    rests: list[Equation] = []
    for one in points:
        row = prefill_row(one.new_tokens, one.context_tokens, one.steps)
        firsts.append((row, one.ttft_s))
        if one.output_tokens > 1:
            context = one.new_tokens + one.context_tokens + 1
            row = decode_row(one.output_tokens - 1, context, one.sequences)
            rests.append((row, one.service_s - one.ttft_s))
    prices: tuple[float, ...] = _NOTHING
    for _ in range(2):
        prices = _prices([*firsts, *rests], prices)
    return Fitted(model_of(prices), _errors(firsts, prices), _errors(rests, prices), len(points))


def _check_enough(count: int) -> None:
    if count < _LEAST_ROWS:
        raise ConfigError(
            f"a service model needs at least {_LEAST_ROWS} answered requests with their times, "
            f"here are {count}; take a longer log"
        )


class _Span:
    """From one moment to the next: whose prompts are computed, and who decodes."""

    def __init__(self, begin: float, end: float) -> None:
        self.seconds = end - begin
        self.prompts: list[int] = []
        self.decoding: list[int] = []
        self.steps = 0.0  # how many there is time for, at the present prices


class _Timeline:
    """What one worker did when."""

    def __init__(self, crowd: Sequence[Served], prices: Sequence[float], batch_tokens: int) -> None:
        self._crowd = sorted(crowd, key=lambda one: one.first_at)
        self._batch_tokens = batch_tokens
        self._cuts = sorted(
            {at for one in crowd for at in (one.asked_at, one.first_at, one.ended_at)}
        )
        self._spans = [_Span(*both) for both in pairwise(self._cuts)]
        for place, one in enumerate(self._crowd):
            for span in self._between(one.asked_at, one.first_at):
                span.prompts.append(place)
            for span in self._between(one.first_at, one.ended_at):
                span.decoding.append(place)
        for span in self._spans:
            self._keep_leaders(span)
            span.steps = self._steps_in(span, prices)

    def tell(self, firsts: list[Equation], rests: list[Equation]) -> None:
        """An equation for each first token, and one for each answer after it."""
        counts = self._counts()
        done = list(accumulate(counts, _plus, initial=_NOTHING))
        for one in self._crowd:
            asked, first, ended = (
                bisect_left(self._cuts, at) for at in (one.asked_at, one.first_at, one.ended_at)
            )
            firsts.append((_minus(done[first], done[asked]), one.ttft_s))
            if one.output_tokens > 1 and one.service_s - one.ttft_s > _LEAST_S:
                rests.append((_minus(done[ended], done[first]), one.service_s - one.ttft_s))

    def _between(self, begin: float, end: float) -> list[_Span]:
        return self._spans[bisect_left(self._cuts, begin) : bisect_left(self._cuts, end)]

    def _keep_leaders(self, span: _Span) -> None:
        """Of the prompts only what is computed now: the next to be ready, several if together."""
        if span.prompts:
            ready_at = self._crowd[span.prompts[0]].first_at
            crowd = self._crowd
            span.prompts = [place for place in span.prompts if crowd[place].first_at == ready_at]

    def _steps_in(self, span: _Span, prices: Sequence[float]) -> float:
        count = len(span.decoding)
        contexts = sum(self._crowd[place].input_tokens for place in span.decoding)
        new = 0
        if span.prompts:
            new = sum(self._crowd[place].new_tokens for place in span.prompts)
            if self._batch_tokens:
                new = min(new, self._batch_tokens)
        step_s = cost_s((1.0, new, 0.0, count, contexts), prices)
        return span.seconds / step_s if step_s > 0.0 else span.seconds

    def _counts(self) -> list[Row]:
        """What was done in each span."""
        prompts, answers = self._parts()
        counts = []
        for number, span in enumerate(self._spans):
            pieces = new = looks = decoded = contexts = most = 0.0
            for place in span.prompts:
                one = self._crowd[place]
                part = prompts[place].get(number, 0.0)
                new += part * one.new_tokens
                looks += part * pairs(one.new_tokens, one.cached_tokens)
                pieces += part * self._pieces(one)
            for place in span.decoding:
                one = self._crowd[place]
                said = answers[place].get(number, 0.0) * (one.output_tokens - 1)
                decoded += said
                contexts += said * (one.input_tokens + 0.5 * one.output_tokens)
                most = max(most, said)
            # A step takes a token of everyone who decodes, and a piece of a prompt besides.
            counts.append((max(pieces, most), new, looks, decoded, contexts))
        return counts

    def _parts(self) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
        """Of each request's prompt, and of its answer, the part that belongs to each span."""
        prompts: list[dict[int, float]] = [{} for _ in self._crowd]
        answers: list[dict[int, float]] = [{} for _ in self._crowd]
        for number, span in enumerate(self._spans):
            for place in span.prompts:
                prompts[place][number] = span.steps
            for place in span.decoding:
                answers[place][number] = span.steps
        for parts in (*prompts, *answers):
            total = sum(parts.values())
            for number in parts:
                parts[number] /= total
        return prompts, answers

    def _pieces(self, one: Served) -> int:
        return -(-one.new_tokens // self._batch_tokens) if self._batch_tokens else 1


def _plus(one: Row, other: Row) -> Row:
    return _row(a + b for a, b in zip(one, other, strict=True))


def _minus(one: Row, other: Row) -> Row:
    return _row(a - b for a, b in zip(one, other, strict=True))


def _row(counts: Iterable[float]) -> Row:
    steps, new, looks, decoded, contexts = counts
    return steps, new, looks, decoded, contexts


def _prices(rows: Sequence[Equation], before: Sequence[float]) -> tuple[float, ...]:
    least_squares = NonNegative(len(_NOTHING))
    for row, took_s in rows:
        expected_s = cost_s(row, before) or took_s
        least_squares.add(row, took_s, 1.0 / max(_LEAST_S, expected_s))
    return least_squares.solution()


def _errors(rows: Sequence[Equation], prices: Sequence[float]) -> Errors:
    shares = [abs(cost_s(row, prices) - took_s) / max(_LEAST_S, took_s) for row, took_s in rows]
    return Errors.of(shares or [0.0])
