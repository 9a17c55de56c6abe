"""Which blocks of KV a memory pool holds: always whole prefixes, and the leaves go first."""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from preheat.core.eviction import EvictionPolicy
from preheat.core.types import Traits

_STALE: Final = 4
"""The heap is made anew when it is so many times larger than what it must hold."""


class LeafOrder(Protocol):
    """Which leaf leaves next. Told of every block that comes, is used, and goes."""

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        """A request uses these; those from `known` on have just come in."""

    def released(self, block: int, now: float) -> None:
        """A request that ended at this block is over."""

    def freed(self, block: int) -> None:
        """Nobody holds it any more, and no block behind it is here."""

    def removed(self, block: int, parent: int | None) -> None:
        """It has left. Told before its parent is `freed`."""

    def victim(self, is_free: Callable[[int], bool], now: float) -> int:
        """A block for which `is_free` holds. Raises LookupError where there is none."""


class PrefixStore:
    """The blocks of one pool, of equal size. A block's id names it with all before it, so a
    block is here only if all before it on its path are: a flat map is the prefix tree.

    What running requests use is held; of the rest the leaves may go, in the order of `order`.
    Blocks that nobody else can reuse (a prompt's last, partial one, and what is being generated)
    are `private`: only counted. This is how paged engines do it (Kwon et al., PagedAttention,
    SOSP 2023; vLLM's prefix caching frees a request's tail first), where `order` is `LeafLru`.
    """

    def __init__(self, capacity_blocks: int, order: LeafOrder) -> None:
        if capacity_blocks < 0:
            raise ValueError(f"a pool can't have {capacity_blocks} blocks")
        self.capacity_blocks = capacity_blocks
        self.evicted: list[int] = []
        """Who was pushed out, oldest first, until the driver has taken note of it and cleared it."""
        self._order = order
        self._parent: dict[int, int | None] = {}
        self._weight: dict[int, int] = {}  # children here, and requests that end at this block
        self._private = 0

    def __len__(self) -> int:
        return len(self._parent)

    def __contains__(self, block: int) -> bool:
        return block in self._parent

    @property
    def free_blocks(self) -> int:
        """Places that nothing is in."""
        return self.capacity_blocks - self._private - len(self._parent)

    def overlap(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are here: a binary search, as they are always whole prefixes."""
        here = self._parent
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in here:
                low = middle + 1
            else:
                high = middle
        return low

    def take(self, blocks: Sequence[int], private: int, now: float, kind: int = 0) -> bool:
        """A request begins: its blocks are here and held from now on, and `private` more counted.

        False where there isn't room beside what is held; free leaves may then be gone all the same.
        `kind` is the class that `Traits.kind` means.
        """
        known = self.overlap(blocks)
        if known:
            self._weight[blocks[known - 1]] += 1  # the request's hold; then its first new block
        if not self._make_room(len(blocks) - known + private, now):
            if known:
                self._let_go(blocks[known - 1])
            return False
        parent = blocks[known - 1] if known else None
        for block in blocks[known:]:
            self._parent[block] = parent
            self._weight[block] = 1  # the next block, or at the end the request
            parent = block
        self._private += private
        self._order.used(blocks, known, now, kind)
        return True

    def grow(self, private: int, now: float) -> bool:
        """So many more private blocks; False where there isn't room."""
        if not self._make_room(private, now):
            return False
        self._private += private
        return True

    def release(self, blocks: Sequence[int], private: int, now: float) -> None:
        """A request has ended: its blocks stay until they are pushed out, its private ones go."""
        self._private -= private
        if blocks:
            self._order.released(blocks[-1], now)
            self._let_go(blocks[-1])

    def drop(self, blocks: Sequence[int], keep: int) -> None:
        """Forget the blocks behind the first `keep` that nobody needs: they were never computed,
        or are known to be of no use any more."""
        for block in reversed(blocks[keep : self.overlap(blocks)]):
            if not self._is_free(block):
                return
            self._remove(block)

    def put(self, blocks: Sequence[int], used_at: float, kind: int = 0) -> int:
        """Bring in blocks that no request asks for (restored, warmed), as far as there are free
        places; nobody is pushed out. Returns how many came in."""
        known = self.overlap(blocks)
        count = min(len(blocks), known + self.free_blocks)
        if count <= known:
            return 0
        self.take(blocks[:count], 0, used_at, kind)
        self.release(blocks[:count], 0, used_at)
        return count - known

    def __iter__(self) -> Iterator[int]:
        """All blocks, each after its parent."""
        return iter(self._parent)

    def parent_of(self, block: int) -> int | None:
        """The block before it; None for the first of a prompt."""
        return self._parent[block]

    def _is_free(self, block: int) -> bool:
        return self._weight.get(block) == 0

    def _let_go(self, block: int) -> None:
        self._weight[block] -= 1
        if not self._weight[block]:
            self._order.freed(block)

    def _make_room(self, count: int, now: float) -> bool:
        try:
            for _ in range(count - self.free_blocks):
                block = self._order.victim(self._is_free, now)
                self._remove(block)
                self.evicted.append(block)
        except LookupError:
            return False
        return True

    def _remove(self, block: int) -> None:
        parent = self._parent.pop(block)
        del self._weight[block]
        self._order.removed(block, parent)
        if parent is not None:
            self._let_go(parent)


class LeafLru:
    """The engines' own: the leaf that was released longest ago.

    Only where a path ends is its time kept; a block whose last child leaves inherits the child's.
    So a request costs O(1) and not O(its blocks), and the order is the same as if every block had
    been touched, the deepest first.
    """

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._count = 0

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        for block in blocks[known:]:
            self._at[block] = now
        if blocks:
            self._at[blocks[-1]] = now

    def released(self, block: int, now: float) -> None:
        self._at[block] = now

    def freed(self, block: int) -> None:
        self._count += 1
        heappush(self._heap, (self._at[block], self._count, block))

    def removed(self, block: int, parent: int | None) -> None:
        at = self._at.pop(block)
        if parent is not None and self._at[parent] < at:
            self._at[parent] = at

    def victim(self, is_free: Callable[[int], bool], now: float) -> int:
        heap, at = self._heap, self._at
        if len(heap) > _STALE * len(at) + 64:
            heap[:] = [one for one in set(heap) if at.get(one[2]) == one[0] and is_free(one[2])]
            heapify(heap)
        while heap:
            used_at, _, block = heap[0]
            if at.get(block) == used_at and is_free(block):
                return block
            heappop(heap)
        raise LookupError("every block is held")

    def used_at(self, block: int) -> float:
        """When a path through it was last used, as far as it ended here or lost its children."""
        return self._at[block]


class LeafPolicy:
    """Any policy of the table, on leaves only: a victim that is held, or has a block behind it
    here, counts as used, and another is asked for.

    Paths are touched deepest block first, so that a root is younger than its leaves. `costs_s`
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

    def used(self, blocks: Sequence[int], known: int, now: float, kind: int) -> None:
        for place in range(len(blocks) - 1, -1, -1):
            traits = self._traits.get((place, kind)) or self._make(place, kind)
            if place >= known:
                self._policy.insert(blocks[place], self._block_bytes, now, traits)
            else:
                self._policy.touch(blocks[place], now, traits)

    def released(self, block: int, now: float) -> None:
        """A use is counted when it begins."""

    def freed(self, block: int) -> None:
        """The policy is asked, and told no, instead."""

    def removed(self, block: int, parent: int | None) -> None:
        self._policy.remove(block)

    def victim(self, is_free: Callable[[int], bool], now: float) -> int:
        for _ in range(2 * len(self._policy) + 1):
            block = self._policy.victim(now)
            if is_free(block):
                return block
            self._policy.touch(block, now)
        raise LookupError("every block is held")

    def _make(self, place: int, kind: int) -> Traits:
        tokens = (place + 1) * self._block_tokens
        made = self._traits[place, kind] = Traits(self._cost_s(place), kind, tokens)
        return made
