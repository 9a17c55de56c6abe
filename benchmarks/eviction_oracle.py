"""Our eviction policies against libCacheSim's on recorded key streams, at 1, 5, 10 and 25 % of each
stream's distinct keys.

LRU, SIEVE, LFU, S3-FIFO and, with libCacheSim's sketch and ways of counting (`their_wtinylfu.py`),
W-TinyLFU must decide every request alike: `unequal_…` is the most requests decided otherwise in a cell.
For the others it is the largest distance between the two object hit ratios in points (`points_…`): GDSF,
where theirs may turn a newcomer away, and W-TinyLFU as the paper has it, where theirs counts otherwise.

Left out are cells in which libCacheSim holds nothing at all, since its parts round to nothing:
S3-FIFO's small queue below two objects, W-TinyLFU's window below one (`cells_left_out`). For W-TinyLFU
the capacity is moved up to where its segments round evenly: elsewhere libCacheSim evicts on hits.

    python -m benchmarks eviction_oracle --json eviction_oracle.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.their_wtinylfu import TheirWTinyLfu
from benchmarks.traces import DATA
from preheat.core.eviction import POLICIES, EvictionPolicy
from preheat.replay.keys import outcomes
from preheat.traces.reading import read

SHARES = (0.01, 0.05, 0.1, 0.25)


class Case(msgspec.Struct, frozen=True):
    """A policy of ours for a capacity, and the least one at which its counterpart works."""

    name: str
    theirs: str
    make: Callable[[int], EvictionPolicy[int]]
    least_capacity: int = 2
    is_exact: bool = False

    @property
    def figure(self) -> str:
        return f"unequal_{self.name}" if self.is_exact else f"points_{self.name}"

    def capacity(self, wanted: int) -> int:
        while self.theirs == "WTinyLFU" and (wanted - int(wanted * 0.01)) % 5:
            wanted += 1
        return wanted


def _ours(name: str) -> Callable[[int], EvictionPolicy[int]]:
    return lambda capacity: POLICIES[name]()


CASES = (
    Case("lru", "LRU", _ours("lru"), is_exact=True),
    Case("sieve", "Sieve", _ours("sieve"), is_exact=True),
    Case("lfu", "LFU", _ours("lfu"), is_exact=True),
    Case("s3fifo", "S3FIFO", _ours("s3fifo"), least_capacity=20, is_exact=True),
    Case("gdsf", "GDSF", _ours("gdsf")),
    Case("their_wtinylfu", "WTinyLFU", TheirWTinyLfu, least_capacity=100, is_exact=True),
    Case("wtinylfu", "WTinyLFU", _ours("wtinylfu"), least_capacity=100),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1_000_000, help="of each stream, at most")
    parser.add_argument("--streams", default="", help="only those whose file's name has this")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    library = _library()
    figures = {case.figure: 0.0 for case in CASES}
    left_out = cells = 0
    paths = sorted(p for p in (DATA / "cache_traces").glob("*.[bt]*z") if options.streams in p.name)
    if not paths:
        raise BenchmarkError(f"no key stream under {DATA / 'cache_traces'} has that name")
    for path in paths:
        names = _dense([arrival.key for arrival in read([path]).arrivals[: options.requests]])
        for share in SHARES:
            row = []
            for case in CASES:
                cells += 1
                capacity = case.capacity(max(2, int(max(names) * share)))
                if capacity < case.least_capacity:
                    left_out += 1
                    continue
                ours = outcomes(case.make(capacity), names, None, None, capacity)
                theirs = _hits(getattr(library, case.theirs), library.Request(), names, capacity)
                points = 100 * (sum(ours) - sum(theirs)) / len(names)
                unequal = sum(one != other for one, other in zip(ours, theirs, strict=True))
                found = unequal if case.is_exact else abs(points)
                figures[case.figure] = max(figures[case.figure], found)
                row.append(f"{case.name} {100 * sum(ours) / len(names):.2f} ({points:+.2f})")
            progress.say(f"{path.name} {share:.0%} of {max(names):,}: {', '.join(row)}")
    return Result({**figures, "cells": cells, "cells_left_out": left_out}, {"shares": SHARES})


def _library() -> Any:
    try:
        import libcachesim  # GPL-3.0: a tool, never a part
    except ImportError as error:
        raise BenchmarkError("libcachesim isn't installed: pip install libcachesim") from error
    return libcachesim


def _dense(keys: Sequence[int]) -> list[int]:
    """Names from 1: libCacheSim keeps 0 and very large ids for itself."""
    names: dict[int, int] = {}
    return [names.setdefault(key, len(names) + 1) for key in keys]


def _hits(make: Callable[..., Any], request: Any, names: Sequence[int], capacity: int) -> bytearray:
    get = partial(make(cache_size=capacity, hashpower=18).get, request)
    request.obj_size = 1
    hits = bytearray(len(names))
    for now, name in enumerate(names):
        request.obj_id = name
        hits[now] = get()
    return hits
