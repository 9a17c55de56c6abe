"""Does what the controller decided."""

import time
from collections.abc import Iterator
from typing import Final

from preheat.core.controller import Controller
from preheat.core.stats import Counters
from preheat.core.types import (
    Forward,
    Hit,
    Join,
    Outcome,
    Reject,
    Request,
)
from preheat.errors import EngineError, RequestError
from preheat.gateway import heads
from preheat.gateway.flights import Call, Flight, Flights, Listener
from preheat.gateway.intake import Intake
from preheat.gateway.upstreams import Upstreams
from preheat.telemetry.logs import Log
from preheat.transport.server import Exchange
from preheat.wire import openai

_ID_PREFIX: Final = {path: dialect.id_prefix for path, dialect in openai.DIALECTS.items()}
_SLICE_BYTES: Final = 65_536
_REJECTIONS: Final = {
    "only-if-cached": "no stored answer, and the request allows no other",
}


class Proxy:
    """Answers the cacheable paths: a hit at once, everything else through a flight."""

    def __init__(
        self,
        controller: Controller,
        intake: Intake,
        upstreams: Upstreams,
        counters: Counters,
        log: Log,
        *,
        fallback: str,
        log_requests: str,
    ) -> None:
        self.flights = Flights()
        self._controller = controller
        self._intake = intake
        self._read, self._on_request = intake.read, controller.on_request
        self._upstreams = upstreams
        self._counters = counters
        self._log = log
        self._fallback = fallback
        self._logs_hits = log_requests == "all"
        self._logs_misses = log_requests != "none"
        self._hit_latency = counters.latency["exact"]

    def serve(self, exchange: Exchange) -> None:
        """Answer one request, now or through a flight. Raises RequestError."""
        now = time.monotonic()
        request = self._read(exchange)
        decision = self._on_request(request, now)
        if type(decision) is Hit:
            self._send_hit(exchange, request, decision, now)
        else:
            self._act(exchange, request, decision, now)

    def _send_hit(self, exchange: Exchange, request: Request, hit: Hit, now: float) -> None:
        answer: openai.Answer = hit.answer
        ask, name = request.ask, request.id
        label, age_s = hit.label, now - hit.stored_at
        ttl_s = hit.ttl_s - age_s
        id_prefix = _ID_PREFIX[exchange.head.path]
        created = int(time.time())
        if exchange.head.is_plain and not ask.stream:
            date = exchange.date
            exchange.send(
                heads.whole_hit(name, label, age_s, ttl_s, date, id_prefix, created, answer.body)
            )
        elif ask.stream:
            events = openai.events(
                answer,
                openai.DIALECTS[exchange.path],
                id_prefix + name,
                created,
                include_usage=ask.include_usage,
            )
            _replay(exchange, heads.hit(name, label, age_s, ttl_s, heads.EVENTS), events)
        else:
            exchange.reply(
                heads.hit(name, label, age_s, ttl_s, heads.JSON),
                openai.whole(answer, id_prefix + name, created),
            )
        self._hit_latency.observe(time.monotonic() - now)
        if self._logs_hits:
            self._log_request(request, 200, "exact", "hit; detail=exact", time.monotonic() - now)

    def _act(
        self,
        exchange: Exchange,
        request: Request,
        decision: Hit | Join | Forward | Reject,
        now: float,
    ) -> None:
        match decision:
            case Reject(status, reason):
                raise RequestError(_REJECTIONS[reason], status=status, code=reason)
            case Join(leader):
                flight = self.flights.find(leader)
                assert flight is not None, "the controller joins only what is under way"
                flight.add(self._listener(exchange, request, "", now))
            case Forward(fwd, reason, _):
                listener = self._listener(exchange, request, f"fwd={fwd}; detail={reason}", now)
                try:
                    self._launch(listener, reason, generation=0)
                except BaseException:  # whoever is equal must not join what never began
                    self._controller.on_failure(request, "internal", 0.0)
                    raise
            case Hit():
                raise AssertionError("a hit is sent, not acted on")

    def _listener(
        self, exchange: Exchange, request: Request, cache_status: str, now: float
    ) -> Listener:
        name = openai.DIALECTS[exchange.path].id_prefix + request.id
        return Listener(exchange, request, name, cache_status, now)

    def _launch(self, listener: Listener, reason: str, generation: int) -> None:
        exchange, ask = listener.exchange, listener.request.ask
        engine = self._upstreams.engine_for(ask.model)
        body, is_injected = self._upstreams.body_for(exchange.body, ask, engine)
        path = exchange.path.removeprefix(b"/v1")
        if exchange.query:
            path += b"?" + exchange.query
        headers = self._upstreams.headers_for(exchange.headers, engine)
        call = Call(
            engine,
            path,
            headers,
            body,
            openai.DIALECTS[exchange.path],
            is_usage_injected=is_injected,
        )
        flight = Flight(
            call,
            listener,
            generation=generation,
            fallback=self._fallback,
            on_answer=lambda flight: self._on_answer(flight, reason),
            on_failure=self._on_failure,
            on_overflow=self._on_overflow,
            on_orphan=self._on_orphan,
            on_served=self._on_served,
            on_bug=self._on_bug,
        )
        self.flights.launch(flight)

    def _on_answer(self, flight: Flight, reason: str) -> None:
        """The engine has given an answer: book it, and keep it if it is worth it."""
        self.flights.close(flight)
        answer = flight.answer
        outcome = Outcome(
            request=flight.request,
            asked_at=flight.asked_at,
            service_s=flight.ended_at - flight.asked_at - flight.paced_s,
            answer=answer,
            size_bytes=answer.size_bytes if answer is not None else 0,
            usage=flight.usage,
            unstorable=flight.unstorable or ("" if answer is not None else "no-answer"),
            joined=flight.joined,
        )
        self._controller.on_outcome(outcome, reason, time.monotonic())

    def _on_failure(self, flight: Flight, error: EngineError | None) -> None:
        self.flights.close(flight)
        if error is not None:
            kind = error.kind
        elif flight.status not in {0, 200}:
            kind = f"status-{flight.status}"
        else:
            kind = "cancelled"
        self._counters.bump(self._counters.engine_errors, kind)
        service_s = time.monotonic() - flight.asked_at - flight.paced_s
        self._controller.on_failure(flight.request, kind, service_s)
        if self._logs_misses:
            self._log.event(
                "engine_failed",
                request=flight.request.id.decode(),
                engine=flight.call.engine.name,
                kind=kind,
            )

    def _on_overflow(self, flight: Flight) -> None:
        self.flights.close(flight)
        self._controller.on_overflow(flight.request)

    def _on_orphan(self, _flight: Flight, listener: Listener) -> None:
        """Its flight gave it nothing: one of the followers leads once more, the others join."""
        now = time.monotonic()
        decision = self._controller.on_miss(listener.request, now)
        if isinstance(decision, Hit):
            self._send_hit(listener.exchange, listener.request, decision, now)
            return
        if isinstance(decision, Join):
            again = self.flights.find(decision.leader)
            assert again is not None, "the controller joins only what is under way"
            again.add(listener)
            return
        listener.cache_status = f"fwd={decision.fwd}; detail={decision.reason}"
        self._launch(listener, decision.reason, generation=1)

    def _on_served(self, _flight: Flight, listener: Listener) -> None:
        duration_s = time.monotonic() - listener.started_at
        layer = "forward" if listener.is_leader else "join"
        self._counters.latency[layer].observe(duration_s)
        if self._logs_misses:
            detail = listener.cache_status or "fwd=miss; collapsed; detail=join"
            self._log_request(listener.request, listener.status, layer, detail, duration_s)

    def _log_request(
        self, request: Request, status: int, layer: str, detail: str, duration_s: float
    ) -> None:
        self._log.event(
            "request",
            request=request.id.decode(),
            tenant=request.tenant,
            namespace=request.namespace,
            model=request.ask.model[:128],
            status=status,
            layer=layer,
            detail=detail,
            duration_s=round(duration_s, 6),
        )

    def _on_bug(self, bug: Exception) -> None:
        log_bug(self._log, bug)


def _replay(exchange: Exchange, head: bytes, events: Iterator[bytes]) -> None:
    """A stored stream at the client's pace: a few events in one piece, many as they are taken.
    What is kept at two bytes a token is told at two hundred."""
    first = _take(events)
    if len(first) < _SLICE_BYTES:
        exchange.reply(head, first)
        return

    def go_on() -> None:
        while exchange.is_writable and not exchange.is_done:
            piece = _take(events)
            if not piece:
                exchange.on_writable = None
                exchange.end()
            exchange.write(piece)

    exchange.begin(head)
    exchange.write(first)
    exchange.on_writable = go_on
    go_on()


def _take(events: Iterator[bytes]) -> bytes:
    """The next events, up to about a slice."""
    taken = bytearray()
    for event in events:
        taken += event
        if len(taken) >= _SLICE_BYTES:
            break
    return bytes(taken)


def log_bug(log: Log, bug: Exception) -> None:
    """Where it happened, not what was in the values: those may be somebody's text."""
    trace = bug.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"
    log.event("bug", type=type(bug).__name__, where=where)
