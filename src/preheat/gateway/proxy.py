"""Does what the controller decided."""

from collections.abc import Callable
from time import time as wall_s
from typing import Final, Literal

import msgspec

from preheat.core.controller import Controller
from preheat.core.stats import Counters
from preheat.core.types import (
    Decision,
    Effects,
    Entry,
    Forward,
    Hit,
    Join,
    Keep,
    Key,
    Look,
    Outcome,
    Refresh,
    Reject,
    Request,
)
from preheat.errors import EngineError, RequestError, place_of
from preheat.gateway import heads
from preheat.gateway.departures import Departures
from preheat.gateway.flights import Flight
from preheat.gateway.heads import whole_hit
from preheat.gateway.intake import Intake
from preheat.gateway.l2 import L2
from preheat.gateway.listeners import Call, Listener
from preheat.gateway.lookups import Lookup
from preheat.gateway.replies import ID_PREFIX, send_hit
from preheat.gateway.sightings import Sightings
from preheat.gateway.upstreams import Upstreams
from preheat.telemetry.logs import Log
from preheat.telemetry.requestlog import RequestFeed
from preheat.transport.server import Exchange
from preheat.wire import openai
from preheat.wire.journal import Row

_MOST_REFRESHES: Final = 64  # at once: clients come first
_CHAT: Final = b"/v1/chat/completions"
_REJECTIONS: Final = {
    "only-if-cached": "no stored answer, and the request allows no other",
}


