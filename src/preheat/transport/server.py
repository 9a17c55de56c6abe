"""The server side of HTTP/1.1: bytes to exchanges, answers to bytes, nothing about LLMs.

llhttp (under httptools) refuses what is ambiguous: both Content-Length and Transfer-Encoding, a
repeated or malformed Content-Length, folded headers, bare line feeds, bad chunk sizes. It bounds
nothing, so every size and time limit is here.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any, Final, cast

import httptools
import msgspec

from preheat.core.memo import Memo

_LINGER_S: Final = 2.0
_TICK_S: Final = 1.0
_SMALL_BODY_BYTES: Final = 65_536
_HEADS: Final = 2_048
_REMEMBERED_BYTES: Final = 4_096
_NOT_REMEMBERED: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection"})
# What the kernel may hold of an answer beside what is on its way: a slow client's answer waits
# here, where it is bounded and where its progress is seen, and not there in megabytes.
_UNSENT_BYTES: Final = 131_072
_BACKLOG: Final = 1_024
_STEP_S: Final = 0.05
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_BODILESS: Final = (b"HTTP/1.1 204", b"HTTP/1.1 304")
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # socket(7), SO_LINGER


class Limits(msgspec.Struct, frozen=True):
    """What one client may take, and how long it may take it."""

    head_bytes: int = 65_536
    head_lines: int = 100
    target_bytes: int = 8_192
    body_bytes: int = 33_554_432
    bodies_bytes: int = 1_073_741_824
    connections: int = 4_096
    pipelined: int = 64
    idle_s: float = 75.0
    head_s: float = 10.0
    body_s: float = 120.0
    write_s: float = 60.0


class Refusal(msgspec.Struct, frozen=True):
    """A request that isn't answered because of its form."""

    status: int
    code: str
    message: str


