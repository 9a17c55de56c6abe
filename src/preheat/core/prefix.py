"""Which blocks of KV a memory pool holds: always whole prefixes, and the leaves go first."""

from collections.abc import Iterator, Mapping, Sequence

from preheat.core.leaf_orders import LeafLru, LeafOrder, LeafPolicy, Leaves

__all__ = ["LeafLru", "LeafOrder", "LeafPolicy", "Leaves", "PrefixStore"]


class PrefixStore:
    """The blocks of one pool. A block's id names it with all before it, so a block is here only if
    all before it on its path are: a flat map is the prefix tree. Each takes one place, or as many as
    `sizes` says.

    What running requests use is held; of the rest the leaves may go, in the order of `order`.
    Blocks that nobody else can reuse (a prompt's last, partial one, and what is being generated)
    are `private`: only counted. This is how paged engines do it (Kwon et al., PagedAttention,
    SOSP 2023; vLLM's prefix caching frees a request's tail first), where `order` is `LeafLru`.
    """

    def __init__(
        self, capacity_blocks: int, order: LeafOrder, sizes: Mapping[int, int] | None = None
    ) -> None:
        if capacity_blocks < 0:
            raise ValueError(f"a pool can't have {capacity_blocks} blocks")
        self.capacity_blocks = capacity_blocks
        self.evicted: list[int] = []
        """Who was pushed out, oldest first, until the driver has taken note of it and cleared it."""
        self._order = order
        self._parent: dict[int, int | None] = {}
        self._weight: dict[int, int] = {}  # children here, and requests that end at this block
        self._used_at: dict[int, float] = {}
        self._sizes = sizes
        self._taken = 0  # places of all blocks that are here, and private ones
        self._private = 0
        self._running: dict[int, int] = {}  # the last blocks of held paths, how often each
        self._claimed = (
            0  # places that held paths would take if they shared nothing, and private ones
        )

    def __len__(self) -> int:
        return len(self._parent)

    def __contains__(self, block: int) -> bool:
        return block in self._parent

    @property
    def free_blocks(self) -> int:
        """Places that nothing is in."""
        return self.capacity_blocks - self._taken

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

        False where there isn't room beside what is held; nothing has changed then. `kind` is the
        class that `Traits.kind` means.
        """
        known = self.overlap(blocks)
        needed = private + self._places(blocks[known:])
        if not self._has_room(needed, blocks[:known]):
            return False
        if known:
            self._weight[blocks[known - 1]] += 1  # the request's hold; then its first new block
        if not self._make_room(needed, now):
            if known:
                self._let_go(blocks[known - 1])
            return False
        parent = blocks[known - 1] if known else None
        for block in blocks[known:]:
            self._parent[block] = parent
            self._weight[block] = 1  # the next block, or at the end the request
            self._used_at[block] = now
            parent = block
        if blocks:
            self._used_at[blocks[-1]] = now
            self._running[blocks[-1]] = self._running.get(blocks[-1], 0) + 1
        self._taken += needed
        self._private += private
        self._claimed += private + self._places(blocks)
        self._order.used(blocks, known, now, kind)
        return True

    def grow(self, private: int, now: float) -> bool:
        """So many more private blocks. False where there isn't room; nothing has changed then."""
        if not (self._has_room(private, ()) and self._make_room(private, now)):
            return False
        self._taken += private
        self._private += private
        self._claimed += private
        return True

    def release(self, blocks: Sequence[int], private: int, now: float) -> None:
        """A request has ended: its blocks stay until they are pushed out, its private ones go."""
        self._taken -= private
        self._private -= private
        self._claimed -= private + self._places(blocks)
        if blocks:
            last = blocks[-1]
            self._running[last] -= 1
            if not self._running[last]:
                del self._running[last]
            self._used_at[last] = now
            self._let_go(last)

    def serve(self, blocks: Sequence[int], now: float, kind: int = 0) -> int:
        """A request that is over as soon as it begins. How many leading blocks it found; they all stay,
        if there is room for them."""
        found = self.overlap(blocks)
        if self.take(blocks, 0, now, kind):
            self.release(blocks, 0, now)
        return found

    def drop(self, blocks: Sequence[int], keep: int) -> None:
        """Forget the blocks behind the first `keep` that nobody needs: they were never computed,
        or are known to be of no use any more."""
        for block in reversed(blocks[keep : self.overlap(blocks)]):
            if not self.is_free(block):
                return
            self._remove(block)

    def put(self, blocks: Sequence[int], used_at: float, kind: int = 0) -> int:
        """Bring in blocks that no request asks for (restored, warmed), as far as there are free
        places; nobody is pushed out. Returns how many came in."""
        known = count = self.overlap(blocks)
        left = self.free_blocks
        while count < len(blocks) and (left := left - self._places(blocks[count : count + 1])) >= 0:
            count += 1
        if count == known:
            return 0
        self.take(blocks[:count], 0, used_at, kind)
        self.release(blocks[:count], 0, used_at)
        return count - known

    def outdate(self, blocks: Sequence[int]) -> None:
        """Nobody will ask for these again: they are the oldest from now on."""
        for block in blocks:
            if block in self._used_at:
                self._used_at[block] = float("-inf")
                if self.is_free(block):
                    self._order.freed(block, float("-inf"))

    def resize(self, capacity_blocks: int, now: float) -> None:
        """The pool has so many places from now on. Who is too many, and isn't held, is pushed out."""
        self.capacity_blocks = capacity_blocks
        self._make_room(0, now)

    def flush(self) -> None:
        """A restart: whatever no running request holds is gone."""
        for block in reversed(list(self._parent)):
            if self.is_free(block):
                self._remove(block)

    def paths(self) -> list[list[int]]:
        """The prefixes it consists of, from a root to each leaf; the one used last comes first."""
        leaves = sorted(set(self._parent) - set(self._parent.values()))
        leaves.sort(key=lambda block: -self._used_at[block])
        return [self.path_to(block) for block in leaves]

    def path_to(self, block: int) -> list[int]:
        """The block and all before it, root first."""
        path: list[int] = []
        at: int | None = block
        while at is not None:
            path.append(at)
            at = self._parent[at]
        path.reverse()
        return path

    def __iter__(self) -> Iterator[int]:
        """All blocks, each after its parent."""
        return iter(self._parent)

    def is_free(self, block: int) -> bool:
        """See `Leaves`."""
        return self._weight.get(block) == 0

    def used_at(self, block: int) -> float:
        """See `Leaves`."""
        return self._used_at[block]

    def _places(self, blocks: Sequence[int]) -> int:
        sizes = self._sizes
        return len(blocks) if sizes is None else sum(sizes[block] for block in blocks)

    def _let_go(self, block: int) -> None:
        self._weight[block] -= 1
        if not self._weight[block]:
            self._order.freed(block, self._used_at[block])

    def _has_room(self, count: int, known: Sequence[int]) -> bool:
        """Whether so many places are free or can be, while held paths and this one stay.

        Nearly always a sum says so. Where held paths share much it says too little, and they are
        walked through.
        """
        if count <= self.free_blocks or (
            self._claimed + self._places(known) + count <= self.capacity_blocks
        ):
            return True
        held = set(known)
        for last in self._running:
            at: int | None = last
            while at is not None and at not in held:
                held.add(at)
                at = self._parent[at]
        return self._private + self._places([*held]) + count <= self.capacity_blocks

    def _make_room(self, count: int, now: float) -> bool:
        try:
            while count > self.free_blocks:
                block = self._order.victim(self, now)
                self._remove(block)
                self.evicted.append(block)
        except LookupError:
            return False
        return True

    def _remove(self, block: int) -> None:
        parent = self._parent.pop(block)
        self._taken -= 1 if self._sizes is None else self._sizes[block]
        del self._weight[block]
        used_at = self._used_at.pop(block)
        self._order.removed(block)
        if parent is not None:
            self._used_at[parent] = max(self._used_at[parent], used_at)
            self._let_go(parent)
