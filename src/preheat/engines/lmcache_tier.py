"""KV that LMCache keeps for a group's servers: known where it could be loaded, brought nearer, let go."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

import msgspec

from preheat.core.blocks import prefix_of
from preheat.core.router import Ask, Loadable
from preheat.core.sharing import Sharing
from preheat.core.slot_ways import Speed
from preheat.engines import lmcache
from preheat.engines.attendant import Attendant
from preheat.engines.beside import aside, guarded, tell_bug
from preheat.engines.kv_tokens import prompt_of
from preheat.engines.lmcache import Held
from preheat.engines.lmcache_fleet import Found, LmcacheFleet, LmcacheRules
from preheat.engines.worker import OnEvent, Worker
from preheat.errors import ConfigError, EngineError

T = TypeVar("T")

_LEAST_QUEUE_S: Final = 0.005
"""With less to wait for nothing is asked: tokenising and looking up take about that."""
_MOST_WAIT_S: Final = 0.25
_LEAST_BYTES: Final = 2_048
_MOST_BODY_BYTES: Final = 4_194_304
"""A prompt under it and a body over it aren't looked up: two chunks of 256 tokens, and a million tokens."""
_MOST_AT_ONCE: Final = 32
_MOST_PREFETCHES: Final = 2
"""At once of an instance: it does eight (`max_in_flight`), those of requests among them."""
_AGAIN_S: Final = 60.0
_FIRST_AGAIN_S: Final = 5.0
_FAILURES: Final = 8
_REST_S: Final = 60.0
"""After so many in a row nothing is asked for so long."""
_SETTLED_S: Final = 3.0
"""How long after a request's end what it has left is known: events are sent every second."""
_MARGIN_TOKENS: Final = 1_024
"""By so much a text's share of a prompt may be wrong as its tokens' share."""
_MOST_OVER: Final = 256
_MEMORY: Final = 16e9
_LOWER: Final = 1e9
"""Bytes a second: from memory to a GPU (half of PCIe 4.0 x16, as chunks are small), and from a lower tier to
memory (a usual SSD's) until prefetches have told."""


class LmcacheCounts(msgspec.Struct):
    """What was done so far."""

    lookups: int = 0
    in_time: int = 0
    failed: int = 0
    prefetched: int = 0
    deleted_keys: int = 0


