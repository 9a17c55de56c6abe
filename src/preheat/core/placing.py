"""What a router may know of a request that needs a worker, and of the workers that may get it."""

from collections.abc import Sequence

import msgspec


class Placing(msgspec.Struct, frozen=True, gc=False):
    """A request that needs a worker: what a policy may know of it.

    `blocks` are its prompt's full blocks, root first, of `block_tokens` tokens each.
    """

    input_tokens: int
    blocks: Sequence[int] = ()
    block_tokens: int = 0
    session: str = ""
    output_tokens: int = 0
    """Expected, not known."""


class Candidate(msgspec.Struct, gc=False):
    """One worker that may get it, as its index and its load are known at this moment.

    `number` is its place in the fleet, the same for its life. `overlap_tokens` of the prompt it
    holds (`loadable_tokens` more in a lower tier, at `load_s`). `miss_s` is what computing the rest
    takes it alone. `queue_s` is the prefill work it has before it could begin. `in_flight` requests
    were sent to it and aren't finished, `waiting` of them not begun. `prefill_tokens` of theirs are
    still to be computed; they hold `kv_blocks` of `kv_capacity_blocks`. `price` is what a
    block's place costs there in seconds: what pushing out one block is worth (`core.ghosts`; 0
    where nobody learns it).
    """

    number: int
    overlap_tokens: int = 0
    loadable_tokens: int = 0
    load_s: float = 0.0
    miss_s: float = 0.0
    queue_s: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    kv_blocks: int = 0
    kv_capacity_blocks: int = 0
    price: float = 0.0
