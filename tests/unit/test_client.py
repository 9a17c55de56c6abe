"""The pooled client against real sockets, most of them misbehaving on purpose."""

import asyncio
import contextlib
import gc
import os
import random
import socket
import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from certificate import make_certificate
from preheat.errors import EngineError
from preheat.transport.client import Client, Response, Timeouts
from preheat.transport.exchange import Exchange
from preheat.transport.pool import Pool

pytestmark = pytest.mark.timeout(30)

MIB = 1024 * 1024
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Script = Callable[["Engine", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """What a test can know about the server it started."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        self.requests: list[tuple[bytes, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def read_request(self, reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_length_of(head))
        self.requests.append((head, body))
        return head, body


def _length_of(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name == b"Content-Length":
            return int(value)
    return 0


@contextlib.asynccontextmanager
async def serve(script: Script, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Engine]:
    """Run a script for each connection, and end all of them with the block."""
    engine = Engine()
    tasks: set[asyncio.Task[None]] = set()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        engine.connections += 1
        try:
            # Cancelled is how all end; asyncio's streams would log it.
            with contextlib.suppress(
                ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
            ):
                await script(engine, reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=tls)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def client_of(
    engine: Engine,
    *,
    timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    max_connections: int = 8,
) -> AsyncIterator[Client]:
    client = Client(engine.url, timeouts=timeouts, max_connections=max_connections)
    try:
        yield client
    finally:
        await client.aclose()


def answering(answer: bytes, *, then_close: bool = False) -> Script:
    """Answer every request of a connection with the same bytes."""

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            await engine.read_request(reader)
            writer.write(answer)
            if then_close:
                return

    return script


@pytest.fixture(autouse=True)
def _errors_of_callbacks_fail_the_test(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record for record in caplog.get_records("call") if record.name == "asyncio"] == []


async def silent(engine: Engine, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Read requests, answer none."""
    while True:
        await engine.read_request(reader)


async def post(client: Client, body: bytes = b"{}") -> Response:
    return await client.request(b"POST", b"/v1/x", [(b"Content-Type", b"application/json")], body)


async def get(client: Client) -> Response:
    return await client.request(b"GET", b"/", [], b"")


async def fetch(client: Client) -> tuple[int, bytes]:
    response = await get(client)
    return response.status, await response.read(MIB)


async def failure_of(client: Client) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await fetch(client)
    return caught.value


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.005)


# What is sent.


@pytest.mark.asyncio
async def test_a_request_carries_its_line_host_headers_length_and_body() -> None:
    async with serve(answering(OK)) as engine, client_of(engine) as client:
        response = await client.request(b"POST", b"/v1/x?a=b", [(b"Accept", b"*/*")], b"hello")
        assert await response.read(10) == b"ok"
    assert engine.requests == [
        (
            b"POST /v1/x?a=b HTTP/1.1\r\n"
            b"Host: 127.0.0.1:%d\r\nAccept: */*\r\nContent-Length: 5\r\n\r\n" % engine.port,
            b"hello",
        )
    ]


@pytest.mark.asyncio
async def test_a_host_header_given_by_the_caller_replaces_the_clients() -> None:
    async with serve(answering(OK)) as engine, client_of(engine) as client:
        await client.request(b"GET", b"/", [(b"host", b"example.org")], b"")
    head, _ = engine.requests[0]
    assert head == b"GET / HTTP/1.1\r\nhost: example.org\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("url", "host", "port", "base_path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, b""),
        ("http://engine/", "engine", 80, b""),
        ("http://[::1]:81/llm/", "::1", 81, b"/llm"),
        ("https://api.example.org/v1beta/openai", "api.example.org", 443, b"/v1beta/openai"),
    ],
)
def test_a_url_gives_host_port_and_base_path(
    url: str, host: str, port: int, base_path: bytes
) -> None:
    client = Client(url)
    assert (client.host, client.port, client.base_path) == (host, port, base_path)


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:80", "http://", "http://x:y", "http://me:hush@x", "http://x/?q=1"]
)
def test_a_url_that_names_no_origin_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(ValueError, match=r"url|[Pp]ort") as caught:
        Client(url)
    assert "hush" not in str(caught.value)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        (b"GET /x\r\nA:", b"/", []),
        (b"", b"/", []),
        (b"GET", b"/ HTTP/1.1\r\nA: b", []),
        (b"GET", b"/a b", []),
        (b"GET", b" /", []),
        (b"GET", b"/\0", []),
        (b"GET", b"", []),
        (b"GET", b"/", [(b"a\r\nb", b"c")]),
        (b"GET", b"/", [(b"a ", b"c")]),
        (b"GET", b"/", [(b"", b"c")]),
        (b"GET", b"/", [(b"a", b"c\r\nd: e")]),
        (b"GET", b"/", [(b"a", b"c\rd")]),
        (b"GET", b"/", [(b"a", b"c\nd")]),
        (b"GET", b"/", [(b"a", b"c\0d")]),
        (b"GET", b"/", [(b"Content-Length", b"3")]),
        (b"GET", b"/", [(b"Transfer-Encoding", b"chunked")]),
    ],
)
async def test_a_request_that_could_be_read_as_another_is_refused(
    method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    async with serve(answering(OK)) as engine, client_of(engine) as client:
        with pytest.raises(ValueError, match=r"token|target|header|frames"):
            await client.request(method, target, headers, b"")
    assert engine.connections == 0


@pytest.mark.asyncio
async def test_connections_send_without_delay() -> None:
    async with serve(answering(OK)) as engine, client_of(engine) as client:
        await fetch(client)
        assert _no_delay_flags(engine.port) == [True]


def _no_delay_flags(port: int) -> list[bool]:
    """Look at all sockets of this process that are connected to that port."""
    fds = Path("/proc/self/fd")
    if not fds.is_dir():
        pytest.skip("needs /proc/self/fd to find the client's socket")
    flags = [_no_delay(int(fd.name), port) for fd in fds.iterdir()]
    return [flag for flag in flags if flag is not None]


def _no_delay(fd: int, port: int) -> bool | None:
    """Tell whether a descriptor's socket sends at once, if it is connected to that port."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.getpeername()[1] != port:
                return None
            return bool(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    except (OSError, IndexError):
        return None


# What is received.


@pytest.mark.asyncio
async def test_a_body_with_a_length_is_read_to_its_end() -> None:
    async with serve(answering(OK)) as engine, client_of(engine) as client:
        response = await get(client)
        assert response.status == 200
        assert response.headers == [(b"content-length", b"2")]
        assert [piece async for piece in response] == [b"ok"]
        assert [piece async for piece in response] == []


@pytest.mark.asyncio
async def test_an_empty_body_has_no_pieces() -> None:
    empty = b"HTTP/1.1 200 OK\r\nX-A:  b \r\nContent-Length: 0\r\n\r\n"
    async with serve(answering(empty)) as engine, client_of(engine) as client:
        response = await get(client)
        assert response.headers == [(b"x-a", b"b"), (b"content-length", b"0")]
        assert [piece async for piece in response] == []


@pytest.mark.asyncio
async def test_a_chunked_response_may_come_byte_by_byte() -> None:
    answer = CHUNKED + b"5;ext=1\r\nhello\r\n1\r\n,\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n"

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            await engine.read_request(reader)
            for position in range(len(answer)):
                writer.write(answer[position : position + 1])
                await asyncio.sleep(0.001)

    async with serve(script) as engine, client_of(engine) as client:
        assert await fetch(client) == (200, b"hello, world")
        assert await fetch(client) == (200, b"hello, world")
    assert engine.connections == 1


@pytest.mark.asyncio
async def test_pieces_are_passed_on_as_they_arrive() -> None:
    got_one = asyncio.Event()

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(CHUNKED)
        for number in range(3):
            writer.write(b"1\r\n%d\r\n" % number)
            await got_one.wait()  # the next comes only when this one was seen
            got_one.clear()
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async with serve(script) as engine, client_of(engine) as client:
        pieces = []
        async for piece in await get(client):
            pieces.append(piece)
            got_one.set()
    assert pieces == [b"0", b"1", b"2"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
    ],
)
async def test_a_body_without_a_length_ends_with_the_connection(head: bytes) -> None:
    async with (
        serve(answering(head + b"until the end", then_close=True)) as engine,
        client_of(engine) as client,
    ):
        assert await fetch(client) == (200, b"until the end")
        assert await fetch(client) == (200, b"until the end")
    assert engine.connections == 2


@pytest.mark.asyncio
async def test_a_body_without_a_length_that_ends_in_a_reset_is_not_complete() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\npart")
        await asyncio.sleep(0.05)
        _reset(writer)

    async with serve(script) as engine, client_of(engine) as client:
        assert (await failure_of(client)).kind == "reset"


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the other side gets an RST."""
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "answer"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"),
    ],
)
async def test_responses_without_a_body_end_with_their_head(method: bytes, answer: bytes) -> None:
    async with serve(answering(answer)) as engine, client_of(engine) as client:
        for _ in range(3):
            response = await client.request(method, b"/", [], b"")
            assert await response.read(10) == b""
    assert engine.connections == 1


