"""A disk tier of slot files for one llama.cpp server that writes to a folder of ours.

A sequence that was pushed out of its slot is loaded back when its session returns, also into several
slots at once, and after a restart. Nothing here is ever a client's error: what can't be done is told
(`Move.why`), and the prompt is computed instead.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from preheat.core.costs import ServiceModel, Tier, saved_s
from preheat.core.slot_desk import Holding
from preheat.core.slot_ways import Speed, is_worth_writing
from preheat.engines.dialects.calls import Call, get
from preheat.engines.dialects.llamacpp import LlamaCpp, model_identity
from preheat.engines.dialects.readings import Moved, Slot, parsed, part
from preheat.engines.direct import Direct
from preheat.engines.slot_folder import SlotFolder
from preheat.engines.slot_jobs import Move, SlotJobs
from preheat.engines.slot_names import MOST_TOKENS, Kept
from preheat.errors import ConfigError, EngineError

_DIALECT: Final = LlamaCpp()
_DESCRIBED: Final = ("/v1/models", "/props", "/lora-adapters")
_DISK: Final = 1e9
_MEMORY: Final = 4e9
"""Bytes a second until they are measured: a usual SSD's, and a copy between two processes."""
_LATENCY_S: Final = 0.005


class Counts(msgspec.Struct):
    """What was done so far, for metrics; `failed` by `Move.why`, with all of the server's own words as
    `refused`."""

    saved: int = 0
    restored: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    failed: dict[str, int] = msgspec.field(default_factory=dict)

    def flat(self) -> dict[str, int]:
        """By their names; all failures together."""
        return {**msgspec.structs.asdict(self), "failed": sum(self.failed.values())}


