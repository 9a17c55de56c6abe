"""Where a provider should end the prefixes of a prompt that it caches, and bills for writing."""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from preheat.core.memo import Memo

MOST: Final = 4
"""What Anthropic takes in one request."""
_TOKEN_BYTES: Final = 4
_REMEMBERED: Final = 65_536
_OFTEN: Final = 2
_PROVEN: Final = 3


Kind = Literal["tools", "system", "turn"]


class Part(msgspec.Struct, frozen=True, gc=False):
    """A piece of a prompt that a prefix may end with. `key` names it with all before it; `changes`: it
    looks as if it were another one next time (a date, a time, an id in it)."""

    kind: Kind
    key: int
    size_bytes: int
    changes: bool = False


class Breakpoints:
    """A prefix should end where others will begin alike: after the tools, after what of the system
    prompt stays, and after the last two turns of a conversation, as the next request repeats them.

    A part of the head stays if it doesn't look as if it changed, or came three times in this place all the
    same (a client that tries again comes twice); it doesn't stay where its place had another one in each request. Behind a part that changes nothing is
    cached. A prefix under `least_tokens` isn't cached by the provider, so it isn't marked.
    """

    def __init__(self, least_tokens: int = 1_024) -> None:
        self._least_bytes = _TOKEN_BYTES * least_tokens
        self._seen: Memo[int, int] = Memo(_REMEMBERED)
        self._behind: Memo[int, int] = Memo(_REMEMBERED)

    def places(self, parts: Sequence[Part]) -> list[int]:
        """The parts to end a prefix with, in order, at most four; and remember them all."""
        staying = self._staying(parts)
        ends: dict[str, int] = {}
        turns: list[int] = []
        size_bytes = 0
        for place, part in enumerate(parts[:staying]):
            size_bytes += part.size_bytes
            if size_bytes < self._least_bytes:
                continue
            if part.kind == "turn":
                turns.append(place)
            else:
                ends[part.kind] = place
        return sorted((*ends.values(), *turns[-(MOST - len(ends)) :][-2:]))

    def _staying(self, parts: Sequence[Part]) -> int:
        """How many parts there are before the first that changes."""
        found, parent = len(parts), 0
        for place, part in enumerate(parts):
            times = self._seen[part.key] or 0
            if part.kind != "turn" and place < found:
                others = self._behind[parent] or 0
                if (part.changes and times < _PROVEN) or (not times and others >= _OFTEN):
                    found = place
            if not times:
                self._behind.put(parent, (self._behind[parent] or 0) + 1)
            self._seen.put(part.key, times + 1)
            parent = part.key
        return found
