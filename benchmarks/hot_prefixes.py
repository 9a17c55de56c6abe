"""Few prefixes that nearly all requests begin with, over four workers: what each routing rule makes of it.

Prompts of 8,192 common tokens and 512 of their own, Poisson arrivals, in simulated time (made up, as no trace
here has such prefixes; the cost model is the headroom study's). The rate is told in what one worker could serve
of them, all with their prefix there: at 2.5 of four the fleet is loaded by 63 %, and one prefix is hotter than a
worker can serve. Figures are of the second half, means and the worst of the seeds.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from benchmarks.report import Progress, Result
from preheat.core.costs import ServiceModel
from preheat.core.routing import POLICIES, RoutingPolicy
from preheat.replay.fleet import Fleet, FleetSpec
from preheat.replay.fleet import run as replay
from preheat.replay.measures import measures_of
from preheat.replay.worker_spec import WorkerSpec
from preheat.traces.arrival import Arrival

WORKERS, REQUESTS = 4, 3_000
COMMON_BLOCKS, OWN_BLOCKS, BLOCK_TOKENS = 64, 4, 128
FAMILIES, RATES = (1, 2, 8, 32), (0.9, 2.5)
SERVICE: Final = ServiceModel()
RULES: Final[Mapping[str, Callable[[], RoutingPolicy]]] = {
    "preheat_copies": partial(POLICIES["preheat"], copies=True),
    "preheat_alone": partial(POLICIES["preheat"], copies=False),
    **{name: POLICIES[name] for name in ("cost", "least_loaded", "vllm_router", "smg", "dualmap")},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=10)


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    figures: dict[str, float] = {}
    for rate in RATES:
        for families in FAMILIES:
            for name in RULES:
                means = [mean_s(name, rate, families, seed) for seed in range(options.seeds)]
                cell = f"{name}_{families}_at_{round(100 * rate)}"
                figures[f"{cell}_mean_ms"] = 1e3 * statistics.fmean(means)
                figures[f"{cell}_worst_ms"] = 1e3 * max(means)
                progress.say(f"{cell}: {1e3 * statistics.fmean(means):.0f} ms")
    return Result(figures=figures, settings={"workers": WORKERS, "requests": REQUESTS})


def mean_s(name: str, rate: float, families: int, seed: int) -> float:
    """The mean TTFT of one run."""
    arrivals = arriving(rate, families, seed)
    worker = WorkerSpec(4_096, BLOCK_TOKENS, step_tokens=0, step_prefills=1)
    fleet = Fleet(FleetSpec(worker, SERVICE, WORKERS), RULES[name]())
    made = replay(arrivals, BLOCK_TOKENS, fleet)
    found = measures_of(made, WORKERS, start=arrivals[REQUESTS // 2].at).ttft.mean
    assert found is not None
    return found


def arriving(rate: float, families: int, seed: int) -> list[Arrival]:
    """At so many times what one worker could serve."""
    chance, at = random.Random(seed), 0.0
    hit_s = SERVICE.prefill_s(OWN_BLOCKS * BLOCK_TOKENS, COMMON_BLOCKS * BLOCK_TOKENS)
    made = []
    for number in range(REQUESTS):
        at += chance.expovariate(rate / hit_s)
        first = 1_000 * chance.randrange(families)
        own = 1_000_000 + OWN_BLOCKS * number
        blocks = (*range(first, first + COMMON_BLOCKS), *range(own, own + OWN_BLOCKS))
        tokens = BLOCK_TOKENS * len(blocks) + 1
        made.append(Arrival(at=at, input_tokens=tokens, output_tokens=1, blocks=blocks))
    return made