class SlotTier:
    """One server's slots and the folder behind them.

    Slots are named by who knows that they are idle (`core.slot_desk`, or `Direct.slots`): the server lets a
    busy one's turn wait until it is free. Each call ends within `limit_s`. Servers of one model may
    share a folder. After a restart, and after any failure to reach it, the server's model is looked
    up before anything is loaded: it would take another's file.
    """

    def __init__(
        self,
        folder: SlotFolder,
        ask: Callable[[Call], Awaitable[tuple[int, bytes]]],
        *,
        slots: int,
        identify: Callable[[], Awaitable[str]] | None = None,
        limit_s: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`identify` tells the server's model, as `folder.identity` does."""
        self.folder = folder
        self._jobs = SlotJobs(limit_s)
        self.counts = Counts(failed=self._jobs.failed)
        self._ask = ask
        self.slots = slots
        self._identify = identify
        self._engine_s = 0.0  # of the last move
        self._is_sure = True  # that the server has the folder's model
        self._clock = clock
        self._fetching = Speed(bytes_per_s=_DISK)
        self._saving = Speed(bytes_per_s=_DISK, latency_s=_LATENCY_S)
        self._loading = Speed(bytes_per_s=_MEMORY, latency_s=_LATENCY_S)
        self.token_bytes = 0.0  # the most of any file; 0 until one was saved

    async def start(self) -> None:
        """Whatever is asked for is done from now on. The folder is open already."""
        self._jobs.start()

    async def aclose(self) -> None:
        """Stop; what wasn't begun is `closed`."""
        await self._jobs.aclose()

    def restarted(self) -> None:
        """The server may be another process, with another model."""
        self._is_sure = False

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

    def pays(self, tokens: int, service: ServiceModel | None) -> bool:
        """Whether loading so many tokens is quicker than computing them. It is thought to be until it
        is known how fast computing is."""
        if service is None:
            return True
        return saved_s(service, self.tier(), tokens, self.token_bytes * tokens) > 0.0

    def repays(self, tokens: int, service: ServiceModel, chance: float) -> bool:
        """Whether so many tokens are worth writing, where they are asked for again with this chance."""
        size = self.token_bytes * tokens
        gain_s = saved_s(service, self.tier(), tokens, size)
        return is_worth_writing(chance, gain_s, self._saving.expected_s(size))

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
        return await self._jobs.later(lambda: self._saved(slot, holding))

    async def save_now(self, slot: int, holding: Holding) -> Move:
        """The same before all others: a request waits for the slot."""
        return await self._jobs.soon(lambda: self._saved(slot, holding))

    async def fetch(self, kept: Kept) -> Move:
        """Bring it to memory and check it, while its request waits in a queue."""
        return await self._jobs.soon(lambda: self._fetched(kept))

    async def restore(self, slot: int, kept: Kept) -> Move:
        """Load it into this idle slot; what that held is lost."""
        return await self._jobs.soon(lambda: self._restored(slot, kept))

    async def over(self, tenant: str, session: str) -> int:
        """As `SlotFolder.over`."""

        async def told() -> Move:
            size = await asyncio.to_thread(self.folder.over, tenant, session)
            return Move(ok=True, size_bytes=size)

        return (await self._jobs.later(told)).size_bytes

    async def told(self) -> list[Slot] | None:
        """Its slots, as it says; None where it doesn't. Raises EngineError."""
        call = _DIALECT.slots()
        assert call is not None
        status, body = await self._ask(call)
        return _DIALECT.read_slots(body) if status == 200 else None

    async def erase(self, tenant: str, session: str | None = None) -> None:
        """Delete a tenant's files, or those of one session."""

        async def told() -> Move:
            try:
                await asyncio.to_thread(self.folder.erase, tenant, session)
            except ConfigError:  # who erases all of a tenant's is told by the folder itself
                return Move(ok=False, why="undeleted")
            return Move(ok=True)

        await self._jobs.soon(told)

    # How -----------------------------------------------------------------------------------------

    async def _saved(self, slot: int, holding: Holding) -> Move:
        if not 0 <= slot < self.slots:
            return Move(ok=False, why="slot")
        if holding.tokens > MOST_TOKENS:
            return Move(ok=False, why="changed", tokens=holding.tokens)  # by a count that can't be
        expected = int(self.token_bytes * holding.tokens)
        part = await asyncio.to_thread(self.folder.begin, expected, self._clock())
        if part is None:
            return Move(ok=False, why="full")
        kept = None
        try:
            moved = await self._moved(_DIALECT.save(slot, part))
            if not moved.ok:
                return Move(ok=False, why=moved.why)
            size, now = moved.size_bytes or 0, self._clock()
            self._saving.learn(size, self._engine_s)
            self.counts.written_bytes += size
            if moved.tokens != holding.tokens:
                return Move(ok=False, why="changed", tokens=moved.tokens or 0)
            kept = await asyncio.to_thread(self.folder.finish, part, holding, size, now)
        finally:
            if not isinstance(kept, Kept):
                await asyncio.to_thread(self.folder.abandon, part)
        if not isinstance(kept, Kept):
            return Move(ok=False, why=kept)
        self.token_bytes = max(self.token_bytes, size / max(1, kept.tokens))
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
        if not 0 <= slot < self.slots:
            return Move(ok=False, why="slot")
        fetched = await self._fetched(kept)
        if not fetched.ok:
            return fetched
        moved = await self._moved(_DIALECT.restore(slot, kept.name))
        if not moved.ok:
            return Move(ok=False, why=moved.why)
        self._loading.learn(kept.size_bytes, self._engine_s)
        self.counts.restored += 1
        self.counts.read_bytes += kept.size_bytes
        await asyncio.to_thread(self.folder.used, kept, self._clock())
        return Move(ok=True, tokens=moved.tokens or 0, size_bytes=kept.size_bytes)

    async def _moved(self, call: Call | None) -> Moved:
        """What the server said; a failure to reach it is told as if by it."""
        assert call is not None
        try:
            if not self._is_sure and self._identify is not None:
                if await self._identify() != self.folder.identity:
                    return Moved(ok=False, why="model")
                self._is_sure = True
            began_at = time.monotonic()
            status, body = await self._ask(call)
            took_s = time.monotonic() - began_at
            self._engine_s = min(_engine_s(body) or took_s, took_s)
            return _DIALECT.read_moved(status, body)
        except EngineError as error:
            self._is_sure = False
            return Moved(ok=False, why=error.kind)
        except ConfigError:
            return Moved(ok=False, why="model")


def _engine_s(body: bytes) -> float | None:
    """What the server itself took for it, without the batch that it was in: that would have been
    waited for by a prompt, too."""
    timings = part(parsed(body), "timings")
    for name in ("save_ms", "restore_ms"):
        took_ms = part(timings, name)
        if isinstance(took_ms, int | float):
            return max(0.0, took_ms / 1e3)
    return None


async def identity_told(direct: Direct, weights: str = "") -> str | None:
    """The same; None where the server doesn't tell its model. Raises EngineError."""
    told = [await direct.told(get(where)) or b"" for where in _DESCRIBED]
    return model_identity(*told, weights=weights)


async def identity_of(direct: Direct, weights: str = "") -> str:
    """What this server's files are bound to (`model_identity`). Raises ConfigError, EngineError."""
    identity = await identity_told(direct, weights)
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
    tier = SlotTier(
        folder,
        direct.ask,
        slots=len(slots),
        identify=lambda: identity_of(direct, weights),
        limit_s=limit_s,
    )
    await tier.start()
    return tier
