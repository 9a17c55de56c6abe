"""Workers that hold every request until they are told to answer it, and say which of them got it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec

from benchmarks.process import free_port
from benchmarks.rawhttp import HOST
from benchmarks.report import BenchmarkError

ARRIVES_WITHIN_S = 20.0
MODEL = "held"
ASKED = b"POST /v1/chat/completions "
ANSWER = (
    b'{"id":"held","object":"chat.completion","created":0,"model":"held","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,'
    b'"total_tokens":2}}'
)
ABOUT = (
    b'{"object":"list","data":[{"id":"held","object":"model"}],"model_path":"held",'
    b'"served_model_name":"held","status":"ok"}'
)


class Held(msgspec.Struct):
    """A request at a worker, by its place in `HeldWorkers.urls`."""

    worker: int
    answer: asyncio.Event


class HeldWorkers:
    """As many HTTP servers as there are workers, in this process. Whatever else is asked is answered
    at once: routers ask for health, models and versions, and try what an engine can do. A token is
    a character. Asked for its own load a worker has no answer, so that a router counts what it sent."""

    def __init__(self, count: int) -> None:
        self.ports = [free_port() for _ in range(count)]
        self.urls = [f"http://{HOST}:{port}" for port in self.ports]
        self._arrived: asyncio.Queue[Held] = asyncio.Queue()
        self._talks: set[asyncio.Task[None]] = set()

    async def arrival(self) -> Held:
        """The next request that comes to any of them."""
        try:
            return await asyncio.wait_for(self._arrived.get(), ARRIVES_WITHIN_S)
        except TimeoutError:
            raise BenchmarkError("the router sent a request to none of its workers") from None

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        servers = []
        try:
            for number, port in enumerate(self.ports):
                servers.append(await asyncio.start_server(self._talker(number), HOST, port))
            yield
        finally:
            for server in servers:
                server.close()
            for talk in self._talks:
                talk.cancel()
            await asyncio.gather(*self._talks, return_exceptions=True)

    def _talker(self, number: int) -> Callable[..., None]:
        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(talk(reader, writer))
            self._talks.add(task)
            task.add_done_callback(self._talks.discard)

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    first, asked = await read_message(reader)
                    status, body = b"200 OK", ABOUT
                    if first.startswith(ASKED):
                        held = Held(number, asyncio.Event())
                        self._arrived.put_nowait(held)
                        await held.answer.wait()
                        body = ANSWER
                    elif first.startswith(b"POST /tokenize "):
                        body = tokenized(asked)
                    elif first.startswith(b"POST") or b"load" in first:
                        status, body = b"404 Not Found", b"{}"
                    writer.write(
                        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n"
                        b"content-length: %d\r\n\r\n%b" % (status, len(body), body)
                    )
                    await writer.drain()
            writer.close()

        return begin


def tokenized(asked: bytes) -> bytes:
    """What vLLM's /tokenize says of a prompt or a chat."""
    fields = msgspec.json.decode(asked)
    text = fields.get("prompt") or "".join(one["content"] for one in fields.get("messages", ()))
    tokens = [ord(character) for character in text]
    return msgspec.json.encode({"count": len(tokens), "max_model_len": 1 << 20, "tokens": tokens})


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """A request or a reply with a length: its first line and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    length = 0
    for line in lines:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    return first, await reader.readexactly(length)


async def ask(
    port: int, prompt: str, headers: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a chat of one message to the router, and doesn't wait for the answer."""
    messages = [{"role": "user", "content": prompt}]
    body = msgspec.json.encode({"model": MODEL, "messages": messages, "max_tokens": 1})
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
        b"%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body)
    )
    await writer.drain()
    return reader, writer
