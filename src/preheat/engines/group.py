"""Several equal servers behind one name: who is asked, who else where that one can't answer."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Final

import msgspec

from preheat.core.blocks import BLOCK_BYTES, prefix_of
from preheat.core.breaker import Breaker, RetryBudget
from preheat.core.router import Ask, Router
from preheat.core.slot_desk import Freed
from preheat.core.types import SessionState
from preheat.engines.attendant import Attendant
from preheat.engines.followers import Followers
from preheat.engines.gate import Gate
from preheat.engines.kv_hearing import Hearing
from preheat.engines.kv_link import LearnerLink
from preheat.engines.lmcache_tier import LmcacheTier, Lookup
from preheat.engines.placement import Placement, Whose
from preheat.engines.roles import Handover, Role, Roles
from preheat.engines.salts import Salts
from preheat.engines.slot_seats import SlotFolders, SlotRules, SlotSeats
from preheat.engines.warmers import Warmers
from preheat.engines.warmth import Hot, Proven, Warmed, Warmth
from preheat.engines.worker import (
    REFUSALS,
    UNASKED,
    Headers,
    HttpClient,
    OnEvent,
    Worker,
    WorkerState,
    name_at,
)
from preheat.errors import ConfigError, EngineError
from preheat.transport.client import Response

# Of the refusals, those after which nothing was done: a proxy says 502 to 504 of one that works on.
_UNDONE: Final = frozenset({429})
_ENDED: Final = frozenset({"connect", "reset"})
"""Failures of a process that is no more: its successor's cache is empty."""
Outcome = Response | EngineError

_LEAVE_S: Final = 600.0
_LOOK_S: Final = 0.1


class Rules(msgspec.Struct, frozen=True):
    """How a group treats failures; each is a setting of `engines.NAME`."""

    retries: int = 2
    retry_ratio: float = 0.2
    health_path: str = "/health"
    health_s: float = 2.0
    seat_s: float = 300.0
    """How long a request waits for a slot."""
    roles: tuple[Role, ...] = ()
    """One for each url, in order; none: all are for all."""


class Care(msgspec.Struct, frozen=True):
    """How each server of a group is looked after: the dialect that it speaks ("auto": it is asked),
    the key that opens it, how often it is asked how busy it is, and where its slots are saved. Who comes cold is
    held back for `gate_s` at most, and given what is hot (`warmth`). `salts` set tenants apart in its cache."""

    dialect: str = "auto"
    api_key: str = ""
    poll_s: float = 5.0
    slots: SlotRules = SlotRules()
    gate_s: float = 0.0
    warmth: Warmth | None = None
    salts: Salts | None = None


