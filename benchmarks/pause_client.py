"""The clients of `pause_return`, and the ways in which their requests reach the server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import chat
from benchmarks.pause_script import Turn
from benchmarks.report import BenchmarkError, Progress
from preheat.core.blocks import prefix_of
from preheat.core.costs import ServiceLearner, Timing
from preheat.engines.dialects.llamacpp import LlamaCpp
from preheat.engines.direct import Direct
from preheat.engines.slot_folder import SlotFolder
from preheat.engines.slot_keeper import SlotKeeper
from preheat.engines.slot_leaders import Wanted
from preheat.engines.slot_tier import SlotTier, identity_of, slot_tier
from preheat.transport.client import Client, Timeouts

MODEL = "m"
TENANT = "t"
WITHIN_S = 600.0
BUDGET_BYTES = 4 * 2**30
TOKEN_BYTES = 4.6
"""Of the prose of `chat.words` in SmolLM2's tokens."""


class Seen(msgspec.Struct, frozen=True):
    """A request and what came of it. Bytes are what its block had written and read since the one before."""

    arm: str
    block: int
    session: int
    turn: int
    ttft_s: float
    prefill_s: float
    prompt_tokens: int
    cached_tokens: int
    way: str
    written_bytes: int
    read_bytes: int


class Told(msgspec.Struct, frozen=True):
    """One answer."""

    content: str
    ttft_s: float
    service_s: float
    prefill_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class _Timings(msgspec.Struct):
    prompt_ms: float = 0.0
    cache_n: int = 0
    prompt_n: int = 0


class _Chunk(msgspec.Struct):
    choices: list[dict[str, object]] = []
    usage: chat.Usage | None = None
    timings: _Timings | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class Way:
    """Straight to the server; it chooses the slot."""

    def __init__(self, url: str, key: str, direct: Direct) -> None:
        self._client = Client(url, timeouts=Timeouts(first_byte_s=WITHIN_S, idle_s=WITHIN_S))
        self._headers = [
            (b"authorization", f"Bearer {key}".encode()),
            (b"content-type", b"application/json"),
        ]
        self._direct = direct

    async def ask(
        self, session: str, messages: Sequence[Mapping[str, str]], max_tokens: int
    ) -> tuple[Told, str]:
        """The answer, and how the prefix came to where it was."""
        return await self._asked(messages, max_tokens), "engine"

    async def calibrated(self, tokens: int) -> float:
        """Seconds of a cold prompt of so many tokens: the middle one of three."""
        took = []
        for seed in range(3):
            text = chat.words(random.Random(1_000 + seed), int(tokens * TOKEN_BYTES))
            asked = [{"role": "user", "content": f"{secrets.token_hex(8)} {text}"}]
            took.append((await self._asked(asked, 1, id_slot=0)).ttft_s)
        return sorted(took)[1]

    async def emptied(self, slots: int) -> None:
        """Every slot holds nothing."""
        for slot in range(slots):
            status, body = await self._direct.ask(LlamaCpp().erase(slot))
            if status != 200:
                raise BenchmarkError(f"a slot can't be erased: {body[:200]!r}")

    def moved_bytes(self) -> tuple[int, int]:
        """Written to files and read from them so far."""
        return 0, 0

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _asked(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int, **others: Any
    ) -> Told:
        body = chat.body(
            messages, model=MODEL, stream=True, max_tokens=max_tokens, ignore_eos=True, **others
        )
        began_at = time.perf_counter()
        response = await self._client.request(b"POST", b"/v1/chat/completions", self._headers, body)
        if response.status != 200:
            raise BenchmarkError(f"status {response.status}: {await response.read(2**20)!r}")
        pieces: list[str] = []
        usage, timings, first_at, rest = None, None, 0.0, b""
        async for piece in response:
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    continue
                chunk = _CHUNK.decode(event.removeprefix(b"data: "))
                usage, timings = chunk.usage or usage, chunk.timings or timings
                for choice in chunk.choices:
                    delta = choice.get("delta")
                    content = delta.get("content") if isinstance(delta, dict) else None
                    if isinstance(content, str):
                        first_at = first_at or time.perf_counter()
                        pieces.append(content)
        if usage is None or timings is None or not first_at:
            raise BenchmarkError("an answer had no text, or nothing was told of it")
        return Told(
            "".join(pieces),
            first_at - began_at,
            time.perf_counter() - began_at,
            timings.prompt_ms / 1e3,
            usage.prompt_tokens,
            timings.cache_n,
            usage.completion_tokens,
        )


