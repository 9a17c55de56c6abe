"""What things cost: computing a prompt, decoding, and loading KV from a tier instead.

Whatever an engine does in a step is linear in a few counts (`ServiceModel`), so its prices can be
learned from outcomes; `ServiceLearner` does that online.
"""

from collections import deque
from collections.abc import Sequence
from math import inf, sqrt
from typing import Final, cast

import msgspec

from preheat.core.least_squares import NonNegative
from preheat.core.memo import Memo

_MODELS: Final = 4_096
_ENOUGH: Final = 10
_WEIGHT: Final = 0.1

_LEARNED_MODELS: Final = 256
_KEEP: Final = 0.998
"""What an equation's weight shrinks by with each later one: half of all is of the last 350."""
_ERRORS: Final = 512
_LEAST_S: Final = 1e-3
"""Below a millisecond a relative error says more about clocks than about engines."""
_LEAST_TOKEN_S: Final = 2e-5
"""No engine says 50,000 tokens a second to one client: what comes so fast was said before."""


class ServiceTimes:
    """A running mean of service seconds for each model. Clients choose the models' names, so their
    number is bounded."""

    def __init__(self) -> None:
        self._means: Memo[str, list[float]] = Memo(_MODELS)

    def learn(self, model: str, service_s: float) -> None:
        """One more outcome: a plain mean of the first ten, then one that forgets."""
        known = self._means[model]
        if known is None:
            self._means.put(model, [1.0, service_s])
            return
        known[0] += 1.0
        known[1] += (service_s - known[1]) * max(_WEIGHT, 1.0 / known[0])

    def expected_s(self, model: str) -> float | None:
        """The mean; None before ten outcomes."""
        known = self._means[model]
        return None if known is None or known[0] < _ENOUGH else known[1]


class ServiceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that a worker computes: one engine step of continuous batching is

        step_s + token_s·new + attention_s·Σ(new tokens · tokens before each)
               + sequence_s·decoding sequences + context_s·Σ their contexts.

    The form is the usual one (Agrawal et al., Vidur, MLSys 2024; Mooncake, FAST 2025, section 5):
    linear layers cost by the token, causal attention by the pair, decoding reads the weights once
    a step and every sequence's KV. The defaults are headroom's: an 8B model (32 layers, width
    4,096, 8 KV heads) at 200 TFLOP/s, and nothing for decoding.
    """

    token_s: float = 8e-5
    attention_s: float = 2.62144e-9
    step_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0

    def prefill_s(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Computing `new_tokens` behind `context_tokens` that are there already, without what each
        step costs."""
        return self.token_s * new_tokens + self.attention_s * pairs(new_tokens, context_tokens)

    def decode_s(self, tokens: int, context_tokens: int, sequences: float = 1.0) -> float:
        """So many steps of decoding, while `sequences` equal ones do the same; the first step
        reads `context_tokens` of each."""
        contexts = tokens * context_tokens + tokens * (tokens - 1) / 2
        each_s = self.sequence_s * tokens + self.context_s * contexts
        return self.step_s * tokens + sequences * each_s


DECODING: Final = ServiceModel(step_s=0.007, sequence_s=8e-5, context_s=5.7e-8)
"""The same model with decoding on a GPU of 2.3 TB/s: 16 GB of weights a step, 2·8e9 FLOP a
sequence, 128 KiB of KV a context token."""


def pairs(new_tokens: float, context_tokens: float) -> float:
    """How often a new token looks back at another: the context, and half the new ones."""
    return new_tokens * (context_tokens + 0.5 * new_tokens)


# Learned from outcomes ---------------------------------------------------------------------------


class Timing(msgspec.Struct, frozen=True):
    """What one outcome tells: tokens computed, tokens that were there, tokens said, seconds.

    `ttft_s` is None where the answer came in one piece: then its seconds say only what prompt and
    decoding took together.
    `sequences` is how many decoded on this worker meanwhile, itself included; `steps` into how
    many the engine cut the prompt.
    """

    new_tokens: int
    context_tokens: int
    output_tokens: int
    ttft_s: float | None
    service_s: float
    sequences: float = 1.0
    steps: int = 1


def came_whole(ttft_s: float | None, service_s: float, output_tokens: int) -> bool:
    """Whether an answer came in one piece: it wasn't streamed (None), or whoever passed it on kept it
    until it was all there. Then the time to its first token says nothing of its prompt.

    >>> came_whole(None, 2.0, 9), came_whole(1.9999, 2.0, 9), came_whole(0.5, 2.0, 9)
    (True, True, False)
    >>> came_whole(2.0, 2.0, 1)  # its only token
    False
    """
    if ttft_s is None:
        return True
    steps = output_tokens - 1
    return steps > 0 and service_s - ttft_s <= max(_LEAST_S, _LEAST_TOKEN_S * steps)


Row = tuple[float, float, float, float, float]
"""Counts of steps, new tokens, pairs, decoded tokens, contexts: what the prices stand for."""


class Errors(msgspec.Struct, frozen=True):
    """How far predictions were from what came, as a share of it, by percentile."""

    count: int
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, shares: Sequence[float]) -> "Errors":
        """From each prediction's error (absolute), at least one."""
        ordered = sorted(shares)
        last = len(ordered) - 1
        p50, p90, p99 = (ordered[round(share * last)] for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), p50, p90, p99)


