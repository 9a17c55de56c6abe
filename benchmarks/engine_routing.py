"""Two real servers with fewer slots than prompt families: whose choices have the first tokens out first.

Two llama.cpp servers with a real small model, one a core, each one thread; what is pushed out of a slot
is gone (`--cache-ram-mib` gives them a prompt cache in memory). Before them in turn:

- preheat, least_loaded, round_robin: our gateway with that rule, its exact cache never hit, as every
  request is another;
- vllm_router: the real program, cache-aware with its defaults;
- preheat_files (`--files`): ours, with slots kept in files besides. Not part of the comparison.

Arms alternate in blocks, forwards and backwards in turn. In a block each arm has the same families in the
same order at the same times, with texts of its own, and begins with empty slots; what it has learned of
speeds it keeps. The loop is open: Poisson arrivals at `--load` times what round robin answers with
four clients that never pause, measured first. Families' popularity is Zipf's.

TTFT is a client's, from sending to the first text. Hits are prompt tokens that the engines say were
cached, by all. Ratios are ours by the best other's, whichever that is; intervals are bootstrap over
blocks (95 %, the best other chosen anew in each draw).

The router wants an environment of its own:
    python3 -m venv ~/vllm-router && ~/vllm-router/bin/pip install vllm-router
    python -m benchmarks engine_routing --vllm-router ~/vllm-router/bin/vllm-router
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.engine_pair import Door, Pair, gateway, pair, vllm_router
from benchmarks.families import Chats, Shape, closed_loop, played, poisson, ready, write_trace
from benchmarks.miss_path import router_version
from benchmarks.process import Others
from benchmarks.report import BenchmarkError, Progress, Result, first_line
from preheat.core.spread import spread_of
from preheat.lab.load.exchange import Outcome

CALIBRATED = "round_robin"
OURS, FILES, ROUTER = "preheat", "preheat_files", "vllm_router"
RULES = ("preheat", "least_loaded", "round_robin")
CALIBRATING_CLIENTS = 4
LEARNING_REQUESTS = 48
"""The size of a server's prompt cache, which it doesn't tell, is learned from answers, too."""
CALIBRATING_REQUESTS = 32
RESAMPLES = 10_000

Blocks = list[list[Outcome]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm-router", metavar="PATH", help="the program of PyPI's vllm-router")
    parser.add_argument("--without-router", action="store_true", help="leave it out")
    parser.add_argument("--files", action="store_true", help="also ours with slot files")
    parser.add_argument("--blocks", type=int, default=6, help="of each arm (6)")
    parser.add_argument("--requests", type=int, default=100, help="of a block (100)")
    parser.add_argument("--load", type=float, default=0.65, help="of round robin's most (0.65)")
    parser.add_argument("--rate", type=float, help="requests a second, instead of a load")
    parser.add_argument("--families", type=int, default=10, help="of prompts (10)")
    parser.add_argument("--slots", type=int, default=3, help="of each server (3)")
    parser.add_argument("--slot-tokens", type=int, default=512, help="that a slot holds (512)")
    parser.add_argument("--prefix-tokens", type=int, default=200, help="that a family shares (200)")
    parser.add_argument("--own-tokens", type=int, default=20, help="of each request (20)")
    parser.add_argument("--answer-tokens", type=int, default=4, help="(4)")
    parser.add_argument("--skew", type=float, default=1.0, help="Zipf's exponent (1)")
    parser.add_argument("--cache-ram-mib", type=int, default=0, help="of each server (0)")
    parser.add_argument("--model", default="", help="a GGUF file; else the weights' package")
    parser.add_argument("--seed", type=int, default=1, help="of times, families and texts (1)")
    parser.add_argument("--requests-to", type=Path, metavar="FILE", help="a JSON line a request")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    executable = None if options.without_router else _router(options.vllm_router)
    shape = Shape(
        options.families,
        options.prefix_tokens,
        options.own_tokens,
        options.answer_tokens,
        options.skew,
    )
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        engines = stack.enter_context(
            pair(
                folder,
                model=options.model,
                slots=options.slots,
                slot_tokens=options.slot_tokens,
                cache_ram_mib=options.cache_ram_mib,
            )
        )
        doors = _doors(stack, folder, engines, executable, has_files=options.files)
        others = Others([*engines.servers, *(door.server for door in doors.values())])
        bench = _Bench(engines, doors, shape, folder, options, progress)
        rate, seen = asyncio.run(bench.run())
        others_share = others.share()
    if options.requests_to:
        _write(options.requests_to, seen)
    settings: dict[str, object] = {
        "xllamacpp": importlib.metadata.version("xllamacpp"),
        "rate_per_s": rate,
        "others_share": others_share,
        "block_mean_ttft_s": {
            arm: [mean_ttft_s([block]) for block in blocks] for arm, blocks in seen.items()
        },
        "block_hits": {arm: [hits([block]) for block in blocks] for arm, blocks in seen.items()},
    }
    if executable is not None:
        settings["vllm_router"] = first_line(router_version(executable))
    return Result(figures(seen), settings)


def _router(path: str | None) -> str:
    found = shutil.which(path or "vllm-router")
    if found is None:
        raise BenchmarkError(
            f"there is no {path or 'vllm-router'}. It wants an environment of its own:\n"
            "  python3 -m venv ~/vllm-router && ~/vllm-router/bin/pip install vllm-router\n"
            "then: --vllm-router ~/vllm-router/bin/vllm-router, or --without-router"
        )
    return found


def _doors(
    stack: contextlib.ExitStack,
    folder: Path,
    engines: Pair,
    executable: str | None,
    *,
    has_files: bool,
) -> dict[str, Door]:
    """All that stands before the servers, by arm; only one is asked at a time."""
    doors = {
        rule: stack.enter_context(gateway(folder, engines, name=rule, routing=rule))
        for rule in RULES
    }
    if executable is not None:
        doors[ROUTER] = stack.enter_context(vllm_router(folder, engines, executable=executable))
    if has_files:
        folders = ", ".join(f'"{path}"' for path in engines.folders)
        lines = [f"slot_folders = [{folders}]"]
        doors[FILES] = stack.enter_context(
            gateway(folder, engines, name=FILES, routing=OURS, lines=lines)
        )
    return doors


class _Bench:
    """Calibrates, then plays block after block."""

    def __init__(
        self,
        engines: Pair,
        doors: Mapping[str, Door],
        shape: Shape,
        folder: Path,
        options: argparse.Namespace,
        progress: Progress,
    ) -> None:
        self._engines = engines
        self._doors = doors
        self._shape = shape
        self._folder = folder
        self._options = options
        self._progress = progress

    async def run(self) -> tuple[float, dict[str, Blocks]]:
        """Requests a second, and what came of each arm's blocks."""
        options = self._options
        most_per_s = await self._learned()
        rate = options.rate or options.load * most_per_s
        self._progress.say(f"round robin answers {most_per_s:.2f}/s; asked are {rate:.2f}/s")
        seen: dict[str, Blocks] = {arm: [] for arm in self._doors}
        for block in range(options.blocks):
            arms = list(self._doors)
            for arm in arms if block % 2 == 0 else reversed(arms):
                seen[arm].append(await self._block(arm, block, rate))
                self._progress.say(
                    f"block {block + 1} of {options.blocks}: {arm} "
                    f"{mean_ttft_s(seen[arm][-1:]):.3f} s, hits {hits(seen[arm][-1:]):.2f}"
                )
        return rate, seen

    async def _learned(self) -> float:
        """Each door knows its servers, and ours their speeds; what round robin can answer a second."""
        most_per_s = 0.0
        for arm, door in self._doors.items():
            self._progress.say(f"{arm} gets to know the servers")
            await ready(door, self._chats("ready", arm))
            await self._engines.emptied()
            learning = self._chats("learning", arm)
            await closed_loop(
                door, learning, requests=LEARNING_REQUESTS, clients=CALIBRATING_CLIENTS
            )
            if arm == CALIBRATED:  # again, now that slots are full and speeds known
                most_per_s = await closed_loop(
                    door, learning, requests=CALIBRATING_REQUESTS, clients=CALIBRATING_CLIENTS
                )
        return most_per_s

    async def _block(self, arm: str, block: int, rate: float) -> list[Outcome]:
        await self._engines.emptied()
        pattern = f"{self._options.seed} {block}"
        times = itertools.islice(poisson(pattern, rate), self._options.requests)
        path = self._folder / "trace.jsonl"
        write_trace(path, self._chats(f"block {block}", arm), times)
        outcomes = await played(self._doors[arm], path)
        errors = [one.error for one in outcomes if one.error]
        if errors:
            raise BenchmarkError(f"{arm}: {len(errors)} requests failed, one with {errors[0]}")
        return outcomes

    def _chats(self, what: str, arm: str) -> Chats:
        seed = f"{self._options.seed} {what}"
        return Chats(self._shape, pattern=seed, texts=f"{seed} {arm}")


