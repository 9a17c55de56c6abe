"""Tail-optimised LRU: what a conversation can lose without missing its target leaves first."""

from collections import OrderedDict
from typing import ClassVar, Final, Generic, TypeVar

from preheat.core.types import PLAIN, Traits

K = TypeVar("K")

_NEXT_TOKENS: Final = 200
"""What a user adds in a turn, roughly: a default of ours, to be set from the traffic at hand."""


class TLru(Generic[K]):
    """Zhang, Li, Moallemi and Peng, "Tail-Optimized Caching for LLM Inference", 2025
    (arXiv 2510.15152), for blocks of prompts.

    A next turn meets its target when at most `target_tokens` of it must be computed. A conversation
    with a history of L tokens, whose next prompt adds about `next_tokens`, needs
    L + next_tokens - target_tokens of them cached; blocks behind that are free to go. Those leave
    first, by LRU; then all others, by LRU.

    A block's place is `Traits.tokens`; blocks without one (0) are never free. L is the place of the
    deepest block of a path, and a path is told deepest block first: a new one begins where the
    place doesn't fall. Once a block was needed it stays needed while it is held: histories only
    grow, and a prefix that a long conversation needs must not be let go for a short one. So the
    needed blocks are closed under prefixes, and victims are leaves.

    A block is `block_tokens` long: without it the conversation would be that much short.
    """

    keeps_order: ClassVar[bool] = True

    def __init__(
        self,
        *,
        target_tokens: int = 1_024,
        next_tokens: int = _NEXT_TOKENS,
        block_tokens: int = 1,
    ) -> None:
        self._spare_tokens = target_tokens - next_tokens
        self._block_tokens = block_tokens
        self._free: OrderedDict[K, int] = OrderedDict()  # the block's place
        self._needed: OrderedDict[K, int] = OrderedDict()
        self._history_tokens = 0
        self._last_tokens = 0

    def insert(self, key: K, size_bytes: int, now: float, traits: Traits = PLAIN) -> None:
        if self._is_free(traits.tokens):
            self._free[key] = traits.tokens
        else:
            self._needed[key] = traits.tokens

    def touch(self, key: K, now: float, traits: Traits | None = None) -> None:
        if key in self._needed:
            known_tokens = self._needed.pop(key)
            tokens = known_tokens if traits is None else traits.tokens
            self._is_free(tokens)
            self._needed[key] = tokens
        else:
            known_tokens = self._free.pop(key)
            tokens = known_tokens if traits is None else traits.tokens
            (self._free if self._is_free(tokens) else self._needed)[key] = tokens

    def remove(self, key: K) -> None:
        if key in self._free:
            del self._free[key]
        else:
            del self._needed[key]

    def victim(self, now: float) -> K:
        for key in self._free or self._needed:
            return key
        raise LookupError("no entry to evict")

    def __len__(self) -> int:
        return len(self._free) + len(self._needed)

    def _is_free(self, tokens: int) -> bool:
        """Whether the path that is being told can do without the block at this place."""
        if tokens >= self._last_tokens:
            self._history_tokens = tokens
        self._last_tokens = tokens
        needed_tokens = self._history_tokens - self._spare_tokens
        return tokens > 0 and tokens - self._block_tokens >= needed_tokens
