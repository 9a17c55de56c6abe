"""What LMDB's files look like after long use at full budget by processes that are killed.

Workers put values of 0.5 to 200 KB (log-uniform) under 20,000 keys and read others' all the time;
each value names its key and carries a digest. A worker is killed (SIGKILL) after every so many
puts, at whatever it is doing, and another takes its place; the keeper runs beside as in a
supervisor. Sizes are sampled every 100 ms: `l2_over_budget_bytes` is the most that was booked
beyond the budget, `pages_over_budget_bytes` the same of the pages that the values really took.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from preheat.core.types import Key
from preheat.errors import StoreError
from preheat.stores.keeper import Keeper
from preheat.stores.lmdb import Lmdb

KEYS = 20_000
LEAST_BYTES, MOST_BYTES = 500, 200_000
BUDGET_BYTES = 256 * 1024 * 1024
QUEUE_BYTES = 64 * 1024 * 1024
AT_ONCE = 16
SAMPLE_EVERY_S = 0.1
SAMPLES_A_TICK = 10
LIFE_S = 600.0
LIMIT_S = 1_800.0
DIGEST_BYTES = 16
POOL = random.Random(1).randbytes(2 * MOST_BYTES)


def churn(
    folder: Path,
    values: int = 200_000,
    kill_every: int = 1_000,
    *,
    workers: int = 2,
    budget_bytes: int = BUDGET_BYTES,
    seed: int = 1,
) -> dict[str, float]:
    """The figures of one run; the folder must be new."""
    rng = random.Random(seed)
    watch = Watch(folder, budget_bytes)
    watch.start()
    started_at = time.monotonic()
    crew = Crew(folder, budget_bytes)
    kills = 0
    try:
        for _ in range(workers):
            crew.add()
        while crew.puts < values:
            crew.listen()
            if crew.puts >= (kills + 1) * kill_every and crew.puts < values:
                crew.kill(rng)
                watch.died.set()
                crew.add()
                kills += 1
            if time.monotonic() - started_at > LIMIT_S:
                raise RuntimeError(f"{crew.puts} puts took {LIMIT_S:g} s")
    finally:
        crew.end()
        watch.stop()
    seconds = time.monotonic() - started_at
    return {
        "puts": crew.puts,
        "kills": kills,
        "seconds": seconds,
        "puts_per_s": crew.puts / seconds,
        "reads": crew.reads,
        "found": crew.found,
        "torn_entries": crew.torn,
        "failed_calls": crew.failures,
        "map_full": crew.map_full,
        **watch.figures(),
    }


class Crew:
    """The workers and what they say."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.puts = self.reads = self.found = self.torn = self.failures = self.map_full = 0
        self._arguments = [str(folder), str(budget_bytes)]
        self._number = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()

    def add(self) -> None:
        self._number += 1
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.store_churn",
                "--worker",
                *self._arguments,
                str(self._number),
            ],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, bytearray())
        self._processes.append(process)

    def listen(self) -> None:
        """Add up what was said by now."""
        for ready, _ in self._selector.select(timeout=1.0):
            pipe = ready.fileobj
            said = os.read(ready.fd, 65_536)
            if not said:
                self._selector.unregister(pipe)
                if any(one.stdout is pipe for one in self._processes):
                    raise RuntimeError("a worker ended by itself")
                continue
            ready.data.extend(said)
            *lines, rest = bytes(ready.data).split(b"\n")
            ready.data[:] = rest
            for line in lines:
                puts, reads, found, torn, failures, map_full = map(int, line.split())
                self.puts += puts
                self.reads += reads
                self.found += found
                self.torn += torn
                self.failures += failures
                self.map_full += map_full

    def kill(self, rng: random.Random) -> None:
        """One of them, at a moment that has nothing to do with what it does."""
        process = self._processes.pop(rng.randrange(len(self._processes)))
        time.sleep(rng.random() * 0.01)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
        assert process.stdout is not None
        if process.stdout in [key.fileobj for key in self._selector.get_map().values()]:
            self._selector.unregister(process.stdout)
        process.stdout.close()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
        self._processes.clear()
        self._selector.close()


