"""llm-d's endpoint picker: an affinity filter, then weighted scores."""

from collections.abc import Sequence

from preheat.core.placing import Candidate, Placing


class LlmD:
    """llm-d-router with its precise prefix index (it knows what workers hold from their events).

    First the filter: who holds at least `affinity` of the prompt is kept and nobody else, unless
    the best of these is `most_penalty_s` slower than the best of the others (both estimated as
    tokens in flight at `tokens_per_s`). Then the highest sum of 3 · share held, 2 · shortness of the waiting
    queue (between the longest, 0, and the shortest, 1) and 2 · free KV. Defaults: llm-d's
    (0.80, 18 s, 15,928 tokens/s for a 32B model on two H100; weights of the reference profile).

    We differ: equals go to the one with fewer requests in flight instead of by chance.
    """

    def __init__(
        self,
        *,
        prefix_weight: float = 3.0,
        queue_weight: float = 2.0,
        kv_weight: float = 2.0,
        affinity: float = 0.8,
        most_penalty_s: float = 18.0,
        tokens_per_s: float = 15_928.0,
    ) -> None:
        self._weights = (prefix_weight, queue_weight, kv_weight)
        self._affinity = affinity
        self._most_penalty_s = most_penalty_s
        self._tokens_per_s = tokens_per_s

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        kept = self._filtered(placing, candidates)
        queues = [candidates[place].waiting for place in kept]
        longest, span = max(queues), max(queues) - min(queues)
        prefix_weight, queue_weight, kv_weight = self._weights

        def score(place: int) -> tuple[float, int]:
            one = candidates[place]
            shortness = (longest - one.waiting) / span if span else 1.0
            free = 1.0 - one.kv_blocks / one.kv_capacity_blocks if one.kv_capacity_blocks else 1.0
            held = one.overlap_tokens / max(1, placing.input_tokens)
            total = prefix_weight * held + queue_weight * shortness + kv_weight * free
            return total, -one.in_flight

        return max(kept, key=score)

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass

    def _filtered(self, placing: Placing, candidates: Sequence[Candidate]) -> list[int]:
        least = self._affinity * placing.input_tokens
        every = list(range(len(candidates)))
        sticky = [place for place in every if candidates[place].overlap_tokens >= least]
        others = [place for place in every if candidates[place].overlap_tokens < least]
        if not sticky or not others:
            return every
        fewest = min(candidates[place].prefill_tokens for place in sticky)
        elsewhere = min(candidates[place].prefill_tokens for place in others)
        penalty_s = (fewest - elsewhere) / self._tokens_per_s
        return every if penalty_s > self._most_penalty_s else sticky
