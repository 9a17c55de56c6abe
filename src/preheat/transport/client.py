"""A pooled HTTP/1.1 client for calling engines, over `asyncio.Protocol` and `httptools`.

It does what a gateway needs and no more: one origin a client, a body that is at hand whole, an
answer whose pieces are passed on as they arrive. Redirects, cookies, content codings and retries
on another worker are the caller's business; so is taking hop-by-hop headers out.

Everything that goes wrong with the engine is an `EngineError` with one of these kinds:

| kind | means | `before_first_byte` |
| --- | --- | --- |
| `queue` | all connections stayed busy for `queue_s` | always |
| `connect` | refused, unreachable, unknown host, or this client was closed | always |
| `timeout-connect` | no connection (TLS included) within `connect_s` | always |
| `tls` | the TLS handshake failed | always |
| `timeout-first-byte` | sent, but no complete response head within `first_byte_s` | if it is so |
| `timeout-idle` | a reader waited `idle_s` for the next piece of the body | never |
| `reset` | the connection ended before the response did (truncated bodies too) | if it is so |
| `protocol` | the answer isn't HTTP/1.x, or its head is larger than 256 KiB | if it is so |
| `too-large` | `Response.read` met more than its limit | never |

Messages name host and port and what to do; they hold neither request text nor headers. A request
that can't be written down safely (CR, LF or NUL in it) is the caller's bug: `ValueError`.

**The one silent retry.** An idle connection may be closed by the engine in the very moment it is
used again. When a *reused* connection ends with not one byte of response, the request is sent
once more on a fresh connection, as every HTTP client does (so a request that kills its engine
before the first byte may kill it twice). On a fresh connection nothing is ever repeated.
"""

import asyncio
import contextlib
import errno
import ssl
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from preheat.errors import EngineError

# uvicorn, and so vLLM and SGLang, closes a connection that was idle for 5 s (`timeout_keep_alive`):
# give up a second earlier, so that a request hardly ever meets a connection that is being closed.
_MAX_IDLE_S: Final = 4.0
# A body up to this size is joined with the head: one copy is cheaper than a second system call.
_JOIN_BYTES: Final = 64 * 1024
# A larger one is written in slices of this size, so that other requests get their turn between.
_SLICE_BYTES: Final = 256 * 1024
# Body that waits for its reader: above this stop reading from the socket. A reader takes all there
# is, so that reading goes on at zero and no lower mark is needed.
_HIGH_WATER_BYTES: Final = 256 * 1024
# Bytes that may arrive without being body: heads (1xx included), chunk extensions, trailers.
_MAX_BARE_BYTES: Final = 256 * 1024
# How long `Client.aclose` waits for sockets that are closing already.
_CLOSE_S: Final = 1.0

# RFC 9110, section 5.6.2: what a method or a header name is made of.
_TOKEN_BYTES: Final = (
    b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)

_CR, _LF, _NUL = b"\r\n\0"  # as numbers: looking for those in bytes is three times as fast
# Headers a caller can't give: framing is done here.
_REFUSED_NAMES: Final = frozenset([b"", b"content-length", b"transfer-encoding"])


class Timeouts(msgspec.Struct, frozen=True):
    """How long each stage of a request may take."""

    connect_s: float = 5.0
    first_byte_s: float = 300.0
    idle_s: float = 60.0
    queue_s: float = 30.0


_DEFAULT_TIMEOUTS: Final = Timeouts()


