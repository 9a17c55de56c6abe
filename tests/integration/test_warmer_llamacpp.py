"""A warmer and a real llama.cpp server: chunks in one slot, resumed, called off, spread, proven."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="the embedded engine isn't installed")
pytest.importorskip("gguf", reason="the tiny model is written with gguf")

from preheat.core.warmup import Mark, Outcome, Pace
from preheat.engines.child import ChildSettings, EngineChild
from preheat.engines.dialects.calls import Prompt
from preheat.engines.direct import Direct
from preheat.engines.slot_files import SlotFiles
from preheat.engines.warmer import Step, Warmer
from tiny_model import write_tiny_gguf

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio]

SLOTS = 3
PACE = Pace(slack_s=0.1, first_tokens=100, least_tokens=50)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


@asynccontextmanager
async def running(weights: str, folder: Path, cache_ram_mib: int = 0) -> AsyncIterator[Direct]:
    settings = ChildSettings(
        model=weights,
        slots=SLOTS,
        ctx_tokens=SLOTS * 4_096,
        cache_ram_mib=cache_ram_mib,
        slot_save_dir=str(folder / "slots"),
    )
    engine = EngineChild(settings, on_event=lambda _name, _fields: None)
    await engine.start()
    assert engine.url is not None
    direct = Direct(engine.url, api_key=engine.api_key)
    try:
        yield direct
    finally:
        await direct.aclose()
        await engine.aclose()


def chat(word: str, size: int = 1_200) -> Prompt:
    return Prompt(messages=[{"role": "system", "content": (word + " ") * (size // len(word))}])


def warmer_of(direct: Direct, **options: Any) -> Warmer:
    return Warmer(direct, pace=PACE, **options)


def marked(outcome: Outcome, tokens: int | None = None, at: float = 0.0) -> Mark:
    return Mark(
        worker=outcome.worker,
        prefix=outcome.object,
        tokens=tokens or outcome.tokens,
        done_tokens=outcome.tokens,
        slot=outcome.slot,
        at=at,
    )


async def erase(direct: Direct, slot: int) -> None:
    dialect = await direct.known()
    call = dialect.erase(slot)
    assert call is not None
    status, body = await direct.ask(call)
    moved = dialect.read_moved(status, body)
    assert moved is not None
    assert moved.ok


async def test_prefixes_are_warmed_in_chunks_proven_and_refuted_after_an_erase(
    weights: str, tmp_path: Path
) -> None:
    async with running(weights, tmp_path) as direct:
        warmer = warmer_of(direct)
        prompts = [chat("alpha"), chat("bravo"), Prompt(text="charlie " * 150)]
        outcomes = [await warmer.warm(one) for one in prompts]
        assert [one.state for one in outcomes] == ["done"] * 3
        assert len({one.slot for one in outcomes}) == 3
        for one in outcomes:
            assert one.chunks > 2
            assert one.computed_tokens <= one.tokens + 30  # what prompts share is computed again
        marks = [marked(one, at=float(i)) for i, one in enumerate(outcomes)]
        assert await warmer.order(marks) == [2, 1, 0]

        gone = 2
        assert outcomes[gone].slot is not None
        await erase(direct, outcomes[gone].slot)
        order = await warmer.order(marks)
        assert order == [1, 0, 2]  # what is refuted is computed, and must not push out the others
        proofs = {i: await warmer.prove(prompts[i]) for i in order}
        assert [proofs[i].verdict for i in range(3)] == ["proven", "proven", "refuted"]
        assert proofs[0].cached_tokens == proofs[0].warmed_tokens - 1


async def test_a_short_first_piece_doesnt_take_the_place_of_another_prefix(
    weights: str, tmp_path: Path
) -> None:
    """They share more than a tenth of it, by which llama.cpp would choose the other's slot."""
    same = "You are a helpful assistant. "
    prompts = [Prompt(text=same + (word + " ") * 150) for word in ("kilo", "lima", "mike")]
    async with running(weights, tmp_path) as direct:
        warmer = warmer_of(direct)
        outcomes = [await warmer.warm(one) for one in prompts]
        assert len({one.slot for one in outcomes}) == 3
        assert [(await warmer.prove(one)).verdict for one in prompts] == ["proven"] * 3