class Keeping(Way):
    """Each request in the slot that the keeper names."""

    def __init__(self, url: str, key: str, direct: Direct, tier: SlotTier, slots: int) -> None:
        super().__init__(url, key, direct)
        self.tier = tier
        self._keeper = SlotKeeper(tier, slots=slots)
        self._learner = ServiceLearner()
        self._token_bytes = TOKEN_BYTES

    def moved_bytes(self) -> tuple[int, int]:
        return self.tier.counts.written_bytes, self.tier.counts.read_bytes

    async def ask(
        self, session: str, messages: Sequence[Mapping[str, str]], max_tokens: int
    ) -> tuple[Told, str]:
        body = chat.body(messages, model=MODEL)
        prefix = prefix_of(body, TENANT.encode())
        tokens = max(2, int(prefix.prompt_bytes / self._token_bytes))
        began_at = time.perf_counter()
        wanted = Wanted(TENANT, session, prefix.blocks, tokens)
        seated = await self._keeper.seat(wanted, self._learner.service(MODEL))
        waited_s = time.perf_counter() - began_at
        told = None
        try:
            told = await self._asked(messages, max_tokens, id_slot=seated.slot)
        finally:
            held = None if told is None else told.prompt_tokens + told.output_tokens - 1
            self._keeper.ended(seated, held)
        self._learn(told, prefix.prompt_bytes)
        return msgspec.structs.replace(told, ttft_s=waited_s + told.ttft_s), seated.way

    async def aclose(self) -> None:
        await self._keeper.aclose()
        await super().aclose()

    def _learn(self, told: Told, prompt_bytes: int) -> None:
        self._token_bytes = prompt_bytes / told.prompt_tokens
        self._learner.learn(
            MODEL,
            Timing(
                new_tokens=told.prompt_tokens - told.cached_tokens,
                context_tokens=told.cached_tokens,
                output_tokens=told.output_tokens,
                ttft_s=told.prefill_s,
                service_s=told.prefill_s + told.service_s - told.ttft_s,
            ),
        )


@contextlib.asynccontextmanager
async def plain(url: str, key: str) -> AsyncIterator[Way]:
    """llama.cpp as it is."""
    direct = Direct(url, api_key=key, dialect="llamacpp")
    way = Way(url, key, direct)
    try:
        yield way
    finally:
        await way.aclose()
        await direct.aclose()


@contextlib.asynccontextmanager
async def keeping(url: str, key: str, path: Path) -> AsyncIterator[Way]:
    """With slot files; those of the block before are gone."""
    direct = Direct(url, api_key=key, dialect="llamacpp")
    identity = await identity_of(direct)
    secret = secrets.token_bytes(16)
    folder = SlotFolder(
        path, identity=identity, secret=secret, budget_bytes=BUDGET_BYTES, max_age_s=86_400.0
    )
    folder.open(time.time())
    for kept in folder.newest():
        folder.drop(kept)
    tier = await slot_tier(direct, folder, limit_s=60.0)
    slots = await direct.slots()
    way = Keeping(url, key, direct, tier, len(slots or ()))
    try:
        yield way
        if tier.counts.failed:
            raise BenchmarkError(f"slot files failed: {tier.counts.failed}")
    finally:
        await way.aclose()
        await tier.aclose()
        await direct.aclose()


class Clients:
    """All sessions of a block. Each reads an answer, pauses, and goes on."""

    def __init__(
        self,
        way: Way,
        turns: Sequence[Sequence[Turn]],
        arm: str,
        block: int,
        seed: int,
        answer_tokens: int,
    ) -> None:
        self._way = way
        self._turns = turns
        self._arm = arm
        self._block = block
        self._seed = seed
        self._answer_tokens = answer_tokens
        self._seen: list[Seen] = []
        self._written = self._read = 0

    async def run(self, progress: Progress) -> list[Seen]:
        """Returns when the last answer is there."""
        self._written, self._read = self._way.moved_bytes()
        async with asyncio.TaskGroup() as group:
            for number, turns in enumerate(self._turns):
                group.create_task(self._session(number, turns, progress))
        return self._seen

    async def _session(self, number: int, turns: Sequence[Turn], progress: Progress) -> None:
        chance = random.Random(f"{self._seed} {self._block} {number}")  # in each arm the same
        messages: list[dict[str, str]] = []
        for place, turn in enumerate(turns):
            await asyncio.sleep(turn.pause_s)
            text = chat.words(chance, int(turn.tokens * TOKEN_BYTES))
            mark = f"{chance.getrandbits(64):016x} " if not place else ""
            messages.append({"role": "user", "content": mark + text})
            told, way = await self._way.ask(str(number), messages, self._answer_tokens)
            messages.append({"role": "assistant", "content": told.content})
            self._note(number, place, told, way)
            progress.tick(f"{len(self._seen)} of {sum(map(len, self._turns))} answers")

    def _note(self, number: int, place: int, told: Told, way: str) -> None:
        written, read = self._way.moved_bytes()
        self._seen.append(
            Seen(
                self._arm,
                self._block,
                number,
                place,
                told.ttft_s,
                told.prefill_s,
                told.prompt_tokens,
                told.cached_tokens,
                way,
                written - self._written,
                read - self._read,
            )
        )
        self._written, self._read = written, read
