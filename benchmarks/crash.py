"""Whether anybody gets a wrong answer when processes of the gateway are killed.

A gateway with two workers and L2 on disk stands before an engine that echoes, so the right answer
to each prompt is known. Clients ask without a pause, over connections they keep: some prompts again
and again, others never before, plain and streamed; whatever breaks they ask again. Meanwhile, at
random moments, a worker or the supervisor gets `kill -9`; a supervisor is started again on the same
port and folder, once its workers have noticed.

wrong_answers  answers that are whole and not those of the prompt.
torn_entries   entries that the gateway itself found damaged, and answers with a damaged body.
failed         requests that had no answer after all their tries.
stuck_s        the longest of: the time in which nobody got an answer, and the time for which any
               request that was broken off waited for its own.

Then LMDB alone, at full budget, by processes that are killed every thousand puts (`store_churn`,
which says what its figures mean); `--no-churn` leaves it out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import uvloop

from benchmarks import chat, servers, store_churn
from benchmarks.process import start_times, still_running
from benchmarks.rawhttp import Connection, Reply, post
from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.servers import ECHO, Engine, Gateway, Layout
from benchmarks.workload import Zipf

SEED = 1
MODEL = "m1"
CLIENTS = 16
POOL = 500
PROMPT_BYTES = (200, 20_000)
STREAMED_SHARE = 0.2
REPEATED_SHARE = 0.5
SUPERVISOR_SHARE = 0.2
PAUSE_S = (0.05, 0.8)  # between the gateway's recovery and the next kill
TRY_WITHIN_S = 10.0
REQUEST_WITHIN_S = 30.0
RECOVERED_WITHIN_S = 20.0
L1_BYTES, L1_ENTRIES, L2_BYTES = 4_194_304, 1_000, 67_108_864


class Tally:
    """What the clients saw."""

    def __init__(self) -> None:
        self.answered = 0
        self.hits = 0
        self.wrong = 0
        self.damaged = 0
        self.retries: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.longest_wait_s = 0.0  # of a request that was broken off
        self.longest_silence_s = 0.0
        self._last_at = time.monotonic()

    def answered_now(self) -> None:
        now = time.monotonic()
        self.answered += 1
        self.longest_silence_s = max(self.longest_silence_s, now - self._last_at)
        self._last_at = now

    @property
    def stuck_s(self) -> float:
        silence_s = max(self.longest_silence_s, time.monotonic() - self._last_at)
        return max(self.longest_wait_s, silence_s)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=50, help="processes killed (50)")
    parser.add_argument(
        "--churn", action=argparse.BooleanOptionalAction, default=True, help="LMDB alone, too"
    )
    parser.add_argument("--churn-values", type=int, default=200_000, help="its puts (200,000)")
    Layout.add_options(parser, workers=2, log=False)


def tools() -> dict[str, list[str]]:
    """What else must be installed: nothing."""
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    layout = Layout.of(options, l1_bytes=L1_BYTES, l1_entries=L1_ENTRIES, l2_bytes=L2_BYTES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        engine = stack.enter_context(servers.fake_engine(folder, core=None, is_bare=True))
        engine.answer_with("echo")
        host = stack.enter_context(Host(folder, engine, layout))
        tally = Tally()
        crash = Crash(host, tally, progress)
        uvloop.run(crash.run(options.kills))
        settings: dict[str, object] = {"preheat": host.gateway.settings}
    for wrong, count in tally.failures.most_common():
        progress.say(f"failed: {wrong}: {count:,}")
    figures = crash.figures()
    if options.churn:
        churned = _churn(options.churn_values, progress)
        figures["torn_entries"] += churned.pop("torn_entries")
        figures |= churned
    return Result(figures, settings)


def _churn(values: int, progress: Progress) -> dict[str, float]:
    """The figures of `store_churn`; those whose names mean something else here, with a prefix."""
    progress.say(f"churning LMDB with {values:,} values")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        figures = store_churn.churn(Path(name) / "l2", values)
    own = {"map_full", "l2_over_budget_bytes", "torn_entries"}
    return {name if name in own else f"churn_{name}": value for name, value in figures.items()}


class Host:
    """The gateway, over all its lives."""

    def __init__(self, folder: Path, engine: Engine, layout: Layout) -> None:
        self.workers = layout.workers
        self.bugs = 0
        self._folder = folder
        self._engine = engine
        self._layout = layout
        self._life = ExitStack()
        self.gateway: Gateway = self._start(None)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self._life.close()

    def kill_supervisor(self) -> None:
        """And start it again, as soon as what it leaves behind has ended."""
        server = self.gateway.server
        left = start_times(server.pids()[1:])
        server.kill()
        _wait_until(lambda: not still_running(left), "the workers outlived their supervisor")
        self.end_life()
        self.gateway = self._start(self.gateway)

    def kill_worker(self, rng: random.Random) -> None:
        """And wait until there are as many as before, others than before."""
        server = self.gateway.server
        victim = rng.choice(self._ready_workers())
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)

        def is_whole() -> bool:
            try:
                ready = self._ready_workers()
            except BenchmarkError:
                return False  # the one who was killed was asked
            return victim not in ready and len(ready) >= self.workers and server.is_running()

        _wait_until(is_whole, "no worker came in place of the one that was killed")

    def torn(self) -> int:
        """Entries of L2 that this life of the gateway found damaged, as far as it is known."""
        return int(self.gateway.stats()["l2"]["events"].get("torn", 0))

    def end_life(self) -> None:
        said = self.gateway.server.errors.read_text(errors="replace")
        self.bugs += sum('"event":"bug"' in line for line in said.splitlines())
        self._life.close()

    def _start(self, before: Gateway | None) -> Gateway:
        return self._life.enter_context(
            servers.gateway(
                self._folder,
                {MODEL: self._engine},
                core=None,
                layout=self._layout,
                before=before,
            )
        )

    def _ready_workers(self) -> list[int]:
        return [one["pid"] for one in self.gateway.workers() if one["state"] == "ready"]


class Crash:
    """The clients, and who kills."""

    def __init__(self, host: Host, tally: Tally, progress: Progress) -> None:
        self._host = host
        self._tally = tally
        self._progress = progress
        self._rng = random.Random(SEED)
        self._text = chat.words(self._rng, 100_000)
        self._made = 0
        self._pool = [self._new() for _ in range(POOL)]
        self._ranks = Zipf(POOL).draws(self._rng)
        self._is_over = False
        self._kills: Counter[str] = Counter()
        self._torn = 0

    async def run(self, kills: int) -> None:
        clients = [asyncio.create_task(self._ask_on()) for _ in range(CLIENTS)]
        try:
            for _ in range(kills):
                await asyncio.sleep(self._rng.uniform(*PAUSE_S))
                await self._kill()
            await asyncio.sleep(1.0)
        finally:
            self._is_over = True
            await asyncio.gather(*clients)
        self._torn += await asyncio.to_thread(self._host.torn)
        await self._ask_pool()
        self._host.end_life()

    def figures(self) -> dict[str, float]:
        tally = self._tally
        return {
            "kills": self._kills.total(),
            "kills_supervisor": self._kills["supervisor"],
            "wrong_answers": tally.wrong,
            "torn_entries": self._torn + tally.damaged,
            "failed": tally.failures.total(),
            "stuck_s": tally.stuck_s,
            "longest_silence_s": tally.longest_silence_s,
            "longest_wait_s": tally.longest_wait_s,
            "answered": tally.answered,
            "hit_share": tally.hits / max(1, tally.answered),
            "retries": tally.retries.total(),
            "bugs_logged": self._host.bugs,
        }

    async def _kill(self) -> None:
        is_supervisor = self._rng.random() < SUPERVISOR_SHARE
        began_at = time.monotonic()
        if is_supervisor:
            # Its counts die with it.
            self._torn += await asyncio.to_thread(self._host.torn)
            await asyncio.to_thread(self._host.kill_supervisor)
        else:
            await asyncio.to_thread(self._host.kill_worker, self._rng)
        name = "supervisor" if is_supervisor else "worker"
        self._kills[name] += 1
        self._progress.say(
            f"kill {self._kills.total()}: {name}, whole again after "
            f"{time.monotonic() - began_at:.2f} s; {self._tally.answered:,} answered, "
            f"{self._tally.retries.total():,} retries, stuck {self._tally.stuck_s:.2f} s"
        )

    async def _ask_on(self) -> None:
        client = Client(self._host, self._tally, self._rng)
        while not self._is_over:
            is_repeat = self._rng.random() < REPEATED_SHARE
            prompt = self._pool[next(self._ranks)] if is_repeat else self._new()
            await client.ask(prompt, stream=self._rng.random() < STREAMED_SHARE)
        client.leave()

    async def _ask_pool(self) -> None:
        """What is kept after all of it is right too."""
        client = Client(self._host, self._tally, self._rng)
        for prompt in self._pool:
            await client.ask(prompt, stream=False)
        client.leave()

    def _new(self) -> str:
        self._made += 1
        size = self._rng.randint(*PROMPT_BYTES)
        start = self._rng.randrange(len(self._text) - size)
        return f"{self._made} {self._text[start : start + size]}"


class Client:
    """One of many; asks until it has its answer."""

    def __init__(self, host: Host, tally: Tally, rng: random.Random) -> None:
        self._host = host
        self._tally = tally
        self._rng = rng
        self._connection: Connection | None = None

    async def ask(self, prompt: str, *, stream: bool) -> None:
        gateway, tally = self._host.gateway, self._tally
        request = post(chat.PATH, chat.ask(prompt, model=MODEL, stream=stream), key=gateway.keys[0])
        began_at = time.monotonic()
        broken_at = 0.0
        while True:
            wrong, may_retry = await self._try(gateway.port, request, prompt)
            now = time.monotonic()
            if not wrong:
                break
            broken_at = broken_at or now
            if not may_retry or now - began_at > REQUEST_WITHIN_S:
                tally.failures[wrong] += 1
                break
            tally.retries[wrong] += 1
            await asyncio.sleep(0.02)
        if broken_at:
            tally.longest_wait_s = max(tally.longest_wait_s, now - began_at)

    async def _try(self, port: int, request: bytes, prompt: str) -> tuple[str, bool]:
        """What was wrong, if anything, and whether asking again may help."""
        try:
            if self._connection is None or self._connection.closed:
                self._connection = await Connection.open(port)
            reply = await self._connection.exchange(request, within_s=TRY_WITHIN_S)
        except (OSError, TimeoutError) as error:
            self.leave()
            return type(error).__name__, True
        if reply.status != 200:
            return f"status {reply.status}", False
        self._judge(reply, prompt)
        return "", False

    def _judge(self, reply: Reply, prompt: str) -> None:
        tally = self._tally
        tally.answered_now()
        try:
            answer = chat.read(reply)
        except msgspec.DecodeError:
            tally.damaged += 1
            return
        tally.hits += answer.is_hit
        tally.damaged += not answer.is_complete
        tally.wrong += answer.is_complete and answer.content != ECHO + prompt

    def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + RECOVERED_WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{otherwise} within {RECOVERED_WITHIN_S:g} s")
        time.sleep(0.02)
