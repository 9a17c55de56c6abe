"""What pushing out one more block is worth: how much of what was pushed out is computed again."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import exp


class Ghosts:
    """The blocks that one memory pushed out last, and what it cost that they weren't there.

    The price of a block's place is the seconds spent on blocks that were asked for again while they
    were remembered, by all blocks pushed out: both forgotten over `memory_s`. Nothing is known of
    what comes. As many are remembered as the memory holds, so it is the worth of a memory twice as
    large, as ghost lists have told it since ARC (Megiddo and Modha, FAST 2003); μ at the margin,
    where the engine keeps LRU and not J. 0 as long as nobody had to leave.
    """

    def __init__(self, remembered_blocks: int, *, memory_s: float = 300.0) -> None:
        self._remembered_blocks = remembered_blocks
        self._memory_s = memory_s
        self._gone: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._evicted = 0.0
        self._lost_s = 0.0
        self._at = 0.0

    def __len__(self) -> int:
        return len(self._gone)

    @property
    def price_s(self) -> float:
        """Seconds for one block's place."""
        return self._lost_s / self._evicted if self._evicted > 0.0 else 0.0

    def evicted(self, blocks: Sequence[int], now: float) -> None:
        """These were pushed out, the first of them first."""
        self._forget(now)
        self._evicted += len(blocks)
        gone = self._gone
        for block in blocks:
            gone[block] = None
            gone.move_to_end(block)
        while len(gone) > self._remembered_blocks:
            gone.popitem(last=False)

    def computed(
        self, path: Sequence[int], found: int, cost_s: Callable[[int], float], now: float
    ) -> None:
        """A request had to compute its path but for the first `found` blocks; `cost_s` says what a
        block takes at its place on the path, from 0."""
        self._forget(now)
        gone = self._gone
        for place in range(found, len(path)):
            if path[place] in gone:
                del gone[path[place]]
                self._lost_s += cost_s(place)

    def _forget(self, now: float) -> None:
        if now > self._at:
            keep = exp((self._at - now) / self._memory_s)
            self._evicted *= keep
            self._lost_s *= keep
            self._at = now
