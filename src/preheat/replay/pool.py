"""One memory without a queue: what every request finds there, and what it must compute.

Requests are taken in their order, each over before the next one begins: this is the question of
what is kept, without that of when. What of a prompt is longer than the memory is never kept. A
router, queues and decoding are `fleet`'s.
"""

from collections.abc import Callable, Sequence
from math import fsum

import msgspec

from preheat.core.costs import ServiceModel
from preheat.core.prefix import PrefixStore
from preheat.replay.tiers import Found, Tiers
from preheat.traces.arrival import Arrival


class Service(msgspec.Struct, frozen=True, gc=False):
    """What one request found. Blocks: of its prompt (`full`, without a partial last one; a trace may
    name fewer), of them in memory, in a lower tier, and ever computed before. Seconds: of loading, of computing the
    rest, of computing what was known once and had been lost, of computing all."""

    at: float
    full: int
    cached: int
    loaded: int
    known: int
    load_s: float
    prefill_s: float
    lost_s: float
    no_cache_s: float

    @property
    def ttft_s(self) -> float:
        """Without a queue, and as if loading and computing took turns."""
        return self.load_s + self.prefill_s


def serve(
    arrivals: Sequence[Arrival],
    block_tokens: int,
    service: ServiceModel,
    store: PrefixStore,
    *,
    tiers: Tiers | None = None,
    kinds: Sequence[int] | None = None,
    before: Callable[[int, Arrival], None] | None = None,
    after: Callable[[int, Arrival], None] | None = None,
) -> list[Service]:
    """The whole trace. `before` and `after` are called around each request, with its number."""
    tiers = tiers if tiers is not None else Tiers(())
    seen: set[int] = set()
    served = []
    for number, one in enumerate(arrivals):
        if before is not None:
            before(number, one)
        full = max(0, one.input_tokens) // block_tokens
        blocks = one.blocks[:full]
        cached = store.overlap(blocks)
        found = tiers.find(blocks[cached:])
        known = cached + found.blocks
        while known < len(blocks) and blocks[known] in seen:
            known += 1
        seen.update(blocks[known:])
        kind = kinds[number] if kinds is not None else 0
        kept = blocks[: store.capacity_blocks]
        store.serve(kept, one.at, kind)
        tiers.remove(kept[cached:])
        if store.evicted:
            tiers.put(store.evicted)
            store.evicted.clear()
        served.append(_priced(one, block_tokens, service, full, cached, found, known))
        if after is not None:
            after(number, one)
    return served


def _priced(
    one: Arrival,
    block_tokens: int,
    service: ServiceModel,
    full: int,
    cached: int,
    found: Found,
    known: int,
) -> Service:
    tokens = one.input_tokens
    found = found.if_quicker(service, cached * block_tokens, block_tokens)
    lower = min((cached + found.blocks) * block_tokens, tokens - 1)
    prefill_s = service.prefill_s(tokens - lower, lower)
    once = min(known * block_tokens, tokens - 1)
    least_s = service.prefill_s(tokens - once, once)
    return Service(
        one.at,
        full,
        cached,
        found.blocks,
        known,
        found.load_s,
        prefill_s,
        prefill_s - least_s,
        service.prefill_s(tokens),
    )


def total(served: Sequence[Service], of: Callable[[Service], float]) -> float:
    """The sum over requests, exactly rounded."""
    return fsum(of(one) for one in served)
