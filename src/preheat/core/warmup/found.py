"""What warm-ups have put there, and which request finds it first: a warm-up takes away one miss a copy."""

from collections.abc import Sequence
from typing import Final, NamedTuple

_MOST: Final = 1_024


class Found(NamedTuple):
    """Of a request's cached tokens, those that a warm-up had computed, and the seconds that took."""

    tokens: int = 0
    took_s: float = 0.0


NOTHING_FOUND: Final = Found()


class WarmedPrefixes:
    """Prefixes by worker and by the id of their last block, until a request has begun with them.

    >>> warmed = WarmedPrefixes()
    >>> warmed.put(0, [7, 8], 300, 2.0)
    >>> warmed.used(0, [7, 9], 256), warmed.used(1, [7, 8, 9], 300)
    (Found(tokens=0, took_s=0.0), Found(tokens=0, took_s=0.0))
    >>> warmed.used(0, [7, 8, 9], 150), warmed.used(0, [7, 8, 9], 300)
    (Found(tokens=150, took_s=1.0), Found(tokens=0, took_s=0.0))
    """

    def __init__(self) -> None:
        self._of: dict[int, dict[int, Found]] = {}

    def put(self, worker: int, blocks: Sequence[int], computed_tokens: int, took_s: float) -> None:
        """So many tokens of this prefix were computed there."""
        if not blocks or computed_tokens <= 0:
            return
        mine = self._of.setdefault(worker, {})
        mine[blocks[-1]] = Found(computed_tokens, took_s)
        if len(mine) > _MOST:
            del mine[next(iter(mine))]

    def used(self, worker: int, blocks: Sequence[int], cached_tokens: int) -> Found:
        """A request began with these blocks, and the engine's cache had so many of its tokens."""
        mine = self._of.get(worker)
        if not mine:
            return NOTHING_FOUND
        tokens, took_s = 0, 0.0
        for block in blocks:
            put = mine.pop(block, None)
            if put is not None:
                found = max(0, min(put.tokens, cached_tokens - tokens))
                tokens += found
                took_s += put.took_s * found / put.tokens
        return Found(tokens, took_s)

    def cleared(self, worker: int) -> None:
        """Nothing is there any more."""
        self._of.pop(worker, None)
