"""Several equal servers behind one name: who is asked, who else where that one can't answer."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

import msgspec

from preheat.core.blocks import BLOCK_BYTES, prefix_of
from preheat.core.breaker import Breaker
from preheat.core.router import Ask, Router
from preheat.core.slot_desk import Freed
from preheat.core.types import SessionState
from preheat.engines.adapter_loads import AdapterLoads
from preheat.engines.attendant import Attendant
from preheat.engines.choice import Choice, Chosen, Outcome, is_broken, is_unsent
from preheat.engines.gate import Gate
from preheat.engines.kv_hearing import Hearing
from preheat.engines.kv_link import LearnerLink
from preheat.engines.lmcache_tier import LmcacheTier, Lookup
from preheat.engines.members import Members, checked_path
from preheat.engines.placement import Placement, Whose
from preheat.engines.roles import Handover, Roles
from preheat.engines.rules import Care, Rules
from preheat.engines.second_step import SecondStep
from preheat.engines.slot_seats import SlotRules
from preheat.engines.warmers import Warmers
from preheat.engines.warmth import Hot, Proven, Warmed
from preheat.engines.worker import REFUSALS, Headers, HttpClient, OnEvent, Worker, WorkerState
from preheat.errors import ConfigError, EngineError
from preheat.transport.client import Response

# Of the refusals, those after which nothing was done: a proxy says 502 to 504 of one that works on.
_UNDONE: Final = frozenset({429})


class Group:
    """Asks one after the other for an answer (`engines.choice`), with all that is known of the prompt, and
    has its servers looked after."""

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
        self._on_event = on_event or _ignore
        self._router = router
        self._care = care
        self._hearing = hearing
        self._link = link
        self._lmcache = lmcache
        self._is_started = False
        self._attendants: dict[Worker, tuple[Attendant, asyncio.Task[None]]] = {}
        self._gate: Gate | None = None
        self._warmers = Warmers("auto", api_key, router)
        if care is not None:
            self._warmers = Warmers(
                care.dialect, care.api_key, router, care.salts, care.warmth, link
            )
        self._loads: AdapterLoads | None = None
        if router is not None and care is not None:
            self._loads = AdapterLoads(router.adapters, self._warmers.direct, self._on_event)
            attendants = self._attendants
            self._gate = Gate(
                care.gate_s,
                care.warmth,
                self._warmers,
                router,
                lambda worker: attendants[worker][0] if worker in attendants else None,
                self._on_event,
                self._loads,
            )
        self._members = Members(
            name,
            connect=connect,
            breaker=breaker,
            router=router,
            slots=SlotRules() if care is None else care.slots,
            api_key=api_key if care is None else care.api_key,
            probe_headers=probe_headers,
            on_event=self._on_event,
            on_back=partial(self._hold, why="back"),
            on_leave=self._released,
        )
        self._choice = Choice(name, router, link, self._end_session)
        self._rules = rules
        self._roles: Roles | None = None
        self._members.watch_at(rules.health_path, rules.health_s)
        self._put(urls, rules)

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
        body = await self._warmers.salted(path, body, tenant, self._workers)
        workers = self._workers
        if not self._has_choice and workers[0].breaker.is_closed and not workers[0].is_draining:
            return await workers[0].ask(method, path, headers, body)
        self._choice.budget.earn()
        whose = Whose(tenant, session, state)
        ask = self._with_files(self._ask_of(body, whose), whose)
        lookup = None if ask is None else self._look_up(ask, body, whose)
        if ask is not None:
            ask = await self._known(ask, body, lookup)
        handed = None
        if self._roles is not None and not self._adapter_of(ask):
            handed = await self._handed(self._roles, ask, path, headers, body)
        chosen = self._first(handed, ask, whose, lookup)
        refusals = REFUSALS if is_repeatable else _UNDONE
        tried: list[Worker] = []
        retries = 0
        may_break = is_repeatable
        while True:
            worker, placement = chosen
            outcome: Outcome
            try:
                outcome = await self._asked(
                    worker, placement, method, path, headers, body, handed=handed
                )
                outcome.placement = placement or self._second_step(handed, whose)
                if outcome.status not in refusals:
                    return outcome
            except EngineError as error:
                outcome = error
                chosen.gone()
            except BaseException:
                chosen.gone()
                raise
            tried.append(worker)
            other = self._choice.other(
                outcome, refusals, tried, retries, ask, whose, may_break=may_break
            )
            if other is None:
                break
            chosen = other
            may_break = may_break and not is_broken(outcome)
            if isinstance(outcome, Response):
                outcome.close()
            if not is_unsent(outcome):
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

    async def erase(self, tenant: str) -> int:
        """Delete what a tenant has in files of slots; how many they were. Raises ConfigError."""
        return await self._members.erase(tenant)

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

    def start(self, known_urls: Collection[str] | None = None) -> None:
        """Look after those that there are to choose from, from now on, and after slots with files. Those at other
        addresses than `known_urls` are new; None: nobody is."""
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
                partial(self._hold, worker),
            )
            self._attendants[worker] = attendant, self._members.own(attendant.run())
        if self._link is not None and router is not None and chosen:
            self._link.start(self._on_sent_elsewhere)
        attended = {one: own[0] for one, own in self._attendants.items()}
        if self._hearing is not None and router is not None:
            self._hearing.follow(attended, router)
        if self._lmcache is not None:
            self._lmcache.follow(attended)
        if known_urls is not None:
            for worker in [one for one in self._workers if one.url not in known_urls]:
                self._hold(worker, "new")

    @property
    def is_ready(self) -> bool:
        """Whether any may be asked."""
        now = time.monotonic()
        return any(not one.is_draining and one.breaker.would_allow(now) for one in self._workers)

    def workers(self) -> list[WorkerState]:
        """All of them, those that are leaving last."""
        now = time.monotonic()
        return [self._state(one, now) for one in (*self._workers, *self._members.leaving)]

    def lmcache_counts(self) -> dict[str, int]:
        """What was asked of LMCache so far; nothing where there is none."""
        return {} if self._lmcache is None else msgspec.structs.asdict(self._lmcache.counts)

    def set_draining(self, worker: str, *, is_draining: bool) -> bool:
        """Let that one take nothing more, or again. Whether there is one of that name."""
        for one in self._workers:
            if one.name == worker:
                was_draining, one.is_draining = one.is_draining, is_draining
                if is_draining:
                    if self._gate is not None:
                        self._gate.release(one)
                    self._members.drained(one)
                elif was_draining:
                    self._hold(one, "drained")
                return True
        return False

    def reconfigure(self, urls: Sequence[str], rules: Rules) -> None:
        """Whole or not at all. Who is no longer named takes nothing more, ends what is under way,
        and goes; who still is stays as it is. Raises ConfigError."""
        new = self._put(urls, rules)
        self._members.watch_at(rules.health_path, rules.health_s)
        if self._is_started:
            self.start({one.url for one in self._workers if one not in new})

    async def retire(self) -> None:
        """End what is under way, and what was about to be asked; then close."""
        await asyncio.gather(*(self._members.leave(one) for one in self._workers))
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection now."""
        await self._members.end_tasks()
        if self._gate is not None:
            await self._gate.aclose()
        if self._loads is not None:
            await self._loads.aclose()
        await self._warmers.aclose()
        if self._hearing is not None:
            await self._hearing.aclose()
        if self._link is not None:
            await self._link.aclose()
        if self._lmcache is not None:
            await self._lmcache.aclose()
        await self._members.aclose()

    def _put(self, urls: Sequence[str], rules: Rules) -> list[Worker]:
        """These urls and rules from now on; those servers that are new. Raises ConfigError."""
        if rules.roles and len(rules.roles) != len(urls):
            raise ConfigError(f"engines.{self._name}.roles: give one for each of urls, in order")
        checked_path(self._name, rules.health_path)
        arranged = self._members.arranged(urls)
        new = self._members.change(arranged)
        self._workers = arranged
        self._rules = rules
        self._roles = Roles(urls, rules.roles, self._on_event) if rules.roles else None
        self._choice.among(arranged)
        self._choice.allow(rules.retries, rules.retry_ratio)
        return new

    async def _released(self, worker: Worker) -> None:
        if self._gate is not None:
            await self._gate.left(worker)
        if self._loads is not None:
            await self._loads.forget(worker)
        await self._warmers.forget(worker)

    @property
    def _has_choice(self) -> bool:
        """Whether there is anything to decide: a server, a slot, or an adapter to load."""
        if len(self._workers) > 1 or self._workers[0].seats is not None:
            return True
        return self._router is not None and bool(self._router.adapters.sources)

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
            if placement.loads_adapter and self._loads is not None:
                await placement.loaded(partial(self._loads.ready, worker, placement.adapter))
            keeper = None if worker.seats is None else worker.seats.keeper
            body = await placement.ready(keeper, path, body, self._rules.seat_s)
        if handed is not None:
            return await handed.ask(worker, path, body)
        answer = await worker.ask(method, path, headers, body)
        if answer.status == 404 and placement is not None and placement.adapter:
            return await self._with_adapter(worker, placement, method, path, headers, body, answer)
        return answer

    async def _with_adapter(
        self,
        worker: Worker,
        placement: Placement,
        method: bytes,
        path: bytes,
        headers: Headers,
        body: bytes,
        answer: Response,
    ) -> Response:
        """Asked once more after a 404, where the server has lost the adapter unseen; else that answer."""
        loads, adapter = self._loads, placement.adapter
        try:
            if loads is None or not await loads.is_lost(worker, adapter):
                return answer
        except BaseException:
            answer.close()
            raise
        answer.close()
        await placement.loaded(partial(loads.ready, worker, adapter))
        return await worker.ask(method, path, headers, body)

    async def _handed(
        self, roles: Roles, ask: Ask | None, path: bytes, headers: Headers, body: bytes
    ) -> Handover | None:
        """Its prompt computed by one of those that are for that, if that is to be."""
        handed = await roles.prefilled(self._workers, self._router, ask, path, headers, body)
        if handed is not None and self._link is not None and ask is not None:
            self._link.sent(handed.prefiller.url, ask.blocks, ask.token_blocks)
        return handed

    def _second_step(self, handed: Handover | None, whose: Whose) -> SecondStep | None:
        """Who is told of its end, where no placement is."""
        router = self._router
        if router is None or handed is None or handed.route is None:
            return None
        return SecondStep(router, handed, self._link, whose, self._end_session)

    def _state(self, worker: Worker, now: float) -> WorkerState:
        state = worker.state(now)
        attended = self._attendants.get(worker)
        if self._router is None or not self._has_choice or worker in self._members.leaving:
            return state
        keeper = None if worker.seats is None else worker.seats.keeper
        return msgspec.structs.replace(
            state,
            unsaved_slots=0 if keeper is None else keeper.unsaved,
            slot_files={} if worker.seats is None else worker.seats.counts.flat(),
            dialect="" if attended is None else attended[0].known.dialect,
            known=self._router.known(worker.number, now),
            events=None if self._hearing is None else self._hearing.counts(worker),
            adapters=None if self._loads is None else self._loads.counts(worker),
        )

    # choosing

    def _adapter_of(self, ask: Ask | None) -> str:
        if self._router is None or ask is None:
            return ""
        return self._router.adapters.named(ask.model)

    def _ask_of(self, body: bytes, whose: Whose) -> Ask | None:
        if self._router is None:
            return None
        prefix = prefix_of(body, whose.tenant.encode())
        size = prefix.prompt_bytes
        return Ask(
            prefix.model, prefix.blocks, BLOCK_BYTES, size, whose.session, tenant=whose.tenant
        )

    def _with_files(self, ask: Ask | None, whose: Whose) -> Ask | None:
        """The same with what each server could load of it from files of slots."""
        if ask is None or len(self._workers) < 2:
            return ask
        told = {
            one.number: found
            for one in self._workers
            if one.seats is not None
            and (found := one.seats.loadable(whose.tenant, ask.blocks)) is not None
        }
        return msgspec.structs.replace(ask, loadable=told) if told else ask

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
    ) -> Chosen:
        """Who is asked first. Raises EngineError where nobody can be."""
        if handed is not None:
            return Chosen(handed.decoder, None)
        chosen = self._choice.first((), ask, whose, only_well=False, lookup=lookup)
        if chosen is None:
            raise self._choice.none_left(ask)
        return chosen

    # what goes on beside the requests

    def _hold(self, worker: Worker, why: str) -> None:
        if self._gate is not None:
            self._gate.hold(worker, why)

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

        self._members.own(told())


def _ignore(_event: str, _fields: dict[str, object]) -> None:
    """Nobody wants to know."""
