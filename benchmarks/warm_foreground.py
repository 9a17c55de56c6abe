"""What a warm-up costs the requests that come meanwhile: in virtual time, by the rules that serve.

One server computes prompts one after the other, in the order they come (Poisson, at the stated load). In
its idle moments it warms prefixes, of which there is no end: so no idle second is left, the worst there
is for live requests. A chunk that has begun isn't interrupted. When a chunk may begin, how long it
is and where it goes on are `core.warmup`'s rules, the same objects that `preheat warm` uses.

The slack isn't chosen but follows from an SLO: with a p99 TTFT of so much without a warm-up, and an SLO
of 1.02 times that, chunks are to take less than the difference. Beside it stand a
rest after each chunk as long as the chunk, chunks with four times that slack, and prefixes computed
whole. Every arm gets the same requests. Lengths are composed: lognormal, not recorded.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from statistics import fmean

import msgspec

from benchmarks.report import BenchmarkError, Progress, Result, table
from preheat.core.costs import ServiceModel
from preheat.core.warmup import Busy, ChunkSize, Pace, Walk, blocked, rest_s
from preheat.replay.kernel import Kernel

SLO_RATIO = 1.02
WARM_TOKENS = 8_000
MEDIAN_TOKENS = 700
SIGMA = 1.0
MOST_TOKENS = 32_000
WHOLE = "whole"


class Load(msgspec.Struct, frozen=True):
    """Requests in order: when they come and what computing their prompts takes."""

    arrivals_s: list[float]
    prefill_s: list[float]


class Arm(msgspec.Struct, frozen=True):
    """How it is warmed; None: it isn't."""

    name: str
    pace: Pace | None


class Told(msgspec.Struct, frozen=True):
    """What came of one arm."""

    mean_s: float
    p99_s: float
    warmed_tokens: int
    warm_s: float
    live_s: float
    took_s: float
    longest_chunk_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200_000, help="of each seed (200000)")
    parser.add_argument("--load", type=float, default=0.7, help="of live requests (0.7)")
    parser.add_argument("--seeds", type=int, default=5, help="(5)")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    if options.requests < 1_000 or not 0 < options.load < 1 or options.seeds < 1:
        raise BenchmarkError("at least 1,000 requests, a load between 0 and 1, and a seed")
    service = ServiceModel()
    told: dict[str, list[tuple[Told, Told]]] = {}
    slacks = []
    for seed in range(options.seeds):
        load = load_of(service, options.requests, options.load, random.Random(seed))
        without = Simulation(load, service, Arm("none", None)).run()
        slack_s = (SLO_RATIO - 1.0) * without.p99_s
        slacks.append(slack_s)
        for arm in arms(slack_s):
            told.setdefault(arm.name, []).append((without, Simulation(load, service, arm).run()))
            progress.tick(f"seed {seed}, {arm.name}")
    progress.say("\n" + shown(told))
    settings: dict[str, object] = {
        "load": options.load,
        "seeds": options.seeds,
        "slack_s": slacks,
        "warm_tokens": WARM_TOKENS,
        "lengths": f"composed: lognormal, median {MEDIAN_TOKENS}, sigma {SIGMA}",
        "service": msgspec.to_builtins(service),
    }
    return Result(figures(told, options.requests * options.seeds), settings)


def arms(slack_s: float) -> list[Arm]:
    return [
        Arm("slack", Pace(slack_s=slack_s)),
        Arm("rested", Pace(slack_s=slack_s, share=0.5)),
        Arm("slack_x4", Pace(slack_s=4 * slack_s)),
        Arm(WHOLE, Pace(slack_s=slack_s, first_tokens=WARM_TOKENS, least_tokens=WARM_TOKENS)),
    ]


def load_of(service: ServiceModel, requests: int, load: float, chance: random.Random) -> Load:
    prefill_s = [
        service.prefill_s(
            min(MOST_TOKENS, 1 + int(MEDIAN_TOKENS * chance.lognormvariate(0, SIGMA)))
        )
        for _ in range(requests)
    ]
    rate = load / fmean(prefill_s)
    at, arrivals_s = 0.0, []
    for _ in range(requests):
        at += chance.expovariate(rate)
        arrivals_s.append(at)
    return Load(arrivals_s, prefill_s)


