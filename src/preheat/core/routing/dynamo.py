"""NVIDIA Dynamo's KV router."""

from collections.abc import Sequence

from preheat.core.placing import Candidate, Placing

_HOST_CREDIT = 0.75  # of a block in host memory, against one on the device


class Dynamo:
    """argmin of prefill_load_scale · (blocks to prefill, this request's included, less those it
    holds) + blocks of its decoding sequences (ai-dynamo, `lib/kv-router`, the default selector; defaults:
    scale 1, overlap credit 1, host credit 0.75, temperature 0).

    We differ: blocks here are the trace's (theirs are 16 to 64 tokens); equals go to the one with
    fewer requests in flight instead of by chance; the credit for disk isn't apart from the host's.
    """

    def __init__(self, *, prefill_load_scale: float = 1.0, overlap_credit: float = 1.0) -> None:
        self._scale = prefill_load_scale
        self._credit = overlap_credit

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        block_tokens = max(1, placing.block_tokens)

        def blocks(place: int) -> tuple[float, int]:
            one = candidates[place]
            held = self._credit * one.overlap_tokens + _HOST_CREDIT * one.loadable_tokens
            prefill = max(0.0, one.prefill_tokens + placing.input_tokens - held)
            return self._scale * prefill / block_tokens + one.kv_blocks, one.in_flight

        return min(range(len(candidates)), key=blocks)

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
