"""What one worker probably holds: what was sent to it, in a store as large as its own."""

from collections.abc import Iterator, Sequence
from typing import Final

from preheat.core.prefix import LeafLru, PrefixStore
from preheat.core.witness import Trust, Witness

USUAL_BLOCKS: Final = 4_096
"""Half a million tokens: what an engine is thought to hold that doesn't say."""
_MOST_BLOCKS: Final = 131_072
"""16 million tokens, and 50 MB of ours: where an engine holds more, the rest is unknown."""
_SHRINK: Final = 0.95
_GROW: Final = 1.02
"""A wrong hope takes a twentieth off the size, a wrong fear gives a fiftieth: one that is too hopeful
costs a request's prefill, one too fearful only a little choice."""


class Residency:
    """An estimate of one worker's KV cache, corrected by what its answers say was cached.

    The engine's own rule (paged: whole blocks, leaves first, least recently used) in a store of its
    size. The size is what it says, or begins at `USUAL_BLOCKS`; from then on it is learned: an
    answer with fewer cached tokens than hoped makes it smaller, one with more makes it larger.

    An engine that counts wrongly isn't listened to (`core.witness`).
    """

    def __init__(self, capacity_blocks: int | None = None) -> None:
        self.life = 0
        """How often it was cleared: who was sent there before holds nothing any more."""
        self._said_blocks = capacity_blocks
        size = USUAL_BLOCKS if capacity_blocks is None else capacity_blocks
        self._store = PrefixStore(min(size, _MOST_BLOCKS), LeafLru())
        self._witness = Witness()

    @property
    def trust(self) -> Trust:
        """How far it can be relied upon."""
        return self._witness.trust

    def __len__(self) -> int:
        return len(self._store)

    def __iter__(self) -> Iterator[int]:
        """What it is thought to hold."""
        return iter(list(self._store))

    @property
    def capacity_blocks(self) -> int:
        """How many it is thought to hold."""
        return self._store.capacity_blocks

    def sent(self, blocks: Sequence[int], now: float) -> tuple[Sequence[int], list[int]]:
        """A request goes there: its blocks are held until `ended`. Returns those that came in, and
        those that were pushed out. Of a prompt that is larger than all of it only the beginning
        that fits comes in."""
        store = self._store
        known = store.overlap(blocks)
        fits = store.take(blocks, 0, now)
        gone, store.evicted = store.evicted, []
        return (blocks[known:] if fits else ()), gone

    def holds(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are there."""
        return self._store.overlap(blocks)

    def ended(self, blocks: Sequence[int], now: float) -> None:
        """The request that had been let in with these has ended."""
        self._store.release(blocks, 0, now)

    def failed(self, blocks: Sequence[int], known: int, now: float) -> list[int]:
        """It ended before its prompt was computed: what came in with it isn't there. Returns that."""
        self._store.release(blocks, 0, now)
        before = self._store.overlap(blocks)
        self._store.drop(blocks, known)
        return list(blocks[self._store.overlap(blocks) : before])

    def found(
        self, hoped_blocks: int, found_blocks: float, prompt_blocks: int, now: float
    ) -> list[int]:
        """What an answer said was cached, in blocks, where `hoped_blocks` were thought to be there.
        Returns what isn't there after all."""
        verdict = self._witness.hears(hoped_blocks, found_blocks, prompt_blocks)
        if verdict == "wiped":
            return self.cleared()
        if self._said_blocks is None:
            if verdict == "less":
                used = min(self.capacity_blocks, len(self._store))
                return self._resize(max(1, int(used * _SHRINK)), now)
            if verdict == "more":
                return self._resize(min(_MOST_BLOCKS, int(self.capacity_blocks * _GROW) + 1), now)
        return []

    def cleared(self) -> list[int]:
        """It was restarted or reset: another life begins with nothing. Returns what is gone."""
        before = list(self._store)
        self._store = PrefixStore(self.capacity_blocks, LeafLru())
        self._witness.cleared()
        self.life += 1
        return before

    def resized(self, capacity_blocks: int, now: float) -> list[int]:
        """It says how much it holds. Returns what doesn't fit any more."""
        self._said_blocks = capacity_blocks
        return self._resize(min(capacity_blocks, _MOST_BLOCKS), now)

    def _resize(self, capacity_blocks: int, now: float) -> list[int]:
        store = self._store
        store.resize(capacity_blocks, now)
        gone, store.evicted = store.evicted, []
        return gone
