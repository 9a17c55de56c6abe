"""How a simulated worker is set up."""

import msgspec

from preheat.replay.tiers import TierSpec


class WorkerSpec(msgspec.Struct, frozen=True):
    """How an engine is set up.

    Each step computes one token of every decoding sequence and prompts' chunks up to `step_tokens` in
    all (vLLM's `max_num_batched_tokens`), of at most `step_prefills` prompts; 0 is no limit of
    either. With no token limit and one prefill a step, prompts are computed whole, one after the
    other.
    """

    capacity_blocks: int
    block_tokens: int
    step_tokens: int = 8_192
    step_prefills: int = 0
    sequences: int = 256
    tiers: tuple[TierSpec, ...] = ()
