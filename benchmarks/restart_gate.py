"""A rolling restart of two real servers under load: what requests of the next minute feel.

Two llama.cpp servers with a real small model, one a core, hold one prompt family in each slot; our gateway before
them. A minute apart each is started again while requests go on coming (open loop, Poisson, at `--load` times
what the warm pair answers with four clients that never pause), in three ways:

- gate: the server is drained by the admin call, stopped when nothing runs there and its slots are
  saved, started, and let back in: the readiness gate loads what was used last from the slot files (one
  folder for both servers), and the ramp gives it a growing share;
- nothing: it is killed amid its work and started again; no slot files, no gate;
- undisturbed: as gate, without any restart.

Arms alternate in blocks; a block's arms have the same families in the same order at the same times, with
texts of their own, and begin with empty slots that are filled first. Counted are requests that were due
within a minute of the beginning of either restart. TTFT is a client's, of whole answers; others are
errors. *Time to full traffic* is from a restart's beginning to the first ten seconds in which that
server answered four fifths of its share before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine_pair import Door, Pair, gateway, pair
from benchmarks.families import Chats, Shape, closed_loop, played, poisson, ready, write_trace
from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.restart_scores import MINUTE_S, Block, figures, ttfts_s
from preheat.core.spread import spread_of

ARMS = ("gate", "nothing", "undisturbed")
CLIENTS = 4
WITHIN_S = 60.0
LOOK_S = 0.2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=3, help="of each arm (3)")
    parser.add_argument("--settle-s", type=float, default=30.0, help="before the first (30)")
    parser.add_argument("--apart-s", type=float, default=MINUTE_S, help="two restarts are (60)")
    parser.add_argument("--load", type=float, default=0.3, help="of the warm pair's most (0.3)")
    parser.add_argument("--slots", type=int, default=4, help="of each server (4)")
    parser.add_argument("--slot-tokens", type=int, default=1_024, help="that a slot holds (1024)")
    parser.add_argument("--prefix-tokens", type=int, default=800, help="that a family shares (800)")
    parser.add_argument("--own-tokens", type=int, default=24, help="of each request (24)")
    parser.add_argument("--answer-tokens", type=int, default=8, help="(8)")
    parser.add_argument("--skew", type=float, default=0.5, help="Zipf's exponent (0.5)")
    parser.add_argument("--model", default="", help="a GGUF file; else the weights' package")
    parser.add_argument("--seed", type=int, default=1, help="of times, families and texts (1)")
    parser.add_argument("--requests-to", type=Path, metavar="FILE", help="a JSON line a request")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        engines = stack.enter_context(
            pair(
                folder,
                model=options.model,
                slots=options.slots,
                slot_tokens=options.slot_tokens,
                cache_ram_mib=0,
                slot_folder=folder / "slots",
            )
        )
        doors = {
            arm: stack.enter_context(
                gateway(folder, engines, name=arm, routing="preheat", lines=_lines(arm, engines))
            )
            for arm in ARMS
        }
        bench = _Bench(engines, doors, folder, options, progress)
        rate, seen = asyncio.run(bench.run())
    if options.requests_to:
        _write(options.requests_to, seen)
    return Result(
        figures(seen, options.apart_s),
        {
            "xllamacpp": importlib.metadata.version("xllamacpp"),
            "rate_per_s": rate,
            "block_p95_ttft_s": {
                arm: [spread_of(ttfts_s([one], options.apart_s)).p95 for one in blocks]
                for arm, blocks in seen.items()
            },
            "errors": {
                arm: [one.error for block in blocks for one in block.outcomes if one.error]
                for arm, blocks in seen.items()
            },
        },
    )


def _lines(arm: str, engines: Pair) -> list[str]:
    """Settings of the group that an arm has besides."""
    if arm == "nothing":
        return ["gate_s = 0"]
    return [f'slot_folders = ["{engines.folders[0]}"]']


class _Bench:
    """Calibrates, then plays block after block."""

    def __init__(
        self,
        engines: Pair,
        doors: Mapping[str, Door],
        folder: Path,
        options: argparse.Namespace,
        progress: Progress,
    ) -> None:
        self._engines = engines
        self._doors = doors
        self._folder = folder
        self._options = options
        self._progress = progress
        self._shape = Shape(
            2 * options.slots,
            options.prefix_tokens,
            options.own_tokens,
            options.answer_tokens,
            options.skew,
        )

    async def run(self) -> tuple[float, dict[str, list[Block]]]:
        """Requests a second, and what came of each arm's blocks."""
        options = self._options
        most_per_s = 0.0
        for arm, door in self._doors.items():
            self._progress.say(f"{arm} gets to know the servers")
            most_per_s = await self._filled(door, self._chats("learning", arm))
        rate = options.load * most_per_s
        self._progress.say(f"the warm pair answers {most_per_s:.2f}/s; asked are {rate:.2f}/s")
        seen: dict[str, list[Block]] = {arm: [] for arm in ARMS}
        for block in range(options.blocks):
            for arm in ARMS if block % 2 == 0 else reversed(ARMS):
                one = await self._block(arm, block, rate)
                seen[arm].append(one)
                p95 = spread_of(ttfts_s([one], options.apart_s)).p95 or 0.0
                self._progress.say(
                    f"block {block + 1} of {options.blocks}: {arm}, p95 {p95:.3f} s, "
                    f"{sum(bool(each.error) for each in one.outcomes)} errors, "
                    f"back after {[round(took, 1) for took in one.took_s]} s"
                )
        return rate, seen

    async def _filled(self, door: Door, chats: Chats) -> float:
        """Every family was asked for; answers a second once they all were."""
        await self._engines.emptied()
        await ready(door, chats)
        each = chats.one_of_each()
        await closed_loop(door, each, requests=self._shape.families, clients=2)
        return await closed_loop(door, chats, requests=4 * self._shape.families, clients=CLIENTS)

    async def _block(self, arm: str, block: int, rate: float) -> Block:
        options, door = self._options, self._doors[arm]
        chats = self._chats(f"block {block}", arm)
        await self._filled(door, chats)
        end_s = options.settle_s + options.apart_s + MINUTE_S
        times = poisson(f"{options.seed} {block}", rate)
        path = self._folder / "trace.jsonl"
        write_trace(path, chats, itertools.takewhile(lambda at: at < end_s, times))
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(played(door, path))
            began_s, took_s = await self._restarted(arm, door)
        return Block(playing.result(), began_s, took_s)

    async def _restarted(self, arm: str, door: Door) -> tuple[list[float], list[float]]:
        """Both, one after the other; when each began and how long it took."""
        options, loop = self._options, asyncio.get_running_loop()
        began_s: list[float] = []
        took_s: list[float] = []
        start_at = loop.time()
        for number in range(2):
            due_s = options.settle_s + number * options.apart_s
            await asyncio.sleep(start_at + due_s - loop.time())
            began_s.append(loop.time() - start_at)
            if arm == "nothing":
                await asyncio.to_thread(self._killed, number)
            elif arm == "gate":
                await asyncio.to_thread(self._replaced, door, number)
            took_s.append(loop.time() - start_at - began_s[-1])
        return began_s, took_s

    def _killed(self, number: int) -> None:
        self._engines.stop(number, is_killed=True)
        self._engines.start(number)

    def _replaced(self, door: Door, number: int) -> None:
        """As an operator would do it."""
        name = door.workers()[number]["name"]
        door.drain(name, is_draining=True)
        _wait_until(lambda: _is_idle(door.workers()[number]), f"{name} is drained")
        self._engines.stop(number)
        self._engines.start(number)
        door.drain(name, is_draining=False)
        _wait_until(lambda: not door.workers()[number]["warming"], f"{name} is let in")

    def _chats(self, what: str, arm: str) -> Chats:
        seed = f"{self._options.seed} {what}"
        return Chats(self._shape, pattern=seed, texts=f"{seed} {arm}")


def _wait_until(is_so: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WITHIN_S
    while not is_so():
        if time.monotonic() > until:
            raise BenchmarkError(f"it isn't so after {WITHIN_S:g} s that {what}")
        time.sleep(LOOK_S)


def _is_idle(worker: Mapping[str, Any]) -> bool:
    return not worker["in_flight"] and not worker["unsaved_slots"]


def _write(path: Path, seen: Mapping[str, Sequence[Block]]) -> None:
    with path.open("wb") as file:
        for arm, blocks in seen.items():
            for number, block in enumerate(blocks):
                for one in block.outcomes:
                    row = {"arm": arm, "block": number, **msgspec.to_builtins(one)}
                    file.write(msgspec.json.encode(row) + b"\n")
