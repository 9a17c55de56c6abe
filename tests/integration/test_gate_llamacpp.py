"""The readiness gate before real llama.cpp servers: one that was started again answers with its trunk cached."""

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from ports import free_port

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

import msgspec

from bare_llama import bare_llama
from preheat.core.blocks import block_ends, prefix_of
from preheat.core.routing import POLICIES
from preheat.core.types import Usage
from preheat.engines.dialects.calls import Prompt
from preheat.engines.openai import OpenAi
from preheat.engines.rules import Care
from preheat.engines.warmth import Hot, Warmth
from tiny_model import write_tiny_gguf

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio]

SYSTEM = [
    {"role": "system", "content": " ".join(f"{word} rule {at}." for at in range(60))}
    for word in ("first", "other", "third")
]
SLOTS = 2


def body_of(system: dict[str, str], question: str) -> bytes:
    messages = [system, {"role": "user", "content": question}]
    return msgspec.json.encode({"model": "m", "messages": messages, "max_tokens": 2})


def hot(system: dict[str, str]) -> Hot:
    body = body_of(system, "q")
    return Hot(
        prompt=Prompt(model="m", messages=[system]),
        text_bytes=len(system["content"]),
        blocks=prefix_of(body, b"").blocks[: block_ends(body, 1)[0]],
    )


async def ask(group: OpenAi, system: dict[str, str], question: str) -> tuple[str, int]:
    """Who answered, and how much of its prompt was cached."""
    answer = await group.send(b"POST", b"/chat/completions", [], body_of(system, question))
    usage = json.loads(await answer.read(1_000_000))["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    answer.placement.ended(Usage(usage["prompt_tokens"], 2, cached, tells_cached=True))
    return answer.worker, cached


async def test_one_that_was_started_again_answers_from_what_the_gate_warmed(tmp_path: Path) -> None:
    weights = tmp_path / "tiny.gguf"
    write_tiny_gguf(weights)
    events: list[tuple[str, dict[str, object]]] = []
    ports = [free_port(), free_port()]

    def start(port: int) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(bare_llama(str(weights), port=port, slots=SLOTS, cache_ram_mib=0))
        return stack

    async def source() -> list[Hot]:
        return [hot(one) for one in SYSTEM]  # one more than there are slots

    running = [await asyncio.to_thread(start, port) for port in ports]
    group = OpenAi(
        "many",
        [f"http://127.0.0.1:{port}" for port in ports],
        routing=POLICIES["preheat"](),
        care=Care("auto", "", 0.2, gate_s=30.0, warmth=Warmth(source, lambda *_: None)),
        on_event=lambda event, fields: events.append((event, fields)),
    )
    try:
        await group.start()
        async with asyncio.timeout(30.0):
            while len(events) < 2:
                await asyncio.sleep(0.05)
        for at in range(8):
            await ask(group, SYSTEM[at % 3], f"q{at}")
        group.set_draining("many.0", is_draining=True)
        await asyncio.to_thread(running[0].close)
        running[0] = await asyncio.to_thread(start, ports[0])
        group.set_draining("many.0", is_draining=False)
        async with asyncio.timeout(30.0):
            while not (ready := [said for name, said in events if name == "upstream-ready"]):
                assert (await ask(group, SYSTEM[2], f"q{len(events)}"))[0] == "many.1"
                await asyncio.sleep(0.05)
        assert (ready[0]["worker"], ready[0]["warmed"], ready[0]["in_time"]) == (
            "many.0",
            SLOTS,
            True,
        )
        group.set_draining("many.1", is_draining=True)
        tokens = int(str(ready[0]["tokens"])) // SLOTS
        for system in SYSTEM[:SLOTS]:
            worker, cached = await ask(group, system, "a first question")
            assert worker == "many.0"
            assert cached > 0.9 * tokens
    finally:
        await group.aclose()
        for one in running:
            await asyncio.to_thread(one.close)


async def test_another_model_at_the_same_address_is_seen_without_counts(tmp_path: Path) -> None:
    weights, others = tmp_path / "tiny.gguf", tmp_path / "other.gguf"
    for path in (weights, others):
        write_tiny_gguf(path)
    events: list[tuple[str, dict[str, object]]] = []
    ports = [free_port(), free_port()]

    def start(path: Path, port: int) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(bare_llama(str(path), port=port, slots=SLOTS, has_metrics=False))
        return stack

    async def source() -> list[Hot]:
        return [hot(SYSTEM[0])]

    running = [await asyncio.to_thread(start, weights, port) for port in ports]
    group = OpenAi(
        "many",
        [f"http://127.0.0.1:{port}" for port in ports],
        routing=POLICIES["preheat"](),
        care=Care("auto", "", 0.2, gate_s=30.0, warmth=Warmth(source, lambda *_: None)),
        on_event=lambda event, fields: events.append((event, fields)),
    )
    try:
        await group.start()
        async with asyncio.timeout(30.0):
            while len(events) < 2:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # and each has said which model it has
        await asyncio.to_thread(running[0].close)
        running[0] = await asyncio.to_thread(start, others, ports[0])
        async with asyncio.timeout(30.0):
            while not (ready := [said for name, said in events if name == "upstream-ready"]):
                await asyncio.sleep(0.05)
        assert (ready[0]["worker"], ready[0]["warmed"]) == ("many.0", 1)
        (told,) = [said for name, said in events if name == "upstream-switched"]
        assert str(told["was"]).startswith(str(weights))
        assert str(told["now"]).startswith(str(others))
        assert not [name for name, _ in events if name == "upstream-restarted"]
        group.set_draining("many.1", is_draining=True)
        assert (await ask(group, SYSTEM[0], "a first question"))[1] > 100
    finally:
        await group.aclose()
        for one in running:
            await asyncio.to_thread(one.close)
