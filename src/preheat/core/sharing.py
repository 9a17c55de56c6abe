"""How much of a session's prompt only that session has had: what may go when it is over."""

from collections.abc import Sequence
from typing import Final

from preheat.core.memo import Memo

_CAPACITY: Final = 131_072
_STRIDE: Final = 8
"""Each so many'th block is remembered: at 512 bytes each, about 1,024 tokens of English."""


class Sharing:
    """Whose each beginning of a prompt is. A block names all before it, so what one session alone has had is
    the end of its prompt; what was forgotten counts as others'."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._owners: Memo[int, str] = Memo(capacity)  # "": several

    def saw(self, session: str, blocks: Sequence[int]) -> None:
        """A prompt of this session begins with these; "": of nobody's."""
        for block in blocks[_STRIDE - 1 :: _STRIDE]:
            owner = self._owners[block]
            if owner is None or owner not in {"", session}:
                self._owners.put(block, session if owner is None else "")

    def own_from(self, session: str, blocks: Sequence[int]) -> int | None:
        """How many of these blocks, at most, others had, too; None where nothing is surely its own.

        >>> sharing = Sharing()
        >>> sharing.saw("a", range(24))
        >>> sharing.saw("b", [*range(8), *range(100, 116)])
        >>> sharing.own_from("a", range(24)), sharing.own_from("c", range(24))
        (16, None)
        """
        for at in range(_STRIDE - 1, len(blocks), _STRIDE):
            if session and self._owners[blocks[at]] == session:
                return at + 1
        return None
