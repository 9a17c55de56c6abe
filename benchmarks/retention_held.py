"""The same question where running requests hold their blocks, as they do in an engine's own memory.

In `retention` only the current request is pinned: whatever others are computing meanwhile may go,
as in a pool beside the engine (DRAM, a store), and much of what J wins on agents it wins by letting
go of what a running request can't ask for before its answer is over. Here blocks are held from a
request's beginning to its end; one that finds no room beside what is held isn't kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from benchmarks.retention_streams import Stream
from preheat.core.hold_leaves import HoldLeaves
from preheat.core.prefix import LeafLru, LeafOrder, PrefixStore
from preheat.replay.compiled import Use
from preheat.replay.orders import Clairvoyant

FACTS = "end+stop+pauses"


def held(stream: Stream, told: Sequence[Use], capacity: int, name: str, levels: int) -> list[int]:
    """Blocks found by each request under `lru`, `belady` or `j`."""
    order: LeafOrder = LeafLru()
    if name == "belady":
        order = _Skipping(stream.paths, capacity)
    elif name == "j":
        order = HoldLeaves(levels=levels)
    store = PrefixStore(capacity, order)
    hits = []
    running: list[tuple[float, int, int]] = []  # end, request, its number in J's books
    for number, (path, use) in enumerate(zip(stream.paths, told, strict=True)):
        while running and running[0][0] <= use.began_at:
            ended_at, over, known_as = heappop(running)
            store.release(stream.paths[over][:capacity], 0, ended_at)
            if isinstance(order, HoldLeaves):
                order.ended(known_as, ended_at, told[over].ended_kind)
        hits.append(store.overlap(path))
        blocks = path[:capacity]
        if not store.take(blocks, 0, use.began_at, use.began_kind):
            if isinstance(order, _Skipping):
                order.skip(blocks, store)
        elif use.ended_at is None:
            store.release(blocks, 0, use.began_at)
        else:
            known_as = 0
            if isinstance(order, HoldLeaves):
                order.began()
                known_as = order.requests - 1
            heappush(running, (use.ended_at, number, known_as))
        store.evicted.clear()
    return hits


class _Skipping(Clairvoyant):
    """Knows what comes, of requests too that find no room."""

    def skip(self, blocks: Sequence[int], store: PrefixStore) -> None:
        """These are asked for now, and not taken in."""
        for block in blocks:
            self._uses[block].pop()
        for block in blocks:
            if store.is_free(block):
                self.freed(block, 0.0)
