"""What a server itself says of its slots, beside what is believed of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from preheat.engines.dialects.readings import Slot
from preheat.errors import EngineError

_WITHIN_S: Final = 1.0
"""A server that computes answers between two batches; who waits for a slot doesn't wait longer for this."""
_ALIKE_TOKENS: Final = 16
"""Its count and an answer's may differ by so many: by the last ones said."""


class Said(NamedTuple):
    """Whether it is another process, and else which slots hold something else than is believed."""

    is_another: bool
    changed: tuple[int, ...] = ()


class SlotTruth:
    """A slot that has had a request says how many tokens it holds, and one of a new process says nothing
    (llama.cpp; also of a file that was loaded into it). So what answers have left is compared with that:
    a restart that nobody saw, and requests that came to a slot unnamed, are found out.

    It is asked in doubt: after a failure, an answer that had less than was believed, a request that
    named no slot.
    """

    def __init__(self, tell: Callable[[], Awaitable[list[Slot] | None]]) -> None:
        """`tell` asks the server. May raise EngineError."""
        self.life = 0
        """How often it was started again, as far as is known."""
        self._tell = tell
        self._left: dict[int, int] = {}  # tokens, by slot, since its last answer
        self._is_doubted = False
        self._turn = asyncio.Lock()

    def doubt(self) -> None:
        """What is believed may be wrong."""
        self._is_doubted = True

    def taken(self, slot: int) -> None:
        """What it holds changes from now on."""
        self._left.pop(slot, None)

    def left(self, slot: int, tokens: int) -> None:
        """An answer has left so many there."""
        self._left[slot] = tokens

    def clear(self) -> None:
        """It is another process, as is known: nothing was answered yet."""
        self.life += 1
        self._left.clear()
        self._is_doubted = False

    async def resolved(self) -> Said | None:
        """As `compared`, if there is a doubt; each is asked about once, whatever comes of it."""
        if not self._is_doubted:
            return None
        async with self._turn:
            if not self._is_doubted:  # another has asked meanwhile
                return None
            self._is_doubted = False
            return await self.compared()

    async def compared(self) -> Said | None:
        """What it says; None where it doesn't, or nothing was answered that could be compared."""
        before = dict(self._left)
        if not before:
            return None
        try:
            async with asyncio.timeout(_WITHIN_S):
                slots = await self._tell()
        except (EngineError, TimeoutError):
            return None
        same = {slot: held for slot, held in before.items() if self._left.get(slot) == held}
        told = [one for one in slots or () if one.number in same and not one.is_busy]
        if not told:
            return None
        if any(one.tokens is None for one in told):
            return Said(is_another=True)
        changed = (
            one.number for one in told if abs((one.tokens or 0) - same[one.number]) > _ALIKE_TOKENS
        )
        return Said(is_another=False, changed=tuple(changed))