class ServiceLearner:
    """A service model for each of at most 256 models, learned online, with its error.

    An outcome gives two equations, one for its prompt and one for its decoding, weighted so that
    relative errors count. Prices are never negative, and old outcomes fade. Each prediction is
    judged before its outcome is learned from.
    """

    def __init__(self) -> None:
        self._known: Memo[str, _Learned] = Memo(_LEARNED_MODELS)

    def learn(self, model: str, timing: Timing) -> None:
        """One more outcome."""
        known = self._known[model]
        if known is None:
            known = _Learned()
            self._known.put(model, known)
        known.learn(timing)

    def service(self, model: str) -> ServiceModel | None:
        """What was learned; None before ten outcomes."""
        known = self._known[model]
        return None if known is None or known.count < _ENOUGH else model_of(known.prices())

    def errors(self, model: str) -> Errors | None:
        """Of the last 512 predictions of TTFT; None while there is none."""
        known = self._known[model]
        return Errors.of(known.errors) if known is not None and known.errors else None


class _Learned:
    """One model's fit. It is solved anew after every eighth as many outcomes as it had, of the last
    256: a solution takes a tenth of a millisecond, and one more among so many changes little."""

    def __init__(self) -> None:
        self.count = 0
        self._prices: Sequence[float] = ()
        self._solve_at = 0
        self.fit = NonNegative(5, keep=_KEEP)
        self.errors: deque[float] = deque(maxlen=_ERRORS)

    def learn(self, timing: Timing) -> None:
        row = prefill_row(timing.new_tokens, timing.context_tokens, timing.steps)
        steps = max(0, timing.output_tokens - 1)
        context = timing.new_tokens + timing.context_tokens + 1
        decoding = decode_row(steps, context, timing.sequences)
        ttft_s = timing.ttft_s
        if ttft_s is None or came_whole(ttft_s, timing.service_s, timing.output_tokens):
            service_s = max(_LEAST_S, timing.service_s)
            both = cast("Row", tuple(a + b for a, b in zip(row, decoding, strict=True)))
            self.count += 1
            self.fit.add(both, service_s, 1.0 / service_s**2)
            return
        decode_s = timing.service_s - ttft_s
        ttft_s = max(_LEAST_S, ttft_s)
        if self.count >= _ENOUGH:
            expected_s = cost_s(row, self.prices())
            self.errors.append(abs(expected_s - ttft_s) / ttft_s)
        self.count += 1
        self.fit.add(row, ttft_s, 1.0 / ttft_s**2)
        if steps > 0:
            self.fit.add(decoding, decode_s, 1.0 / decode_s**2)

    def prices(self) -> Sequence[float]:
        """What was learned, in a row's order."""
        if self.count >= self._solve_at:
            self._prices = self.fit.solution()
            self._solve_at = self.count + max(1, min(256, self.count) // 8)
        return self._prices


def prefill_row(new_tokens: float, context_tokens: float, steps: float) -> Row:
    """The counts of one prompt."""
    return (steps, new_tokens, pairs(new_tokens, context_tokens), 0.0, 0.0)


def decode_row(steps: float, context_tokens: float, sequences: float) -> Row:
    """The counts of so many decoding steps of equal sequences, as `ServiceModel.decode_s`."""
    contexts = steps * context_tokens + steps * (steps - 1) / 2
    return (steps, 0.0, 0.0, steps * sequences, contexts * sequences)


def cost_s(row: Sequence[float], prices: Sequence[float]) -> float:
    """Counts times prices."""
    return sum(count * price for count, price in zip(row, prices, strict=True))


def model_of(prices: Sequence[float]) -> ServiceModel:
    """The model with these prices, in a row's order."""
    step_s, token_s, attention_s, sequence_s, context_s = prices
    return ServiceModel(token_s, attention_s, step_s, sequence_s, context_s)


# Load or recompute -------------------------------------------------------------------------------


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A place where KV can be kept: how fast it comes back, and what keeping it costs.

    `price` is the going rate of its room in seconds of value a byte and second (μ): what the last
    object that found room there was worth.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    price: float = 0.0

    def load_s(self, size_bytes: float) -> float:
        """Bringing so many bytes back."""
        return self.latency_s + size_bytes / self.bytes_per_s


def saved_s(
    service: ServiceModel, tier: Tier, tokens: int, size_bytes: float, context_tokens: int = 0
) -> float:
    """What loading `tokens` behind a context saves against computing them; below zero it is
    better to compute."""
    return service.prefill_s(tokens, context_tokens) - tier.load_s(size_bytes)


def break_even_tokens(
    service: ServiceModel, tier: Tier, token_bytes: float, context_tokens: int = 0
) -> float:
    """From how many tokens on loading beats computing; 0 is always, infinity is never.

    Computing grows with the square of the length and loading in proportion to it, so there is one
    such length: the root of attention_s/2·n² + (token_s + attention_s·context - load)·n - latency.
    A cache in whole blocks, or with windows, has it nearby: `saved_s` takes its true bytes.
    """
    half = 0.5 * service.attention_s
    gain_s = service.token_s + service.attention_s * context_tokens - token_bytes / tier.bytes_per_s
    if half == 0.0:
        if gain_s > 0.0:
            return tier.latency_s / gain_s
        return 0.0 if gain_s == tier.latency_s == 0.0 else inf
    root = sqrt(gain_s * gain_s + 4.0 * half * tier.latency_s)
    if gain_s > 0.0:  # the same root without the difference of two near numbers
        return 2.0 * tier.latency_s / (gain_s + root)
    return (root - gain_s) / (2.0 * half)


def best_tier(
    tiers: Sequence[Tier], *, size_bytes: float, recompute_s: float, uses: float, hold_s: float
) -> Tier | None:
    """Where to keep an object: the tier with the largest value minus its price for the bytes.

    The value is what `uses` expected loads save against `recompute_s`; it holds its room for
    `hold_s`. None: no tier is worth it.
    """
    best, most = None, 0.0
    for tier in tiers:
        value = uses * (recompute_s - tier.load_s(size_bytes))
        net = value - tier.price * size_bytes * hold_s
        if net > most:
            best, most = tier, net
    return best
