"""The slots of one llama.cpp server with their files: each request gets a slot with its prefix in it."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from preheat.core.costs import ServiceModel
from preheat.core.pauses import Pauses
from preheat.core.router import Loadable
from preheat.core.slot_desk import Freed, Holding, Seat, SlotDesk
from preheat.engines.slot_choices import loads, waits
from preheat.engines.slot_leaders import Leader, Leaders, Seated, Wanted
from preheat.engines.slot_loans import SlotLoans
from preheat.engines.slot_saver import SlotSaver
from preheat.engines.slot_shelf import SlotShelf
from preheat.engines.slot_tier import SlotTier
from preheat.engines.slot_truth import Said, SlotTruth

OVER: Final = "over"
"""The kind of a pause that never ends."""


class SlotKeeper:
    """Whoever asks this server asks here for a slot first, and says how it ended: then what lies where
    is known. A sequence that is pushed out is saved where loading it will be quicker than computing,
    and loaded when it is asked for again.

    The slot that would be taken next is saved ahead, so that nobody waits for that. No more than that
    is written: most sessions come back before their slot is taken.

    Who asks for a prefix that a running request computes waits for its end where that is quicker than
    computing it again. Several who do find it in a file then, for a slot each.
    """

    def __init__(
        self,
        tier: SlotTier,
        *,
        slots: int,
        shelf: SlotShelf | None = None,
        on_restart: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shelf` is that of the tier's folder, where several servers share it. `on_restart` hears where the
        server is found to be another process, and calls `restarted`."""
        self._tier = tier
        self._desk = SlotDesk(slots)
        self._pauses = Pauses()
        self._clock = clock
        self._seats = asyncio.Semaphore(slots)  # it serves in the order of asking
        self._leaders = Leaders()
        self._handing: set[asyncio.Task[None]] = set()
        self._shelf = SlotShelf(tier.folder) if shelf is None else shelf
        self._saver = SlotSaver(tier, self._desk, self._shelf)
        self._truth = SlotTruth(tier.told)
        self.loans = SlotLoans(
            self._desk, self._seats, self._saver, self._truth, self._pauses, clock, self._filled
        )
        """Slots for warm-ups and probes."""
        self._on_restart = on_restart or self.restarted

    def loadable(self, tenant: str, blocks: Sequence[int]) -> Loadable | None:
        """What it could load of a prompt from files."""
        file = self._shelf.find(tenant, blocks)
        if file is None or not file.tokens:
            return None
        return Loadable(file.tokens, self._tier.fetch_s(file.kept) + self._tier.load_s(file.kept))

    async def seat(self, wanted: Wanted, service: ServiceModel | None) -> Seated:
        """A slot for it, in the order of asking; what it has of the prompt is there when this returns.
        It is busy until `ended`. `service` is the model's speed on this server, if it is known."""
        self._saver.service = service
        self._pauses.came(wanted.blocks, self._clock())
        self._resolve(await self._truth.resolved())
        if service is not None:
            await self._led(wanted, service)
        file = self._shelf.find(wanted.tenant, wanted.blocks)
        fetch = None
        if file is not None and not file.kept.is_checked:  # hidden behind the queue
            fetch = asyncio.create_task(self._tier.fetch(file.kept))
        try:
            if self._seats.locked():
                self.loans.recall()
            await self._seats.acquire()
            while True:
                self._judge()
                seat = self._desk.take(wanted.tenant, wanted.blocks)
                assert seat is not None  # no more are let in than there are
                self._truth.taken(seat.slot)
                seated = Seated(
                    wanted, seat.slot, "recompute", 0, self._truth.life, self._saver.erasures
                )
                self._leaders.began(seat.slot, wanted, self._clock())
                try:
                    filled = await self._filled(seated, seat)
                except BaseException:
                    self.ended(seated, None)
                    raise
                if filled.life == self._truth.life:  # else its slot is empty again, and anybody's
                    return filled
        finally:
            if fetch is not None:
                fetch.cancel()

    def ended(
        self,
        seated: Seated,
        tokens: int | None,
        pause: str = "",
        *,
        cached_tokens: int | None = None,
    ) -> None:
        """Its request is over. `tokens` are what the slot holds now, by the engine's count: of prompt
        and answer together, less the last one; None where that isn't known. `pause` is the kind of
        what its session does now (`Pauses`). A prompt shorter than a block isn't kept, nor one whose
        session is `over`. So many `cached_tokens` its answer told, if it did."""
        wanted = seated.wanted
        holding = None
        is_erased = self._saver.is_erased(wanted.tenant, seated.erasures)
        if tokens is not None and wanted.blocks and not is_erased:
            holding = Holding(wanted.tenant, wanted.session, wanted.blocks, tokens)
        if seated.life != self._truth.life:
            self._seats.release()
            return
        if tokens is not None:
            self._truth.left(seated.slot, tokens)
        if cached_tokens is not None and 2 * cached_tokens < seated.found_tokens:
            self._truth.doubt()
        leader = self._leaders.ended(seated.slot)
        if leader is not None and holding is not None and len(leader.followers) > 1:
            task = asyncio.create_task(self._handed_over(seated, holding, leader, pause))
            self._handing.add(task)
            task.add_done_callback(self._handing.discard)
            return
        self._free(seated, holding, pause)
        if leader is not None:
            leader.release()

    async def over(self, tenant: str, session: str) -> Freed:
        """That session won't come back: its slot and its files are the first to go."""
        return Freed(self._desk.over(tenant, session), await self._tier.over(tenant, session))

    @property
    def unsaved(self) -> int:
        """Idle slots with what would be lost, and is worth a file."""
        return len(self._saver.unsaved)

    async def save_all(self) -> int:
        """Write whatever no file has, before the server is stopped; how many are written now."""
        return await self._saver.save_all()

    async def refill(self) -> int:
        """Load what was used last into empty slots, those of a server that was started again; how many.
        Only what this process has written or loaded: of another's files nobody knows the prompt."""
        filled = 0
        for kept, holding in self._shelf.newest():
            if self._desk.holds(holding):
                continue
            if self._seats.locked():
                break
            await self._seats.acquire()
            slot, life = self._desk.take_empty(), self._truth.life
            if slot is None:
                self._seats.release()
                break
            is_there = False
            try:
                is_there = (await self._tier.restore(slot, kept)).ok
            finally:
                if life == self._truth.life:
                    self._desk.ended(slot, holding if is_there else None, self._clock())
                    self._desk.saved(slot, holding)
                self._seats.release()
            filled += is_there
        return filled

    async def erase(self, tenant: str) -> None:
        """Delete a tenant's files, behind what is being written; what the slots hold of it is found and
        written by nobody, of any request under way neither."""
        self._desk.erase(tenant)
        await self._saver.erase(tenant)

    def doubt(self) -> None:
        """What is believed may be wrong: the server is asked before the next request is seated."""
        self._truth.doubt()

    async def look(self) -> bool | None:
        """Ask it what its slots hold, and believe it. Whether it is another process; None where that can't be
        told."""
        return self._resolve(await self._truth.compared())

    def restarted(self) -> None:
        """The server is another process: its slots are empty."""
        self._tier.restarted()
        self._desk.cleared()
        self._leaders.clear()
        self._truth.clear()

    async def aclose(self) -> None:
        """Save nothing more."""
        await self._saver.aclose()
        for task in self._handing:
            task.cancel()
        if self._handing:
            await asyncio.wait(self._handing)

    def _resolve(self, said: Said | None) -> bool | None:
        if said is None:
            return None
        if said.is_another:
            self._on_restart()
        for slot in said.changed:
            self._desk.forget(slot)
            self._truth.taken(slot)
        return said.is_another

    def _judge(self) -> None:
        """Which idle slots' sessions are over, by the chance of their return and what a file would then save."""
        service, tier, pauses = self._saver.service, self._tier, self._pauses
        if service is not None:
            self._desk.judge(
                lambda holding, pause, idle_s: (
                    not tier.repays(holding.tokens, service, pauses.returns(pause, idle_s))
                ),
                self._clock(),
            )

    def _free(self, seated: Seated, holding: Holding | None, pause: str) -> None:
        if seated.life == self._truth.life:
            now, longer_s = self._clock(), 0.0
            if holding is not None and pause != OVER:
                longer_s = self._pauses.ended(holding.blocks, pause, now)
            self._desk.ended(seated.slot, holding, now, longer_s, pause)
            if pause == OVER:
                self._desk.over_at(seated.slot)
                self._desk.over(seated.wanted.tenant, seated.wanted.session)
        self._seats.release()
        self._judge()
        self._saver.save_next()

    async def _led(self, wanted: Wanted, service: ServiceModel) -> None:
        """Wait for the end of who computes the same, where that is the quickest way."""
        found = self._leaders.best(wanted)
        file = self._shelf.find(wanted.tenant, wanted.blocks)
        there = self._desk.most_found(wanted.tenant, wanted.blocks)
        if found is None or found[1] <= max(there, file.blocks if file else 0):
            return
        leader, shared = found
        leader_s = max(0.0, leader.ends_at - self._clock())
        if waits(wanted, there, shared, leader_s, service):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    2.0 * leader_s + 1.0
                ):  # it may take longer than it should
                    await self._leaders.join(leader, shared)

    async def _handed_over(
        self, seated: Seated, holding: Holding, leader: Leader, pause: str
    ) -> None:
        """What its followers share gets a file before anybody takes the slot."""
        wanted = leader.wanted
        shared = wanted.blocks[: leader.shared_blocks]
        try:
            whole = Holding(wanted.tenant, "", shared, holding.tokens)
            await self._saver.save(seated.slot, whole, at_once=True)
        finally:
            self._free(seated, holding, pause)
            leader.release()

    async def _filled(self, seated: Seated, seat: Seat) -> Seated:
        """Once what it is about to lose is saved, and what a file has of its prompt loaded."""
        wanted, losing, service = seated.wanted, seat.losing, self._saver.service
        if await self._saver.ended(seat.slot) and self._desk.is_saved(seat.slot):
            losing = None
        if losing is not None and self._saver.pays(losing):
            await self._saver.save(seat.slot, losing, at_once=True)
        file = self._shelf.find(wanted.tenant, wanted.blocks)  # it may have been saved meanwhile
        most = wanted.tokens - 1
        found = min(seat.found_tokens, most)
        hot = seated
        if found:
            hot = msgspec.structs.replace(seated, way="hot", found_tokens=found)
        if file is None or file.tokens <= seat.found_tokens:
            return hot
        if service is not None and not loads(self._tier, file, wanted, found, service):
            return hot
        if not (await self._tier.restore(seat.slot, file.kept)).ok:
            return hot
        return msgspec.structs.replace(seated, way="restore", found_tokens=min(file.tokens, most))
