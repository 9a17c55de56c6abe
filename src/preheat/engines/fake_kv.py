"""An engine's KV cache without the engine: which tokens of a prompt it would have had.

It is vLLM's rule (whole blocks, least recently used, leaves first), and in the scenario of
`tests/integration/test_fake_kv.py` it hits and misses where llama.cpp does.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b


class BlockLru:
    """A bounded set of chained token blocks: holding one implies holding all before it.

    Each serve touches the last block first, so a block is always less recently used than
    those it builds on. Evicting the least recently used one is then evicting a leaf, and a
    prefix outlives its suffixes.

    llama.cpp keeps whole sequences, in its slots and in host memory: one slot and a memory
    for K sequences of equal length behave like `capacity_blocks` = K sequences and a half.
    (Why not K + 1, and why a half, is in the test.) The likeness ends where questions are long
    beside their prefix, because here each one stays until it is old and there the next one
    overwrites it, and where sequences branch late: their trunk counts once here, there in each.

    >>> cache = BlockLru(capacity_blocks=2, block_tokens=2)
    >>> [cache.serve(tokens) for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 9, 9])]
    [0, 4, 2]
    """

    def __init__(self, capacity_blocks: int, block_tokens: int = 16) -> None:
        if capacity_blocks < 1 or block_tokens < 1:
            raise ValueError("a cache has at least one block, and a block at least one token")
        self.capacity_blocks = capacity_blocks
        self.block_tokens = block_tokens
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def serve(self, tokens: Sequence[int], adapter: str = "") -> int:
        """Return how many leading tokens were cached, then hold the sequence, which is that adapter's own.

        At most all but one: an engine has to compute the last to have something to answer.
        """
        chain = list(self._chain(tokens, adapter))
        held = 0
        while held < len(chain) and chain[held] in self._blocks:
            held += 1
        self._hold(chain)
        return max(0, min(held * self.block_tokens, len(tokens) - 1))

    def clear(self) -> None:
        """Forget everything, as a restarted engine does."""
        self._blocks.clear()

    def _hold(self, chain: list[bytes]) -> None:
        del chain[self.capacity_blocks :]
        for block in reversed(chain):  # so that a prefix outlives its suffix
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity_blocks:
            self._blocks.popitem(last=False)

    def _chain(self, tokens: Sequence[int], adapter: str) -> Iterator[bytes]:
        data = array("q", tokens).tobytes()
        size = self.block_tokens * 8
        parent = blake2b(adapter.encode(), digest_size=16).digest() if adapter else b""
        for start in range(0, len(data) - size + 1, size):
            parent = blake2b(data[start : start + size], digest_size=16, key=parent).digest()
            yield parent
