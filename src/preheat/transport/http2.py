"""A client for engines that speak HTTP/2 over TLS, on `h2`, with the interface of `client.Client`.

Requests share connections, as many at once as the engine allows; another connection is opened
when all are full. Errors, their kinds and their words are those of `client`: what waits for an
answer is the same `Exchange`, only that a stream carries it instead of a connection. Cancelling
resets the stream, so that the engine notices.

**Silent retries** are for what the engine surely hasn't worked on: a stream it refused or left
out of its GOAWAY; and, once as in `client`, for a connection that had been idle and was gone.
"""

import asyncio
import ssl
from collections.abc import Sequence
from typing import Final, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes
from hyperframe.frame import Frame, GoAwayFrame

from preheat.errors import EngineError
from preheat.transport.client import encode_head
from preheat.transport.exchange import Exchange, Response, Timeouts
from preheat.transport.origin import Origin
from preheat.transport.pool import Pool

__all__ = ["Http2Client"]

_DEFAULT_TIMEOUTS: Final = Timeouts()
_IDLE_S: Final = 30.0  # servers close after 60 s and more
# What may arrive before its reader takes it: of one stream, and of all on a connection.
_STREAM_WINDOW_BYTES: Final = 256 * 1024
_CONNECTION_WINDOW_BYTES: Final = 64 * 1024 * 1024
_TRIES: Final = 5  # of a request that the engine hasn't begun
_FIRST_STREAMS: Final = 100
_LAST_NUMBER: Final = 2**30  # of streams on one connection; they end at 2**31
# What belongs to a connection has no place in HTTP/2.
_HOP_BY_HOP: Final = frozenset(
    [b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade", b"host"]
)
_FIRST_WINDOW_BYTES: Final = 65_535  # of a connection, by RFC 9113


class Http2Client:
    """One https origin and the connections to it."""

    def __init__(
        self,
        url: str,
        *,
        timeouts: Timeouts = _DEFAULT_TIMEOUTS,
        max_connections: int = 256,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Check the url; connect to nothing yet. `max_connections`: most requests at once."""
        if max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {max_connections}")
        self._origin = origin = Origin(url)
        if not origin.is_tls:
            raise ValueError("HTTP/2 is spoken over TLS only: https://host")
        self.host = origin.host
        self.port = origin.port
        self._timeouts = timeouts
        self._tls = tls or ssl.create_default_context()
        self._tls.set_alpn_protocols(["h2"])
        self._pool: Pool[_Connection] = Pool(origin.where, max_connections)
        self._connections: list[_Connection] = []
        self._connecting: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Requests under way, those that wait for a slot included."""
        return self._pool.in_flight

    @property
    def has_room(self) -> bool:
        """Whether a request would be sent at once."""
        return self._pool.has_room

    async def request(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
    ) -> Response:
        """Send a request and return once the response's head is complete, 1xx ones skipped."""
        encode_head(method, target, headers, b"Host: x", len(body))  # refuses what it refuses
        authority = next(
            (value for name, value in headers if name.lower() == b"host"), self._origin.authority
        )
        head = [
            (b":method", method),
            (b":scheme", b"https"),
            (b":authority", authority),
            (b":path", target),
            *((name.lower(), value) for name, value in headers if name.lower() not in _HOP_BY_HOP),
            (b"content-length", b"%d" % len(body)),
        ]
        if not self._pool.try_lease():
            await self._pool.lease(self._timeouts.queue_s)
        exchange = Exchange(self._pool, self._timeouts, is_head=method == b"HEAD")
        try:
            for tries_left in reversed(range(_TRIES)):
                connection = await self._connection()
                connection.start(exchange, head, body, tries_left)
                await exchange.wait_for_head()
                if not exchange.is_stale:
                    break
        except BaseException:  # cancellation above all: the slot must come back in any case
            exchange.close()
            raise
        return Response(exchange)

    async def aclose(self) -> None:
        """Close every connection; requests under way fail, and so do later ones."""
        self._pool.is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        await self._pool.aclose()

    async def _connection(self) -> "_Connection":
        """One with room for another stream. Who comes while one is being opened waits for that."""
        while True:
            self._connections = [one for one in self._connections if not one.is_closing()]
            for connection in self._connections:
                if connection.has_room:
                    return connection
            if self._pool.is_closed:
                raise self._pool.closed_error()
            if self._connecting is None:
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
                self._connecting.add_done_callback(self._connected)
            connecting = self._connecting
            await asyncio.wait([connecting])
            if connecting.cancelled():
                raise self._pool.closed_error()
            error = connecting.exception()
            if isinstance(error, EngineError):  # each its own, whoever waits
                raise EngineError(str(error), kind=error.kind) from error
            if error is not None:
                raise error

    def _connected(self, _: asyncio.Task[None]) -> None:
        self._connecting = None

    async def _connect(self) -> None:
        connection = _Connection(self._pool)
        try:
            await self._origin.connect(lambda: connection, self._tls, self._timeouts.connect_s)
        except BaseException:
            connection.abandon()
            raise
        connection.check_fresh()
        self._connections.append(connection)


class _Stream:
    """One request on a connection: what its exchange sees of it."""

    def __init__(self, connection: "_Connection", number: int, exchange: Exchange) -> None:
        self.number = number
        self.exchange = exchange
        self.untaken_bytes = 0
        self.unsent = memoryview(b"")
        self.tries_left = 0
        self.began_idle = False  # on a connection that had been in use, and wasn't just then
        self.heard_before = connection.heard
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None

    def drop(self) -> None:
        """The exchange has failed or been given up."""
        self._connection.reset(self)

    def make_waiter(self, timeout_s: float) -> asyncio.Future[None]:
        waiter = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(lambda _: self._stop_timer())
        self.postpone(timeout_s)
        return waiter

    def postpone(self, timeout_s: float) -> None:
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self.exchange.on_deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_taken(self) -> None:
        self._connection.acknowledge(self)


class _Protocol(H2Connection):
    """What h2 makes of the bytes, but for one thing: it takes a GOAWAY for the end of everything,
    while RFC 9113, 6.8 lets the streams finish that the server has begun, as nginx does."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        event = ConnectionTerminated()
        event.last_stream_id = frame.last_stream_id
        return [], [event]


class _Connection(asyncio.Protocol):
    """One socket and the streams on it."""

    def __init__(self, pool: "Pool[_Connection]") -> None:
        self.idle_at = 0.0
        self.heard = 0  # how often something came
        self._pool = pool
        self._h2 = _Protocol(H2Configuration(client_side=True, header_encoding=None))
        self._streams: dict[int, _Stream] = {}
        self._transport: asyncio.Transport
        self._idle_timer: asyncio.TimerHandle | None = None
        self._takes_more = True
        self._was_used = False
        self._is_writing_paused = False
        self._is_abandoned = False

    # What the client does with it.

    @property
    def has_room(self) -> bool:
        # Before it has said how many, RFC 9113 wants at least so many allowed.
        most = self._h2.remote_settings.max_concurrent_streams if self.heard else _FIRST_STREAMS
        return self._takes_more and len(self._streams) < most and not self.is_closing()

    def start(
        self, exchange: Exchange, head: list[tuple[bytes, bytes]], body: bytes, tries_left: int
    ) -> None:
        """Open a stream; from here on all that happens is reported to the exchange."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        number = self._h2.get_next_available_stream_id()
        stream = _Stream(self, number, exchange)
        stream.tries_left = tries_left
        is_first_try = tries_left == _TRIES - 1
        stream.began_idle = is_first_try and self._was_used and not self._streams
        stream.unsent = memoryview(body)
        self._streams[number] = stream
        if number > _LAST_NUMBER:
            self._takes_more = False
        exchange.connection = stream
        self._h2.send_headers(number, head, end_stream=not body)
        self._send_body(stream)
        self._flush()

    def check_fresh(self) -> None:
        """Raise if a connection just made is of no use."""
        where = self._pool.where
        if self._pool.is_closed:
            self.drop()
            raise self._pool.closed_error()
        chosen = self._transport.get_extra_info("ssl_object")
        if chosen is None or chosen.selected_alpn_protocol() != "h2":
            self.drop()
            raise EngineError(
                f"{where} doesn't offer HTTP/2: set http2 = false for this engine", kind="protocol"
            )
        if self.is_closing():
            raise EngineError(
                f"{where} closed the connection at once: see the engine's log", kind="connect"
            )

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def acknowledge(self, stream: _Stream) -> None:
        """Its reader has taken what there was: let the engine send more."""
        size_bytes, stream.untaken_bytes = stream.untaken_bytes, 0
        if size_bytes and not self.is_closing():
            self._h2.acknowledge_received_data(size_bytes, stream.number)
            self._flush()

    def reset(self, stream: _Stream) -> None:
        """Tell the engine that nobody listens any more."""
        if self._streams.get(stream.number) is not stream:
            return
        if self.heard == stream.heard_before:
            self._takes_more = False  # nothing came in all the time: it may be dead
        if not self.is_closing():
            self.acknowledge(stream)
            self._h2.reset_stream(stream.number, ErrorCodes.CANCEL)
            self._flush()
        self._forget(stream)

    def drop(self) -> None:
        """Close now."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._transport.abort()

    def abandon(self) -> None:
        """Nobody waits for it to open any more."""
        self._is_abandoned = True
        if hasattr(self, "_transport"):
            self.drop()
        self._pool.on_lost(self)

    def give_up(self, what: str) -> None:
        self._takes_more = False
        for stream in self._taken_off():
            stream.exchange.fail("reset", what)
        self.drop()

    # What the event loop reports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._is_abandoned:
            self._transport.abort()
            return
        self._pool.on_open(self)
        self._h2.initiate_connection()
        self._h2.update_settings(
            {
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW_BYTES,
            }
        )
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW_BYTES - _FIRST_WINDOW_BYTES)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self.heard += 1
        try:
            events = self._h2.receive_data(data)
        except H2Error as error:
            self._fail("protocol", type(error).__name__)
            return
        for event in events:
            self._on_event(event)
        self._flush()

    def eof_received(self) -> None:
        self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self._pool.on_lost(self)
        self._takes_more = False
        for stream in self._taken_off():
            if stream.began_idle and self.heard == stream.heard_before:
                self._give_back(stream)
            else:
                stream.exchange.fail(
                    "reset",
                    "closed the connection before its response was complete: see the engine's log",
                )
        self.drop()

    def pause_writing(self) -> None:
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        self._send_bodies()

    # What HTTP/2 says.

    def _on_event(self, event: Event) -> None:
        if isinstance(event, WindowUpdated | RemoteSettingsChanged):
            self._send_bodies()
        elif isinstance(event, ConnectionTerminated):
            self._on_goaway(event.last_stream_id or 0)
        else:
            stream = self._streams.get(getattr(event, "stream_id", None) or 0)
            if stream is not None:
                self._on_stream_event(stream, event)
            elif isinstance(event, DataReceived):  # of a stream that was given up
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    def _on_stream_event(self, stream: _Stream, event: Event) -> None:
        exchange = stream.exchange
        if isinstance(event, ResponseReceived):
            exchange.is_heard = True
            headers = [(bytes(name), bytes(value)) for name, value in event.headers]
            status = next((value for name, value in headers if name == b":status"), b"")
            exchange.on_head(int(status), [one for one in headers if one[0][:1] != b":"])
        elif isinstance(event, DataReceived):
            stream.untaken_bytes += event.flow_controlled_length
            if event.data:
                exchange.on_body(bytes(event.data))
            elif not exchange.pieces:
                self.acknowledge(stream)
        elif isinstance(event, StreamEnded):
            self.acknowledge(stream)
            if stream.unsent:  # it answered without hearing us out
                self._h2.reset_stream(stream.number, ErrorCodes.NO_ERROR)
            self._forget(stream)
            exchange.on_complete()
        elif isinstance(event, StreamReset):
            self._on_reset(stream, event)

    def _on_reset(self, stream: _Stream, event: StreamReset) -> None:
        if event.error_code == ErrorCodes.REFUSED_STREAM and not stream.exchange.is_heard:
            self._takes_more = False
            self._give_back(stream)
            return
        self._forget(stream)
        stream.exchange.fail("reset", "reset the stream before its response was complete")

    def _on_goaway(self, last_number: int) -> None:
        """What it has begun it may finish; the rest is asked on another connection."""
        self._takes_more = False
        for stream in tuple(self._streams.values()):
            if stream.number > last_number:
                self._give_back(stream)
        if not self._streams:
            self.drop()

    def _give_back(self, stream: _Stream) -> None:
        """The engine hasn't worked on it: the client may send it again."""
        self._forget(stream)
        if stream.tries_left == 0:
            stream.exchange.fail("reset", "refused the request each time: see the engine's log")
        else:
            stream.exchange.on_stale()

    def _taken_off(self) -> list[_Stream]:
        """All streams, of which the connection knows no longer: there is nothing to reset."""
        streams = list(self._streams.values())
        self._streams.clear()
        return streams

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.number, None)
        self._was_used = True
        stream.unsent = memoryview(b"")
        if self._streams or self.is_closing():
            return
        if not self._takes_more:
            self.drop()
        elif self._idle_timer is None:
            self._idle_timer = asyncio.get_running_loop().call_later(_IDLE_S, self.drop)

    def _fail(self, kind: str, reason: str) -> None:
        self._takes_more = False
        for stream in self._taken_off():
            stream.exchange.fail(
                kind,
                f"broke the rules of HTTP/2 ({reason}): set http2 = false for this engine",
            )
        self._flush()
        self.drop()

    # Sending.

    def _send_bodies(self) -> None:
        for stream in tuple(self._streams.values()):
            self._send_body(stream)
        self._flush()

    def _send_body(self, stream: _Stream) -> None:
        """As much as the engine and the socket take now."""
        while stream.unsent and not self._is_writing_paused:
            window = self._h2.local_flow_control_window(stream.number)
            size = min(len(stream.unsent), window, self._h2.max_outbound_frame_size)
            if size <= 0:
                return
            piece, stream.unsent = stream.unsent[:size], stream.unsent[size:]
            self._h2.send_data(stream.number, bytes(piece), end_stream=not stream.unsent)
            self._flush()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self.is_closing():
            self._transport.write(data)
