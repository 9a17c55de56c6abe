"""How many accesses of a key stream a second the compiled LRU and J decide, beside libCacheSim.

The stream is CloudPhysics w106 (5.3 M accesses), the capacity a tenth of its distinct keys. Ours goes
from an array of keys to a byte for each access, numbering keys included. libCacheSim runs the loop
in C that its own command line tool runs (`Cache.process_trace` over a `TraceReader` of a binary
oracleGeneral file, sizes ignored): the fastest way it offers. They take turns, and the best of all
rounds counts for each. The core in Python is measured on the first part of the stream.
"""

from __future__ import annotations

import argparse
import lzma
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.traces import DATA
from preheat.replay.compiled import Order, Run, is_available, key_stream

STREAM = "cache_traces/cloud_physics__w106.trace.xz"
ORDERS: tuple[Order, ...] = ("lru", "j")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--share", type=float, default=0.1, help="capacity by distinct keys")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core-accesses", type=int, default=200_000)


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    if not is_available():
        raise BenchmarkError("the compiled path needs the extra: pip install 'preheat[replay]'")
    path = DATA / STREAM
    if not path.exists():
        raise BenchmarkError(f"{path} isn't there: the benchmark needs the public traces")
    keys = np.frombuffer(lzma.decompress(path.read_bytes()), ">i4").astype(np.int64)
    capacity = max(1, int(options.share * len(np.unique(keys))))
    figures: dict[str, float] = {}
    for order in ORDERS:
        figures[f"{order}_first_call_s"] = _seconds(lambda order=order: key_stream(order, keys, 1))
        progress.say(f"{order}: the first call took {figures[f'{order}_first_call_s']:.1f} s")
    best = dict.fromkeys((*ORDERS, "libcachesim"), float("inf"))
    hits: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        theirs = _Theirs(keys, capacity, Path(folder) / "stream.oracleGeneral.bin")
        for turn in range(options.rounds):
            progress.say(f"round {turn + 1} of {options.rounds}")
            for order in ORDERS:
                done: list[Run] = []
                took_s = _seconds(
                    lambda order=order, done=done: done.append(key_stream(order, keys, capacity))
                )
                best[order] = min(best[order], took_s)
                hits[order] = sum(done[0].hits) / len(keys)
            took_s, hits["libcachesim"] = theirs.run()
            best["libcachesim"] = min(best["libcachesim"], took_s)
    if abs(hits["lru"] - hits["libcachesim"]) > 1e-9:
        raise BenchmarkError(f"the two LRUs differ: {hits['lru']} and {hits['libcachesim']}")
    few = keys[: options.core_accesses]
    small = max(1, int(options.share * len(np.unique(few))))
    for order in ORDERS:
        names = few.tolist()
        took_s = _seconds(
            lambda order=order, names=names: key_stream(order, names, small, compiled=False)
        )
        figures[f"core_{order}_accesses_per_s"] = len(few) / took_s
    rates = {name: len(keys) / took_s for name, took_s in best.items()}
    figures |= {f"{name}_accesses_per_s": rate for name, rate in rates.items()}
    figures["lru_ratio_libcachesim"] = rates["lru"] / rates["libcachesim"]
    figures |= {f"{name}_hit_ratio": ratio for name, ratio in hits.items()}
    return Result(figures, {"accesses": len(keys), "capacity": capacity})


def _seconds(do: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    do()
    return time.perf_counter() - began_at


class _Theirs:
    """libCacheSim's LRU over the same stream, from a file as it likes it."""

    def __init__(self, keys: npt.NDArray[np.int64], capacity: int, path: Path) -> None:
        try:
            import libcachesim
        except ImportError as error:
            raise BenchmarkError("libcachesim isn't installed: pip install libcachesim") from error
        self._their = libcachesim
        self._capacity = capacity
        self._path = path
        rows = np.zeros(
            len(keys), dtype=[("at", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")]
        )
        rows["at"] = np.arange(len(keys))
        rows["key"] = keys
        rows["size"] = 1
        rows["next"] = -1
        rows.tofile(path)

    def run(self) -> tuple[float, float]:
        """Seconds and hit ratio of one pass."""
        reader = self._their.TraceReader(
            trace=str(self._path),
            trace_type=self._their.TraceType.ORACLE_GENERAL_TRACE,
            reader_init_params=self._their.ReaderInitParam(ignore_obj_size=True),
        )
        cache = self._their.LRU(cache_size=self._capacity)
        missed: list[float] = []
        took_s = _seconds(lambda: missed.append(cache.process_trace(reader)[0]))
        return took_s, 1.0 - missed[0]