class Head:
    """A request's head, parsed. Clients repeat theirs, so a head whose bytes were seen before isn't
    parsed again, and `memory` keeps what the handler found out about it.

    Header names are lower-cased; lines of one name are joined by a comma, as RFC 9110 section
    5.3 allows.
    """

    __slots__ = (
        "body_bytes",
        "headers",
        "is_http_10",
        "is_plain",
        "keep_alive",
        "memory",
        "method",
        "path",
        "query",
    )

    def __init__(
        self,
        method: bytes,
        path: bytes,
        query: bytes,
        headers: dict[bytes, bytes],
        *,
        keep_alive: bool = True,
        is_http_10: bool = False,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.keep_alive = keep_alive
        self.is_http_10 = is_http_10
        self.is_plain = keep_alive and not is_http_10 and method != b"HEAD"
        self.body_bytes = 0
        self.memory: object = None


_IDLE: Final = 0  # where a connection's reading stands
_HEAD: Final = 1
_BODY: Final = 2
_LINGERING: Final = 3


class Exchange:
    """One request and the way to answer it: `reply` at once, or `begin`, `write`…, `end`.

    `on_gone` is called once when the client leaves before its answer is complete, `on_writable`
    whenever a slow client has caught up.
    """

    # As class attributes, what most exchanges never change costs them nothing.
    refusal: Refusal | None = None
    on_gone: Callable[[], object] | None = None
    on_writable: Callable[[], object] | None = None
    is_started = False
    is_done = False
    held_bytes = 0
    _chunked = False
    _is_bodiless = False

    def __init__(self, connection: "Connection", head: Head, body: bytes) -> None:
        self._connection = connection
        self.head = head
        self.body = body
        self.keep_alive = head.keep_alive and not connection.server.is_draining

    @property
    def method(self) -> bytes:
        """GET, POST, …"""
        return self.head.method

    @property
    def path(self) -> bytes:
        """The target up to its question mark, as it was sent."""
        return self.head.path

    @property
    def query(self) -> bytes:
        """What follows the question mark."""
        return self.head.query

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The head's header lines, by lower-cased name."""
        return self.head.headers

    def reply(self, head: bytes, body: bytes) -> None:
        """The whole answer. `head` is the status line and headers, each ended by CRLF, without
        those that frame the message (Content-Length, Connection, Date)."""
        if self.is_done:
            return
        asked = self.head
        connection = self._connection
        if self.keep_alive and body and not asked.is_http_10 and asked.method != b"HEAD":
            connection.transport.write(
                b"%b%bContent-Length: %d\r\n\r\n%b"
                % (head, connection.server.date, len(body), body)
            )
        else:  # HEAD, HTTP/1.0, an empty body, or the last answer on this connection
            is_bodiless = asked.method == b"HEAD" or head.startswith(_BODILESS)
            framing = b"Content-Length: %d\r\n" % len(body) if body or not is_bodiless else b""
            shown = b"" if is_bodiless else body
            connection.write(
                b"".join((head, connection.server.date, framing, self._fate(), b"\r\n", shown))
            )
        self.is_started = True
        self.is_done = True
        connection.exchange_done(self)

    @property
    def date(self) -> bytes:
        """The Date header line of this second."""
        return self._connection.server.date

    def send(self, message: bytes) -> None:
        """The whole answer as the caller framed it; only where `head.is_plain`."""
        connection = self._connection
        if connection.server.is_draining:
            self.keep_alive = False
            status, _, rest = message.partition(b"\r\n")
            message = b"%b\r\nConnection: close\r\n%b" % (status, rest)
        if not self.is_done:
            self.is_started = self.is_done = True
            connection.transport.write(message)
            connection.exchange_done(self)

    def begin(self, head: bytes) -> None:
        """The head of an answer whose length isn't known yet."""
        self.is_started = True
        if self.head.method == b"HEAD" or head.startswith(_BODILESS):
            self._is_bodiless = True  # nothing may follow the head, not even the last chunk
        elif self.head.is_http_10:
            self.keep_alive = False
        else:
            self._chunked = True
        framing = b"Transfer-Encoding: chunked\r\n" if self._chunked else b""
        self._connection.write(
            b"".join((head, self._connection.server.date, framing, self._fate(), b"\r\n"))
        )

    def write(self, piece: bytes) -> None:
        """A piece of the body."""
        if not piece or self.is_done or self._is_bodiless:
            return
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        self._connection.write(piece)

    def end(self, last: bytes = b"") -> None:
        """The body is complete, after this last piece."""
        if self.is_done:
            return
        if self._is_bodiless:
            last = b""
        elif self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        if last:
            self._connection.write(last)
        self._finish()

    def cut(self) -> None:
        """The answer can't be completed: what was written still goes out, its end never does, so
        that the client notices. HTTP/1.0 has no other end than the connection's: break it."""
        if self.head.is_http_10:
            self.reset()
        elif not self.is_done:
            self.is_done = True
            self._connection.end()

    def reset(self) -> None:
        """Break the connection at once, with whatever was still to be sent."""
        if not self.is_done:
            self.is_done = True
            self._connection.reset()

    @property
    def is_writable(self) -> bool:
        """Whether the client has taken most of what was written; else `on_writable` is called
        when it has."""
        return not self._connection.is_write_paused

    @property
    def is_gone(self) -> bool:
        """Whether the client has left."""
        return self._connection.is_lost

    @property
    def peer(self) -> str:
        """The client's address, or an empty string where it has none."""
        name = self._connection.transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else ""

    def _fate(self) -> bytes:
        """What becomes of the connection, where the client can't know it."""
        if not self.keep_alive:
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self.head.is_http_10 else b""

    def _finish(self) -> None:
        self.is_done = True
        self._connection.exchange_done(self)


class Connection(asyncio.Protocol):
    """One client connection: parses requests, keeps answers in order, bounds everything."""

    def __init__(self, server: "HttpServer") -> None:
        self.server = server
        self.limits = server.limits
        self.transport: asyncio.Transport
        self.is_lost = False
        self._current: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._is_advancing = False
        self._is_refused = False
        self._is_reading_paused = False
        self._owes_continue = False
        self.is_write_paused = False
        self._phase: int = _IDLE
        self._since = server.now
        self._taken_at = 0.0
        self._untaken_bytes = 0
        self._held_bytes = 0
        self._read_bytes = 0
        self._bare_bytes = 0
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body = b""
        self._body_bytes = 0
        self._pieces: bytearray | None = None
        self._head_bytes = 0
        self._head_lines = 0
        self._has_two_hosts = False
        self._parsed: Head | None = None
        self._parser = httptools.HttpRequestParser(self)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's isn't a subclass of it
        if not self.server.take_in(self):
            self._refuse(503, "too-many-connections", "too many connections; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.server.let_go(self)
        self._drop_body()
        for exchange in self._queue:
            self._release_body(exchange)
        self._queue.clear()
        current, self._current = self._current, None
        if current is not None:
            self._release_body(current)
            if not current.is_done:
                current.is_done = True
                if current.on_gone is not None:
                    current.on_gone()
            current.on_gone = current.on_writable = None
        # It refers back to this connection: better freed now than by some later collection.
        del self._parser

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        is_start = self._phase == _IDLE
        if is_start:
            # One whole request whose head was parsed before: llhttp would say the same again.
            text, mark, body = data.partition(b"\r\n\r\n")
            head = self.server.heads[text]
            if head is not None and len(body) == head.body_bytes and mark:
                exchange = Exchange(self, head, body)
                if self._current is None and not self._queue and not self.is_write_paused:
                    self._current = exchange
                    self.server.handle(exchange)
                else:
                    self._enqueue(exchange)
                return
        self._read_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if not self._is_refused and not self._is_closing_after_answer():
                self._refuse(400, "invalid-http", f"not valid HTTP/1.1: {error}")
        parsed, self._parsed = self._parsed, None
        if parsed is not None and is_start:
            self._remember_head(parsed, data)
        if self._phase in {_HEAD, _BODY}:
            self._bare_bytes += len(data)
            if self._bare_bytes > self.limits.head_bytes:
                self._refuse_head()

    def eof_received(self) -> bool:
        return False  # a client that has closed its side has left, or can't be told from one

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._watch_taking()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        current = self._current
        if current is not None and current.on_writable is not None:
            current.on_writable()
        self._advance()

    # httptools callbacks

    def on_message_begin(self) -> None:
        if not self._is_refused:
            self._reset_request()
            self._phase = _HEAD
            self._since = self.server.now
            self._bare_bytes = -self._read_bytes  # not what this read brought before it

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self.limits.target_bytes and not self._is_refused:
            self._refuse(
                414, "target-too-long", f"the URL is longer than {self.limits.target_bytes} bytes"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase != _HEAD:
            return  # a trailer may not change what was decided on the head
        name = name.lower()
        self._head_bytes += len(name) + len(value) + 4
        self._head_lines += 1
        headers = self._headers
        if name in headers:
            if self._head_lines > self.limits.head_lines:
                return  # refused when the head is complete; no joining of endless lines
            if name == b"host":
                self._has_two_hosts = True
            value = headers[name] + (b"; " if name == b"cookie" else b", ") + value
        headers[name] = value

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        self._phase = _BODY
        self._bare_bytes = -self._read_bytes
        headers = self._headers
        if (
            self._head_bytes + len(self._target) > self.limits.head_bytes
            or self._head_lines > self.limits.head_lines
        ):
            self._refuse_head()
        elif (
            b"expect" in headers or b"transfer-encoding" in headers or b"content-length" in headers
        ):
            self._check_body(headers)

    def on_body(self, piece: bytes) -> None:
        if self._is_refused:
            return
        self._bare_bytes = -self._read_bytes  # from here on: chunk extensions and trailers
        if self._body:
            self._grow_body(piece)
        elif len(piece) > self.limits.body_bytes:
            self._refuse_body()
        else:
            self._body = piece

    def on_message_complete(self) -> None:
        parser = self._parser
        if self._is_refused or parser.should_upgrade():
            return
        if self._pieces is not None:
            self._body = bytes(self._pieces)
            self._pieces = None
        version = parser.get_http_version()
        why_not = self._why_invalid(version)
        if why_not is not None:
            self._refuse(*why_not)
            return
        path, _, query = self._target.partition(b"?")
        head = Head(
            parser.get_method(),
            path,
            query,
            self._headers,
            keep_alive=parser.should_keep_alive(),
            is_http_10=version == "1.0",
        )
        exchange = Exchange(self, head, self._body)
        exchange.held_bytes, self._held_bytes = self._held_bytes, 0
        self._parsed = head
        self._body = b""
        self._phase = _IDLE
        self._since = self.server.now
        self._enqueue(exchange)

    def _remember_head(self, head: Head, data: bytes) -> None:
        """Only a head that came in one read with its whole body, framed by its length alone."""
        # It must also be this read's beginning: the end of a head that came in two would answer
        # for the credentials in its first half.
        text, _, body = data.partition(b"\r\n\r\n")
        headers = head.headers
        length = headers.get(b"content-length")
        if (
            length is not None
            and int(length) == len(body)
            and len(text) <= _REMEMBERED_BYTES
            and head.keep_alive
            and not head.is_http_10
            and headers.keys().isdisjoint(_NOT_REMEMBERED)
        ):
            head.body_bytes = len(body)
            self.server.heads.put(text, head)

    # what an exchange does

    def write(self, data: bytes) -> None:
        if not self.is_lost:
            self.transport.write(data)

    def end(self) -> None:
        """Read nothing more; what was written still goes out, as long as the client takes it."""
        self._stop()
        self.transport.close()

    def reset(self) -> None:
        """Break the connection in a way that nobody takes for an orderly end."""
        with contextlib.suppress(OSError):  # it is broken already
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
            )
        self.transport.abort()

    def abort(self) -> None:
        self.transport.abort()

    def exchange_done(self, exchange: Exchange) -> None:
        """The current exchange is answered: the next one's turn, or the end."""
        if self._current is not exchange:
            return
        self._current = None
        if exchange.held_bytes:
            self._release_body(exchange)
        if not exchange.keep_alive:
            self._linger()
        elif self._queue or self._is_reading_paused or self._owes_continue:
            self._advance()
        else:
            self._since = self.server.now

    # what the server does

    def check_time(self, now: float) -> None:
        """Once a second: has this client taken longer than it may?"""
        limits = self.limits
        since_s = now - self._since
        if self.is_write_paused or self._phase == _LINGERING:
            self._check_taking(now)
        elif self._current is not None:
            pass
        elif self._phase == _IDLE:
            if since_s > limits.idle_s:
                self.end()
        elif self._phase == _HEAD:
            if since_s > limits.head_s:
                self._refuse(408, "head-timeout", f"no complete head within {limits.head_s:g} s")
        elif since_s > limits.body_s:
            self._refuse(408, "body-timeout", f"no complete body within {limits.body_s:g} s")

    def close_when_idle(self) -> None:
        """The server is draining."""
        if self.is_idle:
            self.end()
        elif (last := self._last) is not None:
            last.keep_alive = False

    def close_if_told(self) -> None:
        """The server is draining: close after an answer that can still say so."""
        if (last := self._last) is not None and not last.is_started:
            last.keep_alive = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a request is here."""
        return self._current is None and not self._queue and self._phase == _IDLE

    @property
    def _last(self) -> Exchange | None:
        return self._queue[-1] if self._queue else self._current

    # inside

    def _reset_request(self) -> None:
        self._target = b""
        self._headers = {}
        self._body = b""
        self._pieces = None
        self._head_bytes = 0
        self._head_lines = 0
        self._has_two_hosts = False

    def _enqueue(self, exchange: Exchange) -> None:
        if self._current is None and not self._queue and not self.is_write_paused:
            self._current = exchange
            self.server.handle(exchange)
            return
        self._queue.append(exchange)
        if not self._is_reading_paused:
            # No more than what this read already brought is taken in.
            self._is_reading_paused = True
            self.transport.pause_reading()
        if len(self._queue) > self.limits.pipelined and exchange.refusal is None:
            self._refuse(429, "too-many-pipelined", "too many pipelined requests")

    def _watch_taking(self) -> None:
        self._taken_at = self.server.now
        self._untaken_bytes = 0

    def _check_taking(self, now: float) -> None:
        """A client that takes nothing of what was written, or doesn't go when it has all of it."""
        untaken_bytes = self.transport.get_write_buffer_size()
        if untaken_bytes != self._untaken_bytes:
            self._untaken_bytes = untaken_bytes
            self._taken_at = now
            return
        # Under TLS it can't be seen what the layer below still holds.
        has_all = untaken_bytes == 0 and self.transport.can_write_eof()
        if now - self._taken_at > (_LINGER_S if has_all else self.limits.write_s):
            self.transport.abort()

    def _advance(self) -> None:
        """Handle what is queued, one after the other, without recursion."""
        if self._is_advancing or self.is_lost:
            return
        self._is_advancing = True
        try:
            while self._queue and self._current is None and not self.is_write_paused:
                self._current = exchange = self._queue.popleft()
                if exchange.refusal is not None:
                    exchange.reply(*self.server.render_refusal(exchange.refusal))
                else:
                    self.server.handle(exchange)
        finally:
            self._is_advancing = False
        if self._current is None and not self._queue:
            self._since = self.server.now
            if self._owes_continue:
                self._owes_continue = False
                self.write(_CONTINUE)
            if self._is_reading_paused and not self.is_write_paused:
                self._is_reading_paused = False
                if not self.transport.is_closing():
                    self.transport.resume_reading()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer when its turn comes, read nothing more, close."""
        if self._is_refused:
            return  # for another reason already
        self._is_refused = True
        self._phase = _IDLE
        self._reset_request()
        self._drop_body()
        exchange = Exchange(self, Head(b"", b"", b"", {}, keep_alive=False), b"")
        exchange.refusal = Refusal(status, code, message)
        self._queue.append(exchange)
        self._advance()

    def _refuse_head(self) -> None:
        limits = self.limits
        self._refuse(
            431,
            "head-too-large",
            f"the headers exceed {limits.head_bytes} bytes or {limits.head_lines} lines",
        )

    def _refuse_body(self) -> None:
        self._refuse(
            413, "body-too-large", f"the body is larger than {self.limits.body_bytes} bytes"
        )

    def _check_body(self, headers: dict[bytes, bytes]) -> None:
        """Refuse a body before it is sent, where that can be known."""
        if self._parser.should_upgrade():
            return  # the head is refused, or comes again without the offer
        coding = headers.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            self._refuse(501, "unknown-coding", "of the transfer codings only chunked is supported")
            return
        if coding is not None and self._parser.get_http_version() == "1.0":
            self._refuse(400, "invalid-http", "HTTP/1.0 has no Transfer-Encoding")
            return
        if int(headers.get(b"content-length", b"0")) > self.limits.body_bytes:
            self._refuse_body()
            return
        expected = headers.get(b"expect")
        if expected is None or self._parser.get_http_version() == "1.0":
            return
        if expected.lower() != b"100-continue":
            self._refuse(417, "unknown-expectation", "only 100-continue can be expected")
        elif self._current is None and not self._queue:
            self.write(_CONTINUE)
        else:
            self._owes_continue = True

    def _grow_body(self, piece: bytes) -> None:
        if self._pieces is None:
            self._pieces = bytearray(self._body)
            self._body_bytes = len(self._body)
        self._pieces += piece
        self._body_bytes += len(piece)
        if self._body_bytes > self.limits.body_bytes:
            self._refuse_body()
        elif self._body_bytes > _SMALL_BODY_BYTES:
            grown_bytes = self._body_bytes - self._held_bytes
            self._held_bytes += grown_bytes
            self.server.bodies_bytes += grown_bytes
            if self.server.bodies_bytes > self.limits.bodies_bytes:
                self._refuse(503, "bodies-too-large", "too many large bodies at once; try again")

    def _drop_body(self) -> None:
        self.server.bodies_bytes -= self._held_bytes
        self._held_bytes = 0

    def _release_body(self, exchange: Exchange) -> None:
        self.server.bodies_bytes -= exchange.held_bytes
        exchange.held_bytes = 0

    def _why_invalid(self, version: str) -> tuple[int, str, str] | None:
        if version not in {"1.1", "1.0"}:
            return 505, "unknown-version", "only HTTP/1.1 and HTTP/1.0 are spoken here"
        host = self._headers.get(b"host")
        if self._has_two_hosts or (host is None and version == "1.1"):
            return 400, "invalid-host", "exactly one Host header is required"
        if not self._target.startswith(b"/"):
            return self._relative_target()
        return None

    def _relative_target(self) -> tuple[int, str, str] | None:
        """Absolute form (RFC 9112 section 3.2.2) becomes a path, and its host counts; `*` stays,
        for OPTIONS."""
        scheme, mark, rest = self._target.partition(b"://")
        if mark and scheme.lower() in {b"http", b"https"}:
            host, slash, path = rest.partition(b"/")
            host, question, query = host.partition(b"?")
            self._headers[b"host"] = host
            self._target = (slash or b"/") + question + query + path
            return None
        if self._target == b"*" and self._parser.get_method() == b"OPTIONS":
            return None
        return 400, "invalid-target", "the request target must be a path"

    def _decline_upgrade(self, rest: bytes) -> None:
        """RFC 9110 section 7.8: an upgrade may be ignored. Some HTTP/2 clients offer one on each
        first request (Java's, for instance) and go on in HTTP/1.1; a WebSocket client can't."""
        headers = self._headers
        method = self._parser.get_method()
        if method == b"CONNECT" or headers.get(b"upgrade", b"").lower() != b"h2c":
            self._refuse(501, "upgrade-refused", "CONNECT and upgrades are not supported here")
            return
        version = self._parser.get_http_version()
        why_not = self._why_invalid(version)
        if why_not is not None:
            self._refuse(*why_not)
            return
        for name in (b"upgrade", b"http2-settings"):
            headers.pop(name, None)
        options = {option.strip().lower() for option in headers.pop(b"connection").split(b",")}
        for option in options & {b"close", b"keep-alive"}:
            headers[b"connection"] = option
        lines = b"".join(b"%b: %b\r\n" % line for line in headers.items())
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, version.encode(), lines)
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    def _is_closing_after_answer(self) -> bool:
        """Bytes after a request that said `Connection: close` don't matter (RFC 9112, 9.6)."""
        last = self._last
        return self._phase == _LINGERING or (last is not None and not last.keep_alive)

    def _stop(self) -> None:
        self._is_refused = True
        self._owes_continue = False
        self._phase = _LINGERING
        self._watch_taking()
        for exchange in self._queue:
            self._release_body(exchange)
        self._queue.clear()

    def _linger(self) -> None:
        """Say that the answer is complete and wait a moment for the client to take it: closing at
        once, with bytes unread, would reset the connection and the answer with it."""
        self._stop()
        if self.transport.is_closing():
            return
        if self._is_reading_paused:
            self._is_reading_paused = False
            self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


class HttpServer:
    """The listeners, all connections, and a clock that ticks once a second.

    `handle` answers an exchange, now or later; it must not raise. `render_refusal` gives head
    and body of the answer to a request that is refused for its form.
    """

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        render_refusal: Callable[[Refusal], tuple[bytes, bytes]],
        limits: Limits,
    ) -> None:
        self.handle = handle
        self.render_refusal = render_refusal
        self.limits = limits
        self.is_draining = False
        self.bodies_bytes = 0
        self.connections: set[Connection] = set()
        self._emptied = asyncio.Event()
        self.heads: Memo[bytes, Head] = Memo(_HEADS)
        self._listeners: list[asyncio.Server] = []
        self._ticker: asyncio.Task[None] | None = None
        self._set_clock()

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Bind and accept; the port that was taken."""
        listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(self), host, port, backlog=_BACKLOG, **self._tls_options(tls)
        )
        self._watch(listener)
        return int(listener.sockets[0].getsockname()[1])

    async def accept(
        self, listening: Sequence[socket.socket], tls: ssl.SSLContext | None = None
    ) -> None:
        """Accept what comes to these sockets, which may be other processes' too."""
        for one in listening:
            self._watch(
                await asyncio.get_running_loop().create_server(
                    lambda: Connection(self), sock=one, backlog=_BACKLOG, **self._tls_options(tls)
                )
            )

    def _tls_options(self, tls: ssl.SSLContext | None) -> dict[str, Any]:
        return {
            "ssl": tls,
            "ssl_handshake_timeout": self.limits.head_s if tls else None,
            "ssl_shutdown_timeout": self.limits.write_s if tls else None,
        }

    def _watch(self, listener: asyncio.Server) -> None:
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            for bound in listener.sockets:  # connections inherit it
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._listeners.append(listener)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    def take_in(self, connection: Connection) -> bool:
        """A new connection; False where there are too many."""
        self.connections.add(connection)
        return len(self.connections) <= self.limits.connections

    def let_go(self, connection: Connection) -> None:
        """The connection is closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._emptied.set()

    async def drain(self, within_s: float, linger_s: float = 0.0) -> bool:
        """Accept nothing more, let what is under way end; False where time ran out.

        With `linger_s` a connection is closed only when its client was told so, or has asked for
        nothing for so long: a request that is on its way to us is still answered.
        """
        self.is_draining = True
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self.connections):
            if linger_s:
                connection.close_if_told()
            else:
                connection.close_when_idle()
        try:
            async with asyncio.timeout(within_s):
                if linger_s:
                    await self._let_linger(linger_s)
                while self.connections:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    async def _let_linger(self, linger_s: float) -> None:
        idle_since: dict[Connection, float] = {}
        while True:
            await asyncio.sleep(_STEP_S)  # first: what was accepted just now becomes a connection
            if not self.connections:
                return
            now = time.monotonic()
            for connection in tuple(self.connections):
                if not connection.is_idle:
                    idle_since.pop(connection, None)
                elif now - idle_since.setdefault(connection, now) >= linger_s:
                    connection.close_when_idle()

    async def aclose(self) -> None:
        """Break what is left."""
        self.is_draining = True
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self.connections):
            connection.abort()
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.sleep(0)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            self._set_clock()
            for connection in tuple(self.connections):
                try:
                    connection.check_time(self.now)
                except Exception as bug:  # noqa: BLE001  a check that fails mustn't be the last one
                    loop.call_exception_handler({"message": "check_time failed", "exception": bug})

    def _set_clock(self) -> None:
        self.now = time.monotonic()
        self.date = b"Date: %b\r\n" % formatdate(usegmt=True).encode()
