"""What a reader makes up where a trace doesn't say it: settings, each of which is told in
`Trace.rules` where it was used."""

from math import isfinite
from typing import Literal

import msgspec

from preheat.errors import TraceError


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How gaps of a trace are filled. Every draw follows from `seed` alone.

    `batch_spread`: arrivals that were recorded in batches are spread evenly over the time to the
    next batch.

    Sessions without start times (Weka, tau-bench, ShareGPT): `once` lets each begin once, at a
    time drawn evenly from `span_s`. `drawn` is a calendar of `hours`: sessions begin as a Poisson
    process, so many that `open_sessions` are open in the mean, each drawn evenly with replacement
    and cut at its first pause over `longest_pause_s`. The blocks of each draw are its own, but for
    trunks: those that at least `trunk_sessions` sessions have in common. The calendar begins with
    nobody there, so the first hours (6 of 30) should warm caches and not be counted.
    `turn_s` is the time between the requests of a session where a trace knows none.

    `block_tokens`: Weka's blocks of 64 tokens are read in groups of so many tokens.

    Rates instead of requests (ServeGen, BurstGPT): `clients` are the ones wanted (all where empty),
    `days` the days from the start (all where 0), and `rate_scale` multiplies every rate.
    `tokens_per_request` and `input_share` cut BurstGPT's tokens into requests and theirs into
    input and output. `most_requests` bounds what is drawn.
    """

    seed: int = 0
    batch_spread: bool = True
    sessions: Literal["once", "drawn"] = "once"
    span_s: float = 86_400.0
    open_sessions: float = 20.0
    hours: float = 30.0
    longest_pause_s: float = 28_800.0
    trunk_sessions: int = 3
    turn_s: float = 15.0
    block_tokens: int = 1_024
    clients: tuple[str, ...] = ()
    days: float = 0.0
    rate_scale: float = 1.0
    tokens_per_request: float = 840.6
    """Of BurstGPT's days 0 to 40: 767,501,294 tokens of 912,989 requests."""
    input_share: float = 0.7
    """Of a BurstGPT request's tokens; its published sample of single requests has 0.68."""
    most_requests: int = 5_000_000

    def __post_init__(self) -> None:
        """Raises TraceError for a value that no reader could use."""
        for name in ("span_s", "open_sessions", "hours", "longest_pause_s", "turn_s", "rate_scale"):
            _check(name, getattr(self, name), 0.0, is_open=True)
        for name in ("trunk_sessions", "most_requests", "tokens_per_request"):
            _check(name, getattr(self, name), 1.0)
        _check("days", self.days, 0.0)
        _check("input_share", self.input_share, 0.0, most=1.0)
        if self.block_tokens < 64 or self.block_tokens % 64:
            raise TraceError(
                f"block_tokens: {self.block_tokens} isn't a multiple of 64, the blocks of Weka's traces"
            )
        if self.sessions not in ("once", "drawn"):
            raise TraceError(f"sessions: {self.sessions!r} is neither 'once' nor 'drawn'")


def _check(
    name: str, value: float, least: float, *, most: float = float("inf"), is_open: bool = False
) -> None:
    if not isfinite(value) or not least <= value <= most or (is_open and value == least):
        bound = f"above {least:g}" if is_open else f"at least {least:g}"
        limit = f" and at most {most:g}" if isfinite(most) else ""
        raise TraceError(f"{name}: {value} must be {bound}{limit}")
