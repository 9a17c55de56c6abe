"""μ over a trace: what a place in memory was going for, where J decides who leaves."""

from typing import Final

from preheat.core.costs import ServiceModel
from preheat.core.hold_leaves import HoldLeaves
from preheat.core.prefix import PrefixStore
from preheat.replay.pool import serve, total
from preheat.replay.report import PriceCurve
from preheat.traces.arrival import Arrival, Trace

TOKEN_BYTES: Final = 131_072
"""128 KiB of KV: headroom's 8B model."""
_POINTS: Final = 200
_HOUR_S: Final = 3_600.0
_GIB: Final = 2**30


def price_curve(
    trace: Trace, service: ServiceModel, blocks: int, renew_requests: int
) -> PriceCurve:
    """At about two hundred moments. J counts uses per block and second; a use saves a block's prefill at the
    trace's mean place in a prompt, and that gives GPU-seconds for a GiB held an hour."""
    order = HoldLeaves(renew_requests=renew_requests)
    every = max(1, len(trace.arrivals) // _POINTS)
    points: list[tuple[float, float]] = []

    def note(number: int, one: Arrival) -> None:
        if number % every == 0:
            points.append((one.at, order.price.now))

    store = PrefixStore(blocks, order)
    served = serve(trace.arrivals, trace.block_tokens, service, store, after=note)
    use_s = total(served, lambda one: one.no_cache_s) / max(1, sum(one.full for one in served))
    gib_blocks = _GIB / (TOKEN_BYTES * trace.block_tokens)
    return PriceCurve(
        pool=f"one memory of {blocks * trace.block_tokens:,} tokens for all",
        at_s=tuple(at for at, _ in points),
        price_gpu_s_per_gib_h=tuple(price * use_s * gib_blocks * _HOUR_S for _, price in points),
    )
