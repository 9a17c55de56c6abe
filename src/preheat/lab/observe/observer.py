"""Reads a log as it grows, asks its servers beside it, and tells now and then what it sees."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

import msgspec

from preheat.core.router import Ticket
from preheat.core.warmup import Pace
from preheat.engines.direct import Direct
from preheat.errors import TraceError
from preheat.lab.observe import sights
from preheat.lab.observe.fleet import Fleet
from preheat.lab.observe.heard import Heard
from preheat.lab.observe.hot import HotSet, Prefix
from preheat.lab.observe.lines import Names, Record, Seen, read_line
from preheat.lab.observe.plan import Found, Missing, found
from preheat.lab.observe.servers import Server
from preheat.lab.observe.settling import Act, Settling
from preheat.lab.observe.sight import Sight
from preheat.lab.observe.tail import Line, Tail
from preheat.lab.observe.warming import Budget, Warming
from preheat.traces.arrival import BadLine
from preheat.traces.reader import said
from preheat.wire.kv_places import KvPlace

_LOOK_S: Final = 0.25
_FIRST_LOOKS_S: Final = 5.0
"""For servers that don't answer at once: the log is read all the same."""
_AT_ONCE: Final = 32
_REFRESH: Final = 256
_MOST_BAD: Final = 100
_FUTURE_S: Final = 3_600.0
"""A line so far beyond this machine's clock is a mistake, and all others would come after it."""
_LONGEST_S: Final = 86_400.0
"""For the same reason."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be watched, and how. `places` are where KV events are told, by url."""

    log: str
    worker_field: str = ""
    model: str = ""
    places: Mapping[str, KvPlace] = {}
    poll_s: float = 5.0
    settle_s: float = 30.0
    every_s: float = 5.0
    idle_price: float = 0.3
    is_bad_fatal: bool = False
    warms: bool = False
    tokens_per_hour: int = 0
    pace: Pace = Pace()


class Counts(msgspec.Struct):
    """Of the log's lines."""

    lines: int = 0
    bad: int = 0
    undated: int = 0
    without_prompt: int = 0
    without_usage: int = 0
    without_duration: int = 0
    first_at: float | None = None


