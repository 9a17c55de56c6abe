"""Our copies of other routers' rules against the real programs: how often they choose alike.

The real `vllm-router` and `sglang-router` get a stream of prompts, one after the other, in front of
workers that hold every request until they are told to answer. So at each choice it is known how many
requests each worker has, and the copy, asked the same with the same loads, must name the same worker.
A copy keeps its own memory of what *it* would have chosen: one mistake may cause others.

The prompts are a Mooncake trace's, each block as words of its own. SMG's tree is of characters and a
trace knows blocks: `smg_cache_aware` is our copy fed with characters, which compares the rule, and
`smg_blocks` with the trace's blocks, which is how a replay uses it. Where equals are drawn by chance
the copy may name the one that was drawn. A rule that draws by chance is compared
by its distribution: the largest difference between the share of choices that fall on the k-th
least loaded worker and the share that they should have (`distance_…`, 0 is alike). sglang-router 0.3.2 was seen to draw evenly for its `power_of_two`, as if it
counted no requests where engines don't tell their load: that is what its distance shows.

    python3 -m venv ~/vllm-router && ~/vllm-router/bin/pip install vllm-router
    python3 -m venv ~/sglang-router && ~/sglang-router/bin/pip install sglang-router
    python -m benchmarks routers --vllm-router ~/vllm-router/bin/vllm-router \\
        --sglang-router ~/sglang-router/bin/sglang-router --json routers.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

import msgspec

from benchmarks.held_workers import Held, HeldWorkers, ask, read_message
from benchmarks.process import free_port, running
from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.traces import chats
from preheat.core.chance import mix
from preheat.core.placing import Candidate, Placing
from preheat.core.routing import POLICIES, RoutingPolicy

WORKERS = 4
BLOCK_CHARACTERS = 64
WORD_CHARACTERS = 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST_IN_FLIGHT = 96
SETTLES_S = 0.01
"""A router counts a request as over shortly after its answer was read here."""

EVEN = {"cache_threshold": 0.3, "abs_threshold": 64, "rel_threshold": 1.5}
UNEVEN = {"cache_threshold": 0.5, "abs_threshold": 2, "rel_threshold": 1.1}
"""Both routers' defaults, and thresholds so low that the load decides often."""

TREE_CHARACTERS = 1 << 26
"""What both routers' trees hold by default, or half of it, a worker."""

COPIES = {"vllm_router": "vllm_router", "sglang_router": "smg"}


class Case(msgspec.Struct, frozen=True):
    """A rule of a router and what is compared with it: a copy, or how often a draw should fall on
    the k-th least loaded worker."""

    name: str
    flags: tuple[str, ...]
    copy: Callable[[], RoutingPolicy] | None = None
    by_character: bool = False
    draws_equals: bool = False
    share: Callable[[Sequence[int]], list[float]] | None = None


class Prompt(msgspec.Struct, frozen=True):
    """What is sent, and what the copy is told of it."""

    text: str
    placing: Placing

    def by_character(self) -> Placing:
        """As if each character were a block."""
        chained, blocks = 0, []
        for character in self.text:
            chained = mix(chained ^ ord(character))
            blocks.append(chained)
        return Placing(len(self.text), blocks, 1, self.placing.session)


def add_options(parser: argparse.ArgumentParser) -> None:
    for name in ("vllm-router", "sglang-router"):
        parser.add_argument(f"--{name}", metavar="PATH", help=f"the program of PyPI's {name}")
    parser.add_argument("--requests", type=int, default=1_500, help="of each case (1500)")
    parser.add_argument("--seed", type=int, default=1, help="of when requests end (1)")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    programs = {"vllm_router": options.vllm_router, "sglang_router": options.sglang_router}
    programs = {name: path for name, path in programs.items() if path is not None}
    if not programs:
        raise BenchmarkError(
            "no router to compare with. Each wants an environment of its own:\n"
            "  python3 -m venv /tmp/vr && /tmp/vr/bin/pip install vllm-router\n"
            "  python3 -m venv /tmp/sr && /tmp/sr/bin/pip install sglang-router\n"
            "then: --vllm-router /tmp/vr/bin/vllm-router --sglang-router /tmp/sr/bin/sglang-router"
        )
    prompts = list(prompts_of(options.requests))
    figures: dict[str, float] = {}
    for router, path in programs.items():
        if not Path(path).is_file():
            raise BenchmarkError(f"there is no program {path}")
        for case in cases(router):
            progress.say(f"{router}: {case.name}")
            command = [path, *(("launch",) if router == "sglang_router" else ()), *case.flags]
            with tempfile.TemporaryDirectory() as folder:
                measured = asyncio.run(
                    Comparison(case, prompts, options.seed, progress).run(command, Path(folder))
                )
            kind = "agree" if case.copy is not None else "distance"
            figures[f"{kind}_{case.name}_{router}"] = measured
    settings: dict[str, object] = {"workers": WORKERS, "block_characters": BLOCK_CHARACTERS}
    return Result(figures=figures, settings=settings)


