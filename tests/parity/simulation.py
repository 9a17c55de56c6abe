"""The real gateway before fake engines, all in one process and in simulated time.

python -m parity.simulation COUNT     prints a digest of all decisions
"""

import asyncio
import contextlib
import hashlib
import io
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from parity.diary import Diary
from parity.loop import JumpingLoop
from parity.traffic import DELAYS_S, Arrival, arrivals
from preheat import config
from preheat.core.stats import Snapshot
from preheat.core.types import Usage
from preheat.engines.fake import FakeEngine, Script
from preheat.gateway.assembly import assemble
from preheat.telemetry.logs import Log
from preheat.transport.client import Client
from preheat.transport.server import HttpServer, Limits, Refusal
from preheat.wire import openai
from preheat.wire.sse import SseDecoder, data_of

PATH = b"/v1/chat/completions"
PORTS = {model: 9_000 + number for number, model in enumerate(DELAYS_S)}
SECRET_VARIABLE = "PREHEAT_PARITY_SECRET"
ENVIRONMENT = {SECRET_VARIABLE: "the same salts in each run of it"}
JSON = [(b"content-type", b"application/json")]


class Said(msgspec.Struct, frozen=True):
    """What an engine answers, as the gateway understands it."""

    answer: openai.Answer
    usage: Usage | None


Words = Mapping[tuple[str, str, bool], Said]  # by model, prompt and form


class Run(msgspec.Struct, frozen=True):
    """All that a run leaves behind."""

    lines: list[tuple[Any, ...]]
    held: list[bytes]  # the keys in L1, in its order
    snapshot: Snapshot


def settings() -> config.Settings:
    """Small budgets, short lives: there are evictions and expiries."""
    return config.check(
        {
            "listen": {"address": "127.0.0.1:8000"},
            "exact": {"ttl_s": 40.0, "secret_env": SECRET_VARIABLE},
            "l1": {"bytes": 150_000, "entries": 90},
            "l2": {"kind": "off"},
            "telemetry": {"log_requests": "none"},
            "engines": {
                model: {"kind": "openai", "url": f"http://127.0.0.1:{port}"}
                for model, port in PORTS.items()
            },
            "models": {
                model: {"engine": model, "input": 1.0, "cached_input": 0.5, "output": 2.0}
                for model in PORTS
            },
        }
    )


def run(asked: Sequence[Arrival]) -> Run:
    """The gateway's run."""
    return _in_simulated_time(_serve(asked))


def words(asked: Sequence[Arrival]) -> Words:
    """What the engines say to all of this, asked beforehand and directly."""
    return _in_simulated_time(_ask_engines(asked))


def digest(of: Run) -> str:
    """Equal for equal decisions, floats included."""
    return hashlib.sha256(repr((of.lines, of.held)).encode()).hexdigest()


def _in_simulated_time(work: Any) -> Any:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


async def _serve(asked: Sequence[Arrival]) -> Run:
    async with _engines():
        chosen = settings()
        gateway = assemble(chosen, Log(io.BytesIO()), clock=asyncio.get_running_loop().time)
        proxy = gateway.proxy
        diary = Diary(proxy._controller)
        proxy._controller, proxy._on_request = diary, diary.on_request
        await gateway.start_engines()
        port = await gateway.listen("127.0.0.1", 8_000, None)
        client = Client(f"http://127.0.0.1:{port}", max_connections=len(asked))
        try:
            await asyncio.gather(*(_ask(client, arrival) for arrival in asked))
        finally:
            await client.aclose()
            await gateway.aclose()
    held = [key for key, _ in gateway._inventory.records()]
    return Run(diary.lines, held, gateway.snapshot())


async def _ask(client: Client, arrival: Arrival) -> None:
    await asyncio.sleep(arrival.at)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(arrival.leaves_at):
            response = await client.request(b"POST", PATH, JSON, arrival.body())
            said = await response.read(1_000_000)
            assert response.status == 200, said
            assert arrival.prompt.encode() in said, said


async def _ask_engines(asked: Sequence[Arrival]) -> Words:
    async with _engines():
        clients = {model: Client(f"http://127.0.0.1:{port}") for model, port in PORTS.items()}
        distinct = {(one.model, one.prompt, one.is_stream): one for one in asked}
        said = await asyncio.gather(*(_said(clients[one.model], one) for one in distinct.values()))
        for client in clients.values():
            await client.aclose()
        return dict(zip(distinct, said, strict=True))


async def _said(client: Client, arrival: Arrival) -> Said:
    body = arrival.body()
    if arrival.is_stream:
        body = body[:-1] + b',"stream_options":{"include_usage":true}}'
    response = await client.request(b"POST", PATH, JSON, body)
    data = await response.read(1_000_000)
    if not arrival.is_stream:
        fields = openai.decode(data)
        return Said(openai.answer_of(fields), openai.usage_of(fields["usage"]))
    assembler = openai.Assembler(openai.CHAT)
    for block in SseDecoder().feed(data):
        if (event := data_of(block)) not in {None, openai.DONE}:
            assembler.feed(openai.decode(event))
    assembler.end()
    return Said(assembler.answer(), assembler.usage)


@contextlib.asynccontextmanager
async def _engines() -> Any:
    servers = []
    for model, delay_s in DELAYS_S.items():
        script = Script(default="echo", delay_s=delay_s)
        engine = FakeEngine(capacity_blocks=0, logged=0, script=script)
        servers.append(HttpServer(engine.handle, _refuse, Limits()))
        await servers[-1].listen("127.0.0.1", PORTS[model])
    try:
        yield
    finally:
        for server in servers:
            await server.aclose()


def _refuse(refusal: Refusal) -> tuple[bytes, bytes]:
    return b"HTTP/1.1 %d No\r\n" % refusal.status, refusal.message.encode()


if __name__ == "__main__":
    warnings.simplefilter("error")
    print(digest(run(arrivals(int(sys.argv[1])))))
