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
import ssl
from collections.abc import Sequence
from typing import Final, cast

import httptools

from preheat.errors import EngineError
from preheat.transport.exchange import Exchange, Response, Timeouts
from preheat.transport.origin import Origin
from preheat.transport.pool import Pool

__all__ = ["Client", "Response", "Timeouts"]

# A body up to this size is joined with the head: one copy is cheaper than a second system call.
_JOIN_BYTES: Final = 64 * 1024
# A larger one is written in slices of this size, so that other requests get their turn between.
_SLICE_BYTES: Final = 256 * 1024
# Body that waits for its reader: above this stop reading from the socket. A reader takes all there
# is, so that reading goes on at zero and no lower mark is needed.
_HIGH_WATER_BYTES: Final = 256 * 1024
# Bytes that may arrive without being body: heads (1xx included), chunk extensions, trailers.
_MAX_BARE_BYTES: Final = 256 * 1024
# RFC 9110, section 5.6.2: what a method or a header name is made of.
_TOKEN_BYTES: Final = (
    b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)

_CR, _LF, _NUL = b"\r\n\0"  # as numbers: looking for those in bytes is three times as fast
# Headers a caller can't give: framing is done here.
_REFUSED_NAMES: Final = frozenset([b"", b"content-length", b"transfer-encoding"])


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
        if max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {max_connections}")
        self._origin = origin = Origin(url)
        self.host = origin.host
        self.port = origin.port
        self.base_path = origin.base_path
        self._timeouts = timeouts
        self._tls = (tls or ssl.create_default_context()) if origin.is_tls else None
        self._host_line = b"Host: " + origin.authority
        self._pool: Pool[_Connection] = Pool(origin.where, max_connections)

    async def request(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
    ) -> Response:
        """Send a request and return once the response's head is complete, 1xx ones skipped.

        `Host` (unless given) and `Content-Length` are added. The response must be read to its end
        or closed. Cancelling closes the connection, so that the engine notices.
        """
        head = encode_head(method, target, headers, self._host_line, len(body))
        if not self._pool.try_lease():
            await self._pool.lease(self._timeouts.queue_s)
        exchange = Exchange(self._pool, self._timeouts, is_head=method == b"HEAD")
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

    @property
    def in_flight(self) -> int:
        """Requests under way, those that wait for a connection included."""
        return self._pool.in_flight

    @property
    def has_room(self) -> bool:
        """Whether a request would get a connection at once."""
        return self._pool.has_room

    async def aclose(self) -> None:
        """Close every connection; requests under way fail, and so do later ones."""
        await self._pool.aclose()

    async def _connect(self) -> "_Connection":
        connection = _Connection(self._pool)
        try:
            await self._origin.connect(lambda: connection, self._tls, self._timeouts.connect_s)
        except BaseException:
            connection.abandon()  # a loop may open it all the same and tell nobody of its end
            raise
        connection.check_fresh()
        return connection


class _Connection(asyncio.Protocol):
    """One socket: writes requests, and feeds the current exchange with what the parser finds."""

    def __init__(self, pool: Pool["_Connection"]) -> None:
        self.idle_at = 0.0
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._deadline_at = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._unsent: memoryview | None = None
        self._is_reused = False
        self._is_reading_paused = False
        self._is_writing_paused = False
        self._is_abandoned = False
        self._is_spoilt = False  # the engine sent what no request asked for

    # What the client does with it.

    def start(self, exchange: Exchange, head: bytes, body: bytes) -> None:
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
                kind="connect",  # nothing was asked on it yet
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

    def postpone(self, timeout_s: float) -> None:
        """The wait goes on, from now."""
        self._deadline_at = self._loop.time() + timeout_s

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

    def _finish(self, exchange: Exchange) -> None:
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


def encode_head(
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