class Group:
    """Asks one of those that are well: whom the router names, or the least loaded without one. And another where that is safe: before the
    first byte, when nothing could be asked or the answer was 429; and at 502 to 504, where it may
    have been worked on, if the request does no harm twice."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        connect: Callable[[str], HttpClient],
        breaker: Breaker,
        rules: Rules,
        router: Router | None = None,
        care: Care | None = None,
        hearing: Hearing | None = None,
        link: LearnerLink | None = None,
        lmcache: LmcacheTier | None = None,
        probe_headers: Headers = (),
        api_key: str = "",
        on_event: OnEvent | None = None,
    ) -> None:
        self._name = name
        self._router = router
        self._care = care
        self._hearing = hearing
        self._link = link
        self._lmcache = lmcache
        self._followers = None if router is None else Followers(router)
        self._folders = SlotFolders(SlotRules() if care is None else care.slots)
        self._is_started = False
        self._attendants: dict[Worker, tuple[Attendant, asyncio.Task[None]]] = {}
        self._gate: Gate | None = None
        self._salts = None if care is None else care.salts
        self._salt_field: str | None = None
        self._is_salt_known = False
        self._warmers = Warmers("auto", api_key, router)
        if care is not None:
            self._warmers = Warmers(care.dialect, care.api_key, router, care.salts, care.warmth)
        if router is not None and care is not None:
            attendants = self._attendants
            self._gate = Gate(
                care.gate_s,
                care.warmth,
                self._warmers,
                router,
                lambda worker: attendants[worker][0] if worker in attendants else None,
                on_event or _ignore,
            )
        self._connect = connect
        self._breaker = breaker
        self._probe_headers = probe_headers
        self._on_event = on_event or _ignore
        self._leaving: set[Worker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._turn = 0
        self._workers: list[Worker] = []
        self._rules = self._checked(rules)
        self._budget = RetryBudget(rules.retry_ratio, time.monotonic())
        self._workers = self._arranged(urls)
        self._roles = self._roles_of(urls, rules)

    async def send(
        self,
        method: bytes,
        path: bytes,
        headers: Headers,
        body: bytes,
        *,
        is_repeatable: bool = True,
        tenant: str = "",
        session: str = "",
        state: SessionState = "",
    ) -> Response:
        """The answer of whoever could give one, else the last refusal or error."""
        body = await self._salted(path, body, tenant)
        workers = self._workers
        if not self._has_choice and workers[0].breaker.is_closed and not workers[0].is_draining:
            return await workers[0].ask(method, path, headers, body)
        self._budget.earn()
        whose = Whose(tenant, session, state)
        ask = self._ask_of(body, whose)
        lookup = None if ask is None else self._look_up(ask, body, whose)
        if ask is not None:
            ask = await self._known(ask, body, lookup)
        handed = None
        if self._roles is not None:
            handed = await self._handed(self._roles, ask, path, headers, body)
        chosen = self._first(handed, ask, whose, lookup)
        refusals = REFUSALS if is_repeatable else _UNDONE
        tried: list[Worker] = []
        retries = 0
        while True:
            worker, placement = chosen
            outcome: Outcome
            try:
                outcome = await self._asked(
                    worker, placement, method, path, headers, body, handed=handed
                )
                outcome.placement = placement
                if outcome.status not in refusals:
                    return outcome
            except EngineError as error:
                outcome = error
                _end(placement)
            except BaseException:
                _end(placement)
                raise
            tried.append(worker)
            other = self._other(outcome, refusals, tried, retries, ask, whose)
            if other is None:
                break
            chosen = other
            if isinstance(outcome, Response):
                outcome.close()
            if not _is_queue(outcome):
                retries += 1
                worker.retries += 1
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    async def over(self, tenant: str, session: str) -> Freed:
        """That session won't come back: what is kept for it goes first."""
        if self._lmcache is not None:
            self._lmcache.over(tenant, session)
        keepers = [one.seats.keeper for one in self._workers if one.seats is not None]
        freed = await asyncio.gather(
            *(one.over(tenant, session) for one in keepers if one is not None)
        )
        return Freed(sum(one.slots for one in freed), sum(one.file_bytes for one in freed))

    async def warm(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Warmed]:
        """Have it warm at these, or at all that are well, in idle moments."""
        return await asyncio.gather(
            *(self._warmers.warm_within(one, hot, within_s) for one in self._named(workers))
        )

    async def prove(self, hot: Hot, workers: Sequence[str], within_s: float) -> list[Proven]:
        """Whether it is, at these or at all that are well."""
        return await asyncio.gather(
            *(self._warmers.prove_within(one, hot, within_s) for one in self._named(workers))
        )

    def _named(self, workers: Sequence[str]) -> list[Worker]:
        if workers:
            return [one for one in self._workers if one.name in workers]
        return [one for one in self._workers if one.breaker.is_closed and not one.is_draining]

    def start(self) -> None:
        """Look after those that there are to choose from, from now on, and after slots with files."""
        self._is_started = True
        router, care = self._router, self._care
        chosen = self._workers if router is not None and self._has_choice else []
        for worker in [one for one in self._attendants if one not in chosen]:
            self._attendants.pop(worker)[1].cancel()
        for worker in chosen:
            if care is None or router is None or worker in self._attendants:
                continue
            attendant = Attendant(
                worker,
                router,
                care.dialect,
                care.api_key,
                care.poll_s,
                self._on_event,
                partial(self._hold, worker, "restarted"),
            )
            self._attendants[worker] = attendant, self._own(attendant.run())
        if self._link is not None and router is not None and chosen:
            self._link.start(self._on_sent_elsewhere)
        attended = {one: own[0] for one, own in self._attendants.items()}
        if self._hearing is not None and router is not None:
            self._hearing.follow(attended, router)
        if self._lmcache is not None:
            self._lmcache.follow(attended)

    @property
    def is_ready(self) -> bool:
        """Whether any may be asked."""
        now = time.monotonic()
        return any(not one.is_draining and one.breaker.would_allow(now) for one in self._workers)

    def workers(self) -> list[WorkerState]:
        """All of them, those that are leaving last."""
        now = time.monotonic()
        return [self._state(one, now) for one in (*self._workers, *self._leaving)]

    def set_draining(self, worker: str, *, is_draining: bool) -> bool:
        """Let that one take nothing more, or again. Whether there is one of that name."""
        for one in self._workers:
            if one.name == worker:
                was_draining, one.is_draining = one.is_draining, is_draining
                if is_draining:
                    self._own(self._save(one))
                elif was_draining:
                    self._hold(one, "drained")
                return True
        return False

    def reconfigure(self, urls: Sequence[str], rules: Rules) -> None:
        """Whole or not at all. Who is no longer named takes nothing more, ends what is under way,
        and goes; who still is stays as it is. Raises ConfigError."""
        rules = self._checked(rules)
        roles = self._roles_of(urls, rules)
        arranged = self._arranged(urls)
        before = self._workers
        left = [one for one in before if one not in arranged]
        self._workers, self._roles = arranged, roles
        self._turn = 0
        for position, one in enumerate(arranged):
            one.name = name_at(self._name, position, len(arranged))
        for one in left:
            one.is_draining = True
            self._leaving.add(one)
            if self._router is not None:
                self._router.left(one.number)
            self._own(self._leave(one))
        if self._is_started:
            self.start()
            for one in arranged:
                if one not in before:
                    self._hold(one, "new")
        if rules.health_path != self._rules.health_path:
            for one in arranged:
                one.knows_health = True
        if rules != self._rules:
            self._rules = rules
            self._budget = RetryBudget(rules.retry_ratio, time.monotonic())

    async def retire(self) -> None:
        """End what is under way, and what was about to be asked; then close."""
        await asyncio.gather(*(self._leave(one) for one in self._workers))
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection now."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._gate is not None:
            await self._gate.aclose()
        await self._warmers.aclose()
        if self._hearing is not None:
            await self._hearing.aclose()
        if self._link is not None:
            await self._link.aclose()
        if self._lmcache is not None:
            await self._lmcache.aclose()
        await asyncio.gather(*(one.aclose() for one in (*self._workers, *self._leaving)))

    @property
    def _has_choice(self) -> bool:
        """Whether there is anything to decide: a server, or a slot."""
        return len(self._workers) > 1 or self._workers[0].seats is not None

    async def _salted(self, path: bytes, body: bytes, tenant: str) -> bytes:
        """With its tenant's salt, where these servers take one: they are asked what they are before the
        first request. Raises EngineError where none of them says it."""
        salts = self._salts
        if salts is None or not tenant:
            return body
        if not self._is_salt_known:
            self._salt_field = (await self._warmers.known(self._workers)).salt_field
            self._is_salt_known = True
        field = self._salt_field
        return body if field is None else salts.salted(path, body, tenant, field)

    async def _asked(
        self,
        worker: Worker,
        placement: Placement | None,
        method: bytes,
        path: bytes,
        headers: Headers,
        body: bytes,
        *,
        handed: Handover | None,
    ) -> Response:
        if placement is not None:
            keeper = None if worker.seats is None else worker.seats.keeper
            body = await placement.ready(keeper, path, body, self._rules.seat_s)
        if handed is not None:
            return await handed.ask(worker, path, body)
        return await worker.ask(method, path, headers, body)

    async def _handed(
        self, roles: Roles, ask: Ask | None, path: bytes, headers: Headers, body: bytes
    ) -> Handover | None:
        """Its prompt computed by one of those that are for that, if that is to be."""
        handed = await roles.prefilled(self._workers, self._router, ask, path, headers, body)
        if handed is not None and self._link is not None and ask is not None:
            self._link.sent(handed.prefiller.url, ask.blocks, ask.token_blocks)
        return handed

    def _state(self, worker: Worker, now: float) -> WorkerState:
        state = worker.state(now)
        attended = self._attendants.get(worker)
        if self._router is None or not self._has_choice or worker in self._leaving:
            return state
        keeper = None if worker.seats is None else worker.seats.keeper
        return msgspec.structs.replace(
            state,
            unsaved_slots=0 if keeper is None else keeper.unsaved,
            dialect="" if attended is None else attended[0].known.dialect,
            known=self._router.known(worker.number, now),
            events=None if self._hearing is None else self._hearing.counts(worker),
        )

    # choosing

    def _ask_of(self, body: bytes, whose: Whose) -> Ask | None:
        if self._router is None:
            return None
        prefix = prefix_of(body, whose.tenant.encode())
        return Ask(prefix.model, prefix.blocks, BLOCK_BYTES, prefix.prompt_bytes, whose.session)

    async def _known(self, ask: Ask, body: bytes, lookup: Lookup | None) -> Ask:
        """The same with what can be known in time of where it lies."""
        if self._hearing is not None:
            ask = await self._hearing.with_tokens(ask, body)
        return ask if lookup is None else await lookup.within(ask)

    def _look_up(self, ask: Ask, body: bytes, whose: Whose) -> Lookup | None:
        """What LMCache could load of it, where it waits anyway."""
        router, lmcache = self._router, self._lmcache
        if router is None or lmcache is None:
            return None
        lmcache.begun(ask, body, whose.tenant, is_over=whose.is_over)
        now = time.monotonic()
        queues_s = (
            router.queue_s(one.number, now)
            for one in self._workers
            if one.breaker.is_closed and not one.is_draining
        )
        return lmcache.look_up(ask, body, min(queues_s, default=0.0))

    def _first(
        self, handed: Handover | None, ask: Ask | None, whose: Whose, lookup: Lookup | None
    ) -> tuple[Worker, Placement | None]:
        """Who is asked first. Raises EngineError where nobody can be."""
        if handed is not None:
            return handed.decoder, None
        chosen = self._choose((), ask, whose, only_well=False, lookup=lookup)
        if chosen is None:
            raise self._none_left()
        return chosen

    def _choose(
        self,
        tried: Sequence[Worker],
        ask: Ask | None,
        whose: Whose,
        *,
        only_well: bool,
        lookup: Lookup | None = None,
    ) -> tuple[Worker, Placement | None] | None:
        """Of those that are well the router's choice, or the least loaded, in turn where that is
        several; else the one from which an answer is likeliest. With whom it counts as sent."""
        now = time.monotonic()
        well = self._well(tried, now)
        if not well:
            worker = None if only_well else self._least_bad(tried, now)
            if worker is None:
                return None
            well = [worker]
        router, followers = self._router, self._followers
        if router is None or ask is None or followers is None:
            worker = min(well, key=lambda one: one.client.in_flight)
            self._turn = (self._workers.index(worker) + 1) % len(self._workers)
            return worker, None
        route = router.place(ask, [one.number for one in well], now)
        number = route.ticket.worker
        worker = next(one for one in well if one.number == number)
        if self._link is not None:
            self._link.sent(worker.url, ask.blocks, ask.token_blocks)
        if lookup is not None:
            lookup.sent_to(number)
        return worker, Placement(router, route, followers, whose, self._end_session)

    def _well(self, tried: Sequence[Worker], now: float) -> list[Worker]:
        """Who may be asked, from the one whose turn it is; of those that may be well again just one,
        which this request finds out."""
        workers = self._workers
        well: list[Worker] = []
        gated: list[Worker] = []
        for position in range(self._turn - len(workers), self._turn):  # below zero: from the end
            worker = workers[position]
            if tried and worker in tried:
                continue
            if worker.breaker.is_closed and now >= worker.avoided_until and not worker.is_draining:
                (gated if worker.is_gated else well).append(worker)
            elif not tried and worker.may_be_tried(now):
                return [worker]
        return well or gated

    def _least_bad(self, tried: Sequence[Worker], now: float) -> Worker | None:
        left = [one for one in self._workers if one not in tried and not one.is_draining]
        avoided = [one for one in left if one.breaker.is_closed]
        if avoided:
            return min(avoided, key=lambda one: one.avoided_until)
        left.sort(key=lambda one: one.breaker.failures)
        return next((one for one in left if one.breaker.allows(now)), None)

    def _other(
        self,
        outcome: Outcome,
        refusals: frozenset[int],
        tried: Sequence[Worker],
        retries: int,
        ask: Ask | None,
        whose: Whose,
    ) -> tuple[Worker, Placement | None] | None:
        """Who else may be asked the same; None where nobody is, or it wouldn't be safe."""
        if isinstance(outcome, Response) and outcome.status not in refusals:
            return None
        if not _is_queue(outcome):
            if retries >= self._rules.retries:
                return None
            if isinstance(outcome, EngineError) and outcome.kind not in UNASKED:
                return None
        was_refused = isinstance(outcome, Response)
        other = self._choose(tried, ask, whose, only_well=was_refused)
        if other is None:
            return None
        is_full = _is_queue(outcome) and not other[0].client.has_room
        if is_full or (was_refused and not self._budget.take(time.monotonic())):
            _end(other[1])
            return None
        return other

    def _none_left(self) -> EngineError:
        now = time.monotonic()
        asked = [one for one in self._workers if not one.is_draining]
        if not asked:
            return EngineError(
                f"engine {self._name} is being drained: it takes nothing more",
                kind="breaker-open",
            )
        wait_s = min(one.breaker.retry_after_s(now) for one in asked)
        return EngineError(
            f"engine {self._name} is failing; it is tried again in {wait_s:.0f} s",
            kind="breaker-open",
            retry_after_s=max(1.0, wait_s),
        )

    # who there is

    def _checked(self, rules: Rules) -> Rules:
        path = rules.health_path
        if path and not (path.startswith("/") and path.isascii() and path.split() == [path]):
            raise ConfigError(
                f"engines.{self._name}.health_path: expected a path such as /health, got {path!r}"
            )
        return rules

    def _roles_of(self, urls: Sequence[str], rules: Rules) -> Roles | None:
        if rules.roles and len(rules.roles) != len(urls):
            raise ConfigError(f"engines.{self._name}.roles: give one for each of urls, in order")
        return Roles(urls, rules.roles, self._on_event) if rules.roles else None

    def _arranged(self, urls: Sequence[str]) -> list[Worker]:
        """A worker for each url, those there are among them."""
        if not urls:
            raise ConfigError(f"engines.{self._name}.url: expected an address, got none")
        if len(set(urls)) != len(urls):
            raise ConfigError(f"engines.{self._name}.urls: one of them is named twice")
        known = {one.url: one for one in self._workers}
        taken = {one.number for one in (*self._workers, *self._leaving)}
        numbers = (number for number in itertools.count() if number not in taken)
        return [
            known.get(url) or self._made(next(numbers), position, url, len(urls))
            for position, url in enumerate(urls)
        ]

    def _made(self, number: int, position: int, url: str, of: int) -> Worker:
        worker = Worker(
            number,
            name_at(self._name, position, of),
            url,
            self._connect(url),
            self._breaker.fresh(),
            self._on_down,
            self._on_event,
            self._on_back,
        )
        folder = self._folders.at(position)
        if folder is not None and self._care is not None and self._router is not None:
            worker.seats = SlotSeats(url, self._care.api_key, folder, self._folders)
            worker.restore = worker.seats.refill
        return worker

    # what goes on beside the requests

    def _hold(self, worker: Worker, why: str) -> None:
        if self._gate is not None:
            self._gate.hold(worker, why)

    def _on_back(self, worker: Worker) -> None:
        """It is another process, as it seems, and cold."""
        if worker.last_error_kind in _ENDED:
            self._hold(worker, "back")

    def _on_down(self, worker: Worker) -> None:
        """Watch for its return, where there are others to answer meanwhile."""
        if self._router is not None and worker.last_error_kind in _ENDED:
            self._router.cleared(worker.number)
            if worker.seats is not None:
                worker.seats.restarted()
        worker.is_probed = (
            len(self._workers) > 1 and bool(self._rules.health_path) and worker.knows_health
        )
        if worker.is_probed and self._watcher is None:
            self._watcher = self._own(self._watch())

    async def _watch(self) -> None:
        """Ask those that are down for their health, until none is."""
        try:
            while True:
                await asyncio.sleep(self._rules.health_s)
                down = [one for one in self._workers if one.is_probed and not one.breaker.is_closed]
                if not down:
                    return
                target = self._rules.health_path.encode()
                limit_s = min(5.0, max(1.0, self._rules.health_s))
                await asyncio.gather(
                    *(one.probe(target, self._probe_headers, limit_s) for one in down)
                )
        finally:
            self._watcher = None

    async def _leave(self, worker: Worker) -> None:
        if self._gate is not None:
            await self._gate.release(worker)
        await self._warmers.forget(worker)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.sleep(_LOOK_S)
                while worker.client.in_flight:  # noqa: ASYNC110  an event would cost each request
                    await asyncio.sleep(_LOOK_S)
        await worker.aclose()
        self._leaving.discard(worker)

    def _on_sent_elsewhere(
        self, url: str, blocks: Sequence[int], token_blocks: Sequence[int]
    ) -> None:
        """Another process of ours has sent that prompt to that server."""
        worker = next((one for one in self._workers if one.url == url), None)
        if worker is not None and self._router is not None:
            self._router.learned(worker.number, blocks, token_blocks, time.monotonic())

    def _end_session(self, whose: Whose) -> None:
        async def told() -> None:
            await self.over(whose.tenant, whose.session)

        self._own(told())

    async def _save(self, worker: Worker) -> None:
        """What its slots hold, once nothing is under way there: it may be stopped soon."""
        keeper = None if worker.seats is None else worker.seats.keeper
        if keeper is None:
            return
        while worker.client.in_flight and worker.is_draining:  # noqa: ASYNC110  as in `_leave`
            await asyncio.sleep(_LOOK_S)
        if worker.is_draining:
            saved = await keeper.save_all()
            self._on_event("slots-saved", {"worker": worker.name, "slots": saved})

    def _own(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _end(placement: Placement | None) -> None:
    if placement is not None:
        placement.gone()


def _ignore(_event: str, _fields: dict[str, object]) -> None:
    """Nobody wants to know."""


def _is_queue(outcome: Outcome) -> bool:
    return isinstance(outcome, EngineError) and outcome.kind == "queue"