def cases(router: str) -> Iterator[Case]:
    for name, thresholds in (("", EVEN), ("_uneven", UNEVEN)):
        flags = ["--policy", "cache_aware", "--cache-threshold", f"{thresholds['cache_threshold']}"]
        flags += ["--balance-abs-threshold", f"{thresholds['abs_threshold']}"]
        flags += ["--balance-rel-threshold", f"{thresholds['rel_threshold']}"]
        copy = partial(POLICIES[COPIES[router]], tree_blocks=TREE_CHARACTERS, **thresholds)
        yield Case(f"smg_cache_aware{name}", tuple(flags), copy, by_character=True)
        yield Case(f"smg_blocks{name}", tuple(flags), copy)
    yield Case("round_robin", ("--policy", "round_robin"), POLICIES["round_robin"])
    if router == "sglang_router":
        flags = ["--policy", "manual", "--assignment-mode", "min_load"]
        yield Case("session", tuple(flags), POLICIES["session"], draws_equals=True)
    yield Case("random", ("--policy", "random"), share=even_share)
    yield Case("power_of_two", ("--policy", "power_of_two"), share=two_choices_share)


def prompts_of(count: int) -> Iterator[Prompt]:
    """A Mooncake request each; its session is the first block that isn't shared by all."""
    trace = chats()
    per_token = BLOCK_CHARACTERS / trace.block_tokens
    for one in trace.arrivals[:count]:
        characters = max(WORD_CHARACTERS, round(one.input_tokens * per_token))
        text = "".join(words(block) for block in one.blocks)[:characters]
        full = characters // BLOCK_CHARACTERS
        session = f"s{one.blocks[min(1, len(one.blocks) - 1)]}"
        yield Prompt(text, Placing(len(text), one.blocks[:full], BLOCK_CHARACTERS, session))


