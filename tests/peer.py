"""An engine in this process that does as it is told, over TCP; it may die and come back."""

import asyncio
import contextlib
import json
import ssl
from typing import Self

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Peer:
    """`mode` says what it does with a request: a status with headers, or a word of `_act`."""

    def __init__(
        self, mode: str = "fine", *, health: int = 200, tls: ssl.SSLContext | None = None
    ) -> None:
        self.mode = mode
        self.health = health
        self.headers = ""
        self.asked = 0
        self.probed = 0
        self.answered = 0
        self.open = 0
        self.keys: set[str] = set()
        self.release = asyncio.Event()
        self.port = 0
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Every connection is reset, and the next is refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._writers):
            writer.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.open += 1
        try:
            with contextlib.suppress(
                ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
            ):
                while await self._answer(reader, writer):
                    pass
        finally:
            self.open -= 1
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        fields = dict(
            line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line
        )
        await reader.readexactly(int(fields.get("content-length", "0")))
        if head.startswith("GET /health "):
            self.probed += 1
            writer.write(f"HTTP/1.1 {self.health} X\r\nContent-Length: 0\r\n\r\n".encode())
            return True
        self.asked += 1
        self.keys.add(fields.get("authorization", ""))
        return await self._act(reader, writer)

    async def _act(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        body = json.dumps({"port": self.port}).encode()
        mode = self.mode
        if mode == "hang":
            await reader.read(1)
            return False
        if mode == "held":
            await self.release.wait()
        elif mode == "reset":
            writer.transport.abort()
            return False
        elif mode == "reset-after":
            writer.write(OK + b"Content-Length: 99\r\n\r\nhalf")
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()
            return False
        elif mode == "garbage":
            writer.write(b"this is no HTTP\r\n\r\n")
            return False
        status = mode if mode[0].isdigit() else "200 OK"
        writer.write(
            f"HTTP/1.1 {status}\r\n{self.headers}Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        self.answered += 1
        return True