class Watch:
    """The keeper's thread, which also samples."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.died = threading.Event()
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._stopping = threading.Event()
        self._events: list[str] = []
        self._keeper = Keeper(folder, budget_bytes, self._on_event)
        self._thread = threading.Thread(target=self._run)
        self._most_booked = self._most_used = self._most_file = self._samples = 0
        self._longest_tick_s = 0.0

    def start(self) -> None:
        self._keeper.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._keeper.close()

    def figures(self) -> dict[str, float]:
        return {
            "l2_over_budget_bytes": max(0, self._most_booked - self._budget_bytes),
            "pages_over_budget_bytes": max(0, self._most_used - self._budget_bytes),
            "most_booked_share": self._most_booked / self._budget_bytes,
            "most_used_share": self._most_used / self._budget_bytes,
            "file_bytes": self._most_file,
            "longest_tick_ms": self._longest_tick_s * 1e3,
            "samples": self._samples,
            "set_aside": self._events.count("l2-set-aside"),
            "keeper_failures": self._events.count("l2-keeper-failed"),
            "readers_freed": self._events.count("l2-readers-freed"),
        }

    def _run(self) -> None:
        while not self._stopping.wait(SAMPLE_EVERY_S):
            if self.died.is_set():
                self.died.clear()
                self._keeper.after_death(signal.SIGKILL)
            if self._samples % SAMPLES_A_TICK == 0:
                began_at = time.monotonic()
                self._keeper.tick()
                self._longest_tick_s = max(self._longest_tick_s, time.monotonic() - began_at)
            self._sample()

    def _sample(self) -> None:
        self._samples += 1
        place = self._keeper._places["values"]
        with place.env.begin() as txn:
            pages = txn.stat()
        used = pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"]
        self._most_used = max(self._most_used, used * pages["psize"])
        self._most_booked = max(self._most_booked, self._keeper.size().size_bytes)
        file = (self._folder / "values" / "data.mdb").stat()
        self._most_file = max(self._most_file, file.st_size)

    def _on_event(self, name: str, fields: dict[str, object]) -> None:
        self._events.append(name)
        if name != "l2-readers-freed":
            print(name, fields, file=sys.stderr)


# A worker -------------------------------------------------------------------------------------


async def work(folder: Path, budget_bytes: int, seed: int) -> None:
    """Put, read and say so, until killed."""
    rng = random.Random(seed * 1_000_003)
    store = Lmdb(folder, budget_bytes=budget_bytes, queue_bytes=QUEUE_BYTES)
    await store.start()
    map_full = 0
    while True:
        keys = [key_of(rng.randrange(KEYS)) for _ in range(AT_ONCE)]
        expires_at = time.time() + LIFE_S * rng.random()
        puts = (store.put(key, value_of(key, rng), expires_at) for key in keys)
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        failures = sum(isinstance(one, StoreError) for one in outcomes)
        asked = [key_of(rng.randrange(KEYS)) for _ in range(AT_ONCE)]
        found = [(k, v) for k, v in zip(asked, store.get_now(asked), strict=True) if v is not None]
        torn = sum(not is_whole(key, value) for key, value in found) + store.torn
        new_full, map_full, store.torn = store.map_full - map_full, store.map_full, 0
        done = (len(outcomes) - failures, len(asked), len(found), torn, failures, new_full)
        print(*done, flush=True)


def key_of(number: int) -> Key:
    return Key(hashlib.blake2b(number.to_bytes(4, "big"), digest_size=16).digest())


def value_of(key: Key, rng: random.Random) -> bytes:
    size = int(math.exp(rng.uniform(math.log(LEAST_BYTES), math.log(MOST_BYTES))))
    start = rng.randrange(len(POOL) - size)
    body = POOL[start : start + size - DIGEST_BYTES]
    return _digest(key, body) + body


def is_whole(key: Key, value: bytes) -> bool:
    return _digest(key, value[DIGEST_BYTES:]) == value[:DIGEST_BYTES]


def _digest(key: Key, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=DIGEST_BYTES).digest()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_churn", description=__doc__)
    parser.add_argument("--values", type=int, default=200_000, help="puts in all (200,000)")
    parser.add_argument("--kill-every", type=int, default=1_000, help="puts (1,000)")
    parser.add_argument("--workers", type=int, default=2, help="at a time (2)")
    parser.add_argument("--budget-mib", type=int, default=256, help="of the values (256)")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        folder, budget, seed = options.worker
        asyncio.run(work(Path(folder), int(budget), int(seed)))
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        figures = churn(
            Path(name) / "l2",
            options.values,
            options.kill_every,
            workers=options.workers,
            budget_bytes=options.budget_mib * 1024 * 1024,
        )
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
