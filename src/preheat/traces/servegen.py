"""ServeGen's rates of production clients (Xiang et al., 2025), and requests drawn from them.

A rate table says for each client and 10 minutes how many requests came and how they were spaced
(Gamma or Weibull); a token table says the quantiles of lengths by client and 6 hours. Neither
holds a request: each client's are a renewal process with the window's shape and measured rate.
"""

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import gamma
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from preheat.errors import TraceError
from preheat.traces.arrival import UNKNOWN, Arrival
from preheat.traces.reader import MOST, Draft, Format, Reading, too_many
from preheat.traces.rules import Rules
from preheat.traces.source import Head, Source

_WINDOW_S: Final = 600.0
_DAY_S: Final = 86_400.0
_LEAST_SHAPE: Final = 0.006
"""The published least is 0.0069; below 0.0059 the mean of a Weibull's draws is no number any more."""
_QUANTILES: Final = (0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)

Size = Annotated[float, Meta(ge=0, le=MOST)]


class _Rate(msgspec.Struct):
    """A client's window. Of the fitted arguments only the shape is used: the scale doesn't give
    back the measured rate."""

    t_s: Size
    client: str
    rate_rps: Annotated[float, Meta(gt=0)]
    pattern: Literal["Gamma", "Weibull"]
    arg1: Annotated[float, Meta(ge=_LEAST_SHAPE)]


class _Tokens(msgspec.Struct):
    t_s: Size
    client: str
    in_p10: Size
    in_p25: Size
    in_p50: Size
    in_p75: Size
    in_p90: Size
    in_p95: Size
    in_p99: Size
    out_p10: Size
    out_p25: Size
    out_p50: Size
    out_p75: Size
    out_p90: Size
    out_p95: Size
    out_p99: Size

    def lengths(self, end: Literal["in", "out"]) -> tuple[float, ...]:
        """At `_QUANTILES`."""
        return tuple(getattr(self, f"{end}_p{round(100 * share)}") for share in _QUANTILES)


class _Model:
    """One model's tables."""

    def __init__(self) -> None:
        self.rates: dict[str, list[_Rate]] = defaultdict(list)
        self.tokens: dict[str, list[_Tokens]] = defaultdict(list)


def _recognises(head: Head) -> bool:
    return head.has("t_s", "client") and (
        head.has("rate_rps", "pattern", "arg1") or head.has("in_p50", "out_p50")
    )


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    models: dict[str, _Model] = defaultdict(_Model)
    for source in sources:
        model = models[source.path.name.partition(".")[0]]
        is_rates = source.head.has("rate_rps")
        kind: type[Any] = _Rate if is_rates else _Tokens
        table: dict[str, list[Any]] = model.rates if is_rates else model.tokens
        for _, row in reading.rows(source, kind):
            table[row.client].append(row)
    rules = reading.rules
    _check(models, rules)
    arrivals: list[Arrival] = []
    for name, model in sorted(models.items()):
        for client in rules.clients or sorted(model.rates):
            windows = _wanted(model.rates.get(client, []), rules)
            arrivals += _drawn(name, client, windows, model, reading)
            if len(arrivals) > rules.most_requests:
                too_many(len(arrivals), rules)
    _tell(models, reading)
    return Draft(arrivals=arrivals, times="rule")


def _check(models: dict[str, _Model], rules: Rules) -> None:
    """Raises TraceError for a model of which nobody says when requests come, and for too many."""
    expected = 0.0
    for name, model in sorted(models.items()):
        if model.tokens and not model.rates:
            raise TraceError(f"{name}: lengths only, without rates: give the rate file, too")
        for client in rules.clients or model.rates:
            windows = _wanted(model.rates.get(client, []), rules)
            expected += sum(row.rate_rps for row in windows) * rules.rate_scale * _WINDOW_S
    if expected > rules.most_requests:
        too_many(round(expected), rules)


def _wanted(windows: list[_Rate], rules: Rules) -> list[_Rate]:
    end_s = rules.days * _DAY_S or float("inf")
    return sorted((row for row in windows if row.t_s < end_s), key=lambda row: row.t_s)


