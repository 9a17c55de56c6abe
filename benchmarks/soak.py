"""Whether the gateway stays small, exact and kind to good clients under long mixed traffic.

Of all requests 60 % repeat (by Zipf's law), 20 % are new, 10 % stream (half of them repeats), 5 %
come from clients that leave (in the request, before the answer, in the answer), and 5 % are bad
(broken JSON, wrong types, bad headers, deep nesting, broken UTF-8, smuggling). The engine echoes,
so that each good client knows the answer it is owed.

L1 and L2 get small budgets here, so that they are full early and stay so. Memory and open files of
all the gateway's processes, and the bytes of L1 (of all workers) and L2, are read at intervals. `rss_slope_mb_per_100k` is the least-squares slope over the samples
after the first third of the run, when caches, pools and the allocator's arenas are full: what still
grows then, grows for ever. `fd_growth` compares the open files after a warm-up, with all clients
gone, with those at the end, with all clients gone.

`ledger_mismatch` is the difference, in picodollars, between what the clients work out (the usage of
each complete answer at list price) and what the ledger books for the same requests (paid + saved by
us + saved by the provider). Clients that leave and bad ones use other models, so that it is exact.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvloop

from benchmarks import bad_input, servers, traffic
from benchmarks.process import on_core, two_cores
from benchmarks.report import Progress, Result, slope
from benchmarks.servers import Gateway, Layout
from benchmarks.traffic import Client, Prompts, Tally

SEED = 1
CONCURRENCY = 32
L1_BYTES = 16 * 1024 * 1024
L1_ENTRIES = 5_000
L2_BYTES = 32 * 1024 * 1024
SETTLED_WITHIN_S = 20.0
MB = 1e6
AMOUNTS = ("requests", "paid", "saved_by_us", "saved_by_provider")


class Sample(msgspec.Struct, frozen=True):
    """What the gateway holds after so many requests."""

    requests: int
    resident_bytes: int
    anonymous_bytes: int
    open_fds: int
    l1_bytes: int
    l1_entries: int
    over_budget_bytes: int
    l2_over_budget_bytes: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=300_000, help="in all (300,000)")
    parser.add_argument("--sample-every", type=int, default=10_000, help="requests (10,000)")
    parser.add_argument("--warm-up", type=int, default=5_000, help="requests before all (5,000)")
    Layout.add_options(parser, workers=2, log=False)


def tools() -> dict[str, list[str]]:
    """What else must be installed: nothing."""
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    cores = two_cores()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        with (
            servers.fake_engine(folder, core=cores.client) as engine,
            servers.fake_engine(folder, core=cores.client, name="slow") as slow,
            servers.gateway(
                folder,
                {traffic.MODEL: engine, traffic.LEAVING_MODEL: slow, bad_input.MODEL: slow},
                core=cores.server,
                layout=Layout.of(
                    options, l1_bytes=L1_BYTES, l1_entries=L1_ENTRIES, l2_bytes=L2_BYTES
                ),
            ) as gateway,
            on_core(cores.client),
        ):
            engine.answer_with("echo")
            slow.answer_with(traffic.SLOW_REPLY)
            soak = Soak(gateway, progress, options.sample_every, options.workers)
            figures = uvloop.run(soak.run(warm_up=options.warm_up, requests=options.requests))
            return Result(figures, {"preheat": gateway.settings})


class Soak:
    """The run: the same clients all the time, and what is read meanwhile."""

    def __init__(
        self, gateway: Gateway, progress: Progress, sample_every: int, workers: int
    ) -> None:
        self._gateway = gateway
        self._workers = workers
        self._progress = progress
        self._sample_every = sample_every
        self._rng = random.Random(SEED)
        self._prompts = Prompts(self._rng)
        self._samples: list[Sample] = []

    async def run(self, *, warm_up: int, requests: int) -> dict[str, float]:
        warm = Tally()
        await self._send(warm_up, warm)
        fds_before = await self._settled_fds(SETTLED_WITHIN_S)
        booked_before = await self._booked(warm.answered)
        tally = Tally()
        started_at = time.monotonic()
        await self._send(requests, tally, sampled=True)
        seconds = time.monotonic() - started_at
        fds_after = await self._settled_fds(SETTLED_WITHIN_S, wanted=fds_before)
        booked = await self._booked(booked_before["requests"] + tally.answered)
        self._show(tally)
        return {
            "requests_per_s": requests / seconds,
            **self._size_figures(),
            "fd_growth": fds_after - fds_before,
            **await self._ledger_figures(booked_before, booked, tally),
            "tracebacks": self._lines_with("Traceback"),
            "bugs_logged": self._lines_with('"event":"bug"'),
            **_client_figures(tally),
        }

    async def _send(self, requests: int, tally: Tally, *, sampled: bool = False) -> None:
        """So many requests from all clients together."""
        kinds = self._kinds(requests)
        done = 0

        async def work(client: Client) -> None:
            nonlocal done
            for kind in kinds:
                await client.act(kind)
                done += 1
                self._progress.tick(f"{done:,} of {requests:,} requests")
                if sampled and done % self._sample_every == 0:
                    self._samples.append(await self._sample(done))
            client.leave()

        port, keys = self._gateway.port, list(self._gateway.keys)
        clients = [Client(port, keys, self._prompts, self._rng, tally) for _ in range(CONCURRENCY)]
        await asyncio.gather(*(work(client) for client in clients))

    def _kinds(self, requests: int) -> Iterator[str]:
        names, shares = list(traffic.SHARES), list(traffic.SHARES.values())
        return iter(self._rng.choices(names, shares, k=requests))

    async def _sample(self, requests: int) -> Sample:
        stats = await asyncio.to_thread(self._gateway.stats)
        l1, l2 = stats["l1"], {"bytes": 0, "budget_bytes": 0} | stats["l2"]
        memory = self._gateway.server.memory()
        sample = Sample(
            requests=requests,
            resident_bytes=memory.resident_bytes,
            anonymous_bytes=memory.anonymous_bytes,
            open_fds=self._gateway.server.open_fds(),
            l1_bytes=l1["bytes"],
            l1_entries=l1["entries"],
            over_budget_bytes=max(0, l1["bytes"] - l1["budget_bytes"]),
            l2_over_budget_bytes=max(0, l2["bytes"] - l2["budget_bytes"]),
        )
        self._progress.say(
            f"{requests:,} requests: {sample.resident_bytes / MB:.1f} MB resident, "
            f"{sample.open_fds} open files, L1 {sample.l1_bytes:,} bytes, {sample.l1_entries:,}, "
            f"L2 {l2['bytes']:,}"
        )
        return sample

    async def _settled_fds(self, within_s: float, *, wanted: int | None = None) -> int:
        """Open files once all clients are gone: when none goes any more, or as few as wanted."""
        deadline = time.monotonic() + within_s
        least = self._gateway.server.open_fds()
        still = 0
        while time.monotonic() < deadline and still < 10 and not (wanted and least <= wanted):
            await asyncio.sleep(0.2)
            fds = self._gateway.server.open_fds()
            still = still + 1 if fds >= least and wanted is None else 0
            least = min(least, fds)
        return least

    async def _booked(self, requests: int) -> dict[str, int]:
        """The good requests' rows of the ledger, once they are all booked or time is up."""
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while True:
            rows = (await asyncio.to_thread(self._gateway.ledger))["rows"]
            ours = [row for row in rows if row["model"] == traffic.MODEL]
            booked = {name: sum(row[name] for row in ours) for name in AMOUNTS}
            if booked["requests"] >= requests or time.monotonic() > deadline:
                return booked
            await asyncio.sleep(0.1)

    async def _ledger_figures(
        self, before: dict[str, int], after: dict[str, int], tally: Tally
    ) -> dict[str, float]:
        run = {name: after[name] - before[name] for name in AMOUNTS}
        booked = run["paid"] + run["saved_by_us"] + run["saved_by_provider"]
        ledger = await asyncio.to_thread(self._gateway.ledger)
        return {
            "ledger_residual": abs(ledger["residual"]),
            "ledger_mismatch": abs(booked - tally.list_price),
            "ledger_mismatch_paid": abs(run["paid"] - tally.paid_price),
            "ledger_mismatch_requests": abs(run["requests"] - tally.answered),
        }

    def _size_figures(self) -> dict[str, float]:
        samples = self._samples
        settled = [s for s in samples if s.requests > samples[-1].requests / 3] if samples else []
        resident = [(s.requests / 100_000, s.resident_bytes / MB) for s in settled]
        anonymous = [(s.requests / 100_000, s.anonymous_bytes / MB) for s in settled]
        l1_bytes, l1_entries = L1_BYTES * self._workers, L1_ENTRIES * self._workers
        return {
            "l1_over_budget_bytes": max((s.over_budget_bytes for s in samples), default=0),
            "l1_full_share": max((s.l1_bytes for s in samples), default=0) / l1_bytes,
            "l1_full_share_entries": max((s.l1_entries for s in samples), default=0) / l1_entries,
            "l2_over_budget_bytes": max((s.l2_over_budget_bytes for s in samples), default=0),
            "rss_slope_mb_per_100k": slope(resident),
            "rss_slope_mb_per_100k_anonymous": slope(anonymous),
            "rss_mb_max": max((s.resident_bytes for s in samples), default=0) / MB,
        }

    def _lines_with(self, text: str) -> int:
        """Lines of the gateway's output, warm-up included, in which this stands."""
        server = self._gateway.server
        said = server.errors.read_text(errors="replace") + server.output.read_text(errors="replace")
        return sum(text in line for line in said.splitlines())

    def _show(self, tally: Tally) -> None:
        """What was wrong, where a figure only counts."""
        for wrong, count in tally.failures.most_common():
            self._progress.say(f"good requests failed: {wrong}: {count:,}")


def _client_figures(tally: Tally) -> dict[str, float]:
    outcomes = {f"bad_input.{outcome}": count for outcome, count in sorted(tally.bad.items())}
    return {
        "neighbour_failures": sum(tally.failures.values()),
        "hit_share": tally.hits / max(1, tally.answered),
        "bad_input_unexpected": tally.bad_unexpected,
        "smuggled": tally.smuggled,
        **{f"sent_{kind}": count for kind, count in sorted(tally.sent.items())},
        **outcomes,
    }
