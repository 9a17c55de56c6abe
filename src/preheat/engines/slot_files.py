"""llama.cpp's slots on disk: a prefix that was computed once fills other slots, and the next process."""

from preheat.engines.dialects.llamacpp import slot_file
from preheat.engines.dialects.readings import Moved
from preheat.engines.direct import Direct
from preheat.engines.slot_tier import identity_told


class SlotFiles:
    """The files of one server, under `--slot-save-path`, named after its model and their prefix.

    `weights` is the sha256 or version of its model where that is known: two models of the same shape
    under the same path can't be told apart otherwise, and the server takes either's file.

    The folder is the server's and may be another machine's, so nothing checks a file before it is read, and
    llama.cpp dies of one that was cut short. Where the folder is ours `SlotTier` does.
    """

    def __init__(self, direct: Direct, *, weights: str = "") -> None:
        self._direct = direct
        self._weights = weights

    async def save(self, prefix: str, slot: int) -> Moved | None:
        """Write what the slot holds. None where the server has no slots or doesn't say what its
        model is. Raises EngineError."""
        return await self._move("save", await self._file_of(prefix), slot)

    async def restore(self, prefix: str, slot: int) -> Moved | None:
        """Read it into a slot; what that held is lost. As `save`."""
        return await self._move("restore", await self._file_of(prefix), slot)

    async def restore_into_idle(self, prefix: str) -> tuple[int, int] | None:
        """Into the idle slot that holds least: its number and the tokens that it has now; None where
        there is no file, no idle slot or no such server. Raises EngineError."""
        slots = [one for one in await self._direct.slots() or () if not one.is_busy]
        if not slots:
            return None
        slot = min(slots, key=lambda one: one.tokens or 0).number
        moved = await self.restore(prefix, slot)
        return None if moved is None or not moved.ok else (slot, moved.tokens or 0)

    async def spread(self, prefix: str, slot: int) -> list[int]:
        """Fill all other idle slots with what this one holds: a busy slot shares nothing, so a burst needs
        one each. Returns those that have it now, `slot` first; that one alone where files can't be
        written. Raises EngineError."""
        name = await self._file_of(prefix)
        saved = await self._move("save", name, slot)
        filled = [slot]
        if saved is None or not saved.ok:
            return filled
        for other in await self._direct.slots() or ():
            if other.number != slot and not other.is_busy:
                moved = await self._move("restore", name, other.number)
                if moved is not None and moved.ok:
                    filled.append(other.number)
        return filled

    async def _file_of(self, prefix: str) -> str | None:
        """The model is asked for each time: it may be another since."""
        if (await self._direct.known()).slots() is None:
            return None
        identity = await identity_told(self._direct, self._weights)
        return None if identity is None else slot_file(identity, bytes.fromhex(prefix))

    async def _move(self, action: str, name: str | None, slot: int) -> Moved | None:
        if name is None:
            return None
        dialect = await self._direct.known()
        call = dialect.save(slot, name) if action == "save" else dialect.restore(slot, name)
        return None if call is None else dialect.read_moved(*await self._direct.ask(call))
