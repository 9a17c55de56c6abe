"""The same controller under the plainest driver there can be: a loop over a heap of events.

It is what a replay will be. It knows nothing of HTTP, tasks or clients; where the gateway differs
from it, one of the two does something of its own.
"""

import heapq
import io
import itertools
from collections.abc import Sequence

from parity.diary import Diary
from parity.simulation import PATH, Run, Words, settings
from parity.traffic import DELAYS_S, Arrival
from preheat import wiring
from preheat.core.stats import snapshot
from preheat.core.types import Forward, Join, Outcome, Request, RequestId
from preheat.gateway.hosting import Alone
from preheat.gateway.intake import LOCAL_TENANT
from preheat.gateway.table import engines_of, table_of
from preheat.gateway.upstreams import Upstreams
from preheat.telemetry.logs import Log

TICK_S = 1.0


class Flight:
    """An engine call, and who waits for it."""

    def __init__(self, arrival: Arrival, request: Request, reason: str, now: float) -> None:
        self.arrival = arrival
        self.request = request
        self.reason = reason
        self.asked_at = now
        self.waiting = [request]


class Reference:
    """One run."""

    def __init__(self, asked: Sequence[Arrival], words: Words) -> None:
        chosen = settings()
        log = Log(io.BytesIO())
        self._parts = wiring.Parts(chosen, log)
        self._diary = Diary(self._parts.controller)
        upstreams = Upstreams(table_of(chosen, engines_of(chosen, log, Alone())), b"parity")
        self._keyring = wiring.keyring(chosen, wiring.secret(chosen), upstreams.identity_of)
        self._partition = self._keyring.partition(LOCAL_TENANT, PATH.decode(), "")
        self._asked = asked
        self._words = words
        self._flights: dict[RequestId, Flight] = {}  # by leader
        self._flight_of: dict[RequestId, Flight] = {}  # by whoever waits
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, int, Flight | None]] = []
        log.close()

    def run(self) -> Run:
        for number, arrival in enumerate(self._asked, start=1):
            self._plan(arrival.at, "arrive", number)
        tick_at = TICK_S
        while self._events:
            now, _, what, number, flight = heapq.heappop(self._events)
            while tick_at < now:
                while self._diary.on_tick(tick_at):
                    pass
                tick_at += TICK_S
            match what:
                case "arrive":
                    self._arrive(number, self._asked[number - 1], now)
                case "leave":
                    self._leave(_name(number), now)
                case "end":
                    assert flight is not None
                    self._end(flight, now)
        inventory = self._parts.inventory
        inventory.settle(now)
        counted = snapshot(self._parts.ledger, self._parts.counters, {}, {})
        return Run(self._diary.lines, [key for key, _ in inventory.records()], counted)

    def _plan(self, at: float, what: str, number: int, flight: Flight | None = None) -> None:
        heapq.heappush(self._events, (at, next(self._order), what, number, flight))

    def _arrive(self, number: int, arrival: Arrival, now: float) -> None:
        ask = self._keyring.ask(arrival.body(), self._partition)
        request = Request(_name(number), LOCAL_TENANT, "", ask)
        decision = self._diary.on_request(request, now)
        if isinstance(decision, Join):
            flight = self._flights[decision.leader]
            flight.waiting.append(request)
        elif isinstance(decision, Forward):
            flight = Flight(arrival, request, decision.reason, now)
            self._flights[request.id] = flight
            self._plan(now + DELAYS_S[arrival.model], "end", number, flight)
        else:
            return
        self._flight_of[request.id] = flight
        if arrival.leaves_at is not None:
            self._plan(arrival.leaves_at, "leave", number)

    def _leave(self, name: RequestId, now: float) -> None:
        flight = self._flight_of.pop(name, None)
        if flight is None:
            return  # it has its answer
        flight.waiting = [one for one in flight.waiting if one.id != name]
        if not flight.waiting:
            del self._flights[flight.request.id]
            self._diary.on_failure(flight.request, "cancelled", now - flight.asked_at)

    def _end(self, flight: Flight, now: float) -> None:
        if self._flights.pop(flight.request.id, None) is None:
            return  # given up
        arrival = flight.arrival
        said = self._words[arrival.model, arrival.prompt, arrival.is_stream]
        outcome = Outcome(
            request=flight.request,
            asked_at=flight.asked_at,
            service_s=now - flight.asked_at,
            answer=said.answer,
            size_bytes=said.answer.size_bytes,
            usage=said.usage,
            joined=tuple(one for one in flight.waiting if one is not flight.request),
            epoch=self._diary.epoch,
        )
        self._diary.on_outcome(outcome, flight.reason, now)
        for one in flight.waiting:
            del self._flight_of[one.id]


def _name(number: int) -> RequestId:
    return RequestId(b"r-%x" % number)
