"""What is thought of a llama.cpp server against what the server says, request by request."""

import asyncio
import json
import random
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

from preheat.core.slots import SlotResidency
from preheat.engines.child import ChildSettings, EngineChild
from tiny_model import KV_BYTES_A_TOKEN, write_tiny_gguf

CELL_BYTES = 8  # a token's position and how many sequences it is of, in a saved state
REQUESTS = 60


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


@asynccontextmanager
async def running(weights: str, slots: int, cache_mib: int) -> AsyncIterator[EngineChild]:
    settings = ChildSettings(
        model=weights, slots=slots, ctx_tokens=4_096 * slots, cache_ram_mib=cache_mib
    )
    engine = EngineChild(settings, on_event=lambda _name, _fields: None)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


def ask(engine: EngineChild, prompt: list[int], tokens: int = 1) -> int:
    """What was cached of it. With one token said, the slot holds the prompt and no more."""
    asked = urllib.request.Request(
        f"{engine.url}/completion",
        json.dumps({"prompt": prompt, "n_predict": tokens, "ignore_eos": True}).encode(),
        {"Authorization": f"Bearer {engine.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as response:
        return json.load(response)["timings"]["cache_n"]


def chained(tokens: list[int]) -> list[int]:
    """A block a token: so nothing is lost by rounding."""
    blocks, parent = [], 0
    for token in tokens:
        parent = hash((parent, token)) & (2**64 - 1)
        blocks.append(parent)
    return blocks


def prompts(seed: int) -> list[list[int]]:
    """Conversations under a few long beginnings, now this one, now that."""
    chance = random.Random(seed)

    def words(least: int, most: int) -> list[int]:
        return [chance.randrange(30, 120) for _ in range(chance.randrange(least, most))]

    trunks, told = [words(50, 600) for _ in range(5)], []
    for _ in range(REQUESTS):
        before = chance.choice(told[-8:] if told and chance.random() < 0.6 else trunks)
        if len(before) > 3_000:
            before = trunks[0]
        told.append([*before, *words(5, 200)])
    return told


@pytest.mark.parametrize(("slots", "cache_mib"), [(1, 1), (2, 16), (3, 1), (2, 0)])
@pytest.mark.asyncio
async def test_each_request_finds_what_was_hoped(weights: str, slots: int, cache_mib: int) -> None:
    residency = SlotResidency(slots, cache_mib * 2**20 // (KV_BYTES_A_TOKEN + CELL_BYTES))
    found, hoped = [], []
    async with running(weights, slots, cache_mib) as engine:
        for now, tokens in enumerate(prompts(cache_mib)):
            blocks = chained(tokens)
            hoped.append(min(residency.holds(blocks), len(tokens) - 1))
            residency.sent(blocks, float(now))
            found.append(await asyncio.to_thread(ask, engine, tokens))
            residency.ended(blocks, now + 0.5)
            residency.found(hoped[-1], found[-1], len(tokens), now + 0.5)
    assert sum(found) > 0
    assert found == hoped
    assert residency.trust == "confirmed"


@pytest.mark.asyncio
async def test_a_follower_finds_nothing_while_the_leader_runs_and_all_after_it(
    weights: str,
) -> None:
    residency = SlotResidency(2, 0)
    leader = [30 + 7 * i % 90 for i in range(800)]
    follower = [*leader, 40, 41]
    async with running(weights, 2, 0) as engine:
        blocks = chained(leader)
        residency.sent(blocks, 0.0)
        under_way = asyncio.create_task(asyncio.to_thread(ask, engine, leader, 1_500))
        await asyncio.sleep(0.3)  # it says its answer
        now = residency.usable(chained(follower))
        assert not under_way.done()
        assert await asyncio.to_thread(ask, engine, follower) == now.blocks == 0
        assert not under_way.done()
        assert now.running is blocks
        await under_way
        residency.ended(blocks, 2.0)
        later = [*leader, 50, 51, 52]
        assert residency.usable(chained(later)).blocks == now.later_blocks == len(leader)
        assert await asyncio.to_thread(ask, engine, later) == len(leader)
