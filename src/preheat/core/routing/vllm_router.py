"""The cache-aware rule of vLLM's router."""

from collections.abc import Sequence

from preheat.core.memo import Memo
from preheat.core.placing import Candidate, Placing


class VllmRouter:
    """vllm-project/router 0.1.17, policy `cache_aware`: SGLang's rule (`smg`) but for one thing. Of
    all workers that were sent the longest matching beginning the least loaded gets the request,
    and not the one that was sent it first.

    Like SMG's it goes by what it has routed, to a tree of tokens if the workers tell them, and by
    the same three thresholds. Defaults: theirs (0.3, 64, 1.5).

    We differ: our tree is of blocks and holds `tree_blocks` in two generations, theirs is trimmed
    by least use every two minutes.
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
        self._sent: Memo[int, int] = Memo(tree_blocks)
        """For each block a bit mask of the workers' numbers."""

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        loads = [one.in_flight for one in candidates]
        idlest = min(range(len(loads)), key=loads.__getitem__)
        spread = max(loads) - loads[idlest]
        is_uneven = spread > self._abs_threshold
        is_uneven = is_uneven and max(loads) > self._rel_threshold * loads[idlest]
        matched, holders = self._match(placing, candidates)
        enough = matched * placing.block_tokens > self._cache_threshold * placing.input_tokens
        place = idlest
        if enough and not is_uneven:
            holding = [at for at, one in enumerate(candidates) if holders >> one.number & 1]
            place = min(holding, key=loads.__getitem__)
        for block in placing.blocks:
            self._sent.put(block, (self._sent[block] or 0) | 1 << candidates[place].number)
        return place

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass

    def _match(self, placing: Placing, candidates: Sequence[Candidate]) -> tuple[int, int]:
        """How many blocks some of these were sent, and who was sent the last of them."""
        present = sum(1 << one.number for one in candidates)
        holders = 0
        for depth, block in enumerate(placing.blocks):
            sent = (self._sent[block] or 0) & present
            if not sent:
                return depth, holders
            holders = sent
        return len(placing.blocks), holders
