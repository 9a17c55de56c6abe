"""A disk tier of slot files for one llama.cpp server that writes to a folder of ours.

A sequence that was pushed out of its slot is loaded back when its session returns, also into several
slots at once, and after a restart. Nothing here is ever a client's error: what can't be done is told
(`Move.why`), and the prompt is computed instead.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from preheat.core.costs import ServiceModel, Tier, saved_s
from preheat.core.slot_desk import Holding
from preheat.core.slot_ways import Speed
from preheat.engines.dialects.calls import Call, get
from preheat.engines.dialects.llamacpp import LlamaCpp, model_identity
from preheat.engines.dialects.readings import Moved
from preheat.engines.direct import Direct
from preheat.engines.slot_folder import SlotFolder
from preheat.engines.slot_names import Kept
from preheat.errors import ConfigError, EngineError

_DIALECT: Final = LlamaCpp()
_DESCRIBED: Final = ("/v1/models", "/props", "/lora-adapters")
_DISK: Final = 1e9
_MEMORY: Final = 4e9
"""Bytes a second until they are measured: a usual SSD's, and a copy between two processes."""
_LATENCY_S: Final = 0.005

Work = Callable[[], Awaitable["Move"]]


class Move(msgspec.Struct, frozen=True):
    """A slot saved, or a file loaded or checked. `why` not:

    `late` it took longer than it may · `full` no room in the budget or on the disk · `elsewhere` the
    server writes to another folder · `changed` the slot held something else · `damaged` the file
    isn't what was saved; it is deleted · `slot` there is no such slot · `closed` · else the
    server's words, or the error's.
    """

    ok: bool
    why: str = ""
    tokens: int = 0
    size_bytes: int = 0
    took_s: float = 0.0


class Counts(msgspec.Struct):
    """What was done so far, for metrics. `failed` counts by `why`; all of the server's refusals
    are `refused`."""

    saved: int = 0
    restored: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    failed: dict[str, int] = msgspec.field(default_factory=dict)


class _Job(NamedTuple):
    work: Work
    done: asyncio.Future[Move]


