"""Where KV goes that a worker's own memory has no room for, and what bringing it back takes."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from preheat.core.costs import ServiceModel


class TierSpec(msgspec.Struct, frozen=True):
    """One lower tier of a worker, in blocks. `core.costs.Tier` is the same in bytes, for choosing among
    tiers before there is one; where it stands in bandwidths, `block_s` is its `load_s` of a block.

    `block_s` is what bringing back one block takes. With `is_prefetched` what is asked for is
    always there in time: the bound for any prefetch. `survives`: it outlives a restart of its
    worker's engine (another process holds it, or a disk does). With `is_copy` it is what was put
    there once, and takes nothing in that is pushed out later.
    """

    name: str
    capacity_blocks: int
    block_s: float
    latency_s: float = 0.0
    is_prefetched: bool = False
    survives: bool = True
    is_copy: bool = False


class Tier:
    """What was pushed out of the tier above it, the oldest first to go.

    A block is in one tier only: brought back it is here no more. So memory and tier together hold
    what one memory of their common size would.
    """

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def __len__(self) -> int:
        return len(self._order)

    def put(self, blocks: Iterable[int]) -> list[int]:
        """Takes these in, the first of them as the oldest; who has to go for them."""
        order, fallen = self._order, []
        for block in blocks:
            order[block] = None
            order.move_to_end(block)
            if len(order) > self.spec.capacity_blocks:
                fallen.append(order.popitem(last=False)[0])
        return fallen

    def remove(self, blocks: Iterable[int]) -> None:
        """These are here no more, if they were."""
        for block in blocks:
            self._order.pop(block, None)

    def newest(self) -> list[int]:
        """All of it, newest first."""
        return list(reversed(self._order))

    def clear(self) -> None:
        """Forget all of it."""
        self._order.clear()


class Found(msgspec.Struct, frozen=True, gc=False):
    """Blocks behind a prefix in memory that lower tiers have: how many, and what loading takes."""

    blocks: int = 0
    load_s: float = 0.0

    def if_quicker(self, service: ServiceModel, context_tokens: int, block_tokens: int) -> "Found":
        """Load or recompute: itself, or nothing where computing the blocks is quicker."""
        computed_s = service.prefill_s(self.blocks * block_tokens, context_tokens)
        return _NOTHING if self.load_s > computed_s else self


class Tiers:
    """The lower tiers of one worker, the fastest first; what falls out of one goes to the next."""

    def __init__(self, specs: Sequence[TierSpec]) -> None:
        self.all = [Tier(spec) for spec in specs]

    def put(self, blocks: Sequence[int]) -> None:
        """These were pushed out of memory."""
        falling: Sequence[int] = blocks
        for tier in self.all:
            if not falling:
                return
            if not tier.spec.is_copy:
                falling = tier.put(falling)

    def find(self, blocks: Sequence[int]) -> Found:
        """How much of these, from the first on, is in some tier."""
        if not self.all:
            return _NOTHING
        counts = [0] * len(self.all)
        for block in blocks:
            for number, tier in enumerate(self.all):
                if block in tier:
                    counts[number] += 1
                    break
            else:
                break
        total = sum(counts)
        if not total:
            return _NOTHING
        load_s = 0.0
        for count, tier in zip(counts, self.all, strict=True):
            if count and not tier.spec.is_prefetched:
                load_s += tier.spec.latency_s + count * tier.spec.block_s
        return Found(total, load_s)

    def remove(self, blocks: Sequence[int]) -> None:
        """These were brought back, or computed anew."""
        for tier in self.all:
            tier.remove(blocks)


_NOTHING = Found()
