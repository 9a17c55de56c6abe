"""The simulated slots against llama.cpp's own: what it had of each prompt, request by request."""

import asyncio
import json
import random
import urllib.request

import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

from preheat.core.costs import ServiceModel
from preheat.engines.child import ChildSettings, EngineChild
from preheat.replay.kernel import Kernel
from preheat.replay.llamacpp import Prompt, Server, ServerSpec
from tiny_model import KV_BYTES_A_TOKEN, write_tiny_gguf

CELL_BYTES = 8  # a token's position and how many sequences it is of, in a saved state
REQUESTS = 60


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


def ask(engine: EngineChild, prompt: list[int], tokens: int) -> tuple[int, list[int]]:
    """What was cached of it, and the answer's tokens."""
    asked = urllib.request.Request(
        f"{engine.url}/completion",
        json.dumps(
            {
                "prompt": prompt,
                "n_predict": tokens,
                "ignore_eos": True,
                "return_tokens": True,
                "temperature": 0,
            }
        ).encode(),
        {"Authorization": f"Bearer {engine.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as response:
        told = json.load(response)
    return told["timings"]["cache_n"], told["tokens"]


class Talk:
    """Conversations under a few long beginnings, now this one, now that."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._trunks = [self._words(50, 600) for _ in range(5)]
        self._open: list[list[int]] = []

    def _words(self, least: int, most: int) -> list[int]:
        return [self._chance.randrange(30, 120) for _ in range(self._chance.randrange(least, most))]

    def next(self) -> list[int]:
        if self._open and self._chance.random() < 0.6:
            before = self._open.pop(self._chance.randrange(len(self._open)))
        else:
            before = self._chance.choice(self._trunks)
        prompt = [*before, *self._words(5, 200)]
        return prompt if len(prompt) < 3_500 else self.next()

    def answered(self, whole: list[int]) -> None:
        self._open = [*self._open[-7:], whole]


@pytest.mark.parametrize(("slots", "cache_mib"), [(1, 1), (2, 256), (3, 1), (2, 0)])
@pytest.mark.asyncio
async def test_each_prompt_finds_what_was_foretold(
    weights: str, slots: int, cache_mib: int
) -> None:
    settings = ChildSettings(
        model=weights, slots=slots, ctx_tokens=4_096 * slots, cache_ram_mib=cache_mib
    )
    engine = EngineChild(settings, on_event=lambda _name, _fields: None)
    await engine.start()
    texts: dict[int, list[int]] = {}

    def overlap(held: Prompt, prompt: Prompt) -> int:
        one, other = texts[held.number], texts[prompt.number]
        same = zip(one, other, strict=False)
        return next((n for n, (a, b) in enumerate(same) if a != b), min(len(one), len(other)))

    spec = ServerSpec(
        slots=slots, cache_bytes=cache_mib * 2**20, token_bytes=KV_BYTES_A_TOKEN + CELL_BYTES
    )
    kernel = Kernel()
    server = Server(spec, ServiceModel(), kernel, overlap, lambda _one: None)
    talk, chance = Talk(cache_mib), random.Random(slots)
    live, foretold = [], []
    try:
        for number in range(REQUESTS):
            tokens = talk.next()
            cached, said = await asyncio.to_thread(ask, engine, tokens, chance.randrange(1, 10))
            texts[number] = [*tokens, *said]
            talk.answered(texts[number])
            prompt = Prompt(number, kernel.now, len(tokens), len(said))
            server.submit(prompt)
            kernel.run()
            live.append(cached)
            foretold.append(prompt.cached_tokens)
    finally:
        await engine.aclose()
    assert sum(live) > 0
    assert foretold == live
