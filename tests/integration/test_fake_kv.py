"""The fake engine's KV cache forgets what llama.cpp forgets, request by request."""

import asyncio
import http.client
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.engines.child import ChildSettings, EngineChild
from preheat.engines.fake_kv import BlockLru
from tiny_model import KV_BYTES_A_TOKEN, write_tiny_gguf

pytest.importorskip("xllamacpp", reason="the real engine to compare with isn't installed")

SEED = 7
REQUESTS = 100
PREFIXES = 12
BLOCK_TOKENS = 16
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Body = dict[str, Any]


class Served(msgspec.Struct, frozen=True):
    tokens: list[int]
    cached_tokens: int


@pytest.mark.asyncio
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("prefix_letters", "cache_ram_mib"), [(1_900, 16), (900, 10)])
async def test_a_block_lru_hits_and_misses_where_llama_cpp_does(
    tmp_path: Path, prefix_letters: int, cache_ram_mib: int
) -> None:
    bodies = _skewed_requests(prefix_letters)
    served = await _serve_for_real(tmp_path / "tiny.gguf", bodies, cache_ram_mib)
    shared_tokens = _shared_tokens(bodies, served)
    assert shared_tokens > prefix_letters

    cache = BlockLru(_capacity_blocks(len(served[0].tokens), cache_ram_mib), BLOCK_TOKENS)
    real = [one.cached_tokens >= 0.9 * shared_tokens for one in served]
    model = [cache.serve(one.tokens) >= 0.9 * shared_tokens for one in served]

    assert model == real
    assert sum(real) >= 20
    assert REQUESTS - sum(real) >= 20


def _capacity_blocks(sequence_tokens: int, cache_ram_mib: int) -> int:
    """The block LRU that corresponds to one slot and this much host memory.

    K whole sequences fit in host memory, and one more is in the slot; but llama.cpp makes room
    for the slot's sequence *before* it looks for the one wanted. If the memory is full, its
    oldest entry is gone just when it would have been found. So a sequence is found again if at
    most K - 1 others were served since: an LRU of K, not of K + 1. ("Oldest" is by last use: an
    entry moves out of the list when it is loaded and back in at its end.)

    A block LRU also keeps the questions, two blocks each, until they are old. Half a sequence
    of room for those makes up for it.
    """
    sequences = cache_ram_mib * 2**20 // (sequence_tokens * KV_BYTES_A_TOKEN)
    blocks = -(-sequence_tokens // BLOCK_TOKENS)
    return sequences * blocks + blocks // 2


def _skewed_requests(prefix_letters: int) -> list[Body]:
    """A hundred different questions about twelve prefixes, the n-th asked for 1/n as often."""
    chance = random.Random(SEED)
    prefixes = ["".join(chance.choices(LETTERS, k=prefix_letters)) for _ in range(PREFIXES)]
    popularity = [1 / rank for rank in range(1, PREFIXES + 1)]
    return [
        {
            "messages": [
                {"role": "system", "content": chance.choices(prefixes, popularity)[0]},
                {"role": "user", "content": "".join(chance.choices(LETTERS, k=12))},
            ],
            "max_tokens": 1,
        }
        for _ in range(REQUESTS)
    ]


async def _serve_for_real(model: Path, bodies: list[Body], cache_ram_mib: int) -> list[Served]:
    write_tiny_gguf(model)
    settings = ChildSettings(
        model=str(model), slots=1, ctx_tokens=4_096, cache_ram_mib=cache_ram_mib
    )
    engine = EngineChild(settings, on_event=lambda _name, _fields: None)
    await engine.start()
    try:
        assert engine.url is not None
        return await asyncio.to_thread(_serve_all, engine.url, engine.api_key, bodies)
    finally:
        await engine.aclose()


def _serve_all(url: str, api_key: str, bodies: list[Body]) -> list[Served]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)

    def ask(path: str, body: Body) -> Any:
        connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {api_key}"})
        with connection.getresponse() as response:
            assert response.status == 200
            return json.loads(response.read())

    def serve(body: Body) -> Served:
        usage = ask("/v1/chat/completions", body)["usage"]
        prompt = ask("/apply-template", body)["prompt"]
        tokens = ask("/tokenize", {"content": prompt, "parse_special": True})["tokens"]
        assert len(tokens) == usage["prompt_tokens"]  # both saw the same prompt
        return Served(tokens, usage["prompt_tokens_details"]["cached_tokens"])

    try:
        return [serve(body) for body in bodies]
    finally:
        connection.close()


def _shared_tokens(bodies: list[Body], served: list[Served]) -> int:
    """How many tokens two requests on one prefix have in common, up to the question."""
    first = bodies[0]["messages"][0]
    others = [
        one.tokens
        for body, one in zip(bodies[1:], served[1:], strict=True)
        if body["messages"][0] == first
    ]
    return min(_common(served[0].tokens, tokens) for tokens in others)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


sequences = st.lists(st.integers(0, 1), max_size=12)


@given(st.lists(sequences, max_size=30), st.integers(1, 8), st.integers(1, 3))
def test_a_prefix_outlives_its_suffix(
    served: list[list[int]], capacity_blocks: int, block_tokens: int
) -> None:
    cache = BlockLru(capacity_blocks, block_tokens)
    naive: dict[tuple[int, ...], int] = {}  # each held prefix, and when it was last touched
    for now, tokens in enumerate(served):
        chain = [tuple(tokens[:end]) for end in range(block_tokens, len(tokens) + 1, block_tokens)]
        held = next((i for i, block in enumerate(chain) if block not in naive), len(chain))
        naive |= dict.fromkeys(chain, now)
        while len(naive) > capacity_blocks:
            del naive[min(naive, key=lambda block: (naive[block], -len(block)))]
        assert cache.serve(tokens) == max(0, min(held * block_tokens, len(tokens) - 1))
        assert len(cache) == len(naive)
        assert all(block[:-block_tokens] in naive for block in naive if len(block) > block_tokens)


def test_a_cleared_cache_holds_nothing() -> None:
    cache = BlockLru(8, 2)
    cache.serve([1, 2, 3, 4, 5])
    cache.clear()
    assert len(cache) == 0
    assert cache.serve([1, 2, 3, 4, 5]) == 0