def words(block: int) -> str:
    """A block's text, the same wherever it stands: words that begin with any letter."""
    made = []
    for place in range(BLOCK_CHARACTERS // WORD_CHARACTERS):
        bits = mix(mix(block) + place)
        for _ in range(WORD_CHARACTERS - 1):
            bits, letter = divmod(bits, len(LETTERS))
            made.append(LETTERS[letter])
        made.append(" ")
    return "".join(made)


def even_share(loads: Sequence[int]) -> list[float]:
    return [1.0 / len(loads) for _ in loads]


def two_choices_share(loads: Sequence[int]) -> list[float]:
    """For each worker the chance to be one of two drawn and the less loaded, or half of an equal pair."""
    pairs = list(combinations(range(len(loads)), 2))
    shares = [0.0] * len(loads)
    for one, other in pairs:
        wins = 0.5 if loads[one] == loads[other] else float(loads[one] < loads[other])
        shares[one] += wins / len(pairs)
        shares[other] += (1.0 - wins) / len(pairs)
    return shares


class Comparison:
    """One rule of one router, from its start to the last choice."""

    def __init__(
        self, case: Case, prompts: Sequence[Prompt], seed: int, progress: Progress
    ) -> None:
        self._case = case
        self._prompts = prompts
        self._random = random.Random(seed)
        self._progress = progress
        self._workers = HeldWorkers(WORKERS)
        self._open: list[tuple[Held, asyncio.StreamReader, asyncio.StreamWriter, Placing]] = []
        self._port = free_port()

    async def run(self, command: Sequence[str], folder: Path) -> float:
        flags = ["--host", "127.0.0.1", "--port", f"{self._port}"]
        flags += ["--prometheus-port", f"{free_port()}", "--worker-urls", *self._workers.urls]
        async with self._workers.listening():
            with running("router", [*command, *flags], folder=folder, core=None) as server:
                await asyncio.to_thread(server.wait_for_connect, self._port)
                await self._ready()
                order = await self._order()
                measured = await self._compare(order)
                while self._open:
                    await self._end(0)
        return measured

    async def _ready(self) -> None:
        """It takes connections before it knows its workers: asked until a request gets through."""
        for attempt in range(100):
            reader, writer = await ask(self._port, f"ready {attempt}")
            arrived = asyncio.ensure_future(self._workers.arrival())
            refused = asyncio.ensure_future(read_message(reader))
            done, _ = await asyncio.wait({arrived, refused}, return_when="FIRST_COMPLETED")
            if arrived in done:
                arrived.result().answer.set()
                await refused
                writer.close()
                await asyncio.sleep(2.0)  # the last of the workers may still be on its way in
                return
            arrived.cancel()
            writer.close()
            await asyncio.sleep(0.2)
        raise BenchmarkError("the router never sent a request to a worker")

    async def _order(self) -> list[int]:
        """In which order the router has its workers: equals are taken in it. Unrelated requests,
        each held, fall on one worker after the other (not where chance decides)."""
        if self._case.copy is None or self._case.draws_equals:
            return list(range(WORKERS))
        first = [Prompt(words(-1 - at), Placing(1, session=f"o{at}")) for at in range(WORKERS)]
        order = [await self._send(prompt) for prompt in first]
        if sorted(order) != list(range(WORKERS)):
            raise BenchmarkError(f"{WORKERS} first requests went to workers {order}")
        for _ in range(WORKERS):
            await self._end(0)
        return order

    async def _compare(self, order: Sequence[int]) -> float:
        policy = self._case.copy() if self._case.copy is not None else None
        alike = 0
        chosen, expected = [0.0] * WORKERS, [0.0] * WORKERS
        for number, prompt in enumerate(self._prompts):
            await self._let_some_end()
            loads = [sum(held.worker == worker for held, *_ in self._open) for worker in order]
            place = order.index(await self._send(prompt))
            if policy is not None:
                fleet = [Candidate(at, in_flight=load) for at, load in enumerate(loads)]
                if self._case.draws_equals:
                    fleet.insert(0, fleet.pop(place))
                by_character = self._case.by_character
                placing = prompt.by_character() if by_character else prompt.placing
                named = fleet[policy.choose(placing, fleet, float(number))]
                alike += named.number == place
            elif self._case.share is not None:
                ranks = sorted(range(WORKERS), key=loads.__getitem__)
                chosen[ranks.index(place)] += 1
                for rank, worker in enumerate(ranks):
                    expected[rank] += self._case.share(loads)[worker]
            self._progress.tick(f"{number + 1:,} of {len(self._prompts):,}")
        if policy is not None:
            return alike / len(self._prompts)
        return max(abs(a - b) for a, b in zip(chosen, expected, strict=True)) / len(self._prompts)

    async def _send(self, prompt: Prompt) -> int:
        """Which worker it came to. It is held there."""
        session = prompt.placing.session.encode()
        headers = b"x-smg-routing-key: %b\r\n" % session if self._case.draws_equals else b""
        reader, writer = await ask(self._port, prompt.text, headers)
        held = await self._workers.arrival()
        self._open.append((held, reader, writer, prompt.placing))
        return held.worker

    async def _let_some_end(self) -> None:
        """None, one or two, as drawn: the number in flight wanders up to its bound and is halved there."""
        count = self._random.choice((0, 1, 1, 2))
        if len(self._open) >= MOST_IN_FLIGHT:
            count = MOST_IN_FLIGHT // 2
        for _ in range(min(count, len(self._open))):
            await self._end(self._random.randrange(len(self._open)))
        if count:
            await asyncio.sleep(SETTLES_S)

    async def _end(self, place: int) -> None:
        held, reader, writer, _ = self._open.pop(place)
        held.answer.set()
        await read_message(reader)
        writer.close()
