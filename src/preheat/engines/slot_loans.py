"""Slots lent to warm-ups and probes: such as nobody misses soon, and back as soon as a request wants one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from preheat.core.pauses import Pauses
from preheat.core.slot_desk import Holding, Seat, SlotDesk
from preheat.engines.slot_leaders import Seated, Wanted
from preheat.engines.slot_saver import SlotSaver
from preheat.engines.slot_truth import SlotTruth


class Lent(NamedTuple):
    """A slot with `seated.found_tokens` of the prefix. `recalled`: it is to be given back now."""

    seated: Seated
    recalled: asyncio.Event


class SlotLoans:
    """One at a time. `fill` has what lies in files loaded into a slot, and what is lost there written."""

    def __init__(
        self,
        desk: SlotDesk,
        seats: asyncio.Semaphore,
        saver: SlotSaver,
        truth: SlotTruth,
        pauses: Pauses,
        clock: Callable[[], float],
        fill: Callable[[Seated, Seat], Awaitable[Seated]],
    ) -> None:
        self.turn = asyncio.Lock()
        self._desk = desk
        self._seats = seats
        self._saver = saver
        self._truth = truth
        self._pauses = pauses
        self._clock = clock
        self._fill = fill
        self._lent: Lent | None = None

    def has(self, wanted: Wanted) -> bool:
        """Whether an idle slot has all of it."""
        return self._desk.most_found(wanted.tenant, wanted.blocks) == len(wanted.blocks)

    def recall(self) -> None:
        """A request wants a slot."""
        if self._lent is not None:
            self._lent.recalled.set()

    async def lend(self, wanted: Wanted) -> Lent | None:
        """The idle slot that has all of it; else one that is empty, whose session is over, or has paused for
        longer than is usual. None where there is none."""
        if self._seats.locked():
            return None
        now, usual_s = self._clock(), self._pauses.median_s
        seat = self._desk.spare(wanted.tenant, wanted.blocks, now, usual_s)
        if seat is None:
            return None
        await self._seats.acquire()  # at once, as it isn't locked
        self._truth.taken(seat.slot)
        seated = Seated(wanted, seat.slot, "recompute", 0, self._truth.life, self._saver.erasures)
        lent = self._lent = Lent(seated, asyncio.Event())
        try:
            return Lent(await self._fill(seated, seat), lent.recalled)
        except BaseException:
            await self.back(lent, None)
            raise

    async def back(self, lent: Lent, tokens: int | None) -> None:
        """The slot has its prefix and no more, in so many tokens; None: nobody knows what. It gets a file where
        loading pays and no request waits: many begin with such a prefix, and each wants a slot of its own."""
        seated, holding, is_saved = lent.seated, None, False
        wanted = seated.wanted
        self._lent = None
        try:
            is_erased = self._saver.is_erased(wanted.tenant, seated.erasures)
            if tokens is not None and not is_erased and seated.life == self._truth.life:
                holding = Holding(wanted.tenant, "", wanted.blocks, tokens)
                if self._saver.pays(holding) and not lent.recalled.is_set():
                    is_saved = await self._saver.save(seated.slot, holding)
        finally:
            if seated.life == self._truth.life:
                if self._saver.is_erased(wanted.tenant, seated.erasures):
                    holding = None
                self._desk.ended(seated.slot, holding, self._clock())
                if holding is not None and tokens is not None:
                    self._truth.left(seated.slot, tokens)
                    if is_saved:
                        self._desk.saved(seated.slot, holding)
            self._seats.release()