@pytest.mark.asyncio
async def test_interim_responses_are_skipped() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with serve(answering(interim + OK)) as engine, client_of(engine) as client:
        for _ in range(2):
            response = await get(client)
            assert response.status == 200
            assert response.headers == [(b"content-length", b"2")]
            assert await response.read(10) == b"ok"
    assert engine.connections == 1


@pytest.mark.asyncio
async def test_trailers_reach_neither_this_responses_headers_nor_the_nexts() -> None:
    answer = CHUNKED + b"2\r\nok\r\n0\r\nX-Sum: 1\r\nX-Other: 2\r\n\r\n"
    async with serve(answering(answer)) as engine, client_of(engine) as client:
        for _ in range(2):
            response = await get(client)
            assert await response.read(10) == b"ok"
            assert response.headers == [(b"transfer-encoding", b"chunked")]
    assert engine.connections == 1


@pytest.mark.asyncio
async def test_a_body_up_to_the_limit_is_read_and_a_longer_one_is_too_large() -> None:
    async with serve(answering(OK)) as engine, client_of(engine) as client:
        assert await (await get(client)).read(2) == b"ok"
        with pytest.raises(EngineError, match="more than 1 bytes") as caught:
            await (await get(client)).read(1)
    assert caught.value.kind == "too-large"
    assert not caught.value.before_first_byte


@pytest.mark.asyncio
async def test_a_body_that_turns_out_too_large_is_not_read_on() -> None:
    is_left = asyncio.Event()

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(CHUNKED)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"400\r\n%b\r\n" % bytes(1024))
                await writer.drain()
        is_left.set()

    async with serve(script) as engine, client_of(engine) as client:
        error = await failure_of(client)
        assert error.kind == "too-large"
        await asyncio.wait_for(is_left.wait(), 5)


