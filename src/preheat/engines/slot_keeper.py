"""The slots of one llama.cpp server with their files: each request gets a slot with its prefix in it."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from preheat.core.costs import ServiceModel
from preheat.core.pauses import Pauses
from preheat.core.router import Loadable
from preheat.core.slot_desk import Freed, Holding, Seat, SlotDesk
from preheat.core.slot_ways import Prospect, Way, quickest
from preheat.engines.slot_leaders import Leader, Leaders, Wanted
from preheat.engines.slot_shelf import Found, SlotShelf
from preheat.engines.slot_tier import SlotTier

OVER: Final = "over"
"""The kind of a pause that never ends."""


class Seated(msgspec.Struct, frozen=True):
    """The slot to name in the request (`id_slot`), and how it came to what it has: `hot` it was there
    still."""

    wanted: Wanted
    slot: int
    way: Way | Literal["hot"]
    found_tokens: int
    life: int
    erasures: int = 0


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shelf` is that of the tier's folder, where several servers share it."""
        self._tier = tier
        self._desk = SlotDesk(slots)
        self._pauses = Pauses()
        self._clock = clock
        self._seats = asyncio.Semaphore(slots)  # it serves in the order of asking
        self._life = 0
        self._erasures = 0
        self._is_closed = False
        self._service: ServiceModel | None = None
        self._leaders = Leaders()
        self._saver: asyncio.Task[None] | None = None
        self._saving: int | None = None  # the slot that is being saved ahead
        self._handing: set[asyncio.Task[None]] = set()
        self._shelf = SlotShelf(tier.folder) if shelf is None else shelf

    def loadable(self, tenant: str, blocks: Sequence[int]) -> Loadable | None:
        """What it could load of a prompt from files."""
        file = self._shelf.find(tenant, blocks)
        if file is None or not file.tokens:
            return None
        return Loadable(file.tokens, self._tier.fetch_s(file.kept) + self._tier.load_s(file.kept))

    async def seat(self, wanted: Wanted, service: ServiceModel | None) -> Seated:
        """A slot for it, in the order of asking; what it has of the prompt is there when this returns.
        It is busy until `ended`. `service` is the model's speed on this server, if it is known."""
        self._service = service
        self._pauses.came(wanted.blocks, self._clock())
        if service is not None:
            await self._led(wanted, service)
        file = self._shelf.find(wanted.tenant, wanted.blocks)
        fetch = None
        if file is not None and not file.kept.is_checked:  # hidden behind the queue
            fetch = asyncio.create_task(self._tier.fetch(file.kept))
        try:
            await self._seats.acquire()
            seat = self._desk.take(wanted.tenant, wanted.blocks)
            assert seat is not None  # no more are let in than there are
            seated = Seated(wanted, seat.slot, "recompute", 0, self._life, self._erasures)
            self._leaders.began(seat.slot, wanted, self._clock())
            try:
                return await self._filled(seated, seat, service)
            except BaseException:
                self.ended(seated, None)
                raise
        finally:
            if fetch is not None:
                fetch.cancel()

    def ended(self, seated: Seated, tokens: int | None, pause: str = "") -> None:
        """Its request is over. `tokens` are what the slot holds now, by the engine's count: of prompt
        and answer together, less the last one; None where that isn't known. `pause` is the kind of
        what its session does now (`Pauses`). A prompt shorter than a block isn't kept, nor one whose
        session is `over`."""
        wanted = seated.wanted
        holding = None
        if tokens is not None and wanted.blocks and seated.erasures == self._erasures:
            holding = Holding(wanted.tenant, wanted.session, wanted.blocks, tokens)
        if seated.life != self._life:
            self._seats.release()
            return
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
        return sum(
            self._tier.pays(holding.tokens, self._service) for _, holding in self._desk.unsaved()
        )

    async def save_all(self) -> int:
        """Write whatever no file has, before the server is stopped; how many are written now."""
        saved = 0
        for slot, holding in self._desk.unsaved():
            if self._tier.pays(holding.tokens, self._service):
                saved += await self._saved(slot, holding)
        return saved

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
            slot, life = self._desk.take_empty(), self._life
            if slot is None:
                self._seats.release()
                break
            is_there = False
            try:
                is_there = (await self._tier.restore(slot, kept)).ok
            finally:
                if life == self._life:
                    self._desk.ended(slot, holding if is_there else None, self._clock())
                    self._desk.saved(slot, holding)
                self._seats.release()
            filled += is_there
        return filled

    async def erase(self, tenant: str) -> None:
        """Delete a tenant's files, behind what is being written; what the slots hold of it is found and
        written by nobody, of any request under way neither."""
        self._desk.erase(tenant)
        self._erasures += 1
        await self._tier.erase(tenant)

    def restarted(self) -> None:
        """The server is another process: its slots are empty."""
        self._tier.restarted()
        self._desk.cleared()
        self._leaders.clear()
        self._life += 1

    async def aclose(self) -> None:
        """Save nothing more."""
        self._is_closed = True
        tasks = [*self._handing, *([self._saver] if self._saver else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _free(self, seated: Seated, holding: Holding | None, pause: str) -> None:
        if seated.life == self._life:
            now, longer_s = self._clock(), 0.0
            if holding is not None and pause != OVER:
                longer_s = self._pauses.ended(holding.blocks, pause, now)
            self._desk.ended(seated.slot, holding, now, longer_s)
            if pause == OVER:
                self._desk.over(seated.wanted.tenant, seated.wanted.session)
        self._seats.release()
        if self._saver is None and not self._is_closed:
            self._saver = asyncio.create_task(self._save_next())

    async def _led(self, wanted: Wanted, service: ServiceModel) -> None:
        """Wait for the end of who computes the same, where that is the quickest way."""
        found = self._leaders.best(wanted)
        file = self._shelf.find(wanted.tenant, wanted.blocks)
        there = self._desk.most_found(wanted.tenant, wanted.blocks)
        if found is None or found[1] <= max(there, file.blocks if file else 0):
            return
        leader, shared = found
        leader_s = max(0.0, leader.ends_at - self._clock())
        had, left = (wanted.tokens * part // len(wanted.blocks) for part in (there, shared))
        prospect = Prospect(
            queue_s=wanted.queue_s,
            recompute_s=service.prefill_s(wanted.tokens - had, had),
            leader_s=leader_s,
            led_rest_s=service.prefill_s(wanted.tokens - left, left),
        )
        if quickest(prospect).way == "wait":
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
            await self._saved(seated.slot, whole, at_once=True)
        finally:
            self._free(seated, holding, pause)
            leader.release()

    async def _filled(self, seated: Seated, seat: Seat, service: ServiceModel | None) -> Seated:
        wanted, losing = seated.wanted, seat.losing
        if self._saving == seat.slot and self._saver is not None:
            # Else what is saved would be what this request makes of it.
            await asyncio.wait([self._saver])
            losing = None if self._desk.is_saved(seat.slot) else losing
        if losing is not None and self._tier.pays(losing.tokens, service):
            await self._saved(seat.slot, losing, at_once=True)
        file = self._shelf.find(wanted.tenant, wanted.blocks)  # it may have been saved meanwhile
        most = wanted.tokens - 1
        found = min(seat.found_tokens, most)
        hot = seated
        if found:
            hot = msgspec.structs.replace(seated, way="hot", found_tokens=found)
        if file is None or file.tokens <= found:
            return hot
        held = min(file.tokens, most)
        if service is not None and not self._is_quicker(file, wanted.tokens, found, held, service):
            return hot
        if not (await self._tier.restore(seat.slot, file.kept)).ok:
            return hot
        return msgspec.structs.replace(seated, way="restore", found_tokens=held)

    def _is_quicker(
        self, file: Found, tokens: int, found: int, held: int, service: ServiceModel
    ) -> bool:
        """Whether this file is loaded, and not the prompt computed behind what the slot has."""
        prospect = Prospect(
            recompute_s=service.prefill_s(tokens - found, found),
            fetch_s=self._tier.fetch_s(file.kept),
            load_s=self._tier.load_s(file.kept),
            restored_rest_s=service.prefill_s(tokens - held, held),
        )
        return quickest(prospect).way == "restore"

    async def _saved(self, slot: int, holding: Holding, *, at_once: bool = False) -> bool:
        erasures = self._erasures
        move = await (self._tier.save_now if at_once else self._tier.save)(slot, holding)
        if move.ok and erasures != self._erasures:  # it may have been this tenant's
            await self._tier.erase(holding.tenant)
            return False
        if move.ok:
            self._desk.saved(slot, holding)
            self._shelf.wrote(holding)
        return move.ok

    async def _save_next(self) -> None:
        try:
            unsaved = self._desk.unsaved()
            if not unsaved or self._desk.next_slot != unsaved[0][0]:
                return
            slot, holding = unsaved[0]
            self._saving = slot
            if self._tier.pays(holding.tokens, self._service):
                await self._saved(slot, holding)
        finally:
            self._saver = self._saving = None
