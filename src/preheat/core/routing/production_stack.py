"""vLLM production-stack's prefix-aware routing."""

from collections.abc import Sequence

from preheat.core.chance import Chance
from preheat.core.memo import Memo
from preheat.core.placing import Candidate, Placing


class ProductionStack:
    """production-stack's `prefixaware`: anyone of those who were sent the longest beginning of this
    prompt, by chance, whatever their load.

    We differ: its trie is of 128 characters a node and grows without end; ours is of blocks, and
    holds `trie_blocks` in two generations.
    """

    def __init__(self, *, seed: int = 0, trie_blocks: int = 1_000_000) -> None:
        self._chance = Chance(seed)
        self._sent: Memo[int, int] = Memo(trie_blocks)
        """For each block a bit mask of the workers' numbers."""

    def choose(self, placing: Placing, candidates: Sequence[Candidate], now: float) -> int:
        present = sum(1 << one.number for one in candidates)
        matching = present
        for block in placing.blocks:
            sent = (self._sent[block] or 0) & present
            if not sent:
                break
            matching = sent
        places = [at for at, one in enumerate(candidates) if matching >> one.number & 1]
        place = places[self._chance.below(len(places))]
        for block in placing.blocks:
            self._sent.put(block, (self._sent[block] or 0) | 1 << candidates[place].number)
        return place

    def finished(self, placing: Placing, number: int, now: float) -> None:
        pass
