"""What can be won where the engine keeps its own LRU: by order, and by touching prefixes again."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from benchmarks.retention_streams import Stream
from preheat.core.eviction.lhd import Lhd
from preheat.core.hold_leaves import HoldLeaves
from preheat.core.prefix import LeafLru, Leaves, PrefixStore
from preheat.replay.compiled import Use

WINDOW_S = 3.0
MOST_TOUCHES = 4


def ordered(stream: Stream, capacity: int) -> list[int]:
    """LRU, and of the requests that come within three seconds the one with the longest cached
    prefix is served first (SGLang's longest prefix match, Zheng et al., NeurIPS 2024)."""
    store = PrefixStore(capacity, LeafLru())
    hits = [0] * len(stream.paths)
    waiting: list[int] = []

    def serve_all() -> None:
        while waiting:
            best = max(waiting, key=lambda number: (store.overlap(stream.paths[number]), -number))
            waiting.remove(best)
            hits[best] = _take(store, stream.paths[best], stream.arrivals[best].at)

    window = -1
    for number, one in enumerate(stream.arrivals):
        if int(one.at // WINDOW_S) != window:
            serve_all()
            window = int(one.at // WINDOW_S)
        waiting.append(number)
    serve_all()
    return hits


class Touched(HoldLeaves):
    """The engine's LRU, and a gateway that touches again what J would keep.

    Before the leaf used longest ago goes, its prefix is asked for once more if J holds it for worth
    more than the price μ; at most `MOST_TOUCHES` times for one eviction. Each touch is a request of
    one output token, and `touches` counts them.
    """

    def __init__(self, levels: int) -> None:
        super().__init__(levels=levels)
        self.touches = 0
        self._touched: dict[int, int] = {}
        self._turns = 0
        self._oldest: list[tuple[int, int]] = []

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        super().used(blocks, known, now, kind)
        self._turns += 1
        for block in blocks:
            self._touched[block] = self._turns

    def freed(self, block: int, used_at: float) -> None:
        heappush(self._oldest, (self._touched[block], block))

    def removed(self, block: int) -> None:
        super().removed(block)
        del self._touched[block]

    def victim(self, leaves: Leaves, now: float) -> int:
        spared: set[int] = set()
        while self._oldest:
            turn, block = self._oldest[0]
            if not leaves.is_free(block) or self._touched[block] != turn:
                heappop(self._oldest)
                continue
            value, _, _ = self._place(block, now)
            if value <= self.price.now or block in spared or len(spared) == MOST_TOUCHES:
                self.price.learn(value)
                return block
            spared.add(block)
            self._turns += 1
            self._touched[block] = self._turns
            self.touches += 1
            heappush(self._oldest, (self._turns, block))
        raise LookupError("every block is held")


class LeafLhd:
    """LHD with every leaf a candidate: the least hit density of all of them goes.

    Drawn by chance among all blocks, as `Lhd` does it, a candidate is nearly never a leaf, and each
    that is refused would count as used: that is no test of LHD.
    """

    def __init__(self, policy: Lhd[int]) -> None:
        self._policy = policy
        self._free: dict[int, None] = {}
        self._batch: list[tuple[float, int]] = []  # ranks change with requests, not with evictions
        self._batch_at = -1

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        for place in range(len(blocks) - 1, -1, -1):
            if place >= known:
                self._policy.insert(blocks[place], 1, now)
            else:
                self._policy.touch(blocks[place], now)

    def freed(self, block: int, used_at: float) -> None:
        self._free[block] = None
        if self._batch_at == self._policy._requests:
            heappush(self._batch, self._place(block))

    def removed(self, block: int) -> None:
        self._free.pop(block, None)
        self._policy.remove(block)

    def victim(self, leaves: Leaves, now: float) -> int:
        lhd = self._policy
        if self._batch_at != lhd._requests:
            for block in [block for block in self._free if not leaves.is_free(block)]:
                del self._free[block]
            self._batch = [self._place(block) for block in self._free]
            heapify(self._batch)
            self._batch_at = lhd._requests
        while self._batch:
            block = self._batch[0][1]
            if block in self._free and leaves.is_free(block):
                lhd._named = block
                return block
            heappop(self._batch)
        raise LookupError("every block is held")

    def _place(self, block: int) -> tuple[float, int]:
        return self._policy._rank(self._policy._slot[block]), block


def touched(
    stream: Stream, uses: Sequence[Use], capacity: int, levels: int
) -> tuple[list[int], int]:
    """Blocks found by each request, and how many touches that took."""
    order = Touched(levels)
    store = PrefixStore(capacity, order)
    hits = []
    answers: list[tuple[float, int]] = []
    for number, (path, use) in enumerate(zip(stream.paths, uses, strict=True)):
        for over in [one for one in answers if one[0] <= use.began_at]:
            answers.remove(over)
            order.ended(over[1], over[0], uses[over[1]].ended_kind)
        hits.append(_take(store, path, use.began_at, use.began_kind))
        if use.ended_at is not None:
            order.began()
            answers.append((use.ended_at, number))
    return hits, order.touches


def _take(store: PrefixStore, path: Sequence[int], now: float, kind: int = 0) -> int:
    found = store.overlap(path)
    blocks = path[: store.capacity_blocks]
    if store.take(blocks, 0, now, kind):
        store.release(blocks, 0, now)
    store.evicted.clear()
    return found
