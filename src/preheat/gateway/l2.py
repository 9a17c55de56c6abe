"""L2 as the gateway sees it: entries by key, who computes what, and what others invalidated.

Nothing here raises for a store's sake: what fails, or takes longer than a store may, is a miss.
A breaker stops asking one that keeps failing, so that it costs nobody anything.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from preheat.core.breaker import Breaker
from preheat.core.controller import Controller
from preheat.core.stats import Counters
from preheat.core.types import Entry, Epoch, Invalidation, Key, Removed
from preheat.errors import StoreError
from preheat.stores import News, Size, Store
from preheat.telemetry.logs import Log
from preheat.wire.entry import Codec

T = TypeVar("T")

LEASE_S: Final = 3.0
_RENEW_S: Final = 1.0
_NEWS_S: Final = 0.25
_PUBLISH_S: Final = 2.0
_PUT_S: Final = 5.0
_GATHER_S: Final = 0.02
_GATHER_LEASED_S: Final = 0.002
_MOST_GATHERED: Final = 256
_OPEN_AGAIN_S: Final = 5.0
_CATCH_UP_S: Final = 1.5  # a long record of invalidations; leases must be renewed meanwhile
_HICCUP_S: Final = 0.05
_CALL_S: Final = 0.2  # stores bound their calls more tightly; this is for one that doesn't


class L2:
    """The store behind its breaker, with the tasks that keep this process in step with others."""

    def __init__(
        self,
        make: Callable[[], Store],
        codec: Codec,
        breaker: Breaker,
        controller: Controller,
        counters: Counters,
        log: Log,
        *,
        timeout_s: float,
        queue_bytes: int,
        has_company: bool,
        clock: Callable[[], float],
        on_bug: Callable[[Exception], None],
    ) -> None:
        self._make = make
        self._store = make()
        self._is_open = False
        self.is_immediate = self._store.is_immediate
        self._has_company = has_company or self._store.is_shared
        self._codec = codec
        self._breaker = breaker
        self._controller = controller
        self._counters = counters
        self._log = log
        self._timeout_s = timeout_s
        self._call_s = max(_CALL_S, 2 * timeout_s)
        self._queue_bytes = queue_bytes
        self._queued_bytes = 0
        self._torn = 0
        self._clock = clock
        self._on_bug = on_bug
        self._seen = Epoch()
        self._applied: set[int] = set()  # invalidations that we heard of before the board told us
        self._swept: tuple[int, list[Removed]] = (0, [])  # of the last that the board told us first
        # Who else has to forget what others have invalidated.
        self.on_news: Callable[[News], Awaitable[object]] | None = None
        self._leased: set[Key] = set()
        self._gathered: list[tuple[Entry, Key | None]] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._open_at = 0.0
        self._why_closed = ""  # as it was last told
        self._failed_at = float("-inf")

    async def start(self) -> None:
        """Open the store; one that can't be opened is tried again later. Raises ConfigError."""
        await self._open()
        self._keeping = asyncio.get_running_loop().create_task(self._keep_in_step())

    async def aclose(self) -> None:
        """Let go of leases and close the store, once what was put has arrived."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        self._flush()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._leased and self.is_up:
            await self._guarded(self._store.release(tuple(self._leased)))
        await self._store.aclose()

    @property
    def is_up(self) -> bool:
        """Whether it is asked at all. Requests never try whether it is well again: the reading of
        news does, which nobody waits for."""
        return self._breaker.is_closed and self._is_open

    # Entries.

    def look_now(self, keys: Sequence[Key], *, is_again: bool = False) -> list[Entry] | None:
        """What there is of these, where that takes no waiting; None where it does. `is_again`: it
        has been asked before, and this isn't counted as one look more."""
        now = self._clock()
        if not self.is_up:
            return []
        if not self.is_immediate:
            return None
        try:
            values = self._store.get_now(keys)
        except StoreError as error:
            self._failed(error)
            return []
        took_s = self._clock() - now
        if took_s > self._timeout_s:
            self._failed(StoreError("a read took too long", kind="slow"))
        else:
            self._succeeded()
        return self._decoded(keys, values, now, is_again=is_again)

    async def look(self, keys: Sequence[Key], *, is_again: bool = False) -> list[Entry]:
        """What there is of these, as far as the store tells in time."""
        found = self.look_now(keys, is_again=is_again)
        if found is not None:
            return found
        values = await self._guarded(self._store.get(keys))
        return self._decoded(keys, values, self._clock(), is_again=is_again) if values else []

    def keep(self, entry: Entry, leased: Key | None) -> None:
        """Write it, soon and with others; who waits under the lease of that key is let go once it
        can be read."""
        if self._queued_bytes + entry.size_bytes > self._queue_bytes:
            self._controller.on_stored("queue")
            if leased is not None:
                self.release(leased)
            return
        self._queued_bytes += entry.size_bytes
        self._gathered.append((entry, leased))
        # Whoever waits under a lease in another process waits for this.
        gather_s = _GATHER_S if leased is None else _GATHER_LEASED_S
        loop = asyncio.get_running_loop()
        if self._flushing is not None and self._flushing.when() > loop.time() + gather_s:
            self._flushing.cancel()
            self._flushing = None
        if self._flushing is None:
            self._flushing = loop.call_later(gather_s, self._flush)

    async def size(self) -> Size | None:
        """How full the store is, where it says so."""
        return await self._tried(self._store.size())

    # Who computes what.

    @property
    def has_company(self) -> bool:
        """Whether another process might compute the same answer, and can be asked."""
        return self._has_company and self.is_up

    async def claim(self, key: Key) -> bool | None:
        """Whether this process computes the answer for the key: False while another one does, None
        where nobody can tell."""
        if key in self._leased:  # for an answer that was invalidated meanwhile
            return None
        try:
            is_ours = await self._guarded(self._store.take(key, LEASE_S))
        except asyncio.CancelledError:
            self.release(key)  # it may have been given just now
            raise
        if is_ours:
            self._leased.add(key)
        return is_ours

    def release(self, key: Key) -> None:
        """Let others compute it: this process doesn't any more."""
        self._leased.discard(key)
        self._own(self._release((key,)))

    # What is void.

    async def publish(self, what: Invalidation) -> Epoch:
        """Tell everybody who shares the store. Raises StoreError: who asks for it must know."""
        try:
            async with asyncio.timeout(_PUBLISH_S):
                return await self._store.publish(what)
        except TimeoutError:
            raise StoreError("the store took too long", kind="timeout") from None

    def note_applied(self, number: int) -> None:
        """That invalidation was heard of before the board tells it."""
        self._applied.add(number)

    def swept(self, number: int) -> list[Removed]:
        """What went because the board was faster to tell of that invalidation."""
        last, removed = self._swept
        return removed if number == last else []

    async def _read_news(self, limit_s: float) -> None:
        """Invalidations of others: they hold at once, and L1 is swept in portions. Also the probe
        that closes the breaker."""
        news = await self._guarded(self._store.news(self._seen), limit_s, is_probe=True)
        if news is None or news.epoch == self._seen:
            return
        is_first = not self._seen.generation
        if news.epoch.generation != self._seen.generation:
            self._applied.clear()  # those were numbers of another count
        if news.is_all:
            self._controller.on_generation(news.epoch.generation, news.floor)
        fresh = [one for one in news.invalidations if news.is_all or one[0] not in self._applied]
        self._applied = {number for number in self._applied if number > news.epoch.number}
        for number, what in fresh:
            self._controller.on_invalidate(what, number)
        self._seen = news.epoch
        void = [what for _, what in fresh]
        if len(fresh) > 1 or (news.is_all and not is_first):
            void = [Invalidation()]  # one sweep does for many, and for what nobody could tell us
        _, swept = self._swept = (news.epoch.number, [])
        for what in void:
            for removed in self._controller.sweep(what, dry_run=False):
                swept.append(removed)
                await asyncio.sleep(0)
        if self.on_news is not None:
            await self.on_news(news)

    async def _open(self) -> None:
        try:
            await self._store.start()
        except StoreError as error:
            self._counters.bump(self._counters.l2, f"error-{error.kind}")
            if str(error) != self._why_closed:
                self._why_closed = str(error)
                self._log.event("l2-failing", kind=error.kind, why=str(error))
            self._store = self._make()
            self._open_at = self._clock() + _OPEN_AGAIN_S
        else:
            self._is_open = True
            await self._read_news(_CALL_S)

    async def _keep_in_step(self) -> None:
        renewed_at = self._clock()
        while True:
            await asyncio.sleep(_NEWS_S)
            try:
                if not self._is_open:
                    if self._clock() >= self._open_at:
                        await self._open()
                elif self._breaker.allows(self._clock()):
                    await self._read_news(_CATCH_UP_S)
                if self._leased and self.is_up and self._clock() - renewed_at >= _RENEW_S:
                    renewed_at = self._clock()
                    await self._tried(self._store.renew(tuple(self._leased), LEASE_S))
            except Exception as bug:  # noqa: BLE001  one round that fails mustn't be the last one
                self._on_bug(bug)

    # The store, with every call bounded.

    def _flush(self) -> None:
        """A task, a transaction and a thread's waking cost more than a write: one for many."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        gathered, self._gathered = self._gathered, []
        for start in range(0, len(gathered), _MOST_GATHERED):
            self._own(self._put(gathered[start : start + _MOST_GATHERED]))

    async def _put(self, gathered: list[tuple[Entry, Key | None]]) -> None:
        leased = tuple(key for _, key in gathered if key is not None)
        try:
            for why in await self._put_values([entry for entry, _ in gathered]):
                self._controller.on_stored(why)
        finally:  # whatever went wrong, nobody waits for what won't come
            self._queued_bytes -= sum(entry.size_bytes for entry, _ in gathered)
            self._leased.difference_update(leased)
            if leased:
                await self._release(leased)

    async def _put_values(self, entries: list[Entry]) -> list[str]:
        """Why each isn't kept, or an empty string."""
        if not self.is_up:
            return ["breaker-open"] * len(entries)
        ahead_s = _ahead_s(self._clock())
        items = [
            (
                entry.key,
                self._codec.encode(entry, ahead_s),
                entry.stored_at + ahead_s + entry.ttl_s + self._controller.kept_s(entry),
            )
            for entry in entries
        ]
        try:
            async with asyncio.timeout(_PUT_S):
                return await self._store.put_many(items)
        except StoreError as error:
            return [error.kind] * len(entries)
        except TimeoutError:
            return ["timeout"] * len(entries)

    async def _release(self, keys: tuple[Key, ...]) -> None:
        if self.is_up:  # else they end by themselves, soon
            await self._guarded(self._store.release(keys))

    async def _guarded(
        self, call: Coroutine[Any, Any, T], limit_s: float = 0.0, *, is_probe: bool = False
    ) -> T | None:
        """The call's result; None where it failed or took too long. The breaker hears of it."""
        try:
            async with asyncio.timeout(limit_s or self._call_s):
                result = await call
        except StoreError as error:
            self._failed(error, is_probe=is_probe)
            return None
        except TimeoutError:
            self._failed(StoreError("the store took too long", kind="timeout"), is_probe=is_probe)
            return None
        self._succeeded(is_probe=is_probe)
        return result

    async def _tried(self, call: Coroutine[Any, Any, T]) -> T | None:
        """The same for what may take its time: how that goes says nothing of what requests wait
        for."""
        try:
            async with asyncio.timeout(self._call_s):
                return await call
        except StoreError as error:
            kind = error.kind
        except TimeoutError:
            kind = "timeout"
        self._counters.bump(self._counters.l2, f"error-{kind}")
        return None

    def _succeeded(self, *, is_probe: bool = False) -> None:
        if self.is_up or is_probe:
            self._breaker.succeeded()

    def _failed(self, error: StoreError, *, is_probe: bool = False) -> None:
        """Failures close together count as one: under load a pause of some milliseconds makes many.
        Once the breaker is open only probes count: what was under way puts none of them off."""
        self._counters.bump(self._counters.l2, f"error-{error.kind}")
        now, was_up = self._clock(), self.is_up
        if is_probe or (was_up and now - self._failed_at >= _HICCUP_S):
            self._failed_at = now
            self._breaker.failed(now)
        if was_up and not self.is_up:
            self._log.event("l2-failing", kind=error.kind, why=str(error))

    def _decoded(
        self,
        keys: Sequence[Key],
        values: Sequence[bytes | None],
        now: float,
        *,
        is_again: bool = False,
    ) -> list[Entry]:
        entries = []
        ahead_s = _ahead_s(now)
        for key, value in zip(keys, values, strict=True):
            if value is None:
                if self._torn < self._store.torn:
                    self._torn += 1
                    self._counters.bump(self._counters.l2, "torn")
                elif not is_again:
                    self._counters.bump(self._counters.l2, "miss")
                continue
            try:
                entries.append(self._codec.decode(key, value, ahead_s, now))
            except ValueError:
                self._counters.bump(self._counters.l2, "torn")
                continue
            if not is_again:
                self._counters.bump(self._counters.l2, "hit")
        return entries

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._watched(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as bug:  # noqa: BLE001  the edge of a task that nobody awaits
            self._on_bug(bug)


def _ahead_s(now: float) -> float:
    """How far the wall clock is ahead of ours, at this moment."""
    return time.time() - now
