"""An engine call is a task of its own, a flight; clients only listen to it.

So a client that leaves harms nobody else, an equal request can join from the first chunk, and
what one of them paid for all of them get.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from preheat.core.types import Epoch, Key, Request, Usage
from preheat.core.warmup.found import NOTHING_FOUND, Found
from preheat.errors import EngineError
from preheat.gateway import heads
from preheat.gateway.buffer import Buffer, Piece
from preheat.gateway.listeners import Call, Listener
from preheat.gateway.upstreams import shown_of
from preheat.transport.client import Response
from preheat.transport.exchange import Placed
from preheat.transport.server import Exchange
from preheat.wire import openai
from preheat.wire.sse import EventTooLargeError, SseDecoder, data_of
from preheat.wire.template import PlainEvents

BUFFER_BYTES: Final = 8_388_608
_NO_ANSWER: Final = frozenset({"no-choices", "error-event", "bad-chunk", "bad-form"})
_DOWN: Final = frozenset({502, 503, 504})
_FAILING: Final = frozenset({500, 502, 503, 504})  # RFC 5861, section 4
_FALLBACK_KINDS: Final = frozenset(
    {"connect", "tls", "start", "breaker-open", "queue", "reset"}
    | {"timeout-connect", "timeout-first-byte", "timeout-idle"}
)


class Tower(Protocol):
    """Whom a flight tells what becomes of it."""

    def on_answer(self, flight: "Flight") -> None:
        """It has an answer, or knows that there won't be one it may keep."""

    def on_failure(self, flight: "Flight", error: EngineError | None) -> None:
        """It ends without an answer."""

    def on_overflow(self, flight: "Flight") -> None:
        """Nobody may join it any more."""

    def on_orphan(self, listener: Listener) -> None:
        """The follower got nothing from its flight and must ask once more."""

    def on_served(self, flight: "Flight", listener: Listener) -> None:
        """The listener has got all there is."""

    def on_bug(self, bug: Exception) -> None:
        """Something in it raised what nobody expected."""

    def stand_in(self, flight: "Flight", listener: Listener) -> bool:
        """The engine gave this listener nothing: whether it was given a stale answer instead."""


