"""The order of leaving that knows what comes: a bound for every policy."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from preheat.core.prefix import Leaves

_NEVER: Final = 1 << 60
_STALE: Final = 4


class Clairvoyant:
    """Belady's MIN over prefixes: the leaf whose next use is farthest away goes.

    All blocks before a block are used no later than it, so the farthest of all is always a leaf:
    for equal costs, forced insertion and whole requests nothing hits more (Belady, IBM Systems
    Journal 1966). Ties go to the deeper block.
    What of a path is longer than the pool is never taken in, so it isn't a use either.
    """

    def __init__(self, paths: Sequence[Sequence[int]], capacity_blocks: int) -> None:
        self._uses: dict[int, list[int]] = {}  # by block, the requests to come, the next one last
        for number in range(len(paths) - 1, -1, -1):
            for block in paths[number][:capacity_blocks]:
                self._uses.setdefault(block, []).append(number)
        self._depth: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        for depth, block in enumerate(blocks):
            self._depth[block] = depth
            self._uses[block].pop()

    def freed(self, block: int, used_at: float) -> None:
        heappush(self._heap, (-self._next(block), -self._depth[block], block))

    def removed(self, block: int) -> None:
        self._depth.pop(block)

    def victim(self, leaves: Leaves, now: float) -> int:
        heap = self._heap
        if len(heap) > _STALE * len(self._depth) + 64:
            heap[:] = [
                one for one in set(heap) if leaves.is_free(one[2]) and -one[0] == self._next(one[2])
            ]
            heapify(heap)
        while heap:
            farthest, _, block = heappop(heap)
            if leaves.is_free(block) and -farthest == self._next(block):
                return block
        raise LookupError("every block is held")

    def _next(self, block: int) -> int:
        uses = self._uses[block]
        return uses[-1] if uses else _NEVER
