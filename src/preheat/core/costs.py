"""How long an engine takes for a request, learned from what it took."""

from typing import Final

import msgspec

from preheat.core.memo import Memo

_MODELS: Final = 4_096
_ENOUGH: Final = 10
_WEIGHT: Final = 0.1


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


class ServiceModel(msgspec.Struct, frozen=True):
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
        """Computing `new_tokens` behind `context_tokens` that are there already."""
        pairs = new_tokens * (context_tokens + 0.5 * new_tokens)
        return self.token_s * new_tokens + self.attention_s * pairs
