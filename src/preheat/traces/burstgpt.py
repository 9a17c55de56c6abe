"""BurstGPT (Wang et al., 2024): single requests, or requests drawn from its aggregates.

Aggregates are tokens by minute, requests and tokens by day, and requests by hour of the day. They
belong together: where minutes are given, the days say how many tokens a request has; where only
days are, the hours say when in a day requests come.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import exp, sqrt
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from preheat.traces.arrival import Arrival
from preheat.traces.reader import Amount, Count, Draft, Format, Reading, too_many
from preheat.traces.source import Head, Source

_DAY_S: Final = 86_400.0
_DAY_MINUTES: Final = 1_440
_HOUR_S: Final = 3_600.0


class _Minute(msgspec.Struct):
    minute: Count
    tokens_per_s: Amount = msgspec.field(name="total_tokens_per_s")


class _Day(msgspec.Struct):
    day: Count
    requests: Count
    tokens: Count = msgspec.field(name="total_tokens")


class _Hour(msgspec.Struct):
    hour: Annotated[int, Meta(ge=0, le=23)]
    requests: Amount = msgspec.field(name="mean_requests_per_hour")


class _Single(msgspec.Struct):
    at: Amount = msgspec.field(name="Timestamp")
    model: str = msgspec.field(name="Model")
    input_tokens: Count = msgspec.field(name="Request tokens")
    output_tokens: Count = msgspec.field(name="Response tokens")
    kind: str = msgspec.field(name="Log Type", default="")


class _Tables(msgspec.Struct):
    """What the files hold."""

    singles: list[_Single] = []
    minutes: list[_Minute] = []
    days: list[_Day] = []
    hours: list[_Hour] = []


_KINDS: Final = (
    ("total_tokens_per_s", _Minute, "minutes"),
    ("total_tokens", _Day, "days"),
    ("mean_requests_per_hour", _Hour, "hours"),
    ("Request tokens", _Single, "singles"),
)


def _recognises(head: Head) -> bool:
    return (
        head.has("minute", "total_tokens_per_s")
        or head.has("day", "requests", "total_tokens")
        or head.has("hour", "mean_requests_per_hour")
        or head.has("Timestamp", "Model", "Request tokens", "Response tokens")
    )


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    tables = _Tables()
    for source in sources:
        for name, kind, place in _KINDS:
            if source.head.has(name):
                getattr(tables, place).extend(row for _, row in reading.rows(source, kind))
                break
    if tables.singles:
        return Draft(arrivals=[_single(row, place) for place, row in enumerate(tables.singles, 1)])
    chance = random.Random(f"{reading.rules.seed} burstgpt")
    if tables.minutes:
        slots = _by_minute(tables, reading, chance)
    elif tables.days:
        slots = _by_day(tables, reading, chance)
    else:
        slots = _by_hour(tables, reading, chance)
    return Draft(arrivals=_arrivals(slots, reading), times="rule")


def _single(row: _Single, number: int) -> Arrival:
    return Arrival(
        at=row.at,
        id=str(number),
        model=row.model,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        kind=row.kind,
    )


def _arrivals(slots: Iterator[tuple[float, float]], reading: Reading) -> list[Arrival]:
    """Of times and tokens."""
    rules = reading.rules
    end_s = rules.days * _DAY_S or float("inf")
    arrivals: list[Arrival] = []
    for number, (at, tokens) in enumerate(slots):
        if at >= end_s:
            continue
        input_tokens = round(tokens * rules.input_share)
        output_tokens = round(tokens) - input_tokens
        arrivals.append(
            Arrival(at=at, id=str(number), input_tokens=input_tokens, output_tokens=output_tokens)
        )
        if len(arrivals) > rules.most_requests:
            too_many(len(arrivals), rules)
        reading.drawn(1)
    reading.tell(f"Of a request's tokens {rules.input_share:.0%} are input.")
    return arrivals


def _by_minute(
    tables: _Tables, reading: Reading, chance: random.Random
) -> Iterator[tuple[float, float]]:
    rules = reading.rules
    means = {day.day: day.tokens / day.requests for day in tables.days if day.requests}
    reading.tell(
        "Requests are drawn: a minute has a Poisson number of them, at least one where it has "
        "tokens, at times drawn evenly, and they share its tokens; a request has "
        + ("its day's mean" if means else f"{rules.tokens_per_request:g} tokens in the mean")
        + f" (rate scale {rules.rate_scale:g}, seed {rules.seed})."
    )
    for row in sorted(tables.minutes, key=lambda row: row.minute):
        tokens = row.tokens_per_s * 60 * rules.rate_scale
        if tokens:
            mean = means.get(row.minute // _DAY_MINUTES, rules.tokens_per_request)
            count = max(1, poisson(tokens / mean, chance))
            for _ in range(count):
                yield (row.minute + chance.random()) * 60, tokens / count


def _by_day(
    tables: _Tables, reading: Reading, chance: random.Random
) -> Iterator[tuple[float, float]]:
    rules = reading.rules
    hours = sorted(tables.hours, key=lambda row: row.hour)
    weights = list(accumulate(row.requests for row in hours))
    has_hours = bool(weights) and weights[-1] > 0
    when = "by the hours' means" if has_hours else "evenly"
    reading.tell(
        f"Requests are drawn: as many a day as it had, times {rules.rate_scale:g}, at times drawn "
        f"{when} from it, each with the day's mean tokens (seed {rules.seed})."
    )
    for day in sorted(tables.days, key=lambda row: row.day):
        for _ in range(round(day.requests * rules.rate_scale)):
            if has_hours:
                (hour,) = chance.choices(hours, cum_weights=weights)
                second = (hour.hour + chance.random()) * _HOUR_S
            else:
                second = chance.random() * _DAY_S
            yield day.day * _DAY_S + second, day.tokens / day.requests


def _by_hour(
    tables: _Tables, reading: Reading, chance: random.Random
) -> Iterator[tuple[float, float]]:
    rules = reading.rules
    reading.tell(
        "Requests are drawn: one day, a Poisson number each hour at times drawn evenly from it, "
        f"{rules.tokens_per_request:g} tokens each (rate scale {rules.rate_scale:g}, seed {rules.seed})."
    )
    for row in tables.hours:
        for _ in range(poisson(row.requests * rules.rate_scale, chance)):
            yield (row.hour + chance.random()) * _HOUR_S, rules.tokens_per_request


def poisson(mean: float, chance: random.Random) -> int:
    """Knuth's product of uniforms (1969); from 50 on the nearest normal, whose error is then
    below that of any of these tables."""
    if mean > 50:
        return max(0, round(chance.gauss(mean, sqrt(mean))))
    limit, product, count = exp(-mean), chance.random(), 0
    while product > limit:
        product *= chance.random()
        count += 1
    return count


FORMAT: Final = Format(_recognises, _read)
