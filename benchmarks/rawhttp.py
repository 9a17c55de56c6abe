"""A small HTTP/1.1 client on asyncio: cheap enough to load a fast server, and exact."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping
from typing import cast

import httptools
import msgspec

HOST = "127.0.0.1"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Reply(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[bytes, bytes]  # names in lower case
    body: bytes


class Connection(asyncio.Protocol):
    """One connection that carries one exchange after the other."""

    def __init__(self) -> None:
        self.closed = False
        self.raw = b""  # what came outside of an exchange
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._first_bytes: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []

    @classmethod
    async def open(cls, port: int, *, within_s: float = 10.0) -> Connection:
        """A new connection; patient, because a burst of short ones may use up the local ports."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    _, connection = await loop.create_connection(cls, HOST, port)
                return connection
            except ConnectionRefusedError:
                raise
            except OSError:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(0.05)

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def begin(self, request: bytes) -> asyncio.Future[Reply]:
        """Sends a request at once; its reply comes through the future."""
        self._parser = httptools.HttpResponseParser(self)
        self._reply = self._loop.create_future()
        if self.closed:
            self._fail(ConnectionResetError("the connection is closed"))
        self.send(request)
        return self._reply

    async def exchange(self, request: bytes, *, within_s: float = 30.0) -> Reply:
        async with asyncio.timeout(within_s):
            return await self.begin(request)

    async def first_bytes(self, *, within_s: float = 30.0) -> None:
        """Returns when anything has arrived."""
        self._first_bytes = self._loop.create_future()
        async with asyncio.timeout(within_s):
            await self._first_bytes

    async def end(self, *, within_s: float) -> bool:
        """Whether the other side closes within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._end)
        return self.closed

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Ends the connection with a RST, as a crashed client does."""
        if self._transport is None or self.closed:
            return
        sock = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._transport.abort()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        if self._first_bytes is not None and not self._first_bytes.done():
            self._first_bytes.set_result(None)
        if self._parser is None:
            self.raw += data
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        lost = ConnectionResetError("closed before the reply was complete")
        self._fail(lost)
        if self._first_bytes is not None and not self._first_bytes.done():
            self._first_bytes.set_exception(lost)
        if not self._end.done():
            self._end.set_result(None)

    # httptools calls these

    def on_message_begin(self) -> None:
        self._headers = {}
        self._body = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        parser, self._parser = self._parser, None
        if parser is None or self._reply is None or self._reply.done():
            return
        if not parser.should_keep_alive():
            self.close()
            self.closed = True
        reply = Reply(parser.get_status_code(), self._headers, b"".join(self._body))
        self._reply.set_result(reply)

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)


def post(path: str, body: bytes, *, key: str, headers: str = "") -> bytes:
    """The bytes of a POST; `headers` are further whole lines."""
    return post_head(path, len(body), key=key, headers=headers) + body


def post_head(path: str, body_bytes: int, *, key: str, headers: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nUser-Agent: benchmark\r\nAccept: */*\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"{headers}Content-Length: {body_bytes}\r\n\r\n"
    ).encode()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nUser-Agent: benchmark\r\n\r\n".encode()
