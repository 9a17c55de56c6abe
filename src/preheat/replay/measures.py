"""What a run through a fleet comes to, in the numbers every report speaks in."""

from collections.abc import Sequence
from math import fsum
from typing import Final

import msgspec

from preheat.core.spread import Spread, spread_of
from preheat.replay.fleet import Run
from preheat.replay.worker import Job

_WITHOUT_ENGINE: Final = ("exact", "join")  # of `runner.layer_of`


class Measures(msgspec.Struct, frozen=True):
    """One run. Seconds are GPU-seconds of prefill but for TTFTs. `prefill_share`: of what it
    would be without any cache (`no_cache_s`). `hit_token_ratio`: prompt tokens found, in memory or in
    a tier, of all that came to a worker. `work_max_mean_ratio`: the
    busiest worker's prefill by the mean one's. `goodput_per_s`: requests a second whose first
    token came within the target; 0 where all came in one moment. `span_s`: between the first arrival and the last. `stored` and
    `joined`: requests that a stored answer, or another's flight, answered, and `spared_tokens` what
    they would have had generated."""

    requests: int
    refused: int
    prefill_s: float
    no_cache_s: float
    prefill_share: float
    hit_token_ratio: float
    work_max_mean_ratio: float
    ttft: Spread
    service_ttft: Spread
    goodput_per_s: float
    goodput_share: float
    span_s: float
    stored: int
    joined: int
    spared_tokens: int


def measures_of(
    made: Run,
    workers: int,
    *,
    layers: Sequence[str] = (),
    slo_ttft_s: float = 2.0,
    start: float = 0.0,
    end: float = float("inf"),
) -> Measures:
    """Of the requests that came between `start` and `end`. `layers`: what answered each of all, where
    there was a response cache."""
    chosen = [job for job in made.jobs if start <= job.arrived_at < end]
    done = [job for job in chosen if job.first_at is not None]
    placed = [job for job in done if job.worker >= 0]  # the others had a stored answer
    work = [0.0] * workers
    for job in placed:
        work[job.worker] += job.computed_s
    prefill_s = fsum(work)
    no_cache_s = fsum(made.no_cache_s[job.number] for job in done)
    asked = sum(job.input_tokens for job in placed)
    waits = ttfts(done)
    good = sum(wait <= slo_ttft_s for wait in waits)
    spared = [job for job in done if layers and layers[job.number] in _WITHOUT_ENGINE]
    last = min(end, max((job.arrived_at for job in chosen), default=start))
    first = min((job.arrived_at for job in chosen), default=start)
    span_s = max(1e-9, last - first)
    return Measures(
        requests=len(chosen),
        refused=sum(job.refused for job in chosen),
        prefill_s=prefill_s,
        no_cache_s=no_cache_s,
        prefill_share=prefill_s / max(1e-9, no_cache_s),
        hit_token_ratio=sum(job.cached_tokens for job in placed) / max(1, asked),
        work_max_mean_ratio=max(work, default=0.0) * workers / max(1e-9, prefill_s),
        ttft=spread_of(waits),
        service_ttft=spread_of([job.load_s + job.computed_s for job in placed]),
        goodput_per_s=good / span_s if last > first else 0.0,
        goodput_share=good / max(1, len(chosen)),
        span_s=last - first,
        stored=sum(layers[job.number] == "exact" for job in spared),
        joined=sum(layers[job.number] == "join" for job in spared),
        spared_tokens=sum(job.output_tokens for job in spared),
    )


def ttfts(jobs: Sequence[Job], start: float = 0.0, end: float = float("inf")) -> list[float]:
    """Waits for the first token, of the requests that came between `start` and `end`."""
    return [
        job.first_at - job.arrived_at
        for job in jobs
        if job.first_at is not None and start <= job.arrived_at < end
    ]
