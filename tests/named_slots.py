"""An engine that names the slots of real llama.cpp servers and keeps them in files, asked as the gateway asks."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Care, Rules
from preheat.engines.slot_seats import SlotRules
from preheat.engines.warmth import Warmth

Event = tuple[str, dict[str, object]]
Served = OpenAi
TENANT = "t"


class Answer(NamedTuple):
    """Who answered, the way that was said, and the server's own counts."""

    worker: str
    slot: int
    way: str
    input_tokens: int
    cached_tokens: int


@asynccontextmanager
async def served(
    *urls: str,
    folder: Path | tuple[Path, ...],
    events: list[Event] | None = None,
    poll_s: float = 0.05,
    warmth: Warmth | None = None,
) -> AsyncIterator[OpenAi]:
    """Once it knows all of its servers, and their slots have files."""
    noted = [] if events is None else events
    engine = OpenAi(
        "many",
        urls,
        routing=POLICIES["preheat"](),
        rules=Rules(health_s=0.05),
        care=Care(
            poll_s=poll_s,
            slots=SlotRules(_names(folder), secret=b"s" * 32),
            gate_s=10.0,
            warmth=warmth,
        ),
        on_event=lambda name, fields: noted.append((name, fields)),
    )
    try:
        await engine.start()
        await until(lambda: [name for name, _ in noted].count("slot-files-on") == len(urls))
        yield engine
    finally:
        await engine.aclose()


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


def known(events: list[Event], name: str, **fields: object) -> bool:
    return any(one == name and fields.items() <= has.items() for one, has in events)


def prompt_of(session: int, length: int = 1_600) -> str:
    """A token a letter."""
    return "".join(chr(97 + (11 * session + 7 * i + i // 31) % 26) for i in range(length))


async def ask(engine: OpenAi, session: int, prompt: str) -> Answer:
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    return await asked(engine, session, b"/completions", json.dumps(body).encode())


async def asked(engine: OpenAi, session: int, path: bytes, body: bytes) -> Answer:
    """Told as the gateway tells it."""
    headers = [(b"content-type", b"application/json")]
    response = await engine.send(b"POST", path, headers, body, tenant=TENANT, session=f"s{session}")
    usage = json.loads(await response.read(1 << 20))["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    placement = response.placement
    assert placement is not None
    placement.ended(
        Usage(usage["prompt_tokens"], usage["completion_tokens"], cached, tells_cached=True)
    )
    response.close()
    slot, way = re.findall(rb"slot=(\d+), way=(\w+)", placement.reason)[0]
    return Answer(response.worker, int(slot), way.decode(), usage["prompt_tokens"], cached)


def _names(folder: Path | tuple[Path, ...]) -> tuple[str, ...]:
    folders = folder if isinstance(folder, tuple) else (folder,)
    for one in folders:
        one.mkdir(exist_ok=True)
    return tuple(map(str, folders))