class Proxy:
    """Answers the cacheable paths: a hit at once, everything else through a look into L2 or a
    flight. Both tell it what comes of them."""

    def __init__(
        self,
        controller: Controller,
        intake: Intake,
        upstreams: Upstreams,
        counters: Counters,
        log: Log,
        l2: L2 | None,
        feed: RequestFeed | None,
        *,
        log_requests: str,
        clock: Callable[[], float],
    ) -> None:
        self.departures = Departures()
        self.fallback = ""  # what to say where an engine says nothing
        self.sightings: Sightings | None = None  # who learns what requests begin with
        self._controller = controller
        self._intake = intake
        self._read, self._on_request = intake.read, controller.on_request
        self._upstreams = upstreams
        self._counters = counters
        self._log = log
        self._l2 = l2
        self._feed = feed
        self._clock = clock
        self._logs_hits = log_requests == "all"
        self._logs_misses = log_requests != "none"
        self._hit_latency = counters.latency["exact"]
        self._refreshes = 0

    def serve(self, exchange: Exchange) -> None:
        """Answer one request, now or later. Raises RequestError."""
        now = self._clock()
        request = self._read(exchange)
        decision = self._on_request(request, now)
        if type(decision) is Hit:
            head = exchange.head
            age_s = now - decision.stored_at
            if (
                head.is_plain
                and not request.ask.stream
                and age_s < decision.ttl_s
                and decision.status == 200
            ):
                # The most frequent answer of all, without a frame or a question more.
                exchange.send(
                    whole_hit(
                        request.id,
                        decision.label,
                        age_s,
                        decision.ttl_s - age_s,
                        exchange.date,
                        ID_PREFIX[head.path],
                        int(wall_s()),
                        decision.answer.body,
                    )
                )
            else:
                send_hit(exchange, request, decision, now)
            duration_s = self._clock() - now
            self._hit_latency.observe(duration_s)
            if self._feed is not None:
                self._feed.hit(self._intake.count, request, decision, exchange, now, duration_s)
            if self._logs_hits:
                self._log_request(
                    request, decision.status, "exact", "hit; detail=exact", duration_s
                )
        else:
            try:
                self._act(self._listener(exchange, request, now), decision, generation=0)
            except BaseException:  # whoever is equal must not join what never began
                self._controller.on_abandoned(request)
                raise

    # Doing what was decided.

    def _act(self, listener: Listener, decision: Decision, *, generation: int) -> None:
        exchange, request, now = listener.exchange, listener.request, self._clock()
        match decision:
            case Hit():
                self._send_hit(listener, decision, now)
            case Refresh(hit, reason, is_due):
                self._send_hit(listener, hit, now, "exact" if reason == "early" else reason)
                if is_due:
                    self._refresh(listener, hit)
            case Look():
                self._look(listener, decision, generation)
            case Join(leader):
                venture = self.departures.find(leader)
                assert venture is not None, "the controller joins only what is under way"
                venture.add(listener)
            case Forward():
                self._forward(listener, decision, generation)
            case Reject(status, reason):
                self._counters.bump(self._counters.refused, reason)
                error = RequestError(_REJECTIONS[reason], status=status, code=reason)
                exchange.reply(*heads.request_error(error, request.id))

    def _send_hit(
        self, listener: Listener, hit: Hit, now: float, detail: str = "exact", layer: str = "exact"
    ) -> None:
        """A stored answer that took more than one question."""
        exchange, request = listener.exchange, listener.request
        send_hit(exchange, request, hit, now, detail.encode(), layer.encode())
        duration_s = self._clock() - listener.started_at
        self._hit_latency.observe(duration_s)
        if self._feed is not None:
            row = Row("exact", detail="l2" if layer == "l2" and detail == "exact" else detail)
            number = self._intake.number_of(request.id)
            self._feed.kept(number, request, hit, exchange, row, listener.started_at, duration_s)
        if self._logs_hits:
            self._log_request(request, hit.status, "exact", f"hit; detail={detail}", duration_s)

    def _look(self, listener: Listener, look: Look, generation: int) -> None:
        """Ask L2: at once where that takes no waiting, and nobody else might compute the same."""
        l2, request = self._l2, listener.request
        assert l2 is not None, "the controller looks only where there is an L2"
        entries = l2.look_now(look.keys)
        if entries is not None and (
            not (look.joinable and l2.has_company)
            or self._controller.is_found(request, entries, self._clock())
        ):
            self._act_on_found(listener, entries, generation)
            return
        lookup = self._lookup(request, look, l2, generation, first=entries)
        lookup.add(listener, is_leader=True)
        self.departures.launch(lookup)

    def _act_on_found(self, listener: Listener, entries: list[Entry], generation: int) -> None:
        now = self._clock()
        decision = self._controller.on_found(listener.request, entries, now)
        if isinstance(decision, Hit):
            self._send_hit(listener, decision, now, layer="l2")
        else:
            self._act(listener, decision, generation=generation)

    def _refresh(self, listener: Listener, hit: Hit) -> None:
        """The answer has been given; now see to a new one, which nobody waits for."""
        request, l2 = listener.request, self._l2
        if self._refreshes >= _MOST_REFRESHES:
            self._controller.on_abandoned(request)
            return
        if l2 is None:
            decision = self._controller.on_refresh(request, hit, (), self._clock())
            if decision is not None:
                self._forward(listener, decision, generation=0, is_background=True)
            return
        lookup = self._lookup(request, Look((hit.key,), joinable=True), l2, 0, hit)
        lookup.source = listener
        self.departures.launch(lookup)

    def _lookup(
        self,
        request: Request,
        look: Look,
        l2: L2,
        generation: int,
        refreshed: Hit | None = None,
        first: list[Entry] | None = None,
    ) -> Lookup:
        return Lookup(
            request,
            look,
            l2,
            self,
            patience_s=self._controller.patience_s(request.ask.model),
            clock=self._clock,
            generation=generation,
            refreshed=refreshed,
            first=first,
        )

    def _forward(
        self,
        listener: Listener,
        forward: Forward,
        generation: int,
        *,
        request: Request | None = None,
        leased: Key | None = None,
        is_background: bool = False,
    ) -> Flight:
        """Start a flight in the listener's form; `request` leads it, if not the listener's own."""
        request = request or listener.request
        listener.cache_status = f"fwd={forward.fwd}; detail={forward.reason}"
        try:
            flight = Flight(
                self._call(listener),
                request,
                self,
                reason=forward.reason,
                epoch=self._controller.epoch,
                generation=generation,
                fallback=self.fallback,
                clock=self._clock,
                leased=leased,
            )
            flight.is_outdated = listener.version != self._upstreams.version
            if is_background:
                flight.source = listener.exchange
                self._refreshes += 1
            else:
                flight.add(listener, is_leader=True)
                if self.sightings is not None and listener.exchange.path == _CHAT:
                    self.sightings.note(request, flight.call.body)
            self.departures.launch(flight)
        except BaseException:  # whoever is equal must not join what never began
            self._controller.on_failure(request, "internal", 0.0)
            if leased is not None and self._l2 is not None:
                self._l2.release(leased)
            raise
        return flight

    def _call(self, listener: Listener) -> Call:
        exchange, ask = listener.exchange, listener.request.ask
        engine = self._upstreams.engine_for(ask.model)
        body, is_injected = self._upstreams.body_for(exchange.body, ask, engine)
        path = exchange.path.removeprefix(b"/v1")
        if exchange.query:
            path += b"?" + exchange.query
        return Call(
            engine,
            path,
            self._upstreams.headers_for(exchange.head, engine),
            body,
            openai.DIALECTS[exchange.path],
            is_usage_injected=is_injected,
        )

    def _listener(self, exchange: Exchange, request: Request, now: float) -> Listener:
        name = openai.DIALECTS[exchange.path].id_prefix + request.id
        listener = Listener(exchange, request, name, "", now)
        listener.version = self._upstreams.version
        return listener

    # What a look-up asks and tells.

    def is_found(self, lookup: Lookup, entries: list[Entry]) -> bool:
        """Whether what was looked for is among these."""
        return self._controller.is_found(lookup.request, entries, self._clock(), lookup.refreshed)

    def on_looked(self, lookup: Lookup, entries: list[Entry]) -> None:
        """Go on with what it found, for all who wait for it."""
        self.departures.close(lookup)
        now, request = self._clock(), lookup.request
        if lookup.refreshed is not None:
            self._refreshed(lookup, lookup.refreshed, entries, now)
            return
        first, *others = lookup.listeners
        if not self._controller.is_found(first.request, entries, now):
            decision = self._controller.on_found(request, entries, now)
            if isinstance(decision, Forward):
                flight = self._forward(
                    first, decision, lookup.generation, request=request, leased=lookup.leased
                )
                for listener in others:
                    flight.add(listener)
            else:
                self._give_up_lease(lookup)
                self._act(first, decision, generation=lookup.generation)
            return
        self._give_up_lease(lookup)
        self._controller.on_abandoned(request)
        self._act_on_found(first, entries, lookup.generation)
        for listener in others:
            if self._controller.is_found(listener.request, entries, now):
                self._act_on_found(listener, entries, lookup.generation)
            else:  # it wants a fresher one: the first of those leads once more
                again = self._controller.on_miss(listener.request, now)
                self._act(listener, again, generation=lookup.generation)

    def _refreshed(self, lookup: Lookup, hit: Hit, entries: list[Entry], now: float) -> None:
        """Ask anew, unless another process has or does; some may wait for that meanwhile."""
        forward = self._controller.on_refresh(lookup.request, hit, entries, now)
        if forward is not None and lookup.source is not None:
            flight = self._forward(
                lookup.source, forward, 0, leased=lookup.leased, is_background=True
            )
            for listener in lookup.listeners:
                flight.add(listener)
            return
        self._give_up_lease(lookup)
        for listener in lookup.listeners:
            decision = self._controller.on_miss(listener.request, now)
            self._act(listener, decision, generation=lookup.generation)

    def on_abandoned(self, lookup: Lookup) -> None:
        """Everybody who waited for it has left."""
        self.departures.close(lookup)
        self._controller.on_abandoned(lookup.request)
        self._give_up_lease(lookup)

    def _give_up_lease(self, lookup: Lookup) -> None:
        if lookup.leased is not None and self._l2 is not None:
            self._l2.release(lookup.leased)

    # What a flight tells.

    def on_answer(self, flight: Flight) -> None:
        """The engine has given an answer: book it, and keep it if it is worth it."""
        self._report(flight, flight.reason, flight.ended_at)

    def on_failure(self, flight: Flight, error: EngineError | None) -> None:
        """It gave none; its refusal may be worth keeping too."""
        now, status = self._clock(), flight.status
        if error is not None:
            kind = error.kind
        else:
            kind = f"status-{status}" if status not in {0, 200} else "cancelled"
        self._counters.bump(self._counters.engine_errors, kind)
        if error is None and self._controller.keeps_refusal(flight.request, status):
            self._report(flight, kind, now)
        else:
            self.departures.close(flight)
            service_s = now - flight.asked_at - flight.paced_s
            flight.failure = kind
            is_refresh = flight.source is not None
            self._controller.on_failure(flight.request, kind, service_s, is_refresh=is_refresh)
            self._settle(flight, None)
        if self._logs_misses:
            self._log.event(
                "engine_failed",
                request=flight.request.id.decode(),
                engine=flight.worker,
                kind=kind,
            )

    def _report(self, flight: Flight, reason: str, ended_at: float) -> None:
        self.departures.close(flight)
        answer = flight.answer or flight.refusal
        outcome = Outcome(
            request=flight.request,
            asked_at=flight.asked_at,
            service_s=ended_at - flight.asked_at - flight.paced_s,
            answer=answer,
            size_bytes=answer.size_bytes if answer is not None else 0,
            usage=flight.usage,
            unstorable=_why_unstorable(flight),
            joined=flight.joined if flight.status == 200 else (),
            epoch=flight.epoch,
            status=flight.status,
            is_refresh=flight.source is not None,
            warmed_tokens=flight.warmed.tokens,
            warmed_s=flight.warmed.took_s,
        )
        self._settle(flight, self._controller.on_outcome(outcome, reason, self._clock()))
        if flight.source is not None and self._feed is not None:
            row = self._row(flight, "forward", "stale", reason, flight.status)
            row.provenance = "refresh"
            number = self._intake.number_of(self._intake.next_id())
            self._feed.row(
                number, flight.request, flight.source, row, flight.asked_at, outcome.service_s
            )

    def _row(self, flight: Flight, layer: str, fwd: str, detail: str, status: int) -> Row:
        answer, usage = flight.answer or flight.refusal, flight.usage
        return Row(
            layer,
            fwd=fwd,
            detail=detail,
            status=status,
            input_tokens=usage.input_tokens if usage else None,
            output_tokens=usage.output_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage and usage.tells_cached else None,
            answer_bytes=answer.size_bytes if answer else 0,
            ttft_s=flight.first_at - flight.asked_at if flight.first_at else None,
            service_s=(flight.ended_at or self._clock()) - flight.asked_at - flight.paced_s,
            engine_worker=flight.worker,
        )

    def _settle(self, flight: Flight, effects: Effects | None) -> None:
        """L2 gets what is kept, and whoever waits for it elsewhere is let go."""
        leased, flight.leased = flight.leased, None
        if flight.source is not None and not flight.is_settled:
            self._refreshes -= 1
        flight.is_settled = True
        if self._l2 is None:
            return
        if isinstance(effects, Keep):
            self._l2.keep(effects.entry, leased)
        elif leased is not None:
            self._l2.release(leased)

    def on_overflow(self, flight: Flight) -> None:
        """Too large to be shared or kept."""
        self.departures.close(flight)
        self._controller.on_overflow(flight.request)
        self._settle(flight, None)

    def on_orphan(self, listener: Listener) -> None:
        """Its flight gave it nothing: one of the followers leads once more, the others join."""
        decision = self._controller.on_miss(listener.request, self._clock())
        self._act(listener, decision, generation=1)

    def stand_in(self, flight: Flight, listener: Listener) -> bool:
        """Where the engine gave nothing: a stale answer, if there is one that may be told."""
        now = self._clock()
        booked = flight.failure if listener.is_leader else ""
        hit = self._controller.on_error(listener.request, now, booked)
        if hit is None:
            return False
        listener.status = hit.status
        listener.is_stood_in = True
        self._send_hit(listener, hit, now, "stale-if-error")
        return True

    def on_served(self, flight: Flight, listener: Listener) -> None:
        """A listener has got its answer."""
        if listener.is_stood_in:
            return
        duration_s = self._clock() - listener.started_at
        layer = "forward" if listener.is_leader else "join"
        self._counters.latency[layer].observe(duration_s)
        if self._feed is not None:
            fwd, _, detail = listener.cache_status.partition("; detail=")
            fwd = fwd.removeprefix("fwd=") or "miss"
            row = self._row(flight, layer, fwd, detail or "join", listener.status)
            number = self._intake.number_of(listener.request.id)
            self._feed.row(
                number, listener.request, listener.exchange, row, listener.started_at, duration_s
            )
        if self._logs_misses:
            detail = listener.cache_status or "fwd=miss; collapsed; detail=join"
            self._log_request(listener.request, listener.status, layer, detail, duration_s)

    def on_refused(self, exchange: Exchange, error: RequestError) -> None:
        """A request of a cacheable path that couldn't be read."""
        if self._feed is not None:
            self._intake.count += 1
            row = Row("", detail=error.code, status=error.status, answer_bytes=0)
            self._feed.refusal(self._intake.count, "", exchange, row, self._clock(), 0.0)

    def on_bug(self, bug: Exception) -> None:
        """A defect of ours: the log says where."""
        log_bug(self._log, bug)

    def _log_request(
        self, request: Request, status: int, layer: str, detail: str, duration_s: float
    ) -> None:
        self._log.told(
            _RequestLine(
                at=int(wall_s() * 1_000) / 1_000,
                request=request.id.decode(),
                tenant=request.tenant,
                namespace=request.namespace,
                model=request.ask.model[:128],
                status=status,
                layer=layer,
                detail=detail,
                duration_s=int(duration_s * 1_000_000) / 1_000_000,
            )
        )


def _why_unstorable(flight: Flight) -> str:
    if flight.is_outdated:
        return "reloaded"
    has_answer = flight.answer is not None or flight.refusal is not None
    return flight.unstorable or ("" if has_answer else "no-answer")


class _RequestLine(msgspec.Struct, kw_only=True, gc=False):
    """The log line of a request."""

    at: float
    event: Literal["request"] = "request"
    request: str
    tenant: str
    namespace: str
    model: str
    status: int
    layer: str
    detail: str
    duration_s: float


def log_bug(log: Log, bug: Exception) -> None:
    """A line about a defect of ours."""
    log.event("bug", **place_of(bug))
