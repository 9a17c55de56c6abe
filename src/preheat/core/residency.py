"""What one worker probably holds: what was sent to it, in a store as large as its own."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from preheat.core.prefix import LeafLru, PrefixStore

Trust = Literal["told", "confirmed", "estimated", "doubted"]
"""By its own events; by its counts of cached tokens; by what was sent; its counts can't be true."""

USUAL_BLOCKS: Final = 4_096
"""Half a million tokens: what an engine is thought to hold that doesn't say."""
_MOST_BLOCKS: Final = 131_072
"""16 million tokens, and 50 MB of ours: where an engine holds more, the rest is unknown."""
_SHRINK: Final = 0.95
_GROW: Final = 1.02
"""A wrong hope takes a twentieth off the size, a wrong fear gives a fiftieth: one that is too hopeful
costs a request's prefill, one too fearful only a little choice."""
_SURE: Final = 0.9
"""A share of the hope that counts as fulfilled: templates and the last token take some."""
_WIPED: Final = 2
"""So many requests in a row that find nothing of what should be there: it was restarted or reset."""
_LIES: Final = 8
"""So many whole prompts found that nobody sent there, less those counts that can be true."""
_LONG: Final = 4
"""Fewer blocks may be a template's, or chance."""


class Residency:
    """An estimate of one worker's KV cache, corrected by what its answers say was cached.

    The engine's own rule (paged: whole blocks, leaves first, least recently used) in a store of its
    size. The size is what it says, or begins at `USUAL_BLOCKS`; from then on it is learned: an
    answer with fewer cached tokens than hoped makes it smaller, one with more makes it larger.

    An engine that counts wrongly is `doubted`: its counts are let be, and the estimate stands on what
    was sent alone.
    """

    def __init__(self, capacity_blocks: int | None = None) -> None:
        self.trust: Trust = "estimated"
        self.life = 0
        """How often it was cleared: who was sent there before holds nothing any more."""
        self._said_blocks = capacity_blocks
        size = USUAL_BLOCKS if capacity_blocks is None else capacity_blocks
        self._store = PrefixStore(min(size, _MOST_BLOCKS), LeafLru())
        self._empty_handed = 0
        self._lies = 0

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
        if not self._is_likely(hoped_blocks, found_blocks, prompt_blocks):
            return []
        if found_blocks < _SURE * hoped_blocks - 1.0:
            return self._disappointed(found_blocks, now)
        self._empty_handed = 0
        if found_blocks > hoped_blocks + 1.0 and self._said_blocks is None:
            self._resize(min(_MOST_BLOCKS, int(self.capacity_blocks * _GROW) + 1), now)
        return []

    def _is_likely(self, hoped_blocks: int, found_blocks: float, prompt_blocks: int) -> bool:
        """Whether the count can be true; that it can't be is remembered until it was so often again."""
        is_possible = 0.0 <= found_blocks <= prompt_blocks + 1.0
        is_whole = (
            hoped_blocks == 0 and prompt_blocks >= _LONG and found_blocks >= prompt_blocks - 1
        )
        if not is_possible:
            self._lies = 2 * _LIES
        elif is_whole:
            self._lies = min(2 * _LIES, self._lies + 1)
        elif self._lies:
            self._lies -= 1
        self.trust = "doubted" if self._lies >= _LIES else "confirmed"
        return self._lies < _LIES

    def cleared(self) -> list[int]:
        """It was restarted or reset: another life begins with nothing. Returns what is gone."""
        before = list(self._store)
        self._store = PrefixStore(self.capacity_blocks, LeafLru())
        self._empty_handed = 0
        self.life += 1
        return before

    def resized(self, capacity_blocks: int, now: float) -> list[int]:
        """It says how much it holds. Returns what doesn't fit any more."""
        self._said_blocks = capacity_blocks
        return self._resize(min(capacity_blocks, _MOST_BLOCKS), now)

    def _disappointed(self, found_blocks: float, now: float) -> list[int]:
        self._empty_handed = self._empty_handed + 1 if found_blocks < 1.0 else 0
        if self._empty_handed >= _WIPED:
            return self.cleared()
        if self._said_blocks is not None:
            return []
        return self._resize(max(1, int(min(self.capacity_blocks, len(self._store)) * _SHRINK)), now)

    def _resize(self, capacity_blocks: int, now: float) -> list[int]:
        store = self._store
        store.resize(capacity_blocks, now)
        gone, store.evicted = store.evicted, []
        return gone