# Figures -------------------------------------------------------------------------------------


def mean_ttft_s(blocks: Sequence[Sequence[Outcome]]) -> float:
    times = [one.ttft_s or 0.0 for block in blocks for one in block]
    return sum(times) / len(times)


def p95_ttft_s(blocks: Sequence[Sequence[Outcome]]) -> float:
    return spread_of([one.ttft_s or 0.0 for block in blocks for one in block]).p95 or 0.0


def hits(blocks: Sequence[Sequence[Outcome]]) -> float:
    """Of all prompt tokens, those that were cached."""
    asked = sum(one.input_tokens or 0 for block in blocks for one in block)
    return sum(one.cached_tokens or 0 for block in blocks for one in block) / asked


def figures(seen: Mapping[str, Blocks]) -> dict[str, float]:
    """Of each arm its own; then ours by the best other's."""
    told: dict[str, float] = {}
    for arm, blocks in seen.items():
        told |= {
            f"{arm}_mean_ttft_s": mean_ttft_s(blocks),
            f"{arm}_p95_ttft_s": p95_ttft_s(blocks),
            f"{arm}_hits": hits(blocks),
            f"{arm}_requests": sum(map(len, blocks)),
        }
    compared = {arm: blocks for arm, blocks in seen.items() if arm != FILES}
    told |= _ratios(compared, "mean_ttft_ratio_best_other", mean_ttft_s, min)
    told |= _ratios(compared, "p95_ttft_ratio_best_other", p95_ttft_s, min)
    return told | _ratios(compared, "hits_ratio_best_other", hits, max)


def _ratios(
    seen: Mapping[str, Blocks],
    name: str,
    measure: Callable[[Blocks], float],
    best: Callable[[Iterator[float]], float],
) -> dict[str, float]:
    def ratio(places: Sequence[int]) -> float:
        drawn = {arm: measure([blocks[at] for at in places]) for arm, blocks in seen.items()}
        return drawn[OURS] / best(value for arm, value in drawn.items() if arm != OURS)

    every = range(len(seen[OURS]))
    told = {name: ratio(every)}
    if len(every) > 1:
        chance = random.Random(0)
        drawn = sorted(ratio(chance.choices(every, k=len(every))) for _ in range(RESAMPLES))
        told[f"{name}_low"] = drawn[int(0.025 * RESAMPLES)]
        told[f"{name}_high"] = drawn[int(0.975 * RESAMPLES)]
    return told


def _write(path: Path, seen: Mapping[str, Blocks]) -> None:
    with path.open("wb") as file:
        for arm, blocks in seen.items():
            for number, block in enumerate(blocks):
                for one in block:
                    row = {"arm": arm, "block": number, **msgspec.to_builtins(one)}
                    file.write(msgspec.json.encode(row) + b"\n")
