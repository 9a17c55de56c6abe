"""Which leaf of a pool of prefixes leaves next: what an order is told, the engines' own, and any policy's."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from preheat.core.eviction import EvictionPolicy
from preheat.core.types import Traits

_TRIES: Final = 16
"""How often, by what it holds, a policy may name what is held: one that gives second chances names
every entry some times before another's turn comes."""
_STALE: Final = 4
"""The heap is made anew when it is so many times larger than what it must hold."""


class Leaves(Protocol):
    """What an order may ask of its store."""

    def is_free(self, block: int) -> bool:
        """Whether it is here, nobody holds it, and no block behind it is here."""

    def used_at(self, block: int) -> float:
        """When a path through it was last used, as far as it ended here or lost what was behind."""


class LeafOrder(Protocol):
    """Which leaf leaves next. Told of every block that comes, is used, and goes."""

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        """A request uses these; those from `known` on have just come in."""

    def freed(self, block: int, used_at: float) -> None:
        """It may go: nobody holds it, and no block behind it is here. May be told again."""

    def removed(self, block: int) -> None:
        """It has left. Told before its parent is `freed`."""

    def victim(self, leaves: Leaves, now: float) -> int:
        """A free block, which will be removed. Raises LookupError where there is none."""


class LeafLru:
    """The engines' own: the leaf that was used, or released, longest ago.

    Only where a path ends its time is kept; a block that loses its last child inherits the child's.
    So a request costs O(1) and not O(its blocks), and the order is the same as if every block had
    been touched, the deepest first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        self._count = 0
        self._blocks = 0

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        self._blocks += len(blocks) - known

    def freed(self, block: int, used_at: float) -> None:
        self._count += 1
        heappush(self._heap, (used_at, self._count, block))

    def removed(self, block: int) -> None:
        self._blocks -= 1

    def victim(self, leaves: Leaves, now: float) -> int:
        heap = self._heap
        if len(heap) > _STALE * self._blocks + 64:
            heap[:] = [one for one in heap if _is_current(leaves, one)]
            heapify(heap)
        while heap:
            oldest = heappop(heap)
            if _is_current(leaves, oldest):
                return oldest[2]
        raise LookupError("every block is held")


def _is_current(leaves: Leaves, known: tuple[float, int, int]) -> bool:
    used_at, _, block = known
    return leaves.is_free(block) and leaves.used_at(block) == used_at


class LeafPolicy:
    """Any policy of the table, on leaves only. Where it names a block that has others behind it here,
    the end of a path through it goes instead; where that is held, it counts as used, and another
    is asked for.

    Paths are touched deepest block first, so that a root is younger than its leaves. `cost_s`
    gives the seconds that computing a block takes by its place on the path, from 0.
    """

    def __init__(
        self,
        policy: EvictionPolicy[int],
        *,
        block_tokens: int = 1,
        block_bytes: int = 1,
        cost_s: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        self._policy = policy
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._cost_s = cost_s
        self._traits: dict[tuple[int, int], Traits] = {}
        self._parent: dict[int, int] = {}
        self._behind: dict[int, dict[int, None]] = {}  # the blocks right behind it, oldest first

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        for place in range(len(blocks) - 1, -1, -1):
            traits = self._traits.get((place, kind)) or self._make(place, kind)
            if place < known:
                self._policy.touch(blocks[place], now, traits)
                continue
            self._policy.insert(blocks[place], self._block_bytes, now, traits)
            if place:
                self._parent[blocks[place]] = blocks[place - 1]
                self._behind.setdefault(blocks[place - 1], {})[blocks[place]] = None

    def freed(self, block: int, used_at: float) -> None:
        """The policy is asked instead."""

    def removed(self, block: int) -> None:
        self._policy.remove(block)
        parent = self._parent.pop(block, None)
        if parent is not None:
            del self._behind[parent][block]
            if not self._behind[parent]:
                del self._behind[parent]

    def victim(self, leaves: Leaves, now: float) -> int:
        behind = self._behind
        for _ in range(_TRIES * len(self._policy) + 1):
            named = self._policy.victim(now)
            leaf = named
            while leaf in behind:
                leaf = next(iter(behind[leaf]))
            if leaves.is_free(leaf):
                return leaf
            self._policy.touch(named, now)
        raise LookupError("every block is held")

    def _make(self, place: int, kind: int) -> Traits:
        tokens = (place + 1) * self._block_tokens
        made = self._traits[place, kind] = Traits(self._cost_s(place), kind, tokens)
        return made
