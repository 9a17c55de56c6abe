"""One request on its way and its answer, whatever protocol carries it."""

import asyncio
from collections.abc import Callable
from typing import Protocol, Self

import msgspec

from preheat.core.types import Usage
from preheat.core.warmup.found import Found
from preheat.errors import EngineError


class Timeouts(msgspec.Struct, frozen=True):
    """How long each stage of a request may take."""

    connect_s: float = 5.0
    first_byte_s: float = 300.0
    idle_s: float = 60.0
    queue_s: float = 30.0


class Carrier(Protocol):
    """What carries one exchange: a connection, or a stream of one."""

    def drop(self) -> None:
        """End it now, so that the engine notices."""

    def make_waiter(self, timeout_s: float) -> asyncio.Future[None]:
        """A future to wait on; after so long the exchange's `on_deadline` is called."""

    def postpone(self, timeout_s: float) -> None:
        """The wait goes on for so long from now."""

    def on_taken(self) -> None:
        """The reader has taken all there was."""


class Slots(Protocol):
    """Where an exchange's right to be under way comes from."""

    where: str

    def give_back(self) -> None:
        """It is over."""


class Placed(Protocol):
    """Whoever chose a worker for a request, and learns from what comes of it. `reason` is why that
    one, as a header's value. `warmed` is what it found, at its end, that a warm-up had put there."""

    reason: bytes
    warmed: Found

    def began(self) -> None:
        """The answer's first event is there."""

    def ended(self, usage: Usage | None, *, calls_tool: bool = False) -> None:
        """It was read to its end, and calls a tool or not."""

    def gone(self) -> None:
        """Nobody reads it any more; if it was read to its end, that has been told before."""


class Response:
    """An answer: status and headers now, the body as it arrives.

    Iterate over it or `read` it to the end, or `close` it: until then it holds a connection.
    Buffered bytes are handed out in one piece; chunks of the transfer coding have no meaning.
    """

    __slots__ = ("_exchange", "headers", "placement", "status", "worker")

    def __init__(self, exchange: "Exchange") -> None:
        """Made by `Client.request` only."""
        self.status: int = exchange.status
        self.headers: list[tuple[bytes, bytes]] = exchange.headers
        self.worker = ""  # which of several equal ones answered; whoever chose it says so
        self.placement: Placed | None = None  # whoever chose it wants to hear how it goes
        self._exchange = exchange

    def __aiter__(self) -> Self:
        """Iterate over the body once."""
        return self

    async def __anext__(self) -> bytes:
        """Return what arrived since the last call, waiting if that is nothing.

        Cancelling the wait closes the connection.
        """
        exchange = self._exchange
        if not exchange.pieces and not exchange.is_complete:
            await exchange.wait_for_piece()
        if not exchange.pieces:
            raise StopAsyncIteration
        return exchange.take()

    def hand_to(self, sink: Callable[[bytes], bool]) -> None:
        """From now on offer each piece to the sink first while the reader waits for one: what it
        takes (True), the reader never sees. So a piece that needs no waiting costs no wake-up."""
        self._exchange.sink = sink

    async def read(self, limit_bytes: int) -> bytes:
        """Return the whole body, or close and raise `too-large` if it is longer than the limit."""
        exchange = self._exchange
        pieces = []
        size_bytes = 0
        while exchange.pieces or not exchange.is_complete:
            if not exchange.pieces:
                await exchange.wait_for_piece()
                continue
            pieces.append(exchange.take())
            size_bytes += len(pieces[-1])
            if size_bytes > limit_bytes:
                raise exchange.refuse_size(limit_bytes)
        return b"".join(pieces)

    def close(self) -> None:
        """Give up: close the connection, unless the response has ended and it is pooled again."""
        self._exchange.close()
        if self.placement is not None:
            self.placement.gone()


