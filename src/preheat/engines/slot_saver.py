"""Writes what a server's slots hold to files: the slot that goes next ahead of that, others when asked."""

import asyncio
from typing import Final

from preheat.core.costs import ServiceModel
from preheat.core.memo import Memo
from preheat.core.slot_desk import Holding, SlotDesk
from preheat.engines.slot_shelf import SlotShelf
from preheat.engines.slot_tier import SlotTier

_TENANTS: Final = 4_096


class SlotSaver:
    """Nothing is written whose loading wouldn't pay by `service`, the server's speed, once it is known; nor
    of a tenant that is erased meanwhile."""

    def __init__(self, tier: SlotTier, desk: SlotDesk, shelf: SlotShelf) -> None:
        self.service: ServiceModel | None = None
        self.erasures = 0
        self._erased: Memo[str, int] = Memo(_TENANTS)  # the last of each tenant
        self._tier = tier
        self._desk = desk
        self._shelf = shelf
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None
        self._saving: int | None = None  # the slot that is being saved ahead

    @property
    def unsaved(self) -> list[tuple[int, Holding]]:
        """Idle slots with what would be lost, and is worth a file."""
        return [one for one in self._desk.unsaved() if self.pays(one[1])]

    def pays(self, holding: Holding) -> bool:
        """Whether loading it is quicker than computing."""
        return self._tier.pays(holding.tokens, self.service)

    async def save(self, slot: int, holding: Holding, *, at_once: bool = False) -> bool:
        """Write it, ahead of what can wait or not; whether it is there."""
        erasures = self.erasures
        move = await (self._tier.save_now if at_once else self._tier.save)(slot, holding)
        if move.ok and self.is_erased(holding.tenant, erasures):
            await self._tier.erase(holding.tenant)
            return False
        if move.ok:
            self._desk.saved(slot, holding)
            self._shelf.wrote(holding)
        return move.ok

    async def save_all(self) -> int:
        """Write whatever is unsaved; how many are written now."""
        return sum([await self.save(*one) for one in self.unsaved])

    def save_next(self) -> None:
        """Write what goes next, beside the requests."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._save_next())

    async def ended(self, slot: int) -> bool:
        """Wait until this slot isn't being saved: else what is saved would be what comes there next. Whether
        it was."""
        if self._saving != slot or self._task is None:
            return False
        await asyncio.wait([self._task])
        return True

    async def erase(self, tenant: str) -> None:
        """Delete a tenant's files, behind what is being written."""
        self.erasures += 1
        self._erased.put(tenant, self.erasures)
        await self._tier.erase(tenant)

    def is_erased(self, tenant: str, since: int) -> bool:
        """Whether that tenant was, since there were so many `erasures`."""
        return (self._erased[tenant] or 0) > since

    async def aclose(self) -> None:
        """Save nothing more."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _save_next(self) -> None:
        try:
            unsaved = self._desk.unsaved()
            if not unsaved or self._desk.next_slot != unsaved[0][0]:
                return
            slot, holding = unsaved[0]
            self._saving = slot
            if not self._desk.is_judged(slot) and self.pays(holding):
                await self.save(slot, holding)
        finally:
            self._task = self._saving = None