class Observer:
    """One log and its servers, in one task and a few beside it. Bounded, however long it runs.

    The log's clock rules: what servers say is put where the log was at that moment, so both clocks
    should agree to a second or so.
    """

    def __init__(self, order: Order, tail: Tail, directs: Mapping[str, Direct]) -> None:
        """`directs` by name. Raises ConfigError where KV events can't be heard here."""
        self.order = order
        self.counts = Counts()
        self.bad: deque[BadLine] = deque(maxlen=_MOST_BAD)
        self.fleet = Fleet(len(directs))
        self.hot = HotSet(order.model)
        self.settling = Settling(order.settle_s)
        self.is_over = False
        self._tail = tail
        self._names = Names({name: one.url for name, one in directs.items()})
        router = self.fleet.router
        self.servers = [
            Server(number, name, one, router, self._tell, order.poll_s)
            for number, (name, one) in enumerate(directs.items())
        ]
        self.heard: Heard | None = None
        if order.places:
            self.heard = Heard(self.servers, order.places, router, self._tell, order.model)
        self.warming: Warming | None = None
        if order.warms:
            budget = Budget(order.tokens_per_hour)
            self.warming = Warming(
                self.servers, budget, order.pace, time.time, self._tells, self._warmed
            )
        self._hears_since = inf
        self._sightings = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """See no more; `run` ends with what was seen."""
        self._stopping.set()

    async def run(self, on_sight: Callable[[Sight], None]) -> Sight:
        """Until the log is over, or it is told to stop. Raises TraceError."""
        tasks = await self._begun()
        try:
            await self._follow(on_sight)
            self.is_over = self._tail.is_over
            self.settling.run(inf)
            await self._warm_all()
            return sights.sight_of(self, await self._found())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.warming is not None:
                await self.warming.aclose()
            if self.heard is not None:
                await self.heard.aclose()
            await asyncio.gather(*(one.direct.aclose() for one in self.servers))
            self._tail.close()

    # The loop.

    async def _begun(self) -> list[asyncio.Task[None]]:
        looks = [asyncio.create_task(one.look()) for one in self.servers]
        _, late = await asyncio.wait(looks, timeout=_FIRST_LOOKS_S)
        for look in late:
            look.cancel()
        self._hears_since = time.time()
        tasks = [asyncio.create_task(one.run()) for one in self.servers]
        if self.heard is not None:
            tasks += [asyncio.create_task(ear.run()) for ear in self.heard.ears]
        return tasks

    async def _follow(self, on_sight: Callable[[Sight], None]) -> None:
        shown_at = read_at = time.monotonic()
        while not (self._tail.is_over or self._stopping.is_set()):
            lines = self._tail.read()
            for at, line in enumerate(lines):
                await self._take(line)
                if at % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                    self.settling.run()
            now = time.monotonic()
            read_at = now if lines else read_at
            self.settling.run(time.time() if now - read_at >= self.order.settle_s else -inf)
            if now - shown_at >= self.order.every_s:
                shown_at = now
                seen = await self._found()
                if self.warming is not None:
                    self.warming.begin(_all_missing(seen))
                on_sight(sights.sight_of(self, seen))
            if not lines and not self._tail.is_over:
                await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_LOOK_S):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _warm_all(self) -> None:
        """What was seen to its end is warmed to its end, unless it was stopped."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while self.warming is not None and not self._stopping.is_set():
                begun = self.warming.begin(_all_missing(await self._found()))
                settled = asyncio.create_task(self.warming.settled())
                await asyncio.wait([settled, stopping], return_when=asyncio.FIRST_COMPLETED)
                settled.cancel()
                if not begun:
                    return
        finally:
            stopping.cancel()

    async def _found(self) -> list[Found]:
        """Which prefixes are hot, and where they are missing."""
        now = self.settling.now
        self.hot.refresh(now)
        if self.heard is not None:
            self.fleet.block_tokens = self.heard.names.block_tokens
            for ear in self.heard.ears:
                ear.age(now)
            for prefix in self.hot.prefixes:
                prefix.token_blocks = prefix.token_blocks or await self.heard.blocks_of(prefix.body)
        capacities = [None if one.capacity is None else one.capacity.tokens for one in self.servers]
        return found(self.fleet, self.hot.prefixes, capacities, self.order.idle_price, now)

    # Lines, and what they mean.

    async def _take(self, line: Line) -> None:
        self.counts.lines += 1
        if line.data is None:
            self._refuse(line.number, "a line that is too long")
            return
        if not line.data.strip():
            return
        try:
            record = read_line(line.data, self.order.worker_field)
            self._dated(record.seen)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._refuse(line.number, said(error))
            return
        await self._understood(record)

    def _dated(self, seen: Seen) -> None:
        """Without a time it came when its line did. Raises ValueError for one that can't be."""
        now = time.time()
        if seen.at is None:
            self.counts.undated += 1
            seen.at = now - max(0.0, seen.service_s)
        elif seen.at > now + _FUTURE_S:
            raise ValueError("a time that hasn't come yet")
        if seen.service_s > _LONGEST_S:
            raise ValueError("a duration of more than a day")

    def _refuse(self, number: int, why: str) -> None:
        if self.order.is_bad_fatal:
            raise TraceError(
                f"{self.order.log}:{number}: {why}; bad lines can be passed over (--on-bad skip)"
            )
        self.counts.bad += 1
        self.bad.append(BadLine(self.order.log, number, why))

    async def _understood(self, record: Record) -> None:
        seen, counts = record.seen, self.counts
        at = seen.at or 0.0
        counts.first_at = at if counts.first_at is None else min(at, counts.first_at)
        counts.without_prompt += not seen.prompt_bytes
        counts.without_duration += seen.service_s < 0.0
        counts.without_usage += seen.cached_tokens is None
        if record.sighting is not None and not seen.is_failed:
            self.hot.saw(record.sighting, at)
            self._sightings += 1
            if self._sightings % _REFRESH == 0:  # uses are counted from then on
                self.hot.refresh(at)
        # What came before anybody listened is looked up by its text: nothing was told of that time.
        if self.heard is not None and at >= self._hears_since:
            seen.token_blocks = await self.heard.blocks_of(record.body)
        number = 0 if len(self.servers) == 1 else self._names.find(seen.worker)
        weight = 1 + len(seen.blocks) + len(seen.token_blocks)
        self.settling.began(at, lambda now: self._came(seen, number, now), weight)

    def _came(self, seen: Seen, worker: int | None, now: float) -> None:
        if self.heard is not None:
            self.fleet.block_tokens = self.heard.names.block_tokens
        ticket, repeated = self.fleet.began(seen, worker, now)
        used = self.hot.used(seen.blocks, worker, now)
        if ticket is None:
            return
        if 0.0 <= seen.ttft_s <= seen.service_s and not seen.is_failed:
            self.settling.add(now + seen.ttft_s, lambda at: self.fleet.router.began(ticket, at))
        self.settling.add(
            now + max(0.0, seen.service_s), lambda at: self._ended(ticket, seen, repeated, used, at)
        )

    def _ended(
        self, ticket: Ticket, seen: Seen, repeated: int, used: list[Prefix], now: float
    ) -> None:
        self.fleet.ended(ticket, seen, repeated, now)
        cached = self.fleet.cached_tokens(ticket.worker, seen)
        if self.warming is None or seen.is_failed or cached is None:
            return
        for prefix in used:
            self.warming.used(ticket.worker, prefix.name, cached, seen.at or 0.0)

    def _tells(self, worker: int) -> bool:
        return self.fleet.router.tells(worker)

    def _warmed(self, one: Missing) -> None:
        """It is there now, as if a request had gone there."""
        now = self.settling.now
        self.fleet.router.learned(one.worker, one.prefix.blocks, one.prefix.token_blocks, now)

    def _tell(self, act: Act, weight: int = 1) -> None:
        """What a server says now, where the log is now; before the log began, at once."""
        if self.counts.first_at is None:
            act(0.0)
        else:
            self.settling.add(time.time(), act, weight)


def _all_missing(seen: list[Found]) -> list[Missing]:
    return [one for prefix in seen for one in prefix.missing]
