"""The cache-aware rule of SGLang's gateway."""

from collections.abc import Sequence

from preheat.core.memo import Memo
from preheat.core.placing import Candidate, Placing


class Smg:
    """SGLang Model Gateway, policy `cache_aware`, HTTP mode (and vllm-project/router before 0.1.17).

    It doesn't know what workers hold: it keeps a tree of the prompts it has routed. Is the load
    uneven (busiest - idlest > `abs_threshold` requests and busiest > `rel_threshold` · idlest), the
    least loaded gets the request. Else, if more than `cache_threshold` of the prompt is in the
    tree, the worker that was the first to get the deepest matching piece; else the least loaded.
    Defaults: theirs (0.3, 64, 1.5).

    We differ: their tree is of characters and ours of blocks, so that a match ends at a block;
    theirs is trimmed by least use to 2^26 characters a worker every minute or two, ours holds
    `tree_blocks` in two generations. `benchmarks routers` measures how often the choices agree.
    """

    def __init__(
        self,
        *,
        cache_threshold: float = 0.3,
        abs_threshold: int = 64,
        rel_threshold: float = 1.5,
        tree_blocks: int = 1_000_000,
    ) -> None:
        self._cache_threshold = cache_threshold
        self._abs_threshold = abs_threshold
        self._rel_threshold = rel_threshold
        self._owners: Memo[int, int] = Memo(tree_blocks)

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        loads = [one.in_flight for one in candidates]
        idlest = min(range(len(loads)), key=loads.__getitem__)
        spread = max(loads) - loads[idlest]
        matched, owner = self._match(placing)
        if spread > self._abs_threshold and max(loads) > self._rel_threshold * loads[idlest]:
            place = idlest
        elif matched * placing.block_tokens > self._cache_threshold * placing.input_tokens:
            numbers = [one.number for one in candidates]
            place = numbers.index(owner) if owner in numbers else 0
        else:
            place = idlest
        for block in placing.blocks[matched:]:
            self._owners.put(block, candidates[place].number)
        return place

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass

    def _match(self, placing: Placing) -> tuple[int, int]:
        """How many blocks are in the tree, and whose the deepest of them is."""
        owner = -1
        for depth, block in enumerate(placing.blocks):
            found = self._owners[block]
            if found is None:
                return depth, owner
            owner = found
        return len(placing.blocks), owner
