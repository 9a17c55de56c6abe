"""Plays a trace for `preheat load`, with its progress on a terminal."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from preheat.errors import ConfigError
from preheat.lab.load.exchange import Outcome
from preheat.lab.load.generator import Generator, OnOutcome, Plan, run_shell
from preheat.lab.load.pairs import PairedSummary, Times, paired, warnings_of
from preheat.lab.load.summary import Summary, Tally
from preheat.lab.load.trace import Trace

_PROGRESS_S: Final = 0.5


class Runs:
    """Plays a trace, each time after the command that comes before."""

    def __init__(self, trace: Trace, on_outcome: OnOutcome, before: str) -> None:
        self._trace = trace
        self._on_outcome = on_outcome
        self._before = before

    def play(self, plan: Plan, run: str = "", times: Times | None = None) -> Summary:
        """One run, and what it came to. Raises ConfigError where the command before fails."""

        def note(outcome: Outcome) -> None:
            outcome.run = run
            if times is not None:
                times.note(outcome)
            self._on_outcome(outcome)

        loading = _load(plan, self._trace, note, self._before)
        try:
            import uvloop
        except ImportError:
            return asyncio.run(loading).summary()
        return uvloop.run(loading).summary()

    def twice(self, plan: Plan, cold_starts: Sequence[tuple[float, str]]) -> PairedSummary:
        """Without these cold starts, (seconds, command) in the trace's time, and then with them."""
        warm_times, cold_times = Times(), Times()
        warm = self.play(plan, "warm", warm_times)
        if warm.is_interrupted:
            return PairedSummary(warm=warm)
        with_them = msgspec.structs.replace(plan, commands=(*plan.commands, *cold_starts))
        cold = self.play(with_them, "cold", cold_times)
        warnings = warnings_of(warm, cold)
        if cold.is_interrupted:
            return PairedSummary(warm=warm, cold=cold, warnings=warnings)
        began = [(at_s / plan.speed, command) for at_s, command in cold_starts]
        told = paired(warm_times, cold_times, began)
        return PairedSummary(warm=warm, cold=cold, paired=told, warnings=warnings)


async def _load(plan: Plan, trace: Trace, on_outcome: OnOutcome, before: str) -> Tally:
    if before:
        code = await run_shell(before)
        if code != 0:
            raise ConfigError(f"--before: exit code {code} of {before!r}")
    tally = Tally()
    generator = Generator(plan, trace, tally, on_outcome)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stopping.set)
    progress = None
    if sys.stderr.isatty():
        progress = loop.create_task(_show_progress(trace, plan, tally, generator))
    try:
        await generator.run(stopping)
    finally:
        if progress is not None:
            progress.cancel()
            await asyncio.wait([progress])
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return tally


async def _show_progress(trace: Trace, plan: Plan, tally: Tally, generator: Generator) -> None:
    began_at = asyncio.get_running_loop().time()
    total = min(trace.requests, plan.limit or trace.requests)
    while True:
        await asyncio.sleep(_PROGRESS_S)
        passed_s = asyncio.get_running_loop().time() - began_at
        print(
            f"\r\x1b[K{passed_s:.0f} s: {tally.sent} of {total} sent, {tally.answered} answered, "
            f"{generator.open} open, {tally.errors.total()} not answered",
            end="",
            file=sys.stderr,
            flush=True,
        )
