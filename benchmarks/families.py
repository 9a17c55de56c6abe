"""Chats of prompt families: many requests that begin alike, some families more popular than others."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from benchmarks import chat
from benchmarks.engine_pair import MODEL, Door
from benchmarks.prefix_chats import one_prefix
from benchmarks.report import BenchmarkError
from preheat.lab.load.exchange import Outcome, exchange
from preheat.lab.load.generator import Generator, Plan
from preheat.lab.load.summary import Tally
from preheat.lab.load.trace import Trace
from preheat.transport.client import Client

WITHIN_S = 300.0
READY_WITHIN_S = 60.0


class Shape(msgspec.Struct, frozen=True):
    """What requests look like. The k-th family's share is as 1 ÷ k to the `skew`."""

    families: int
    prefix_tokens: int
    own_tokens: int
    answer_tokens: int
    skew: float = 1.0


class Chats:
    """Endless distinct requests. The same `pattern` asks the same families in the same order; `texts`
    make the words, so that nothing is cached of requests with other texts."""

    def __init__(self, shape: Shape, *, pattern: str, texts: str) -> None:
        self._shape = shape
        self._order = random.Random(pattern)
        self._chance = random.Random(texts)
        self._prefixes = [
            f"{self._chance.getrandbits(64):016x} {one_prefix(self._chance, shape.prefix_tokens)}"
            for _ in range(shape.families)
        ]
        self._shares = [1.0 / place**shape.skew for place in range(1, shape.families + 1)]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """The family's number and the request's body."""
        while True:
            (family,) = self._order.choices(range(self._shape.families), self._shares)
            yield family, self._body(family)

    def one_of_each(self) -> list[tuple[int, bytes]]:
        """A request of every family."""
        return [(family, self._body(family)) for family in range(self._shape.families)]

    def _body(self, family: int) -> bytes:
        own = f"{self._chance.getrandbits(64):016x} "
        own += one_prefix(self._chance, self._shape.own_tokens)
        messages = [
            {"role": "system", "content": self._prefixes[family]},
            {"role": "user", "content": own},
        ]
        tokens = self._shape.answer_tokens
        return chat.body(messages, model=MODEL, stream=True, max_tokens=tokens, ignore_eos=True)


def poisson(pattern: str, rate_per_s: float) -> Iterator[float]:
    """Seconds from the start, in order: clients don't know of each other."""
    chance = random.Random(f"times {pattern}")
    return itertools.accumulate(chance.expovariate(rate_per_s) for _ in itertools.count())


def write_trace(path: Path, chats: Chats, at_s: Iterable[float]) -> None:
    """As `preheat load` reads it; a request's id is its number and its family's."""
    with path.open("wb") as file:
        for number, (at, (family, body)) in enumerate(zip(at_s, chats, strict=False)):
            line = {"at": at, "id": f"{number}-{family}", "body": msgspec.Raw(body)}
            file.write(msgspec.json.encode(line) + b"\n")


async def played(door: Door, path: Path) -> list[Outcome]:
    """What came of each request of the trace, sent at its time by the generator of `preheat load`."""
    outcomes: list[Outcome] = []
    plan = Plan(url=door.url, api_key=door.key, timeout_s=WITHIN_S)
    generator = Generator(plan, Trace(path), Tally(), outcomes.append)
    await generator.run(asyncio.Event())
    return outcomes


async def closed_loop(
    door: Door, chats: Iterable[tuple[int, bytes]], *, requests: int, clients: int
) -> float:
    """Answers a second where each client asks when it has its answer. All must be good."""
    loop, bodies = asyncio.get_running_loop(), iter(chats)
    left = iter(range(requests))

    async def one_client(client: Client) -> None:
        for _ in left:
            await _asked(client, door, next(bodies)[1])

    client = Client(door.url)
    try:
        began_at = loop.time()
        await asyncio.gather(*(one_client(client) for _ in range(clients)))
        return requests / (loop.time() - began_at)
    finally:
        await client.aclose()


async def ready(door: Door, chats: Chats) -> None:
    """Returns when one was answered: some doors open before they know their servers."""
    loop, bodies = asyncio.get_running_loop(), iter(chats)
    until = loop.time() + READY_WITHIN_S
    client = Client(door.url)
    try:
        while True:
            try:
                await _asked(client, door, next(bodies)[1])
                return
            except BenchmarkError:
                if loop.time() > until:
                    raise
                await asyncio.sleep(0.5)
    finally:
        await client.aclose()


async def _asked(client: Client, door: Door, body: bytes) -> None:
    outcome = Outcome(id="", at_s=0.0)
    headers = [
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer " + door.key.encode()),
    ]
    await exchange(client, chat.PATH.encode(), headers, body, outcome, timeout_s=WITHIN_S)
    if outcome.error:
        raise BenchmarkError(f"{door.server.name}: {outcome.error}")