class Client:
    """One origin (scheme, host, port) and its pool of connections.

    Connections are reused last in, first out, so that a quiet hour lets the rest of them go.
    When all are busy, requests wait in the order they came.
    """

    def __init__(
        self,
        url: str,
        *,
        timeouts: Timeouts = _DEFAULT_TIMEOUTS,
        max_connections: int = 256,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Check the url; connect to nothing yet."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("an engine's url must look like http://host:port or https://host")
        if parts.username is not None or parts.query or parts.fragment:
            # The url isn't quoted: what stands before the @ is a secret.
            raise ValueError("an engine's url can't hold a user, a query or a fragment")
        if max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {max_connections}")
        is_tls = parts.scheme == "https"
        default_port = 443 if is_tls else 80
        self.host = parts.hostname
        self.port = parts.port or default_port
        self.base_path = parts.path.rstrip("/").encode("ascii")
        self._timeouts = timeouts
        self._tls = (tls or ssl.create_default_context()) if is_tls else None
        name = f"[{self.host}]" if ":" in self.host else self.host
        self._where = f"{name}:{self.port}"
        authority = name if self.port == default_port else self._where
        self._host_line = b"Host: " + authority.encode("ascii")
        self._pool = _Pool(self._where, max_connections)

    async def request(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
    ) -> "Response":
        """Send a request and return once the response's head is complete, 1xx ones skipped.

        `Host` (unless given) and `Content-Length` are added. The response must be read to its end
        or closed. Cancelling closes the connection, so that the engine notices.
        """
        head = _encode_head(method, target, headers, self._host_line, len(body))
        if not self._pool.try_lease():
            await self._pool.lease(self._timeouts.queue_s)
        exchange = _Exchange(self._pool, self._timeouts, is_head=method == b"HEAD")
        try:
            connection = self._pool.take_idle()
            if connection is not None:
                connection.start(exchange, head, body)
                await exchange.wait_for_head()
            if connection is None or exchange.is_stale:
                connection = await self._connect()
                connection.start(exchange, head, body)
                await exchange.wait_for_head()
        except BaseException:  # cancellation above all: the slot must come back in any case
            exchange.close()
            raise
        return Response(exchange)

    async def aclose(self) -> None:
        """Close every connection; requests under way fail, and so do later ones."""
        await self._pool.aclose()

    async def _connect(self) -> "_Connection":
        connection = _Connection(self._pool)
        try:
            await self._open(connection)
        except BaseException:
            connection.abandon()  # a loop may open it all the same and tell nobody of its end
            raise
        connection.check_fresh()
        return connection

    async def _open(self, connection: "_Connection") -> None:
        where = self._where
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, self.host, self.port, ssl=self._tls
                )
        except TimeoutError as error:
            raise EngineError(
                f"{where} took no connection within {self._timeouts.connect_s:g} s: check the "
                "address and the firewalls on the way, or raise connect_s",
                kind="timeout-connect",
            ) from error
        except ssl.SSLError as error:
            raise EngineError(
                f"TLS with {where} failed ({_describe(error)}): check its certificate, and that "
                "the url's scheme is right",
                kind="tls",
            ) from error
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
                raise EngineError(
                    "this gateway has no file descriptor left for a connection: raise its limit "
                    "(ulimit -n), or lower listen.connections",
                    kind="queue",
                ) from error
            raise EngineError(
                f"can't connect to {where} ({_describe(error)}): check that the engine runs and "
                "that its url is right",
                kind="connect",
            ) from error


class Response:
    """An answer: status and headers now, the body as it arrives.

    Iterate over it or `read` it to the end, or `close` it: until then it holds a connection.
    Buffered bytes are handed out in one piece; chunks of the transfer coding have no meaning.
    """

    __slots__ = ("_exchange", "headers", "status")

    def __init__(self, exchange: "_Exchange") -> None:
        """Made by `Client.request` only."""
        self.status: int = exchange.status
        self.headers: list[tuple[bytes, bytes]] = exchange.headers
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


class _Exchange:
    """One request on its way: what has come of the answer, and the slot in the pool it holds.

    The connection writes into it, the one reader waits on it. It outlives the connection's part
    in it, since a body may be complete before it is read.
    """

    def __init__(self, pool: "_Pool", timeouts: Timeouts, *, is_head: bool) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.buffered_bytes = 0
        self.connection: _Connection | None = None
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
        self.connection = None
        self._pool.give_back()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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


