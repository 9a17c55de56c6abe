"""Who of several equal servers is asked, and who else where that one can't answer."""

import time
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import msgspec

from preheat.core.breaker import RetryBudget
from preheat.core.router import Ask, Router
from preheat.engines.followers import Followers
from preheat.engines.kv_link import LearnerLink
from preheat.engines.lmcache_tier import Lookup
from preheat.engines.placement import Placement, Whose
from preheat.engines.worker import UNASKED, Worker
from preheat.errors import EngineError
from preheat.transport.client import Response

Outcome = Response | EngineError


class Chosen(NamedTuple):
    """A server, and what is told to the router of the request's stay there; None without a router."""

    worker: Worker
    placement: Placement | None

    def gone(self) -> None:
        """It isn't asked after all, or has failed."""
        if self.placement is not None:
            self.placement.gone()


class Choice:
    """Asks the router among those that are well, or takes the least loaded without one. And another where that
    is safe: before the first byte, when nothing could be asked or the answer was 429; and, if the request does
    no harm twice, where it may have been worked on: at 502 to 504, and once where the connection broke. Only once: it may be that the
    request itself kills its server."""

    def __init__(
        self,
        name: str,
        router: Router | None,
        link: LearnerLink | None,
        on_over: Callable[[Whose], None],
    ) -> None:
        self._name = name
        self._router = router
        self._followers = None if router is None else Followers(router)
        self._link = link
        self._on_over = on_over
        self._workers: Sequence[Worker] = ()
        self._turn = 0
        self._retries = 0
        self._ratio = -1.0
        self.budget = RetryBudget(0.0, time.monotonic())

    def among(self, workers: Sequence[Worker]) -> None:
        """From now on these are there."""
        self._workers = workers
        self._turn = 0

    def allow(self, retries: int, ratio: float) -> None:
        """How many others are asked, and which share of all requests may be asked again."""
        self._retries = retries
        if ratio != self._ratio:
            self._ratio = ratio
            self.budget = RetryBudget(ratio, time.monotonic())

    def first(
        self,
        tried: Sequence[Worker],
        ask: Ask | None,
        whose: Whose,
        *,
        only_well: bool,
        lookup: Lookup | None = None,
    ) -> Chosen | None:
        """Of those that are well the router's choice, or the least loaded, in turn where that is
        several; else the one from which an answer is likeliest. With whom it counts as sent."""
        now = time.monotonic()
        router, followers = self._router, self._followers
        adapter, places = "", None
        if router is not None and ask is not None:
            adapter = router.adapters.named(ask.model)
            if adapter:
                places = self._places(router, adapter, now)
                ask = msgspec.structs.replace(ask, adapter_s=places)
        well = self._well(tried, now, places)
        if not well:
            worker = None if only_well else self._least_bad(tried, now, places)
            if worker is None:
                return None
            well = [worker]
        if router is None or ask is None or followers is None:
            worker = min(well, key=lambda one: one.client.in_flight)
            self._turn = (self._workers.index(worker) + 1) % len(self._workers)
            return Chosen(worker, None)
        route = router.place(ask, [one.number for one in well], now)
        number = route.ticket.worker
        worker = next(one for one in well if one.number == number)
        if self._link is not None:
            self._link.sent(worker.url, ask.blocks, ask.token_blocks)
        if lookup is not None:
            lookup.sent_to(number)
        placement = Placement(router, route, followers, whose, self._on_over)
        if places is not None:
            router.adapters.asked(adapter, number, now)
            placement.needs(adapter, is_held=not places[number])
        return Chosen(worker, placement)

    def other(
        self,
        outcome: Outcome,
        refusals: frozenset[int],
        tried: Sequence[Worker],
        retries: int,
        ask: Ask | None,
        whose: Whose,
        *,
        may_break: bool,
    ) -> Chosen | None:
        """Who else may be asked the same; None where nobody is, or it wouldn't be safe. It `may_break` where
        it does no harm twice and hasn't broken off before."""
        if isinstance(outcome, Response) and outcome.status not in refusals:
            return None
        if not is_unsent(outcome):
            if retries >= self._retries:
                return None
            is_safe = may_break and is_broken(outcome)
            if isinstance(outcome, EngineError) and outcome.kind not in UNASKED and not is_safe:
                return None
        was_asked = isinstance(outcome, Response) or is_broken(outcome)
        other = self.first(tried, ask, whose, only_well=was_asked)
        if other is None:
            return None
        is_full = is_queue(outcome) and not other.worker.client.has_room
        if is_full or (was_asked and not self.budget.take(time.monotonic())):
            other.gone()
            return None
        return other

    def none_left(self, ask: Ask | None = None) -> EngineError:
        """Why nobody can be asked."""
        now = time.monotonic()
        asked = [one for one in self._workers if not one.is_draining]
        router = self._router
        if asked and router is not None and ask is not None:
            adapter = router.adapters.named(ask.model)
            if adapter and not self._places(router, adapter, now):
                return self._without(router, adapter, now)
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

    def _places(self, router: Router, adapter: str, now: float) -> dict[int, float]:
        return router.adapters.places(adapter, [one.number for one in self._workers], now)

    def _without(self, router: Router, adapter: str, now: float) -> EngineError:
        wait_s = router.adapters.retry_s(adapter, [one.number for one in self._workers], now)
        return EngineError(
            f"no server of engine {self._name} has the adapter {adapter} or loads it now",
            kind="adapter",
            retry_after_s=max(1.0, wait_s),
        )

    def _well(
        self, tried: Sequence[Worker], now: float, places: Container[int] | None
    ) -> list[Worker]:
        """Who may be asked, from the one whose turn it is; of those that may be well again just one,
        which this request finds out. None has no adapter that it needs but these `places`."""
        workers = self._workers
        well: list[Worker] = []
        gated: list[Worker] = []
        for position in range(self._turn - len(workers), self._turn):  # below zero: from the end
            worker = workers[position]
            if (tried and worker in tried) or (places is not None and worker.number not in places):
                continue
            if worker.breaker.is_closed and now >= worker.avoided_until and not worker.is_draining:
                (gated if worker.is_gated else well).append(worker)
            elif not tried and worker.may_be_tried(now):
                return [worker]
        return well or gated

    def _least_bad(
        self, tried: Sequence[Worker], now: float, places: Container[int] | None
    ) -> Worker | None:
        left = [one for one in self._workers if one not in tried and not one.is_draining]
        if places is not None:
            left = [one for one in left if one.number in places]
        avoided = [one for one in left if one.breaker.is_closed]
        if avoided:
            return min(avoided, key=lambda one: one.avoided_until)
        left.sort(key=lambda one: one.breaker.failures)
        return next((one for one in left if one.breaker.allows(now)), None)


def is_broken(outcome: Outcome) -> bool:
    """Whether its connection ended before one byte of an answer: mostly because its server did."""
    return (
        isinstance(outcome, EngineError) and outcome.kind == "reset" and outcome.before_first_byte
    )


def is_queue(outcome: Outcome) -> bool:
    """Whether it is our own limit that was met, not the engine's failure."""
    return isinstance(outcome, EngineError) and outcome.kind == "queue"


def is_unsent(outcome: Outcome) -> bool:
    """Whether nothing was asked, and nothing has failed: another may be asked whatever the rules are."""
    return isinstance(outcome, EngineError) and outcome.kind in {"queue", "adapter"}