def _drawn(
    name: str, client: str, windows: list[_Rate], model: _Model, reading: Reading
) -> list[Arrival]:
    rules = reading.rules
    chance = random.Random(f"{rules.seed} servegen {name} {client}")
    lengths = _Lengths(model, client, chance)
    arrivals = []
    for number, at in enumerate(_times(windows, rules.rate_scale, chance)):
        if number > rules.most_requests:  # a shape near nothing has hardly an interval but 0
            too_many(number, rules)
        reading.drawn(1)
        input_tokens, output_tokens = lengths.at(at)
        arrivals.append(
            Arrival(
                at=at,
                id=f"{name}-{client}-{number}",
                tenant=client,
                model=name,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
            )
        )
    return arrivals


def _times(windows: list[_Rate], rate_scale: float, chance: random.Random) -> Iterator[float]:
    """A renewal process in operational time: one interval is 1 in the mean, and a window's rate
    says how fast that time runs, so that windows get the requests that were measured. (A process
    begun anew in each window would give too many where intervals vary much.)"""
    if not windows:
        return
    due = _interval(windows[0], chance) * chance.random()
    passed = 0.0
    for row in windows:
        rate = row.rate_rps * rate_scale
        end = passed + rate * _WINDOW_S
        while due < end:
            yield row.t_s + (due - passed) / rate
            due += _interval(row, chance)
        passed = end


def _interval(row: _Rate, chance: random.Random) -> float:
    """Of the fitted shape, 1 in the mean."""
    shape = row.arg1
    if row.pattern == "Gamma":
        return chance.gammavariate(shape, 1 / shape)
    return chance.weibullvariate(1 / gamma(1 + 1 / shape), shape)


class _Lengths:
    """Draws lengths of one client's requests, or where it has no table, of any client's."""

    def __init__(self, model: _Model, client: str, chance: random.Random) -> None:
        own = model.tokens.get(client)
        rows = own or [row for rows in model.tokens.values() for row in rows]
        rows = sorted(rows, key=lambda row: row.t_s)
        self._from_s = [row.t_s for row in rows]
        self._lengths = [(row.lengths("in"), row.lengths("out")) for row in rows]
        self._is_own = bool(own)
        self._chance = chance

    def at(self, at: float) -> tuple[int, int]:
        """Input and output tokens of a request at that time."""
        if not self._lengths:
            return UNKNOWN, UNKNOWN
        if self._is_own:
            row = self._lengths[max(0, bisect_right(self._from_s, at) - 1)]
        else:
            row = self._chance.choice(self._lengths)
        return self._draw(row[0]), self._draw(row[1])

    def _draw(self, lengths: tuple[float, ...]) -> int:
        """Between two quantiles evenly; below the first and above the last as those."""
        share = self._chance.random()
        place = bisect_right(_QUANTILES, share)
        if place == 0:
            length = lengths[0]
        elif place == len(_QUANTILES):
            length = lengths[-1]
        else:
            below, above = _QUANTILES[place - 1], _QUANTILES[place]
            part = (share - below) / (above - below)
            length = lengths[place - 1] + part * (lengths[place] - lengths[place - 1])
        return max(1, round(length))


def _tell(models: dict[str, _Model], reading: Reading) -> None:
    rules = reading.rules
    reading.tell(
        "Requests are drawn: each client's is a renewal process with each window's shape and "
        f"{rules.rate_scale:g} times its measured rate (seed {rules.seed})."
    )
    reading.tell("Lengths are drawn evenly between a client's quantiles (p10 to p99).")
    for name, model in sorted(models.items()):
        without = len(set(model.rates) - set(model.tokens))
        if not model.tokens:
            reading.tell(f"{name}: no lengths; give the file with its tokens as well.")
        elif without:
            reading.tell(f"{name}: {without} clients have no lengths: drawn from any client's.")


FORMAT: Final = Format(_recognises, _read)
