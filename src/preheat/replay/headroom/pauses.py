"""Pauses: sessions wait, come back, and end. What is lost of them meanwhile, and what would keep it.

One memory for all sessions, without a queue (`replay.pool`): "service TTFT" is loading and
computing. Capacities are tokens of KV for each session that is open in the mean.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from preheat.core.costs import ServiceModel
from preheat.core.prefix import LeafLru, LeafOrder, PrefixStore
from preheat.replay.granularity import full_paths
from preheat.replay.headroom.ladder import CONNECTED, DRAM_TOKEN_S, SSD_TOKEN_S, Lever
from preheat.replay.orders import Clairvoyant
from preheat.replay.pool import serve
from preheat.replay.tiers import Tiers, TierSpec
from preheat.traces.arrival import Arrival, Trace

ENDLESS: Final = 1 << 40
DAY_S: Final = 86_400.0
LRU: Final = "the engine's LRU"
DRAM: Final = "DRAM on demand"
SSD: Final = "SSD on demand"
FINITE: Final = "DRAM of 192 k on demand"
TOLD: Final = "told when a session is over"
OURS: Final = "ours: DRAM of 192 k, told when over"
_BELOW: Final = Lever(f"{CONNECTED}, llama.cpp", "a tier under the GPU's; llama.cpp's prompt cache")
_BOUND: Final = Lever("none: a bound", "what nobody can know")
LEVERS: Final[Mapping[str, Lever]] = {
    LRU: Lever("any", "none"),
    TOLD: Lever("LMCache, llama.cpp", "clear keys; erase a slot"),
    DRAM: _BELOW,
    SSD: Lever(CONNECTED, "a tier on a disk"),
    FINITE: _BELOW,
    OURS: Lever("vLLM (LMCache)", "a tier, and clearing its keys"),
    "DRAM of 192 k, always in time": _BOUND,
    "always in time": _BOUND,
    "clairvoyant": _BOUND,
}
"""Who offers what the arms need (docs/levers.md)."""


class Sitting(msgspec.Struct, frozen=True):
    """A trace of sessions, `open_sessions` of them open in the mean. What comes before `counted_at`
    warms the memory and isn't counted."""

    trace: Trace
    open_sessions: float
    counted_at: float
    service: ServiceModel = ServiceModel()


class Arm(msgspec.Struct, frozen=True):
    """One way to keep what sessions had. `told_over`: their clients say when they are. `bound`: it
    knows what nobody can know."""

    name: str
    tiers: tuple[TierSpec, ...] = ()
    told_over: bool = False
    order: Callable[[Sitting, int], LeafOrder] | None = None
    bound: bool = False


class Kept(msgspec.Struct, frozen=True):
    """What came of one arm at one capacity: seconds a day and open session, and service TTFTs."""

    arm: str
    session_tokens: int
    served_s: float
    lost_s: float
    ttfts_s: Sequence[float]
    bound: bool


def arms(block_tokens: int, open_sessions: float) -> Iterator[Arm]:
    """All of them. The tier of 192 k tokens a session is the one whose bar the product sets itself;
    the others are endless."""
    dram_s, ssd_s = DRAM_TOKEN_S * block_tokens, SSD_TOKEN_S * block_tokens
    dram = TierSpec("dram", int(192_000 * open_sessions) // block_tokens, dram_s)
    yield Arm(LRU)
    yield Arm(TOLD, told_over=True)
    yield Arm(DRAM, (TierSpec("dram", ENDLESS, dram_s),))
    yield Arm(SSD, (TierSpec("ssd", ENDLESS, ssd_s),))
    yield Arm(FINITE, (dram,))
    yield Arm(OURS, (dram,), told_over=True)
    yield Arm(
        "DRAM of 192 k, always in time",
        (msgspec.structs.replace(dram, is_prefetched=True),),
        bound=True,
    )
    yield Arm("always in time", (TierSpec("any", ENDLESS, 0.0, is_prefetched=True),), bound=True)
    yield Arm("clairvoyant", order=_clairvoyant, bound=True)


def keep(sitting: Sitting, arm: Arm, session_tokens: int) -> Kept:
    """One arm at one capacity."""
    trace = sitting.trace
    blocks = int(session_tokens * sitting.open_sessions) // trace.block_tokens
    store = PrefixStore(blocks, arm.order(sitting, blocks) if arm.order else LeafLru())
    tiers = Tiers(arm.tiers)
    after = Closing(sitting, store, tiers).after if arm.told_over else None
    served = serve(
        trace.arrivals,
        trace.block_tokens,
        sitting.service,
        store,
        tiers=tiers,
        after=after,
    )
    counted = [one for one in served if one.at >= sitting.counted_at]
    days = (trace.arrivals[-1].at - sitting.counted_at) / DAY_S * sitting.open_sessions
    return Kept(
        arm.name,
        session_tokens,
        sum(one.prefill_s for one in counted) / days,
        sum(one.lost_s for one in counted) / days,
        [one.ttft_s for one in counted],
        arm.bound,
    )


class Closing:
    """A session's last request has come: what only it used goes first from now on, and out of the
    lower tiers at once. Trunks that others use stay."""

    def __init__(self, sitting: Sitting, store: PrefixStore, tiers: Tiers) -> None:
        self._store = store
        self._tiers = tiers
        arrivals = sitting.trace.arrivals
        self._paths = full_paths(sitting.trace)
        self._last = {one.session: number for number, one in enumerate(arrivals)}
        self._owner: dict[int, str] = {}  # of blocks; "" where there are several
        self._own: dict[str, list[int]] = {}

    def after(self, number: int, one: Arrival) -> None:
        """Called with every request that was served."""
        own = self._own.setdefault(one.session, [])
        for block in self._paths[number]:
            owner = self._owner.get(block)
            if owner is None:
                self._owner[block] = one.session
                own.append(block)
            elif owner != one.session:
                self._owner[block] = ""
        if self._last[one.session] == number:
            gone = [block for block in self._own.pop(one.session) if self._owner[block]]
            self._store.outdate(gone)
            self._tiers.remove(gone)


def _clairvoyant(sitting: Sitting, blocks: int) -> LeafOrder:
    return Clairvoyant(full_paths(sitting.trace), blocks)