class _Connection(asyncio.Protocol):
    """One socket: writes requests, and feeds the current exchange with what the parser finds."""

    def __init__(self, pool: "_Pool") -> None:
        self.idle_at = 0.0
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._deadline_at = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: _Exchange | None = None
        self._unsent: memoryview | None = None
        self._is_reused = False
        self._is_reading_paused = False
        self._is_writing_paused = False
        self._is_abandoned = False
        self._is_spoilt = False  # the engine sent what no request asked for

    # What the client does with it.

    def start(self, exchange: _Exchange, head: bytes, body: bytes) -> None:
        """Send a request; from here on all that happens is reported to the exchange."""
        self._exchange = exchange
        exchange.connection = self
        self._headers: list[tuple[bytes, bytes]] = []
        self._bare_bytes = 0
        self._has_head = False
        self._has_ended = False
        self._is_interim = False
        self._keeps_alive = False
        self._ends_at_eof = False
        self._needs_parser = False
        if len(body) <= _JOIN_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._send_slice()

    def check_fresh(self) -> None:
        """Raise if a connection just made is of no use."""
        if self._pool.is_closed:
            self.drop()
            raise self._pool.closed_error()
        if self._is_spoilt:
            raise EngineError(
                f"{self._pool.where} spoke before it was asked: check that the url points at an "
                "HTTP API",
                kind="protocol",
                before_first_byte=False,
            )
        if self.is_closing():
            raise EngineError(
                f"{self._pool.where} closed the connection at once: see the engine's log",
                kind="reset",
            )

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def drop(self) -> None:
        """Close now, whatever is still unsent or unread."""
        self._exchange = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.abort()

    def abandon(self) -> None:
        """Nobody waits for it to open any more."""
        self._is_abandoned = True
        if hasattr(self, "_transport"):
            self.drop()
        self._pool.on_lost(self)

    def make_waiter(self, timeout_s: float) -> asyncio.Future[None]:
        """Return a future for the exchange to wait on, and move the deadline.

        The timer is touched only if the deadline is nearer than it: it belongs to the connection,
        so that neither a request nor a piece of a stream costs one of its own.
        """
        loop = self._loop
        self._deadline_at = loop.time() + timeout_s
        if self._timer is not None and self._timer_at > self._deadline_at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._set_timer()
        return loop.create_future()

    def give_up(self, what: str) -> None:
        if self._exchange is None:
            self.drop()
        else:
            self._exchange.fail("reset", what)

    def on_taken(self) -> None:
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()

    # What the event loop reports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Both loops set TCP_NODELAY on every TCP connection themselves.
        self._transport = cast("asyncio.Transport", transport)
        if self._is_abandoned:
            self._transport.abort()
        else:
            self._pool.on_open(self)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            # Nobody asked: bytes after a response's end would be taken for the next one's.
            self._is_spoilt = True
            self._transport.abort()
            return
        exchange.is_heard = True
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._is_spoilt = True
            if not self._has_ended:
                # llhttp's reasons are fixed words; what a callback below raised stands in context.
                self._fail_protocol(str(error.__context__ or error))
                return
        if self._has_ended:
            self._finish(exchange)
        elif self._bare_bytes > _MAX_BARE_BYTES:
            self._fail_protocol("more than 256 KiB that are not body")
        elif exchange.buffered_bytes > _HIGH_WATER_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        # Don't wait for the transport's own closing: it would try to send what is unsent first.
        self._end(None)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.on_lost(self)
        self._end(exc)
        self.drop()
        del self._parser  # it refers back to this connection

    def pause_writing(self) -> None:
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        if self._unsent is not None:
            # Not at once: an answer that came early should be read before more is written.
            self._loop.call_soon(self._send_slice)

    # What the parser reports.

    def on_message_begin(self) -> None:
        if self._has_ended:
            self._is_spoilt = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else it is a trailer
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._exchange is None or self._has_ended:
            return
        if status < 200:
            if status < 100 or status == 101:
                raise httptools.HttpParserError(f"unexpected status {status}")
            self._is_interim = True
            return
        headers = self._headers
        if self._bare_bytes > _MAX_BARE_BYTES and _size_bytes(headers) > _MAX_BARE_BYTES:
            raise httptools.HttpParserError("a response head of more than 256 KiB")
        self._bare_bytes = 0
        self._keeps_alive = self._parser.should_keep_alive()
        self._ends_at_eof = not self._keeps_alive and not _has_length(headers)
        if self._exchange.is_head:
            # The parser can't be told that this response has no body, whatever its headers say.
            self._has_ended = self._needs_parser = True
        self._has_head = True
        self._exchange.on_head(status, headers)

    def on_body(self, piece: bytes) -> None:
        if self._has_ended or self._exchange is None:
            self._is_spoilt = True
            return
        self._bare_bytes = 0
        self._exchange.on_body(piece)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
            self._headers = []
        else:
            self._has_ended = True

    # The rest is private.

    def _set_timer(self) -> None:
        self._timer_at = self._deadline_at
        self._timer = self._loop.call_at(self._timer_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._exchange is None:
            return
        if self._loop.time() < self._deadline_at:
            self._set_timer()
        else:
            self._exchange.on_deadline()

    def _send_slice(self) -> None:
        """Write the next slice of a large body; called again as the transport drains."""
        unsent = self._unsent
        if unsent is None or self._is_writing_paused or self.is_closing():
            return
        self._unsent = unsent[_SLICE_BYTES:] if len(unsent) > _SLICE_BYTES else None
        self._transport.write(unsent[:_SLICE_BYTES])
        if self._unsent is not None:
            self._loop.call_soon(self._send_slice)

    def _finish(self, exchange: _Exchange) -> None:
        """Pool the connection again if request and response both went over it to their ends."""
        self._exchange = None
        is_sent = self._unsent is None
        if self._keeps_alive and is_sent and not self._is_spoilt:
            if self._needs_parser:
                self._parser = httptools.HttpResponseParser(self)
            self._is_reused = True
            self.idle_at = self._loop.time()
            self._pool.put_idle(self)
        else:
            self.drop()
        exchange.on_complete()

    def _end(self, error: Exception | None) -> None:
        exchange = self._exchange
        self._exchange = None
        self._unsent = None
        if exchange is None:
            return
        if self._ends_at_eof and error is None:
            exchange.on_complete()
        elif self._is_reused and not exchange.is_heard:
            exchange.on_stale()
        else:
            exchange.fail(
                "reset",
                "closed the connection before its response was complete: see the engine's log",
            )

    def _fail_protocol(self, reason: str) -> None:
        if self._exchange is not None:
            self._exchange.fail(
                "protocol",
                f"didn't answer in HTTP/1.1 ({reason}): check that the url points at an HTTP API",
            )


class _Pool:
    """The connections of one client: who may use one, which are idle, when those must go.

    A slot is the right to have one connection in use. Idle connections hold none, but a new one
    is only made when no idle one is left, so there are never more than `max_connections`.
    """

    def __init__(self, where: str, max_connections: int) -> None:
        self.where = where
        self.is_closed = False
        self._max_connections = max_connections
        self._busy = 0
        self._waiters: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._idle: deque[_Connection] = deque()  # oldest first, closed ones among them
        self._open: set[_Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None

    def try_lease(self) -> bool:
        """Take a slot if one is free."""
        # While anybody waits none is: a slot given back is handed on.
        if self._busy >= self._max_connections or self.is_closed:
            return False
        self._busy += 1
        return True

    async def lease(self, queue_s: float) -> None:
        """Wait for a slot, in the order of asking."""
        if self.is_closed:
            raise self.closed_error()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(queue_s):
                await waiter
        except BaseException as error:
            self._waiters.pop(waiter, None)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give_back()  # the slot came in the moment of giving up
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"all {self._max_connections} connections to {self.where} stayed busy for "
                    f"{queue_s:g} s: add engines, or raise max_connections or queue_s",
                    kind="queue",
                ) from error
            raise

    def give_back(self) -> None:
        """Pass a slot on to whoever waits longest."""
        while self._waiters:
            waiter, _ = self._waiters.popitem(last=False)
            if not waiter.done():
                waiter.set_result(None)
                return
        self._busy -= 1

    def take_idle(self) -> _Connection | None:
        """Return the connection used last, of those the engine hasn't closed."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing():
                return connection
        return None

    def put_idle(self, connection: _Connection) -> None:
        self._idle.append(connection)
        if self._timer is None:
            self._set_timer()

    def _drop_old(self) -> None:
        """Close what has been idle too long; one timer does it, and only while any is idle."""
        self._timer = None
        too_old_at = asyncio.get_running_loop().time() - _MAX_IDLE_S
        while self._idle and self._idle[0].idle_at <= too_old_at:
            self._idle.popleft().drop()
        if self._idle:
            self._set_timer()

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(self._idle[0].idle_at + _MAX_IDLE_S, self._drop_old)

    def on_open(self, connection: _Connection) -> None:
        self._open.add(connection)

    def on_lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if self._emptied is not None and not self._open:
            self._emptied.set()

    def closed_error(self) -> EngineError:
        return EngineError(
            f"the client for {self.where} is closed: the gateway is shutting down, ask again later",
            kind="connect",
        )

    async def aclose(self) -> None:
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self.closed_error())
        self._waiters.clear()
        for connection in list(self._open):
            connection.give_up("was let go: the gateway is shutting down, ask again later")
        if self._open:
            self._emptied = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._emptied.wait()


def _encode_head(
    method: bytes,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    host_line: bytes,
    body_bytes: int,
) -> bytes:
    """Return the request's head, refusing what would read as more or other lines than meant."""
    names = [name.lower() for name, _ in headers]
    if not method or (method + b"".join(names)).translate(None, _TOKEN_BYTES):
        raise ValueError("a method or header name isn't a token")
    if not _REFUSED_NAMES.isdisjoint(names):
        raise ValueError("a header is nameless, Content-Length or Transfer-Encoding (set here)")
    if target.split() != [target]:
        raise ValueError("the target is empty or holds white space")
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    if b"host" not in names:
        lines.append(host_line)
    lines += map(b": ".join, headers)
    text = b"".join(lines)
    if _CR in text or _LF in text or _NUL in text:
        raise ValueError("a header value or the target holds CR, LF or NUL")
    lines.append(b"Content-Length: %d\r\n\r\n" % body_bytes)
    return b"\r\n".join(lines)


def _has_length(headers: list[tuple[bytes, bytes]]) -> bool:
    """Tell whether a response says where its body ends; else the connection's end is the body's."""
    codings = b""
    for name, value in headers:
        if name == b"content-length":
            return True
        if name == b"transfer-encoding":
            codings = value.lower()
    return codings.endswith(b"chunked")


def _size_bytes(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _describe(error: OSError | UnicodeError) -> str:
    """Return the reason in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError):
        return str(error.reason)
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error))
    return str(error) or type(error).__name__