@pytest.mark.asyncio
async def test_a_reader_that_is_slow_slows_the_engine() -> None:
    size_bytes = 64 * MIB
    sent_bytes = 0

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal sent_bytes
        await engine.read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size_bytes)
        piece = bytes(256 * 1024)
        for _ in range(size_bytes // len(piece)):
            writer.write(piece)
            await writer.drain()
            sent_bytes += len(piece)
        await reader.read()

    async with serve(script) as engine, client_of(engine) as client:
        response = await get(client)
        before = -1
        while sent_bytes != before:  # until the engine makes no headway
            before = sent_bytes
            await asyncio.sleep(0.2)
        assert sent_bytes < size_bytes // 2
        pieces = [len(piece) async for piece in response]
    assert sum(pieces) == size_bytes
    assert max(pieces) <= MIB


@pytest.mark.asyncio
async def test_a_connection_whose_reading_was_paused_is_good_for_another_request() -> None:
    body = bytes(600 * 1024)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with serve(answering(answer)) as engine, client_of(engine) as client:
        for _ in range(3):
            response = await get(client)
            await asyncio.sleep(0.05)
            assert await response.read(MIB) == body
    assert engine.connections == 1


@pytest.mark.asyncio
async def test_two_tasks_cannot_read_one_response() -> None:
    async with serve(answering(CHUNKED)) as engine, client_of(engine) as client:
        response = await get(client)
        first = asyncio.ensure_future(anext(response))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks"):
            await anext(response)
        first.cancel()


# A sink, which is offered what comes while the reader waits.


class Drip:
    """Sends a piece whenever it is told to."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.is_left = asyncio.Event()

    async def script(
        self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(CHUNKED)
        while piece := await self.pieces.get():
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        await reader.read()
        self.is_left.set()


@pytest.mark.asyncio
async def test_what_a_sink_takes_the_reader_does_not_see() -> None:
    drip, taken = Drip(), []

    def sink(piece: bytes) -> bool:
        drip.pieces.put_nowait(said.pop(0))
        if piece in b"aeiou":
            taken.append(piece)
        return piece in b"aeiou"

    said = [b"c", b"e", b"i", b"d", b"u", b""]
    async with serve(drip.script) as engine, client_of(engine) as client:
        response = await get(client)
        response.hand_to(sink)
        drip.pieces.put_nowait(b"a")
        assert [piece async for piece in response] == [b"c", b"d"]
        assert (taken, said) == ([b"a", b"e", b"i", b"u"], [])
        assert client.in_flight == 0


@pytest.mark.asyncio
async def test_a_sink_is_offered_nothing_while_the_reader_is_busy() -> None:
    drip, offered = Drip(), []
    async with serve(drip.script) as engine, client_of(engine) as client:
        response = await get(client)
        response.hand_to(lambda piece: offered.append(piece) or True)
        drip.pieces.put_nowait(b"early")
        await until(lambda: response._exchange.pieces)
        drip.pieces.put_nowait(b" and next")
        await until(lambda: response._exchange.buffered_bytes == 14)
        assert b"".join([await anext(response)]) == b"early and next"
        waiting = asyncio.ensure_future(anext(response, b"the end"))
        await asyncio.sleep(0)
        drip.pieces.put_nowait(b"late")
        await until(lambda: offered)
        drip.pieces.put_nowait(b"")
        assert await waiting == b"the end"
    assert offered == [b"late"]


@pytest.mark.asyncio
async def test_what_follows_a_piece_that_the_sink_refused_stays_behind_it() -> None:
    is_waiting = asyncio.Event()

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(CHUNKED)
        await is_waiting.wait()
        writer.write(b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n")
        await reader.read()

    taken: list[bytes] = []
    async with serve(script) as engine, client_of(engine) as client:
        response = await get(client)
        response.hand_to(lambda piece: piece != b"b" and not taken.append(piece))
        is_waiting.set()
        assert [piece async for piece in response] == [b"bc"]
    assert taken == [b"a"]


@pytest.mark.asyncio
async def test_what_a_sink_takes_puts_off_the_deadline_by_idle_s() -> None:
    drip = Drip()
    timeouts = Timeouts(idle_s=0.3)
    async with serve(drip.script) as engine, client_of(engine, timeouts=timeouts) as client:
        response = await get(client)
        response.hand_to(lambda _: True)
        waiting = asyncio.ensure_future(anext(response))
        for _ in range(8):
            await asyncio.sleep(0.1)
            drip.pieces.put_nowait(b"more")
        assert not waiting.done()
        with pytest.raises(EngineError) as caught:
            await waiting
        assert caught.value.kind == "timeout-idle"
        drip.pieces.put_nowait(b"")
        await asyncio.wait_for(drip.is_left.wait(), 5)


@pytest.mark.asyncio
async def test_what_a_sink_raises_the_reader_meets() -> None:
    drip = Drip()

    def sink(_: bytes) -> bool:
        raise ArithmeticError("a bug")

    async with serve(drip.script) as engine, client_of(engine) as client:
        response = await get(client)
        response.hand_to(sink)
        drip.pieces.put_nowait(b"a")
        with pytest.raises(ArithmeticError, match="a bug"):
            await anext(response)
        assert client.in_flight == 0
        drip.pieces.put_nowait(b"")
        await asyncio.wait_for(drip.is_left.wait(), 5)


# When the engine fails.


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart",
        CHUNKED + b"4\r\npart\r\n",
        CHUNKED + b"9\r\npart",
        b"HTTP/1.1 200 OK\r\nContent-Le",
    ],
)
async def test_a_response_cut_short_is_a_reset(answer: bytes) -> None:
    async with serve(answering(answer, then_close=True)) as engine, client_of(engine) as client:
        error = await failure_of(client)
    assert error.kind == "reset"
    assert not error.before_first_byte
    assert f"127.0.0.1:{engine.port}" in str(error)


@pytest.mark.asyncio
async def test_what_arrived_before_the_end_is_delivered_before_the_error() -> None:
    answer = CHUNKED + b"4\r\npart\r\n"
    async with serve(answering(answer, then_close=True)) as engine, client_of(engine) as client:
        response = await get(client)
        await asyncio.sleep(0.05)
        assert await anext(response) == b"part"
        for _ in range(2):
            with pytest.raises(EngineError, match="closed the connection"):
                await anext(response)
            response.close()


@pytest.mark.asyncio
async def test_a_fresh_connection_that_ends_without_an_answer_is_not_tried_again() -> None:
    async with serve(answering(b"", then_close=True)) as engine, client_of(engine) as client:
        error = await failure_of(client)
    assert error.kind == "reset"
    assert error.before_first_byte
    assert engine.connections == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 099 Odd\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"fffffffffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * (300 * 1024) + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 60_000 + b"Content-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * MIB,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
        CHUNKED + b"2\r\nok\r\n0\r\nA: " + b"x" * MIB,
        CHUNKED + b"2;" + b"x" * MIB,
    ],
    ids=lambda answer: str(answer[:60]),
)
async def test_what_is_not_http_is_a_protocol_error(answer: bytes) -> None:
    async with serve(answering(answer)) as engine, client_of(engine) as client:
        error = await failure_of(client)
    assert error.kind == "protocol"
    assert not error.before_first_byte
    assert f"127.0.0.1:{engine.port}" in str(error)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 101 Switching\r\n\r\n", "unexpected status 101"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 60_000 + b"\r\n", "256 KiB"),
        (b"SSH-2.0\r\n", "Expected HTTP/"),
    ],
    ids=["101", "large", "ssh"],
)
async def test_a_protocol_error_names_the_reason(answer: bytes, reason: str) -> None:
    async with serve(answering(answer)) as engine, client_of(engine) as client:
        assert reason in str(await failure_of(client))


@pytest.mark.asyncio
async def test_a_large_head_below_the_limit_is_fine() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        for part in (
            CHUNKED[:-2] + b"A: " + b"x" * (250 * 1024) + b"\r\n\r\n",
            b"2;" + b"x" * (50 * 1024) + b"\r\n",
            b"ok\r\n0\r\n\r\n",
        ):
            writer.write(part)
            await asyncio.sleep(0.02)
        await reader.read()

    async with serve(script) as engine, client_of(engine) as client:
        assert await fetch(client) == (200, b"ok")


@pytest.mark.asyncio
async def test_a_server_that_speaks_first_is_a_protocol_error() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert engine.port
        writer.write(b"220 mail ready\r\n")
        await reader.read()

    async with serve(script) as engine, client_of(engine) as client:
        assert (await failure_of(client)).kind == "protocol"


@pytest.mark.asyncio
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_response_without_a_head_times_out(answer: bytes) -> None:
    timeouts = Timeouts(first_byte_s=0.1)
    async with serve(answering(answer)) as engine, client_of(engine, timeouts=timeouts) as client:
        error = await failure_of(client)
    assert error.kind == "timeout-first-byte"
    assert error.before_first_byte is (answer == b"")
    assert "first_byte_s" in str(error)


@pytest.mark.asyncio
async def test_a_body_that_stops_coming_times_out() -> None:
    timeouts = Timeouts(idle_s=0.1)
    answer = CHUNKED + b"4\r\npart\r\n"
    async with serve(answering(answer)) as engine, client_of(engine, timeouts=timeouts) as client:
        response = await get(client)
        assert await anext(response) == b"part"
        with pytest.raises(EngineError, match="idle_s") as caught:
            await anext(response)
    assert caught.value.kind == "timeout-idle"
    assert not caught.value.before_first_byte


@pytest.mark.asyncio
async def test_a_body_that_drips_is_not_idle() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(CHUNKED)
        for _ in range(12):
            await asyncio.sleep(0.05)
            writer.write(b"1\r\n.\r\n")
        writer.write(b"0\r\n\r\n")
        await reader.read()

    timeouts = Timeouts(idle_s=0.4)
    async with serve(script) as engine, client_of(engine, timeouts=timeouts) as client:
        assert await fetch(client) == (200, b"." * 12)


@pytest.mark.asyncio
async def test_a_reader_that_takes_its_time_is_not_an_idle_engine() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(CHUNKED)
        await asyncio.sleep(0.2)
        writer.write(b"2\r\nok\r\n0\r\n\r\n")
        await reader.read()

    timeouts = Timeouts(idle_s=0.1, first_byte_s=0.1)
    async with serve(script) as engine, client_of(engine, timeouts=timeouts) as client:
        response = await get(client)
        await asyncio.sleep(0.15)
        assert await response.read(10) == b"ok"


@pytest.mark.asyncio
async def test_a_refused_port_is_a_connect_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: nobody else can take it
        port = unused.getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", max_connections=1)
        for _ in range(2):  # twice on one slot: the first attempt gave it back
            error = await failure_of(client)
            assert error.kind == "connect"
            assert error.before_first_byte
            assert f"127.0.0.1:{port}" in str(error)


@pytest.mark.asyncio
async def test_each_wait_has_a_deadline_of_its_own() -> None:
    """Also where the timer of an earlier request still runs."""
    timeouts = Timeouts(first_byte_s=0.3, idle_s=0.3)
    stops = False

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            await engine.read_request(reader)
            if not stops:
                writer.write(OK)

    async with serve(script) as engine, client_of(engine, timeouts=timeouts) as client:
        await fetch(client)
        await asyncio.sleep(0.2)
        stops = True
        asked_at = asyncio.get_running_loop().time()
        assert (await failure_of(client)).kind == "timeout-first-byte"
        assert 0.29 < asyncio.get_running_loop().time() - asked_at < 0.6
    assert engine.connections == 1


@pytest.mark.asyncio
async def test_an_unknown_host_is_a_connect_error() -> None:
    client = Client("http://" + "a" * 64 + ".invalid:1")  # no label has more than 63 bytes
    assert (await failure_of(client)).kind == "connect"


@pytest.mark.asyncio
async def test_no_message_tells_what_was_asked() -> None:
    timeouts = Timeouts(first_byte_s=0.05)
    for script in (silent, answering(b"hush"), answering(b"", then_close=True)):
        async with serve(script) as engine, client_of(engine, timeouts=timeouts) as client:
            with pytest.raises(EngineError) as caught:
                await client.request(b"POST", b"/hush", [(b"a", b"hush")], b"hush")
        assert "hush" not in str(caught.value)


# Who leaves, and what is left.


@contextlib.asynccontextmanager
async def one_watched_connection(
    answer: bytes,
) -> AsyncIterator[tuple[Client, asyncio.Event, asyncio.Event]]:
    """Yield a client of one slot, an event "asked" and an event "the engine saw it leave"."""
    asked = asyncio.Event()
    left = asyncio.Event()

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(answer if engine.connections == 1 else OK)
        asked.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    timeouts = Timeouts(queue_s=5)
    async with (
        serve(script) as engine,
        client_of(engine, timeouts=timeouts, max_connections=1) as client,
    ):
        yield client, asked, left


@pytest.mark.asyncio
async def test_a_cancelled_request_closes_its_connection_and_frees_its_slot() -> None:
    async with one_watched_connection(b"") as (client, asked, left):
        request = asyncio.ensure_future(get(client))
        await asked.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.wait_for(left.wait(), 5)
        assert await fetch(client) == (200, b"ok")


@pytest.mark.asyncio
async def test_a_cancelled_reader_closes_its_connection_and_frees_its_slot() -> None:
    async with one_watched_connection(CHUNKED + b"4\r\npart\r\n") as (client, _, left):
        response = await get(client)
        reader = asyncio.ensure_future(response.read(MIB))
        await asyncio.sleep(0.05)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await asyncio.wait_for(left.wait(), 5)
        assert await fetch(client) == (200, b"ok")
        with pytest.raises(EngineError, match="given up"):
            await anext(response)


@pytest.mark.asyncio
async def test_a_response_given_up_closes_its_connection_and_frees_its_slot() -> None:
    async with one_watched_connection(CHUNKED + b"4\r\npart\r\n") as (client, _, left):
        response = await get(client)
        await asyncio.sleep(0.02)
        response.close()
        response.close()
        with pytest.raises(EngineError, match="given up"):
            await anext(response)
        await asyncio.wait_for(left.wait(), 5)
        assert await fetch(client) == (200, b"ok")


@pytest.mark.asyncio
async def test_a_response_closed_after_its_end_leaves_its_connection_in_the_pool() -> None:
    async with serve(answering(OK)) as engine, client_of(engine) as client:
        for _ in range(3):
            response = await get(client)
            await response.read(10)
            response.close()
    assert engine.connections == 1


@pytest.mark.asyncio
async def test_a_request_cancelled_while_connecting_frees_its_slot() -> None:
    async with one_watched_connection(OK) as (client, _, _):
        request = asyncio.ensure_future(get(client))
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await fetch(client) == (200, b"ok")


# The pool.


@pytest.mark.asyncio
async def test_a_connection_is_used_again() -> None:
    async with serve(answering(OK)) as engine, client_of(engine) as client:
        for _ in range(5):
            assert await fetch(client) == (200, b"ok")
    assert engine.connections == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n",
    ],
)
async def test_a_connection_that_the_engine_ends_is_not_used_again(head: bytes) -> None:
    # The server leaves it open: the client must not count on that.
    async with serve(answering(head + b"ok")) as engine, client_of(engine) as client:
        for _ in range(2):
            assert await fetch(client) == (200, b"ok")
    assert engine.connections == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("extra", [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", b"H", b"?"])
async def test_a_connection_with_bytes_after_the_responses_end_is_closed(
    *, is_late: bool, extra: bytes
) -> None:
    left = asyncio.Event()

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(OK if is_late else OK + extra)
        if is_late:
            await asyncio.sleep(0.05)
            writer.write(extra)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    async with serve(script) as engine, client_of(engine) as client:
        assert await fetch(client) == (200, b"ok")
        await asyncio.wait_for(left.wait(), 2)  # less than an idle connection is kept
        assert await fetch(client) == (200, b"ok")
    assert engine.connections == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("answer", [OK, CHUNKED + b"2\r\nok\r\n0\r\n\r\n", CHUNKED + b"zz\r\n"])
async def test_a_body_that_follows_the_answer_to_head_closes_the_connection(answer: bytes) -> None:
    async with serve(answering(answer)) as engine, client_of(engine) as client:
        for _ in range(2):
            response = await client.request(b"HEAD", b"/", [], b"")
            assert await response.read(10) == b""
    assert engine.connections == 2


@pytest.mark.asyncio
async def test_a_reused_connection_that_had_been_closed_is_replaced_once_and_silently() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(OK)
        await engine.read_request(reader)  # closed in the moment of being used again

    async with (
        serve(script) as engine,
        client_of(engine, max_connections=1) as client,
    ):
        for _ in range(3):
            response = await post(client, b"body")
            assert (response.status, await response.read(10)) == (200, b"ok")
    assert engine.connections == 3
    assert [body for _, body in engine.requests] == [b"body"] * 5


@pytest.mark.asyncio
async def test_the_silent_retry_is_not_repeated() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        if engine.connections == 1:
            writer.write(OK)
            await engine.read_request(reader)

    async with serve(script) as engine, client_of(engine) as client:
        assert await fetch(client) == (200, b"ok")
        error = await failure_of(client)
    assert error.kind == "reset"
    assert error.before_first_byte
    assert len(engine.requests) == 3


@pytest.mark.asyncio
async def test_a_reused_connection_that_ends_after_one_byte_is_not_tried_again() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await engine.read_request(reader)
        writer.write(OK)
        await engine.read_request(reader)
        writer.write(b"H")

    async with serve(script) as engine, client_of(engine) as client:
        assert await fetch(client) == (200, b"ok")
        error = await failure_of(client)
    assert error.kind == "reset"
    assert not error.before_first_byte
    assert len(engine.requests) == 2


@pytest.mark.asyncio
async def test_a_connection_closed_while_idle_is_not_used_again() -> None:
    async with serve(answering(OK, then_close=True)) as engine, client_of(engine) as client:
        for _ in range(3):
            assert await fetch(client) == (200, b"ok")
            await asyncio.sleep(0.02)
    assert len(engine.requests) == 3


@pytest.mark.asyncio
async def test_idle_connections_are_closed_before_uvicorn_would() -> None:
    idle_s: list[float] = []
    loop = asyncio.get_running_loop()

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await asyncio.sleep(0.1 * engine.connections)  # so that they become idle one by one
        await engine.read_request(reader)
        writer.write(OK)
        answered_at = loop.time()
        await reader.read()
        idle_s.append(loop.time() - answered_at)

    async with serve(script) as engine, client_of(engine) as client:
        await asyncio.gather(*(fetch(client) for _ in range(3)))
        await until(lambda: len(idle_s) == 3)
        assert all(3.9 < seconds < 4.9 for seconds in idle_s)
        assert await fetch(client) == (200, b"ok")
    assert engine.connections == 4


@pytest.mark.asyncio
async def test_the_connection_used_last_is_used_first() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        number = engine.connections
        while True:
            _, body = await engine.read_request(reader)
            await asyncio.sleep(float(body))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)

    async def ask(client: Client, delay_s: str) -> bytes:
        return await (await post(client, delay_s.encode())).read(10)

    async with serve(script) as engine, client_of(engine) as client:
        together = await asyncio.gather(*(ask(client, s) for s in ("0", "0.2", "0.1")))
        assert sorted(together) == [b"1", b"2", b"3"]
        assert [await ask(client, "0") for _ in range(3)] == [together[1]] * 3


@pytest.mark.asyncio
async def test_two_hundred_requests_share_four_connections() -> None:
    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            _, body = await engine.read_request(reader)
            await asyncio.sleep(0.001)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def ask(client: Client, number: int) -> bytes:
        return await (await post(client, b"%d" % number)).read(10)

    async with serve(script) as engine, client_of(engine, max_connections=4) as client:
        answers = await asyncio.gather(*(ask(client, number) for number in range(200)))
    assert answers == [b"%d" % number for number in range(200)]
    assert engine.connections == 4


@pytest.mark.asyncio
async def test_requests_queue_in_the_order_they_came() -> None:
    async with serve(answering(OK)) as engine, client_of(engine, max_connections=1) as client:
        await asyncio.gather(*(_read(client, b"%d" % number) for number in range(20)))
    assert [body for _, body in engine.requests] == [b"%d" % number for number in range(20)]


async def _read(client: Client, body: bytes) -> bytes:
    return await (await post(client, body)).read(10)


@pytest.mark.asyncio
async def test_a_request_that_finds_no_free_connection_in_time_fails() -> None:
    timeouts = Timeouts(queue_s=0.05)
    async with (
        serve(answering(CHUNKED)) as engine,
        client_of(engine, timeouts=timeouts, max_connections=2) as client,
    ):
        held = [await get(client), await get(client)]
        error = await failure_of(client)
        assert error.kind == "queue"
        assert error.before_first_byte
        assert "max_connections" in str(error)
        held[0].close()
        assert (await get(client)).status == 200


@pytest.mark.asyncio
async def test_requests_that_gave_up_queueing_leave_nothing_behind() -> None:
    timeouts = Timeouts(queue_s=0.01)
    async with (
        serve(answering(CHUNKED)) as engine,
        client_of(engine, timeouts=timeouts, max_connections=1) as client,
    ):
        await get(client)
        await asyncio.gather(*(failure_of(client) for _ in range(200)))
        await asyncio.sleep(0)  # the loop lets go of what it just ran
        gc.collect()
        futures = sum(isinstance(one, asyncio.Future) for one in gc.get_objects())
        assert futures < 50


@pytest.mark.asyncio
async def test_waiters_that_leave_take_no_slot_with_them() -> None:
    async with (
        serve(answering(CHUNKED)) as engine,
        client_of(engine, timeouts=Timeouts(queue_s=5), max_connections=1) as client,
    ):
        for leave_first in (True, False):
            held = await get(client)
            waiting = [asyncio.ensure_future(get(client)) for _ in range(3)]
            await asyncio.sleep(0)
            if leave_first:
                waiting[0].cancel()
                held.close()
            else:  # the slot has been handed over when its taker leaves
                held.close()
                waiting[0].cancel()
            waiting[1].cancel()
            (await asyncio.wait_for(waiting[2], 5)).close()
            await asyncio.gather(*waiting[:2], return_exceptions=True)


@pytest.mark.asyncio
async def test_a_closed_client_fails_what_is_under_way_and_what_comes_later() -> None:
    async with serve(answering(CHUNKED)) as engine:
        client = Client(engine.url, max_connections=1)
        response = await get(client)
        reading = asyncio.ensure_future(response.read(10))
        queueing = asyncio.ensure_future(get(client))
        await asyncio.sleep(0.02)
        await client.aclose()
        await client.aclose()
        with pytest.raises(EngineError, match="shutting down"):
            await reading
        with pytest.raises(EngineError, match="shutting down"):
            await queueing
        assert (await failure_of(client)).kind == "connect"
    assert engine.connections == 1


@pytest.mark.asyncio
async def test_connections_that_ended_are_not_remembered() -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\nok"
    async with (
        serve(answering(answer, then_close=True)) as engine,
        client_of(engine) as client,
    ):
        for _ in range(20):
            await fetch(client)
        await asyncio.sleep(0.01)
        assert _kinds_left().count("_Connection") <= 1


def _kinds_left() -> list[str]:
    """Name the kind of each object of the client's modules that is still alive."""
    gc.collect()
    modules = {one.__module__ for one in (Client, Exchange, Pool)}
    kinds = (type(one) for one in gc.get_objects())
    return [kind.__name__ for kind in kinds if kind.__module__ in modules]


@pytest.mark.asyncio
async def test_nothing_is_left_of_a_closed_client() -> None:
    async with serve(answering(OK)) as engine:
        client = Client(engine.url)
        await asyncio.gather(*(fetch(client) for _ in range(4)))
        asked_at = asyncio.get_running_loop().time()
        await client.aclose()
        assert asyncio.get_running_loop().time() - asked_at < 0.5
    del client, engine
    assert _kinds_left() == []


@pytest.mark.asyncio
async def test_a_client_closed_while_connecting_connects_to_nothing() -> None:
    async with serve(silent) as engine:
        client = Client(engine.url)
        request = asyncio.ensure_future(get(client))
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(EngineError, match="shutting down") as caught:
            await request
        assert caught.value.kind == "connect"


@pytest.mark.asyncio
async def test_a_response_that_has_arrived_holds_no_slot_though_unread() -> None:
    async with serve(answering(OK)) as engine, client_of(engine, max_connections=1) as client:
        first = await get(client)
        second = await get(client)
        assert await first.read(10) == await second.read(10) == b"ok"
    assert engine.connections == 1


@pytest.mark.asyncio
async def test_no_slot_is_lost_however_requests_end() -> None:
    chance = random.Random(7)

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            _, body = await engine.read_request(reader)
            writer.write(CHUNKED)
            for part in (b"2\r\nok\r\n", b"0\r\n\r\n"):
                await asyncio.sleep(chance.random() * 0.004)
                if body == b"cut" or writer.is_closing():
                    return
                if body != b"hold":
                    writer.write(part)

    timeouts = Timeouts(queue_s=0.5, first_byte_s=5)
    async with (
        serve(script) as engine,
        client_of(engine, timeouts=timeouts, max_connections=4) as client,
    ):
        tasks = []
        for _ in range(400):
            body = chance.choice([b"whole", b"cut", b"give up", b"cancel"])
            tasks.append(asyncio.ensure_future(_post_and_end(client, body)))
            if body == b"cancel":
                asyncio.get_running_loop().call_later(chance.random() * 0.1, tasks[-1].cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(4):
            assert (await post(client, b"hold")).status == 200
        assert (await failure_of(client)).kind == "queue"


async def _post_and_end(client: Client, body: bytes) -> None:
    with contextlib.closing(await post(client, body)) as response:
        if body != b"give up":
            await response.read(10)


# Large requests.


@pytest.mark.asyncio
async def test_a_large_body_arrives_whole() -> None:
    body = os.urandom(MIB) * 32
    async with serve(answering(OK)) as engine, client_of(engine) as client:
        for _ in range(2):
            response = await post(client, body)
            assert await response.read(10) == b"ok"
    assert engine.connections == 1
    assert all(received == body for _, received in engine.requests)


@pytest.mark.asyncio
async def test_a_large_body_is_not_copied_into_a_buffer_when_the_engine_is_slow() -> None:
    body = bytes(32 * MIB)

    async def script(_: Engine, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # streams can't be told
        await asyncio.sleep(60)

    timeouts = Timeouts(first_byte_s=0.5)
    async with serve(script) as engine, client_of(engine, timeouts=timeouts) as client:
        tracemalloc.start()
        try:
            error = await failure_of_large(client, body)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert error.kind == "timeout-first-byte"
    assert peak_bytes < 4 * MIB


async def failure_of_large(client: Client, body: bytes) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await post(client, body)
    return caught.value


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", ["open", "half-closed", "closed"])
async def test_an_answer_that_comes_before_the_body_is_sent_is_delivered(ends: str) -> None:
    # In the second case the end of the sending is the only end of the body.
    length = b"" if ends == "half-closed" else b"Content-Length: 2\r\n"

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        assert engine.port
        await asyncio.sleep(0.05)  # until the client can't write on
        writer.write(b"HTTP/1.1 413 Too Large\r\n%b\r\nno" % length)
        if ends == "open":
            await asyncio.sleep(20)
        elif ends == "half-closed":
            writer.write_eof()
            await asyncio.sleep(20)

    async with serve(script) as engine, client_of(engine, max_connections=1) as client:
        for _ in range(3):
            response = await post(client, bytes(32 * MIB))
            assert (response.status, await response.read(10)) == (413, b"no")
    assert engine.connections == 3


@pytest.mark.asyncio
async def test_a_request_body_is_still_sent_while_the_answer_comes() -> None:
    """As an engine does that transcribes sound while it is uploaded."""

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            assert engine.port
            writer.write(CHUNKED)
            await reader.readexactly(_length_of(head))
            writer.write(b"2\r\nok\r\n0\r\n\r\n")

    async with serve(script) as engine, client_of(engine) as client:
        for _ in range(2):
            response = await post(client, bytes(8 * MIB))
            assert await response.read(10) == b"ok"
    assert engine.connections == 1


# TLS.


@pytest.fixture(scope="module")
def server_tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.asyncio
async def test_tls_carries_requests_both_ways(server_tls: tuple[ssl.SSLContext, Path]) -> None:
    context, certificate = server_tls
    trusting = ssl.create_default_context(cafile=certificate)
    body = os.urandom(3 * MIB)

    async def script(
        engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            _, received = await engine.read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(received))
            writer.write(received)

    async with serve(script, tls=context) as engine:
        client = Client(f"https://127.0.0.1:{engine.port}", tls=trusting)
        for sent in (b"", b"small", body, body):
            response = await post(client, sent)
            await asyncio.sleep(0.02)  # so that the large ones meet back-pressure
            assert await response.read(4 * MIB) == sent
        await client.aclose()
    assert engine.connections == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(("greeting", "kind"), [(b"", "connect"), (b"220 ready\r\n", "protocol")])
async def test_what_comes_with_the_end_of_the_handshake_is_not_missed(
    server_tls: tuple[ssl.SSLContext, Path], greeting: bytes, kind: str
) -> None:
    """In TLS 1.2 the server has the last word, and what it says next may come with that."""
    context, certificate = server_tls

    async def script(_: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greeting:
            writer.write(greeting)
            await reader.read()

    trusting = ssl.create_default_context(cafile=certificate)
    trusting.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serve(script, tls=context) as engine:
        client = Client(f"https://127.0.0.1:{engine.port}", tls=trusting)
        assert (await failure_of(client)).kind == kind


@pytest.mark.asyncio
async def test_a_certificate_nobody_vouches_for_is_a_tls_error(
    server_tls: tuple[ssl.SSLContext, Path],
) -> None:
    async with serve(silent, tls=server_tls[0]) as engine:
        client = Client(f"https://127.0.0.1:{engine.port}", max_connections=1)
        for _ in range(2):
            error = await failure_of(client)
            assert error.kind == "tls"
            assert error.before_first_byte
            assert "self-signed" in str(error)


@pytest.mark.asyncio
async def test_a_server_without_tls_is_a_tls_error() -> None:
    async def script(_: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()

    async with serve(script) as engine:
        client = Client(f"https://127.0.0.1:{engine.port}")
        assert (await failure_of(client)).kind == "tls"


@pytest.mark.asyncio
@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_handshake_that_is_cut_off_is_a_connect_error(*, is_reset: bool) -> None:
    async def script(_: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(MIB)
        if is_reset:
            _reset(writer)

    async with serve(script) as engine:
        client = Client(f"https://127.0.0.1:{engine.port}")
        error = await failure_of(client)
    assert error.kind == "connect"
    assert "()" not in str(error)


@pytest.mark.asyncio
async def test_a_handshake_that_hangs_is_a_connect_timeout() -> None:
    async def script(_: Engine, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serve(script) as engine:
        client = Client(
            f"https://127.0.0.1:{engine.port}", timeouts=Timeouts(connect_s=0.1), max_connections=1
        )
        for _ in range(2):
            error = await failure_of(client)
            assert error.kind == "timeout-connect"
            assert "connect_s" in str(error)


@pytest.mark.parametrize("loop_of", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_request_cancelled_while_it_connects_leaves_no_connection(
    loop_of: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def cancel_at_every_moment() -> int:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}")
        for turns in list(range(12)) * 40:
            asking = asyncio.ensure_future(client.request(b"GET", b"/", [], b""))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.2)
        left = len(client._pool._open)
        await client.aclose()
        server.close()
        return left

    with asyncio.Runner(loop_factory=loop_of) as runner:
        assert runner.run(cancel_at_every_moment()) == 0