class Simulation:
    """One server over one load."""

    def __init__(self, load: Load, service: ServiceModel, arm: Arm) -> None:
        self._load = load
        self._service = service
        self._arm = arm
        self._kernel = Kernel()
        self._waiting: deque[int] = deque()
        self._is_busy = False
        self._ttft_s = [0.0] * len(load.arrivals_s)
        self._left = len(load.arrivals_s)
        self._walk = Walk(tokens=WARM_TOKENS)
        self._size = ChunkSize(arm.pace or Pace())
        self._warmed_tokens = 0
        self._warm_s = self._longest_s = self._rests_until = 0.0

    def run(self) -> Told:
        self._kernel.plan(self._load.arrivals_s[0], self._arrive, 0)
        self._kernel.run()
        if self._left:
            raise BenchmarkError(f"{self._left} requests weren't answered")
        ordered = sorted(self._ttft_s)
        return Told(
            fmean(ordered),
            ordered[int(0.99 * len(ordered))],
            self._warmed_tokens,
            self._warm_s,
            sum(self._load.prefill_s),
            self._load.arrivals_s[-1],
            self._longest_s,
        )

    def _arrive(self, number: int) -> None:
        self._waiting.append(number)
        if number + 1 < len(self._load.arrivals_s):
            self._kernel.plan(self._load.arrivals_s[number + 1], self._arrive, number + 1)
        if not self._is_busy:
            self._serve()

    def _serve(self) -> None:
        number = self._waiting.popleft()
        self._is_busy = True
        self._kernel.plan(self._kernel.now + self._load.prefill_s[number], self._served, number)

    def _served(self, number: int) -> None:
        self._is_busy = False
        self._ttft_s[number] = self._kernel.now - self._load.arrivals_s[number]
        self._left -= 1
        self._next()

    def _next(self) -> None:
        """The server is free: a chunk if the rule has nothing against it, else who waits."""
        pace = self._arm.pace
        busy = Busy(running=0, waiting=len(self._waiting), load=0.0)
        if pace is not None and self._left and not blocked(pace, busy):
            if self._kernel.now >= self._rests_until:
                self._warm()
            else:
                self._kernel.plan(self._rests_until, self._wake, None)
        elif self._waiting:
            self._serve()

    def _wake(self, _: None) -> None:
        if not self._is_busy:
            self._next()

    def _warm(self) -> None:
        walk = self._walk
        end = walk.end(self._size.tokens)
        took_s = self._service.prefill_s(end - walk.done_tokens, walk.done_tokens)
        self._is_busy = True
        self._kernel.plan(self._kernel.now + took_s, self._warmed, (end, took_s))

    def _warmed(self, piece: tuple[int, float]) -> None:
        end, took_s = piece
        self._is_busy = False
        computed = self._walk.did(end, self._walk.done_tokens)
        self._size.took(computed, took_s)
        self._warmed_tokens += computed
        self._warm_s += took_s
        self._longest_s = max(self._longest_s, took_s)
        self._rests_until = self._kernel.now + rest_s(self._arm.pace or Pace(), took_s)
        if self._walk.is_over:
            self._walk = Walk(tokens=WARM_TOKENS)
        self._next()


def figures(told: dict[str, list[tuple[Told, Told]]], requests: int) -> dict[str, float]:
    found: dict[str, float] = {"foreground_requests": requests}
    for name, pairs in told.items():
        label = "" if name == "slack" else f"_{name}"
        ratios = [arm.p99_s / without.p99_s for without, arm in pairs]
        found[f"foreground_p99_ratio{label}"] = fmean(ratios)
        found[f"foreground_p99_ratio{label}_most"] = max(ratios)
        found[f"foreground_mean_ratio{label}"] = fmean(
            arm.mean_s / without.mean_s for without, arm in pairs
        )
        found[f"idle_share_used{label}"] = fmean(
            arm.warm_s / (arm.took_s - arm.live_s) for _, arm in pairs
        )
    return found


def shown(told: dict[str, list[tuple[Told, Told]]]) -> str:
    rows = []
    for name, pairs in told.items():
        arm = [one for _, one in pairs]
        rows.append(
            [
                name,
                f"{fmean(one.p99_s / base.p99_s for base, one in pairs):.4f}",
                f"{fmean(one.mean_s / base.mean_s for base, one in pairs):.4f}",
                f"{fmean(one.p99_s for one in arm):.3f}",
                f"{max(one.longest_chunk_s for one in arm):.3f}",
                f"{fmean(one.warmed_tokens / one.took_s for one in arm):.0f}",
            ]
        )
    head = ["warmed in", "p99 ratio", "mean ratio", "p99 s", "longest chunk s", "warmed tokens/s"]
    return table(rows, head=head)
