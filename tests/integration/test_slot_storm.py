"""Servers with slots and files, at fault at random, under clients that leave: at the end nothing is left over."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from preheat.core.breaker import Breaker
from preheat.core.routing import POLICIES
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Care, Rules
from preheat.engines.slot_seats import SlotRules
from preheat.errors import EngineError
from preheat.transport.client import Timeouts
from preheat.wire.openai import usage_of
from slots_faked import Slots

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(90)]

SERVERS, CLIENTS, REQUESTS, BUDGET_BYTES = 3, 64, 1_200, 400_000


def engine_of(servers: list[Slots], folder: Path, noted: list[tuple[str, object]]) -> OpenAi:
    return OpenAi(
        "many",
        [one.url for one in servers],
        routing=POLICIES["preheat"](),
        timeouts=Timeouts(connect_s=0.5, first_byte_s=0.5, idle_s=0.5, queue_s=0.5),
        breaker=Breaker(5, 0.1),
        rules=Rules(health_s=0.05, retry_ratio=1.0, seat_s=2.0),
        care=Care(
            poll_s=0.1,
            gate_s=0.5,
            slots=SlotRules((str(folder),), budget_bytes=BUDGET_BYTES, secret=b"s" * 32),
        ),
        on_event=lambda name, fields: noted.append((name, fields)),
    )


class Clients:
    """Many sessions of a few families of prompts; one in four goes before it is answered."""

    def __init__(self, engine: OpenAi) -> None:
        self.outcomes: Counter[str] = Counter()
        self._engine = engine
        self._random = Random(5)
        self._places = asyncio.Semaphore(CLIENTS)

    async def ask(self) -> None:
        async with self._places:
            leaves_s = self._random.choice((0.003, 0.02, *[30.0] * 6))
            try:
                async with asyncio.timeout(leaves_s):
                    outcome = await self._asked()
            except EngineError as error:
                outcome = error.kind
            except TimeoutError:
                outcome = "left"
            self.outcomes[outcome] += 1

    async def _asked(self) -> str:
        session = self._random.randrange(200)
        family = f"family {self._random.randrange(8)} " * 150
        prompt = family + f"session {session} " * self._random.randrange(1, 120)
        response = await self._engine.send(
            b"POST",
            b"/completions",
            [(b"content-type", b"application/json")],
            json.dumps({"model": "m", "prompt": prompt}).encode(),
            tenant=f"t{session % 3}",
            session=f"s{session}",
            state=self._random.choice(("", "tool", "over")),
        )
        assert response.placement is not None
        try:
            body = await response.read(1 << 20)
            if response.status == 200 and body:
                response.placement.ended(usage_of(json.loads(body).get("usage")))
        finally:
            response.placement.gone()
            response.close()
        return str(response.status)


async def trouble(engine: OpenAi, servers: list[Slots]) -> None:
    random = Random(7)
    while True:
        await asyncio.sleep(0.4 * random.random())
        match random.randrange(4):
            case 0:
                server = random.choice(servers)
                await server.stop()
                await asyncio.sleep(0.1)
                await server.start()
            case 1:
                await engine.erase(f"t{random.randrange(3)}")
            case 2:
                await engine.over("t1", f"s{random.randrange(200)}")
            case _:
                name = random.choice(engine.workers()).name
                engine.set_draining(name, is_draining=True)
                await asyncio.sleep(0.1)
                engine.set_draining(name, is_draining=False)


def rests(engine: OpenAi) -> bool:
    """Nothing is under way anywhere, and nobody is thought to have anything to do."""
    states = engine.workers()
    return all(
        (one.state, one.in_flight, one.known and one.known.queue_s) == ("well", 0, 0.0)
        for one in states
    )


async def test_after_a_storm_nothing_is_left_over(tmp_path: Path) -> None:
    noted: list[tuple[str, Any]] = []
    loose: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: loose.append(context))
    servers = [Slots(tmp_path, seed) for seed in range(SERVERS)]
    for one in servers:
        await one.start()
    engine = engine_of(servers, tmp_path, noted)
    clients = Clients(engine)
    try:
        await engine.start()
        async with asyncio.timeout(10):
            while [name for name, _ in noted].count("slot-files-on") < SERVERS:
                await asyncio.sleep(0.02)
        for one in servers:
            one.faults = 0.05
        troubling = asyncio.create_task(trouble(engine, servers))
        await asyncio.gather(*(clients.ask() for _ in range(REQUESTS)))
        assert not troubling.done()
        troubling.cancel()
        await asyncio.wait([troubling])
        await asyncio.gather(*(one.stop() for one in servers))
        for one in servers:
            one.faults = 0.0
            await one.start()
        for one in engine.workers():
            engine.set_draining(one.name, is_draining=False)
        assert clients.outcomes["200"] > REQUESTS / 2
        assert sum(one.loaded for one in servers) > 50

        async with asyncio.timeout(20):
            while not rests(engine):
                await clients.ask()  # whoever is down is found to be well again
                await asyncio.sleep(0.05)
        clients.outcomes.clear()
        await asyncio.gather(*(clients.ask() for _ in range(100)))  # every seat can be had
        assert set(clients.outcomes) == {"200", "left"}
        for tenant in range(3):
            await engine.erase(f"t{tenant}")
        assert not list(tmp_path.glob("*.kv"))
        assert [fields for name, fields in noted if name == "bug"] == []
        assert loose == []
    finally:
        await engine.aclose()
        for one in servers:
            await one.stop()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == {asyncio.current_task()}
