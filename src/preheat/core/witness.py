"""How far an engine's counts of cached tokens can be believed."""

from typing import Final, Literal

Trust = Literal["told", "confirmed", "estimated", "doubted"]
"""By its own events; by its counts of cached tokens; by what was sent; its counts can't be true."""
Verdict = Literal["unlikely", "less", "as-hoped", "more", "wiped"]

_SURE: Final = 0.9
"""A share of the hope that counts as fulfilled: templates and the last token take some."""
_WIPED: Final = 2
"""So many requests in a row that find nothing of what should be there: it was restarted or reset."""
_LIES: Final = 8
"""So many whole prompts found that nobody sent there, less those counts that can be true."""
_LONG: Final = 4
"""Fewer blocks may be a template's, or chance."""


class Witness:
    """What each answer's count says of our estimate, in blocks.

    An engine that counts wrongly is `doubted`: its counts are let be, and the estimate stands on what
    was sent alone.
    """

    def __init__(self) -> None:
        self.trust: Trust = "estimated"
        self._empty_handed = 0
        self._lies = 0

    def hears(self, hoped_blocks: int, found_blocks: float, prompt_blocks: int) -> Verdict:
        """An answer found so much of a prompt where `hoped_blocks` were thought to be there."""
        if not self._is_likely(hoped_blocks, found_blocks, prompt_blocks):
            return "unlikely"
        if found_blocks < _SURE * hoped_blocks - 1.0:
            self._empty_handed = self._empty_handed + 1 if found_blocks < 1.0 else 0
            return "wiped" if self._empty_handed >= _WIPED else "less"
        self._empty_handed = 0
        return "more" if found_blocks > hoped_blocks + 1.0 else "as-hoped"

    def cleared(self) -> None:
        """It was restarted or reset."""
        self._empty_handed = 0

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