async def test_a_warm_up_that_is_called_off_goes_on_where_it_was(
    weights: str, tmp_path: Path
) -> None:
    async with running(weights, tmp_path) as direct:
        steps: list[Step] = []
        enough = asyncio.Event()

        def on_step(step: Step) -> None:
            steps.append(step)
            if step.done_tokens >= 300:
                enough.set()

        warming = asyncio.create_task(warmer_of(direct, on_step=on_step).warm(chat("delta", 3_000)))
        await enough.wait()
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        last = steps[-1]
        assert 300 <= last.done_tokens < last.tokens
        await idle(direct)
        mark = Mark(
            worker=direct.url,
            prefix=last.prefix,
            tokens=last.tokens,
            done_tokens=last.done_tokens,
            slot=last.slot,
        )
        outcome = await warmer_of(direct).warm(chat("delta", 3_000), mark)
        assert outcome.state == "done"
        assert outcome.tokens == last.tokens
        assert outcome.computed_tokens <= last.tokens - last.done_tokens + 1

        again = await warmer_of(direct).warm(chat("delta", 3_000), marked(outcome))
        assert (again.chunks, again.computed_tokens) == (1, 1)


async def idle(direct: Direct) -> None:
    while any(one.is_busy for one in await direct.slots() or ()):
        await asyncio.sleep(0.05)


async def test_a_mark_that_is_no_longer_true_makes_it_begin_anew(
    weights: str, tmp_path: Path
) -> None:
    async with running(weights, tmp_path) as direct:
        outcome = await warmer_of(direct).warm(chat("echo"))
        assert outcome.slot is not None
        await erase(direct, outcome.slot)
        again = await warmer_of(direct).warm(chat("echo"), marked(outcome))
        assert again.chunks > 2
        assert again.computed_tokens == again.tokens


async def test_it_waits_while_a_live_request_runs(weights: str, tmp_path: Path) -> None:
    async with running(weights, tmp_path) as direct:
        dialect = await direct.known()
        live = dialect.warm(Prompt(ids=[30 + i % 200 for i in range(4_000)]))
        assert live is not None
        warmer = Warmer(direct, pace=Pace(slack_s=0.1, most_load=0.3), patience_s=60)
        running_live = asyncio.create_task(direct.ask(live))
        while not any(one.is_busy for one in await direct.slots() or ()):
            await asyncio.sleep(0.01)
        outcome = await warmer.warm(chat("foxtrot", 200))
        assert running_live.done()
        assert outcome.state == "done"
        assert outcome.waited_s > 0


async def test_a_warm_slot_is_spread_over_the_others_and_survives_a_restart(
    weights: str, tmp_path: Path
) -> None:
    prompt = chat("golf")
    async with running(weights, tmp_path) as direct:
        files = SlotFiles(direct)
        outcome = await warmer_of(direct, files=files).warm(prompt)
        assert outcome.slot is not None
        spread = await files.spread(outcome.object, outcome.slot)
        assert sorted(spread) == [0, 1, 2]
        assert spread[0] == outcome.slot
        proofs = await asyncio.gather(
            *(Warmer(direct, pace=Pace(most_load=2.0)).prove(prompt) for _ in range(SLOTS))
        )
        assert [one.verdict for one in proofs] == ["proven"] * SLOTS
    async with running(weights, tmp_path) as direct:
        assert (await warmer_of(direct).prove(chat("hotel"))).verdict == "refuted"
        again = await warmer_of(direct, files=SlotFiles(direct)).warm(prompt)
        assert (again.state, again.chunks, again.computed_tokens) == ("done", 1, 1)
        assert (await warmer_of(direct).prove(prompt)).verdict == "proven"


async def test_without_files_or_with_a_torn_one_it_is_computed(
    weights: str, tmp_path: Path
) -> None:
    async with running(weights, tmp_path) as direct:
        files = SlotFiles(direct)
        first = await warmer_of(direct, files=files).warm(chat("india"))
        (written,) = (tmp_path / "slots").iterdir()
        written.write_bytes(written.read_bytes()[:5_000])
        assert first.slot is not None
        await erase(direct, first.slot)
        again = await warmer_of(direct, files=files).warm(chat("india"))
        assert (again.state, again.computed_tokens) == ("done", again.tokens)


async def test_what_is_too_long_for_the_server_fails_with_its_words(
    weights: str, tmp_path: Path
) -> None:
    async with running(weights, tmp_path) as direct:
        outcome = await warmer_of(direct).warm(chat("juliet", 6_000))
        assert outcome.state == "failed"
        assert "its slots hold 4096 tokens" in outcome.why
        assert (outcome.tokens, outcome.chunks) == (0, 0)
        assert (await warmer_of(direct).prove(chat("juliet", 6_000))).verdict == "unknown"
        assert (await warmer_of(direct).prove_adapter("0")).verdict == "refuted"
        assert (await warmer_of(direct).load_adapter("sql", "/x")).state == "failed"