class Exchange:
    """One request on its way: what has come of the answer, and the slot in the pool it holds.

    The connection writes into it, the one reader waits on it. It outlives the connection's part
    in it, since a body may be complete before it is read.
    """

    def __init__(self, pool: Slots, timeouts: Timeouts, *, is_head: bool) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.buffered_bytes = 0
        self.connection: Carrier | None = None
        self.sink: Callable[[bytes], bool] | None = None
        self.is_head = is_head
        self.is_heard = False  # a byte of the response came
        self.has_head = False
        self.is_stale = False  # a reused connection had been closed by the engine
        self.is_complete = False
        self._error: EngineError | None = None
        self._pool = pool
        self._timeouts = timeouts
        self._waiter: asyncio.Future[None] | None = None

    # The reader's side.

    async def wait_for_head(self) -> None:
        self.is_stale = False
        while not self.has_head and not self.is_stale:
            await self._wait(self._timeouts.first_byte_s)

    async def wait_for_piece(self) -> None:
        """Return when there is a piece to take or the body has ended."""
        while not self.pieces and not self.is_complete:
            await self._wait(self._timeouts.idle_s)

    def take(self) -> bytes:
        pieces = self.pieces
        self.pieces = []
        self.buffered_bytes = 0
        if self.connection is not None:
            self.connection.on_taken()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self.pieces = []
        self.fail("reset", "was given up here before the response was complete")

    def refuse_size(self, limit_bytes: int) -> EngineError:
        self.close()
        return EngineError(
            f"{self._pool.where} answered with a body of more than {limit_bytes} bytes: ask for "
            "less, or raise the limit",
            kind="too-large",
            before_first_byte=False,
        )

    # The connection's side.

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = headers
        self.has_head = True
        self._wake()

    def on_body(self, piece: bytes) -> None:
        if self.sink is not None and self._is_taken_by(self.sink, piece):
            return
        self.pieces.append(piece)
        self.buffered_bytes += len(piece)
        self._wake()

    def on_complete(self) -> None:
        self.is_complete = True
        self._let_go()

    def on_stale(self) -> None:
        self.connection = None
        self.is_stale = True
        self._wake()

    def fail(self, kind: str, what: str) -> None:
        """End with an error, which the reader meets once it has taken what arrived before."""
        if self._error is not None or self.is_complete:
            return
        self._error = EngineError(
            f"{self._pool.where} {what}", kind=kind, before_first_byte=not self.is_heard
        )
        if self.connection is not None:
            self.connection.drop()
        self._let_go()

    def on_deadline(self) -> None:
        if self._waiter is None or self._waiter.done():
            return  # nobody waits, or what was waited for came in this very moment
        if self.has_head:
            self.fail(
                "timeout-idle",
                f"sent nothing more of its response for {self._timeouts.idle_s:g} s: see whether "
                "the engine is stuck, or raise idle_s",
            )
        else:
            self.fail(
                "timeout-first-byte",
                f"sent no response head within {self._timeouts.first_byte_s:g} s: see whether the "
                "engine is overloaded or stuck, or raise first_byte_s",
            )

    # Common ground.

    def _let_go(self) -> None:
        # Once for each exchange: it completes or fails, and then no connection knows it any more.
        self.connection = self.sink = None
        self._pool.give_back()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_taken_by(self, sink: Callable[[bytes], bool], piece: bytes) -> bool:
        """Only while the reader waits: else it is still busy with what came before."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return False
        try:
            if not sink(piece):
                return False
        except Exception as bug:  # noqa: BLE001  the reader's own, who meets it where it waits
            waiter.set_exception(bug)
        if self.connection is not None:
            self.connection.on_taken()
            self.connection.postpone(self._timeouts.idle_s)
        return True

    async def _wait(self, timeout_s: float) -> None:
        """Wait until something happened; everything that matters ends a wait."""
        if self._waiter is not None:
            raise RuntimeError("two tasks read one response")
        if self._error is not None:
            raise self._error
        assert self.connection is not None  # it neither ended nor failed
        self._waiter = self.connection.make_waiter(timeout_s)
        try:
            await self._waiter
        except BaseException:  # cancelled: the engine must notice that nobody listens any more
            self.close()
            raise
        finally:
            self._waiter = None