class SlotTier:
    """One server's slots and the folder behind them. One task does one thing at a time: two at once
    would only hold up the server's loop, and race for the room. What a request waits for comes before
    what is saved for later.

    Slots are named by who knows that they are idle (`core.slot_desk`, or `Direct.slots`): the server lets a
    busy one's turn wait until it is free. Each call ends within `limit_s`. Servers of one model may
    share a folder. After a server's restart its tier goes on as it is; with another model it needs
    another tier.
    """

    def __init__(
        self,
        folder: SlotFolder,
        ask: Callable[[Call], Awaitable[tuple[int, bytes]]],
        *,
        slots: int,
        limit_s: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.counts = Counts()
        self._ask = ask
        self._slots = slots
        self._limit_s = limit_s
        self._clock = clock
        self._fetching = Speed(bytes_per_s=_DISK)
        self._loading = Speed(bytes_per_s=_MEMORY, latency_s=_LATENCY_S)
        self._token_bytes = 0.0
        self._urgent: deque[_Job] = deque()
        self._later: deque[_Job] = deque()
        self._has_work = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Whatever is asked for is done from now on. The folder is open already."""
        self._owner = asyncio.create_task(self._run(), name="slot-tier")

    async def aclose(self) -> None:
        """Stop; what wasn't begun is `closed`."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.cancel()
            await asyncio.wait([owner])
        for job in (*self._urgent, *self._later):
            if not job.done.done():
                job.done.set_result(Move(ok=False, why="closed"))
        self._urgent.clear()
        self._later.clear()

    # What it would take --------------------------------------------------------------------------

    def find(self, tenant: str, blocks: Sequence[int]) -> Kept | None:
        """The file with the longest beginning of this prompt."""
        return self.folder.find(tenant, blocks)

    def fetch_s(self, kept: Kept) -> float:
        """Expected seconds to bring it to memory and check it, which needs no engine."""
        return 0.0 if kept.is_checked else self._fetching.expected_s(kept.size_bytes)

    def load_s(self, kept: Kept) -> float:
        """Expected seconds of the engine to load it."""
        return self._loading.expected_s(kept.size_bytes)

    def pays(self, tokens: int, service: ServiceModel) -> bool:
        """Whether loading so many tokens is quicker than computing them."""
        return saved_s(service, self.tier(), tokens, self._token_bytes * tokens) > 0.0

    def tier(self) -> Tier:
        """What was measured, from a cold file to the slot, for `core.costs`."""
        byte_s = self._fetching.byte_s + self._loading.byte_s
        return Tier(
            name="slot files",
            bytes_per_s=1.0 / byte_s if byte_s else _MEMORY,
            latency_s=self._fetching.latency_s + self._loading.latency_s,
        )

    # What it does --------------------------------------------------------------------------------

    async def save(self, slot: int, holding: Holding) -> Move:
        """Write what this idle slot holds, in place of what it continues."""
        return await self._do(self._later, lambda: self._saved(slot, holding))

    async def save_now(self, slot: int, holding: Holding) -> Move:
        """The same before all others: a request waits for the slot."""
        return await self._do(self._urgent, lambda: self._saved(slot, holding))

    async def fetch(self, kept: Kept) -> Move:
        """Bring it to memory and check it, while its request waits in a queue."""
        return await self._do(self._urgent, lambda: self._fetched(kept))

    async def restore(self, slot: int, kept: Kept) -> Move:
        """Load it into this idle slot; what that held is lost."""
        return await self._do(self._urgent, lambda: self._restored(slot, kept))

    async def fan_out(self, kept: Kept, slots: Iterable[int]) -> list[int]:
        """Load it into each of these idle slots, for a burst. Those that have it now."""
        return [slot for slot in slots if (await self.restore(slot, kept)).ok]

    async def over(self, tenant: str, session: str) -> None:
        """As `SlotFolder.over`."""
        await self._do(self._later, lambda: self._told(self.folder.over, tenant, session))

    async def erase(self, tenant: str, session: str | None = None) -> None:
        """Delete a tenant's files, or those of one session."""
        await self._do(self._urgent, lambda: self._told(self.folder.erase, tenant, session))

    # The one task --------------------------------------------------------------------------------

    async def _do(self, queue: deque[_Job], work: Work) -> Move:
        if self._owner is None:
            return Move(ok=False, why="closed")
        job = _Job(work, asyncio.get_running_loop().create_future())
        queue.append(job)
        self._has_work.set()
        try:
            async with asyncio.timeout(self._limit_s):
                return await job.done
        except TimeoutError:
            return self._noted(Move(ok=False, why="late"))

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            queue = self._urgent or self._later
            if not queue:
                self._has_work.clear()
                continue
            job = queue.popleft()
            if not job.done.done():  # whoever asked has gone
                move = await self._timed(job.work)
                if not job.done.done():
                    job.done.set_result(self._noted(move))

    async def _timed(self, work: Work) -> Move:
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(self._limit_s):
                move = await work()
        except TimeoutError:
            move = Move(ok=False, why="late")
        except EngineError as error:
            move = Move(ok=False, why=error.kind)
        except OSError as error:
            move = Move(ok=False, why=error.strerror or "unreadable")
        return msgspec.structs.replace(move, took_s=time.monotonic() - began_at)

    async def _saved(self, slot: int, holding: Holding) -> Move:
        if not 0 <= slot < self._slots:
            return Move(ok=False, why="slot")
        expected = int(self._token_bytes * holding.tokens)
        part = await asyncio.to_thread(self.folder.begin, expected, self._clock())
        if part is None:
            return Move(ok=False, why="full")
        kept = None
        try:
            moved = await self._moved(_DIALECT.save(slot, part))
            if not moved.ok:
                return Move(ok=False, why=moved.why)
            if moved.tokens != holding.tokens:
                return Move(ok=False, why="changed", tokens=moved.tokens or 0)
            size, now = moved.size_bytes or 0, self._clock()
            self.counts.written_bytes += size
            kept = await asyncio.to_thread(self.folder.finish, part, holding, size, now)
        finally:
            if not isinstance(kept, Kept):
                await asyncio.to_thread(self.folder.abandon, part)
        if not isinstance(kept, Kept):
            return Move(ok=False, why=kept)
        self._token_bytes = max(self._token_bytes, size / max(1, kept.tokens))
        self.counts.saved += 1
        return Move(ok=True, tokens=kept.tokens, size_bytes=size)

    async def _fetched(self, kept: Kept) -> Move:
        was_checked, began_at = kept.is_checked, time.monotonic()
        if not await asyncio.to_thread(self.folder.is_whole, kept):
            return Move(ok=False, why="damaged")
        if not was_checked:
            self._fetching.learn(kept.size_bytes, time.monotonic() - began_at)
        return Move(ok=True, tokens=kept.tokens, size_bytes=kept.size_bytes)

    async def _restored(self, slot: int, kept: Kept) -> Move:
        if not 0 <= slot < self._slots:
            return Move(ok=False, why="slot")
        fetched = await self._fetched(kept)
        if not fetched.ok:
            return fetched
        began_at = time.monotonic()
        moved = await self._moved(_DIALECT.restore(slot, kept.name))
        if not moved.ok:
            return Move(ok=False, why=moved.why)
        self._loading.learn(kept.size_bytes, time.monotonic() - began_at)
        self.counts.restored += 1
        self.counts.read_bytes += kept.size_bytes
        await asyncio.to_thread(self.folder.used, kept, self._clock())
        return Move(ok=True, tokens=moved.tokens or 0, size_bytes=kept.size_bytes)

    async def _moved(self, call: Call | None) -> Moved:
        assert call is not None
        return _DIALECT.read_moved(*await self._ask(call))

    async def _told(self, tell: Callable[..., object], *what: str | None) -> Move:
        await asyncio.to_thread(tell, *what)
        return Move(ok=True)

    def _noted(self, move: Move) -> Move:
        if not move.ok:
            is_ours = move.why.isalpha() or move.why.startswith("timeout")
            why = move.why if is_ours else "refused"
            self.counts.failed[why] = self.counts.failed.get(why, 0) + 1
        return move


async def identity_of(direct: Direct, weights: str = "") -> str:
    """What this server's files are bound to (`model_identity`). Raises ConfigError, EngineError."""
    told = [await direct.told(get(where)) or b"" for where in _DESCRIBED]
    identity = model_identity(*told, weights=weights)
    if identity is None:
        raise ConfigError(f"{direct.url} doesn't tell its model: only llama.cpp has slot files")
    return identity


async def slot_tier(
    direct: Direct, folder: SlotFolder, *, weights: str = "", limit_s: float = 10.0
) -> SlotTier:
    """The tier of this server, started; `folder` is open. Raises ConfigError, EngineError."""
    if await identity_of(direct, weights) != folder.identity:
        raise ConfigError(f"{direct.url} has another model than the slot files of {folder.path}")
    slots = await direct.slots()
    if not slots:
        raise ConfigError(f"{direct.url} tells no slots: start llama.cpp's server with --slots")
    tier = SlotTier(folder, direct.ask, slots=len(slots), limit_s=limit_s)
    await tier.start()
    return tier
