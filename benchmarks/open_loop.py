"""Requests sent at planned moments, whether or not those before are answered."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.rawhttp import Connection
from benchmarks.report import BenchmarkError

WITHIN_S = 30.0
START_IN_S = 0.05


class Sample(msgspec.Struct, frozen=True):
    """What one window gave. Latencies run from the moment a request was really sent; how late that
    was is kept apart, because it is ours."""

    latencies_s: list[float]
    lateness_s: list[float]


def moments(rng: random.Random, *, rate: float, duration_s: float) -> list[float]:
    """A Poisson process: clients don't know of each other, so some come together."""
    gaps = (rng.expovariate(rate) for _ in itertools.count())
    return list(itertools.takewhile(lambda at: at < duration_s, itertools.accumulate(gaps)))


async def send(
    port: int, requests: Iterator[bytes], at_s: Sequence[float], *, connections: int
) -> Sample:
    """Each request at its moment, over idle connections, last in first out.

    A thread keeps the time: the loop's own timers count whole milliseconds.
    """
    loop = asyncio.get_running_loop()
    idle = [await Connection.open(port) for _ in range(connections)]
    sent: list[asyncio.Task[float]] = []
    lateness_s: list[float] = []
    start = time.monotonic() + START_IN_S

    def begin(at: float) -> None:
        lateness_s.append(time.monotonic() - start - at)
        sent.append(loop.create_task(_time(port, next(requests), idle)))

    def pace() -> None:
        for at in at_s:
            time.sleep(max(0.0, start + at - time.monotonic()))
            loop.call_soon_threadsafe(begin, at)

    await asyncio.to_thread(pace)
    await asyncio.sleep(0)  # the last one has begun
    latencies_s = list(await asyncio.gather(*sent))
    for connection in idle:
        connection.close()
    return Sample(latencies_s, lateness_s)


async def _time(port: int, request: bytes, idle: list[Connection]) -> float:
    connection = idle.pop() if idle else await Connection.open(port)
    began_at = time.monotonic()
    try:
        reply = await connection.exchange(request, within_s=WITHIN_S)
    except (OSError, TimeoutError) as error:
        raise BenchmarkError(f"a request wasn't answered: {error!r}") from error
    latency_s = time.monotonic() - began_at
    if reply.status != 200:
        raise BenchmarkError(f"answered {reply.status}: {reply.body[:300]!r}")
    if not connection.closed:
        idle.append(connection)
    return latency_s


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of all lies."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
