"""What is warmed on a llama.cpp server whose slots are named lies where the next request is sent."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

import msgspec

from bare_llama import bare_llama
from named_slots import (
    TENANT,
    Answer,
    Event,
    Served,
    ask,
    asked,
    known,
    prompt_of,
    served,
    until,
)
from ports import free_port
from preheat.core.blocks import block_ends, prefix_of
from preheat.engines.dialects.calls import Prompt
from preheat.engines.warmth import Hot, Warmth
from tiny_model import write_tiny_gguf

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


def order(folder: Path, **more: Any) -> dict[str, Any]:
    fixed = {"slots": 2, "cache_ram_mib": 0, "slot_save_path": str(folder), "port": free_port()}
    return {**fixed, **more}


def system(number: int) -> dict[str, str]:
    return {"role": "system", "content": prompt_of(number, 1_200)}


def body_of(number: int, question: str) -> bytes:
    messages = [system(number), {"role": "user", "content": question}]
    return msgspec.json.encode({"model": "m", "messages": messages, "max_tokens": 2})


def hot(number: int) -> Hot:
    body = body_of(number, "q")
    return Hot(
        prompt=Prompt(model="m", messages=[system(number)]),
        tenant=TENANT,
        text_bytes=1_200,
        blocks=prefix_of(body, TENANT.encode()).blocks[: block_ends(body, 1)[0]],
    )


async def chat(engine: Served, number: int, question: str) -> Answer:
    return await asked(engine, 50 + number, b"/chat/completions", body_of(number, question))


async def warm(engine: Served, number: int, *workers: str) -> list[str]:
    return [one.state for one in await engine.warm(hot(number), workers, 20.0)]


async def verdicts(engine: Served, number: int) -> dict[str, str]:
    proofs = await engine.prove(hot(number), (), 20.0)
    return {one.worker: one.proof.verdict for one in proofs}


async def test_the_next_request_is_sent_to_the_slot_that_was_warmed(
    weights: str, tmp_path: Path
) -> None:
    first, second = order(tmp_path / "a"), order(tmp_path / "b")
    with bare_llama(weights, **first) as one, bare_llama(weights, **second) as other:
        async with served(one, other, folder=(tmp_path / "a", tmp_path / "b")) as engine:
            assert await warm(engine, 0, "many.1") == ["done"]
            again = await engine.warm(hot(0), ("many.1",), 20.0)
            assert [(one.state, one.computed_tokens, one.chunks) for one in again] == [
                ("done", 0, 0)
            ]
            assert again[0].tokens > 1_200
            assert await verdicts(engine, 0) == {"many.0": "refuted", "many.1": "proven"}
            engine.set_draining("many.0", is_draining=True)  # it has it by now, too: by the probe
            answer = await chat(engine, 0, "and this?")
            assert (answer.worker, answer.way) == ("many.1", "hot")
            assert answer.cached_tokens > 1_200
            await chat(engine, 0, "and another session")
            assert (await chat(engine, 0, "that finds it in a file")).cached_tokens > 1_200


async def test_nothing_is_warmed_in_place_of_what_is_missed_sooner(
    weights: str, tmp_path: Path
) -> None:
    with bare_llama(weights, **order(tmp_path)) as url:
        async with served(url, folder=tmp_path) as engine:
            for session in range(2):
                await ask(engine, session, prompt_of(session))
            outcomes = await engine.warm(hot(0), (), 20.0)
            assert [(one.state, one.computed_tokens) for one in outcomes] == [("busy", 0)]
            assert await verdicts(engine, 0) == {"many": "unknown"}
            for session in range(2):
                answer = await ask(engine, session, prompt_of(session) + " and on")
                assert (answer.way, answer.cached_tokens > 1_500) == ("hot", True)
            await engine.over(TENANT, "s1")
            assert await warm(engine, 0) == ["done"]
            assert (await ask(engine, 0, prompt_of(0) + " and on")).way == "hot"
            assert (await chat(engine, 0, "there?")).way == "hot"


async def test_a_prefix_that_begins_a_sessions_is_there_and_stays_whole(
    weights: str, tmp_path: Path
) -> None:
    with bare_llama(weights, **order(tmp_path)) as url:
        async with served(url, folder=tmp_path) as engine:
            question = prompt_of(7, 600)
            whole = (await chat(engine, 0, question)).input_tokens
            (outcome,) = await engine.warm(hot(0), (), 20.0)
            assert (outcome.state, outcome.chunks) == ("done", 0)
            assert (await chat(engine, 0, question)).cached_tokens >= whole - 1


async def test_a_request_that_wants_the_slot_gets_it_and_the_warm_up_is_busy(
    weights: str, tmp_path: Path
) -> None:
    with bare_llama(weights, **order(tmp_path, slots=1, ctx_tokens=16_384)) as url:
        async with served(url, folder=tmp_path) as engine:
            long = Hot(
                prompt=Prompt(model="m", text=prompt_of(3, 15_000)), tenant=TENANT, blocks=(1, 2)
            )
            warming = asyncio.create_task(engine.warm(long, (), 60.0))
            await until(lambda: computes(url))
            answer = await ask(engine, 0, prompt_of(0))
            assert answer.input_tokens == 1_600
            assert [one.state for one in await warming] == ["busy"]
            assert (await ask(engine, 0, prompt_of(0) + " and on")).way == "hot"


def computes(url: str) -> bool:
    with urlopen(f"{url}/slots", timeout=5.0) as answer:
        return any(one["is_processing"] for one in msgspec.json.decode(answer.read()))


async def test_who_was_started_again_gets_files_first_and_then_what_is_hot(
    weights: str, tmp_path: Path
) -> None:
    events: list[Event] = []
    mine, other = order(tmp_path, slots=3), order(tmp_path)

    async def source() -> Sequence[Hot]:
        return [hot(0), hot(1)]

    with bare_llama(weights, **other) as second:
        with bare_llama(weights, **mine) as url:
            warmth = Warmth(source, lambda *_: None)
            started = served(url, second, folder=tmp_path, events=events, warmth=warmth)
            engine = await started.__aenter__()
            engine.set_draining("many.1", is_draining=True)
            await chat(engine, 0, "what was asked before")
            engine.set_draining("many.0", is_draining=True)
            await until(lambda: known(events, "slots-saved", worker="many.0"))
        try:
            with bare_llama(weights, **mine):
                engine.set_draining("many.0", is_draining=False)
                await until(
                    lambda: known(events, "upstream-ready", worker="many.0", restored=1, warmed=1)
                )
                for number in range(2):
                    answer = await chat(engine, number, "a first question")
                    assert (answer.worker, answer.way) == ("many.0", "hot")
                    assert answer.cached_tokens > 1_200
        finally:
            await started.__aexit__(None, None, None)