class LmcacheTier:
    """Asks beside the requests, for those that would wait anyway. Whatever goes wrong, a request goes where
    it would have gone without.

    LMCache loads what its instance has by itself, once the engine takes the request up: there is nothing to
    restore. So a prompt goes where it could be loaded; what lies in a lower tier comes to memory while the
    request waits; and what a session that is over has left in memory makes room.
    """

    def __init__(self, rules: LmcacheRules, on_event: OnEvent) -> None:
        """Connect to nothing yet. Raises ValueError for a url that can't be."""
        self.counts = LmcacheCounts()
        self._fleet = LmcacheFleet(rules)
        self._on_event = on_event
        self._attendants: Mapping[Worker, Attendant] = {}
        self._behind: dict[int, str] = {}  # by the worker's number
        self._sharing = Sharing()
        self._last: dict[tuple[str, str], tuple[Ask, bytes]] = {}
        self._memory = Speed(bytes_per_s=_MEMORY)
        self._lower = Speed(bytes_per_s=_LOWER)
        self._bringing: dict[str, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._flights = self._failures = self._turn = 0
        self._resting_until = 0.0
        self._opener: asyncio.Task[None] | None = None
        self._why: str | None = None

    def follow(self, chosen: Mapping[Worker, Attendant]) -> None:
        """Those servers, from now on."""
        self._attendants = chosen
        self._behind = {}
        if self._opener is not None:
            self._opener.cancel()
        self._opener = self.own(self._keep_open()) if chosen else None

    def begun(self, ask: Ask, body: bytes, tenant: str, *, is_over: bool) -> None:
        """A request came."""
        blocks = prefix_of(body, b"").blocks if tenant else ask.blocks  # LMCache knows no tenants
        self._sharing.saw(_owner(tenant, ask.session), blocks)
        if is_over and ask.session and len(body) <= _MOST_BODY_BYTES:
            own = msgspec.structs.replace(ask, blocks=blocks)
            self._last[tenant, ask.session] = own, body
            if len(self._last) > _MOST_OVER:  # some end without a word
                del self._last[next(iter(self._last))]

    def look_up(self, ask: Ask, body: bytes, queue_s: float) -> "Lookup | None":
        """Begin to, where the request waits for so long at least, wherever it goes."""
        if (
            not self._behind
            or queue_s < _LEAST_QUEUE_S
            or ask.prompt_bytes < _LEAST_BYTES
            or self._flights >= _MOST_AT_ONCE
            or time.monotonic() < self._resting_until
        ):
            return None
        return Lookup(self, self.own(self._found(body)), queue_s)

    def over(self, tenant: str, session: str) -> None:
        """That session's last request has ended: what only it has had leaves the memory. Of one whose last
        request didn't say so nothing is known here."""
        last = self._last.pop((tenant, session), None)
        if last is not None and self._behind:
            self.own(self._let_go(*last, _owner(tenant, session)))

    async def aclose(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.aclose()

    def loadable(self, found: Found) -> dict[int, Loadable]:
        """By worker."""
        told = {}
        for worker, instance in self._behind.items():
            held = found.held.get(instance)
            if held is not None and held.tokens:
                told[worker] = Loadable(held.tokens, self._load_s(held))
        return told

    async def bring(self, found: Found, worker: int, until: float) -> None:
        """To memory, where that ends before the request begins: later its engine would load the same twice."""
        instance = self._behind.get(worker, "")
        held = found.held.get(instance)
        if held is None or found.directory is None or not held.lower_bytes:
            return
        is_late = time.monotonic() + self._lower.expected_s(held.lower_bytes) > until
        if is_late or self._bringing.get(instance, 0) >= _MOST_PREFETCHES:
            return
        self._bringing[instance] = self._bringing.get(instance, 0) + 1
        try:
            took_s = await self._fleet.prefetch(instance, found)
        except EngineError:
            self.counts.failed += 1
            return
        finally:
            self._bringing[instance] -= 1
        if took_s is not None:
            self.counts.prefetched += 1
            self._lower.learn(held.lower_bytes, took_s)

    def _load_s(self, held: Held) -> float:
        lower_s = self._lower.expected_s(held.lower_bytes) if held.lower_bytes else 0.0
        return lower_s + self._memory.expected_s(held.size_bytes)

    async def _keep_open(self) -> None:
        """Who there is, asked for again and again: instances come and go."""
        while True:
            workers, why = list(self._attendants), ""
            try:
                behind = await self._fleet.open([one.url for one in workers])
            except (ConfigError, EngineError) as error:
                behind, why = {}, str(error)
            except Exception as bug:  # noqa: BLE001  it is asked again
                behind, why = {}, f"a defect of ours: {type(bug).__name__}"
                tell_bug(self._on_event, bug)
            self._behind = {one.number: behind[one.url] for one in workers if one.url in behind}
            if why != self._why:
                self._why = why
                fields: dict[str, object] = {"why": why} if why else {"workers": len(behind)}
                self._on_event("lmcache-off" if why else "lmcache-on", fields)
            await asyncio.sleep(_FIRST_AGAIN_S if why else _AGAIN_S)

    async def _found(self, body: bytes) -> Found | None:
        self._flights += 1
        try:
            tokens = await self._tokenised(body)
            if tokens is None:
                return None
            self.counts.lookups += 1
            found = await self._fleet.look_up(*tokens)
        except EngineError:
            self._failed()
            return None
        finally:
            self._flights -= 1
        self._failures = 0
        return found

    async def _tokenised(self, body: bytes) -> tuple[list[int], str] | None:
        """A prompt's ids and its salt; None where they can't be known."""
        size = len(body)
        prompt = await aside(size, prompt_of, body) if size <= _MOST_BODY_BYTES else None
        able = [one for one in self._attendants.values() if one.is_up and one.dialect is not None]
        if prompt is None or not able:
            return None
        if prompt.ids is not None:
            return list(prompt.ids), prompt.salt
        self._turn = (self._turn + 1) % len(able)
        dialect = able[self._turn].dialect
        call = None if dialect is None else await aside(size, dialect.tokenise, prompt)
        try:
            told = None if call is None else await able[self._turn].told(call)
        except TimeoutError:
            return None
        if told is None or dialect is None:
            return None
        tokens = await aside(len(told), dialect.read_tokens, told)
        if tokens is None or not tokens.ids or len(tokens.ids) > lmcache.MOST_TOKENS:
            return None
        return tokens.ids, prompt.salt

    async def _let_go(self, ask: Ask, body: bytes, owner: str) -> None:
        await asyncio.sleep(_SETTLED_S)
        shared = self._sharing.own_from(owner, ask.blocks)
        found = None if shared is None else await self._found(body)
        if shared is None or found is None:
            return
        share = shared * ask.block_bytes / max(1, ask.prompt_bytes)
        try:
            gone = await self._fleet.let_go(found, int(share * len(found.ids)) + _MARGIN_TOKENS)
        except EngineError:
            self.counts.failed += 1
        else:
            self.counts.deleted_keys += gone

    def _failed(self) -> None:
        self.counts.failed += 1
        self._failures += 1
        if self._failures >= _FAILURES:
            self._failures = 0
            self._resting_until = time.monotonic() + _REST_S

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T | None]:
        """Do it beside the requests, until it is done or all ends. A defect of ours is told: None comes of it."""
        task = asyncio.get_running_loop().create_task(guarded(work, self._on_event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Lookup:
    """One request's."""

    def __init__(
        self, tier: LmcacheTier, found: asyncio.Task[Found | None], queue_s: float
    ) -> None:
        self._tier = tier
        self._found = found
        self._until = time.monotonic() + queue_s

    async def within(self, ask: Ask) -> Ask:
        """The same with what each could load, where that is known before any server could begin."""
        try:
            async with asyncio.timeout(min(self._until - time.monotonic(), _MOST_WAIT_S)):
                found = await asyncio.shield(self._found)
        except TimeoutError:
            return ask
        if found is None:
            return ask
        self._tier.counts.in_time += 1
        return msgspec.structs.replace(ask, loadable=self._tier.loadable(found))

    def sent_to(self, worker: int) -> None:
        """It waits there, at least as long as at the least busy one."""

        async def bring() -> None:
            found = await self._found
            if found is not None:
                await self._tier.bring(found, worker, self._until)

        self._tier.own(bring())


def _owner(tenant: str, session: str) -> str:
    return f"{tenant}\0{session}" if session else ""
