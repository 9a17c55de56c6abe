"""Who looks after a server: finds out what it is, what it holds, how busy it is, and when it restarted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import cast

import pytest

from preheat.core.breaker import Breaker
from preheat.core.router import Ask, Router
from preheat.core.routing import POLICIES
from preheat.engines import attendant as module
from preheat.engines.attendant import Attendant
from preheat.engines.dialects import Dialect
from preheat.engines.slot_seats import SlotSeats
from preheat.engines.worker import Worker
from preheat.transport.client import Client, Timeouts

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}'
METRICS = (
    b'vllm:num_requests_running{engine="0"} 3.0\n'
    b'vllm:num_requests_waiting{engine="0"} %d\n'
    b'vllm:prompt_tokens_total{engine="0"} %d\n'
    b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="%d"} 1.0\n'
)


class Server:
    """Answers by path; None: it says nothing at all."""

    def __init__(self, bodies: Mapping[str, bytes | None]) -> None:
        self.bodies = dict(bodies)
        self.asked: list[str] = []
        self.talks: set[asyncio.Task[None] | None] = set()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.talks.add(asyncio.current_task())
        with (
            contextlib.suppress(asyncio.IncompleteReadError, ConnectionError),
            contextlib.closing(writer),
        ):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                self.asked.append(path)
                body = self.bodies.get(path, b"")
                if body is None:
                    await asyncio.sleep(60)
                status = b"200 OK" if path in self.bodies else b"404 Not Found"
                assert body is not None
                writer.write(
                    b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
                )


@contextlib.asynccontextmanager
async def attended(
    server: Server, router: Router, dialect: str = "auto"
) -> AsyncIterator[tuple[Attendant, list[str]]]:
    events: list[str] = []
    listening = await asyncio.start_server(server.talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = Client(url, timeouts=Timeouts(first_byte_s=2.0, idle_s=2.0))
    worker = Worker(
        0, "gpu.0", url, client, Breaker(), lambda _: None, lambda event, _: events.append(event)
    )
    attendant = Attendant(
        worker, router, dialect, "key", 0.02, lambda event, _: events.append(event)
    )
    task = asyncio.create_task(attendant.run())
    try:
        yield attendant, events
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.aclose()
        listening.close()
        talks = [talk for talk in server.talks if talk is not None]
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.005)


def router() -> Router:
    return Router(POLICIES["preheat"]())


async def test_it_finds_out_who_it_is_what_it_holds_and_who_else_waits_there() -> None:
    made, server = router(), Server({"/v1/models": MODELS, "/metrics": METRICS % (4, 900, 80)})
    for number in range(40):  # what ours take: about 0.2 s
        made.failed(made.place(Ask("m", (), 512, 10_000), [0], float(number)).ticket, 0.0)
    async with attended(server, made) as (attendant, events):
        await until(lambda: attendant.known.load)
        assert attendant.known.dialect == "vllm"
        assert attendant.known.capacity is not None
        assert attendant.known.capacity.tokens == 1_280
        assert made.index.residency(0).capacity_blocks == 10
        assert attendant.known.load is not None
        assert attendant.known.load.waiting == 4
        assert events == ["upstream-known"]
        assert server.asked[:4] == ["/v1/models", "/v1/models", "/version", "/metrics"]


async def test_counts_that_begin_anew_mean_an_empty_cache() -> None:
    made, server = router(), Server({"/v1/models": MODELS, "/metrics": METRICS % (0, 900, 8_000)})
    stay = made.index.sent(0, range(5), 0.0)
    made.index.ended(stay, 0.0, None)
    async with attended(server, made) as (attendant, events):
        await until(lambda: attendant.known.load)
        assert made.index.overlaps(range(5)) == {0: 5}
        server.bodies["/metrics"] = METRICS % (0, 20, 8_000)
        await until(lambda: "upstream-restarted" in events)
        assert made.index.overlaps(range(5)) == {}


async def test_one_that_says_nothing_known_is_any_server_and_asked_no_more() -> None:
    server = Server({"/v1/models": b'{"data":[{"id":"m"}]}'})
    async with attended(server, router()) as (attendant, _):
        await until(lambda: attendant.known.dialect)
        assert attendant.known.dialect == "openai"
        asked = len(server.asked)
        await asyncio.sleep(0.2)
        assert len(server.asked) == asked


@pytest.mark.parametrize("body", [b"\xff\xfe", b"[" * 5_000, b"x" * 300_000, b"{}", None])
async def test_rubbish_and_silence_end_nothing(body: bytes | None) -> None:
    made, server = router(), Server({"/v1/models": body, "/metrics": body, "/props": body})
    async with attended(server, made, "vllm" if body is None else "auto") as (attendant, _):
        await until(lambda: len(server.asked) >= 1)
        await asyncio.sleep(0.1)
        assert attendant.known.load is None
    assert made.queue_s(0, 0.0) == 0.0


@pytest.mark.parametrize("ends_at", ["_measure", "_read_load"])
async def test_a_defect_is_told_and_ends_no_looking(
    ends_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    sound, faults = getattr(Attendant, ends_at), [KeyError("x"), OSError("y")]

    async def faulty(self: Attendant, dialect: Dialect) -> None:
        if faults:
            raise faults.pop()
        await sound(self, dialect)

    monkeypatch.setattr(Attendant, ends_at, faulty)
    made, server = router(), Server({"/v1/models": MODELS, "/metrics": METRICS % (4, 900, 80)})
    async with attended(server, made) as (attendant, events):
        await until(lambda: attendant.known.load)
        assert events == ["upstream-known", "bug", "bug"]


async def test_a_slot_folder_that_fails_keeps_no_load_from_being_read() -> None:
    class Seats:
        keeper = None

        async def open(self, slot_tokens: int) -> bool:
            raise PermissionError(13, "Permission denied", "/slots")

        async def look(self) -> None:
            """It has no slots that would tell."""

    made, server = router(), Server({"/v1/models": MODELS, "/metrics": METRICS % (4, 900, 80)})
    async with attended(server, made) as (attendant, events):
        attendant._worker.seats = cast("SlotSeats", Seats())
        await until(lambda: attendant.known.load)
        await asyncio.sleep(0.1)
        assert events == ["upstream-known", "slot-files-off"]