class Flight:
    """One engine call and everyone who listens.

    It buffers up to 8 MiB, so that an equal request can join from the first chunk; past that it
    takes no joins and isn't stored. The fastest listener paces it; who is slower than the
    buffer is cut off.
    """

    def __init__(
        self,
        call: Call,
        request: Request,
        tower: Tower,
        *,
        reason: str,
        epoch: Epoch,
        generation: int,
        fallback: str,
        clock: Callable[[], float],
        leased: Key | None = None,
    ) -> None:
        self.call = call
        self.request = request
        self.reason = reason  # why it had to be
        self.epoch = epoch
        self.generation = generation
        self.leased = leased
        self.is_settled = False
        self.failure = ""  # the reason under which its end without an answer is booked
        self.is_outdated = False  # its key was made before the engines were changed
        self.source: Exchange | None = None  # of a refresh, which nobody listens to
        self.asked_at = clock()
        self.first_at = 0.0  # when an answer began: its first event, or a whole one's head
        self.ended_at = 0.0
        self.paced_s = 0.0  # of that, spent waiting for slow listeners
        self.answer: openai.Answer | None = None
        self.refusal: openai.RefusedAnswer | None = None
        self.usage: Usage | None = None
        self.unstorable = ""
        self.status = 0
        self.worker = call.engine.name
        self.listeners: list[Listener] = []
        self.task: asyncio.Task[None] | None = None
        self._clock = clock
        self._tower = tower
        self._fallback = fallback
        self._head = b""
        self._content_type = heads.JSON
        self._retry_after = b""
        self._buffer = Buffer(BUFFER_BYTES)
        self._assembler: openai.Assembler | None = openai.Assembler(call.dialect)
        self._decoder = SseDecoder(BUFFER_BYTES)
        self._plain: PlainEvents | None = None
        self._is_event_stream = False
        self._is_handing_on = False
        self._is_overflown = False
        self._is_ended = False
        self._has_content = False
        self._caught_up: asyncio.Future[None] | None = None
        self._placement: Placed | None = None

    # listeners

    def add(self, listener: Listener, *, is_leader: bool = False) -> None:
        """Listen from the first chunk on."""
        listener.is_leader = is_leader
        listener.position = 0
        self.listeners.append(listener)
        self._release_pace()  # it may be faster than those who are here
        exchange = listener.exchange
        exchange.on_gone = lambda: self._leave(listener)
        exchange.on_writable = lambda: self._pump(listener)
        self._pump(listener)

    @property
    def joined(self) -> tuple[Request, ...]:
        """The followers that are still here."""
        return tuple(one.request for one in self.listeners if not one.is_leader)

    def _leave(self, listener: Listener) -> None:
        self._detach(listener)
        self._cancel_if_alone()

    def _done(self, listener: Listener) -> None:
        if listener in self.listeners:
            self._detach(listener)
        self._tower.on_served(self, listener)
        self._cancel_if_alone()

    def _detach(self, listener: Listener) -> None:
        self.listeners.remove(listener)
        listener.exchange.on_gone = listener.exchange.on_writable = None
        self._release_pace()

    def _cancel_if_alone(self) -> None:
        """Nobody listens any more. At once, not when the task gets to it: nobody may join what is
        being cancelled. A refresh goes on, while its answer can be kept."""
        is_wanted = bool(self.listeners) or (self.source is not None and not self.unstorable)
        if not is_wanted and self.task is not None and not self._is_ended:
            self._is_ended = True
            self._tower.on_failure(self, None)
            self.task.cancel()

    # the call

    async def run(self) -> None:
        """Ask the engine and hand on what it says, to the end."""
        response: Response | None = None
        try:
            call = self.call
            response = await call.engine.send(
                b"POST",
                call.path,
                call.headers,
                call.body,
                tenant=self.request.tenant,
                session=self.request.want.session,
                state=self.request.want.session_state,
            )
            await self._relay(response)
        except EngineError as error:
            self._failed(error)
        except asyncio.CancelledError:
            if not self._is_ended:
                self._is_ended = True
                self._tower.on_failure(self, None)
            raise
        except Exception as bug:  # noqa: BLE001  the edge of a request: whatever it is, nobody waits for ever
            self._tower.on_bug(bug)
            self._failed(EngineError("Preheat has failed on this answer", kind="internal"))
        finally:
            if response is not None:
                response.close()
            self._assembler = self._plain = None

    async def _relay(self, response: Response) -> None:
        self.status = response.status
        self.worker = response.worker or self.worker
        self._placement = response.placement
        self.first_at = self._clock()
        shown = shown_of(response)
        self._head = shown.lines
        if shown.retry_after:
            self._retry_after = b"Retry-After: %b\r\n" % shown.retry_after
        if shown.content_type:
            self._content_type = b"Content-Type: %b\r\n" % shown.content_type
        if shown.coding not in {b"", b"identity"}:
            raise EngineError("the engine compressed its answer unasked", kind="protocol")
        if response.status != 200:
            self._refused(response.status, await response.read(BUFFER_BYTES))
        elif shown.content_type.lower().startswith(b"text/event-stream"):
            await self._relay_stream(response)
        else:
            await self._relay_whole(response)

    def _refused(self, status: int, body: bytes) -> None:
        """The engine answered, but not with an answer: the leader's; followers ask once more."""
        self._is_ended = True
        self.refusal = openai.RefusedAnswer(self._content_type, body)
        self._tower.on_failure(self, None)
        for listener in tuple(self.listeners):
            if status in _FAILING and self._stand_in(listener):
                continue
            if not listener.is_leader and self.generation == 0:
                self._orphan(listener)
            elif self._fallback and status in _DOWN:
                self._tell_failure(listener, EngineError("the engine is down", kind="connect"))
            else:
                head = self._head
                if not listener.is_leader:
                    head = self._content_type + self._retry_after
                listener.status = status
                lines = heads.status_line(status) + head + self._our_lines(listener)
                listener.exchange.reply(lines, body)
                self._done(listener)

    def _failed(self, error: EngineError) -> None:
        """No answer, or half of one."""
        self._is_ended = True
        self.worker = error.worker or self.worker
        self._tower.on_failure(self, error)
        for listener in tuple(self.listeners):
            if listener.exchange.is_started:
                self._break_off(listener, error)
            elif self._stand_in(listener):
                continue
            elif listener.is_leader or self.generation > 0 or self._has_content:
                self._tell_failure(listener, error)
            else:
                self._orphan(listener)

    def _stand_in(self, listener: Listener) -> bool:
        if not self._tower.stand_in(self, listener):
            return False
        self._done(listener)
        return True

    def _break_off(self, listener: Listener, error: EngineError) -> None:
        """The status line is long gone: say it in an event, and never send the end."""
        if self._is_event_stream:
            said = openai.error_body(str(error), kind="upstream_error", code=f"engine-{error.kind}")
            listener.exchange.write(b"data: %b\n\n" % said)
        listener.exchange.cut()
        self._done(listener)

    def _tell_failure(self, listener: Listener, error: EngineError) -> None:
        """An error's status, or the operator's words where there are some."""
        exchange, ask = listener.exchange, listener.request.ask
        listener.status = 200
        if not self._fallback or error.kind not in _FALLBACK_KINDS:
            listener.status = error.status
            fwd = listener.cache_status.partition(";")[0] or "fwd=miss"
            listener.cache_status = f"{fwd}; detail=engine-{error.kind}"
            exchange.reply(*heads.engine_error(error, listener.request.id, fwd))
        else:
            dialect, created = self.call.dialect, int(time.time())
            said = openai.fallback_body(dialect, ask.model, self._fallback)
            answer = openai.answer_of(said)
            kind = heads.EVENTS if ask.stream else heads.JSON
            listener.cache_status = "fwd=bypass; detail=fallback"
            lines = heads.forwarded(listener.cache_status, listener.request.id, self.worker, None)
            body = (
                openai.stream(answer, dialect, listener.name, created, include_usage=False)
                if ask.stream
                else openai.whole(answer, listener.name, created)
            )
            exchange.reply(heads.status_line(200) + kind + lines, body)
        self._done(listener)

    def _orphan(self, listener: Listener) -> None:
        self._detach(listener)
        self._tower.on_orphan(listener)

    def _spare(self, followers: Callable[[Listener], bool]) -> tuple[Listener, ...]:
        """Take off those followers, to whom this flight has nothing to give: they ask once more,
        as soon as nobody can join it, and aren't booked as served by it."""
        if self.generation > 0:
            return ()
        spared = tuple(
            one
            for one in self.listeners
            if not one.is_leader and not one.exchange.is_started and followers(one)
        )
        for listener in spared:
            self._detach(listener)
        return spared

    def _end_without(self, spared: tuple[Listener, ...]) -> None:
        self._end()
        for listener in spared:
            self._tower.on_orphan(listener)

    # a whole body

    async def _relay_whole(self, response: Response) -> None:
        body = b""
        async for part in response:
            body = body + part if body else part
            if len(body) > BUFFER_BYTES:
                await self._overflow_whole(response, body)
                return
        self._end_whole(body)

    def _end_whole(self, body: bytes) -> None:
        plain = openai.plain_answer_of(body)
        if plain is not None:
            self.answer, self.usage = plain
            self._end()
            self._hand_out(body, b"")
        else:
            self._end_unusual(body)

    def _end_unusual(self, body: bytes) -> None:
        """Look closely: it may be incomplete, no answer at all, or merely written differently."""
        event = b""
        try:
            fields = openai.decode(body)
            self.usage = openai.usage_of(fields.get("usage"))
            self.unstorable = openai.why_incomplete(fields)
            if self.unstorable in _NO_ANSWER:
                event = b"data: %b\n\n" % openai.encode(fields)
            else:
                self.answer = openai.answer_of(fields)
        except ValueError:
            self.unstorable = "not-json"
        has_answer = self.answer is not None
        self._end_without(self._spare(lambda _: not has_answer))
        self._hand_out(body, event)

    def _hand_out(self, body: bytes, event: bytes) -> None:
        for listener in tuple(self.listeners):
            self._send_whole(listener, body, event)
            self._done(listener)

    def _send_whole(self, listener: Listener, body: bytes, event: bytes) -> None:
        """The answer in the form that was asked for. What isn't one goes through as it is, but
        for those who read events: to them a body without one would be silence."""
        answer, ask = self.answer, listener.request.ask
        created = int(time.time())
        head = self._head if listener.is_leader else self._content_type
        if answer is not None and ask.stream:
            head = heads.EVENTS
            body = openai.stream(
                answer,
                self.call.dialect,
                listener.name,
                created,
                include_usage=ask.include_usage,
            )
        elif answer is not None and not listener.is_leader:
            head = heads.JSON
            body = openai.whole(answer, listener.name, created)
        elif event and ask.stream:
            head, body = heads.EVENTS, event
        listener.status = 200
        listener.exchange.reply(heads.status_line(200) + head + self._our_lines(listener), body)

    async def _overflow_whole(self, response: Response, start: bytes) -> None:
        """Too large to keep: it goes through as it comes, to those who want it as it is."""
        self._overflow()
        for listener in tuple(self.listeners):
            listener.status = 200
            head = self._head if listener.is_leader else self._content_type
            listener.exchange.begin(heads.status_line(200) + head + self._our_lines(listener))
        self._is_handing_on = True
        self._push(Piece(start, is_common=True))
        await self._pace()
        async for part in response:
            self._push(Piece(part, is_common=True))
            await self._pace()
        self._end()
        self._finish_streams()

    # a stream

    async def _relay_stream(self, response: Response) -> None:
        self._is_event_stream = self._is_handing_on = True
        if self._assembler is not None:
            self._plain = PlainEvents(self._assembler, self.call.dialect)
            response.hand_to(self._take_at_once)
        has_begun = False
        async for part in response:
            if not has_begun:  # the head says nothing: llama.cpp sends it before it computes
                self.first_at, has_begun = self._clock(), True
                if self._placement is not None:
                    self._placement.began()
            try:
                blocks = self._decoder.feed(part)
            except EventTooLargeError:
                raise EngineError(
                    "the engine sent an event larger than 8 MiB",
                    kind="protocol",
                    before_first_byte=False,
                ) from None
            for block in blocks:
                self._take_block(block)
            if blocks and not self._is_ended:
                await self._pace()
        last = self._decoder.rest + b"\n\n"
        if not self._is_ended and data_of(last) == openai.DONE:
            self._take_block(last)  # some servers close right after the word
        elif not self._is_ended and self.unstorable == "error-event":
            self._end_stream(None)  # it has said itself that no more will come
        if not self._is_ended:
            raise EngineError(
                "the engine's stream ended without [DONE]", kind="reset", before_first_byte=False
            )

    def _take_at_once(self, part: bytes) -> bool:
        """Whether the part is a plain event that a listener can take now; then it's handed on.
        With any other the task has to deal, which can wait."""
        return (
            not self._is_ended
            and not self._decoder.rest
            and self._can_hand_on()
            and self._buffer.has_room(len(part))
            and self._take_plain(part)
        )

    def _take_plain(self, block: bytes) -> bool:
        plain = self._plain
        if plain is None or not plain.take(block):
            return False
        self._push(Piece(block, is_chunk=True, tells_usage=plain.tells_usage))
        return True

    def _take_block(self, block: bytes) -> None:
        if self._is_ended:
            return  # bytes after [DONE] are nobody's
        if self._take_plain(block):
            return
        data = data_of(block)
        if data is None:
            self._push(Piece(block))
        elif data == openai.DONE:
            self._end_stream(Piece(block, is_common=True))
        else:
            self._push(self._read(block, data))

    def _read(self, block: bytes, data: bytes) -> Piece:
        """An event that has to be decoded."""
        chunk: dict[str, Any] | None = None
        try:
            chunk = openai.decode(data)
            if chunk.get("error") or chunk.get("object") == "error":
                self._take_error()
            elif self._plain is not None:
                self._plain.feed(block, chunk)
            self._has_content = True
        except ValueError:
            self.unstorable = self.unstorable or "bad-chunk"
        return Piece(block, is_common=True) if chunk is None else Piece.of(block, chunk)

    def _take_error(self) -> None:
        """An engine that fails after its status line says so in an event."""
        self.unstorable = "error-event"
        if not self._has_content:
            self._tower.on_overflow(self)  # nobody joins it any more
            for listener in self._spare(lambda _: True):
                self._tower.on_orphan(listener)
            self._cancel_if_alone()

    def _end_stream(self, last: Piece | None) -> None:
        assembler = self._assembler
        if assembler is not None:
            assembler.end()
            self.usage = assembler.usage
            self.unstorable = self.unstorable or assembler.why_incomplete()
            if self.unstorable not in _NO_ANSWER:
                self.answer = assembler.answer()
        has_content, is_readable = self._has_content, self.unstorable != "bad-chunk"
        self._end_without(
            self._spare(lambda one: not has_content or not (one.request.ask.stream or is_readable))
        )
        if last is not None:
            self._push(last)
        self._finish_streams()
        for listener in tuple(self.listeners):
            if not listener.request.ask.stream and not self._is_overflown:
                self._send_assembled(listener)

    def _send_assembled(self, listener: Listener) -> None:
        if self.answer is None:
            error = EngineError("the engine's stream held no answer", kind="protocol")
            self._tell_failure(listener, error)
            return
        body = openai.whole(self.answer, listener.name, int(time.time()))
        listener.status = 200
        listener.exchange.reply(
            heads.status_line(200) + heads.JSON + self._our_lines(listener), body
        )
        self._done(listener)

    # the buffer

    def _push(self, piece: Piece) -> None:
        if not self._buffer.add(piece):
            if not self._is_overflown:
                self._overflow()
            self._forget_pieces()
        for listener in tuple(self.listeners):
            self._pump(listener)

    def _overflow(self) -> None:
        self._is_overflown = True
        self._assembler = self._plain = None
        self.unstorable = "too-large"
        self._tower.on_overflow(self)
        for listener in tuple(self.listeners):
            if (
                listener.request.ask.stream != self._is_event_stream
                and not listener.exchange.is_started
            ):
                if listener.is_leader:
                    error = EngineError("the answer is too large to convert", kind="too-large")
                    self._tell_failure(listener, error)
                else:
                    self._orphan(listener)
        self._cancel_if_alone()

    def _forget_pieces(self) -> None:
        self._buffer.shrink()
        for listener in tuple(self.listeners):
            if listener.position < self._buffer.start and self._listens_to_pieces(listener):
                listener.exchange.cut()
                self._done(listener)

    def _listens_to_pieces(self, listener: Listener) -> bool:
        return self._is_handing_on and (self._is_overflown or listener.request.ask.stream)

    def _pump(self, listener: Listener) -> None:
        """Send what the listener can take now."""
        if not self._listens_to_pieces(listener):
            return
        exchange, buffer = listener.exchange, self._buffer
        end = buffer.end
        while listener.position < end and exchange.is_writable and not exchange.is_done:
            if not exchange.is_started:
                self._begin(listener)
            listener.take(buffer[listener.position], self.call)
            listener.position += 1
        if listener.position == end:
            if self._caught_up is not None:
                self._release_pace()
            if self._is_ended and listener in self.listeners:
                exchange.end()
                self._done(listener)

    def _begin(self, listener: Listener) -> None:
        listener.created, listener.status = int(time.time()), 200
        head = self._head if listener.is_leader else heads.EVENTS
        listener.exchange.begin(heads.status_line(200) + head + self._our_lines(listener))

    def _finish_streams(self) -> None:
        for listener in tuple(self.listeners):
            self._pump(listener)

    async def _pace(self) -> None:
        """Wait while even the fastest listener is behind."""
        if not self._is_held_up():
            return
        began_at = self._clock()
        while self._is_held_up():
            self._caught_up = asyncio.get_running_loop().create_future()
            await self._caught_up
        self.paced_s += self._clock() - began_at

    def _is_held_up(self) -> bool:
        end = self._buffer.end
        return bool(self.listeners) and not any(
            one.position == end or not self._listens_to_pieces(one) for one in self.listeners
        )

    def _can_hand_on(self) -> bool:
        """Whether one more piece would leave nobody waiting for the fastest listener."""
        end = self._buffer.end
        for one in self.listeners:
            is_up = one.position == end and one.exchange.is_writable
            if is_up or not self._listens_to_pieces(one):
                return True
        return not self.listeners

    def _release_pace(self) -> None:
        if self._caught_up is not None and not self._caught_up.done():
            self._caught_up.set_result(None)
        self._caught_up = None

    def _end(self) -> None:
        self._is_ended = True
        self.ended_at = self._clock()
        if self._placement is not None:
            calls_tool = self.answer is not None and openai.calls_tool(self.answer)
            self._placement.ended(self.usage, calls_tool=calls_tool)
        self._tower.on_answer(self)

    @property
    def warmed(self) -> Found:
        """What of its prompt was cached because we had warmed it."""
        return NOTHING_FOUND if self._placement is None else self._placement.warmed

    def _our_lines(self, listener: Listener) -> bytes:
        worker = self.worker
        if not listener.is_leader:
            return heads.joined(listener.request.id, worker)
        usage = self.usage
        cached = usage.cached_tokens if usage is not None and usage.tells_cached else None
        route = self._placement.reason if self._placement is not None else b""
        return heads.forwarded(listener.cache_status, listener.request.id, worker, cached, route)
