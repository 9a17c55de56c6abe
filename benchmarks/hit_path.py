"""What a cache hit costs, beside nginx answering from a constant and LiteLLM answering a hit.

The figures are CPU time (user and system, of the process and its children) per request, not wall
time, with all processes of the gateway in it (supervisor, workers, the log's), L2 and the log on.
On a machine that others use too, wall time measures the others: the 99th percentile of nginx
itself moves from 2 to 20 ms there. CPU time hardly moves, and a million divided by it is what one
core can carry. Both servers are pinned to the same core in turn, wrk to the other; short blocks of
each alternate within one run, so that what drifts (caches, memory bandwidth) drifts for both.

Three spellings of the same chats are measured, each against nginx with the same request bodies:

plain        1 KB chats, each repeated in the same bytes.
rekeyed      with ten tools, each request in bytes never sent before: other white space and
             another order of fields, so the gateway must read all of it to know it again.
rescalared   with ten tools, each request in bytes never sent before that differ only in `user`.

Each spelling is measured by itself, one after the other: bodies that were never sent before push
the known ones out of the memos, and a service whose clients repeat bytes has none of them. nginx
answers in two ways: with its buffers as they come, and (`nginx_tuned`) with one that takes head and
body of this very load in one read.

Every measured request is a hit, or the benchmark fails: the engine's own count of calls and the
gateway's ledger are read before and after each block. Ratios are ours over theirs: 1.2 says that
a hit costs a fifth more than nginx. Latencies are wrk's, and wall time: read them as such.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import uvloop

from benchmarks import chat, servers, workload
from benchmarks.process import Cores, Server, on_core, two_cores
from benchmarks.rawhttp import Connection, Reply, post
from benchmarks.report import BenchmarkError, Progress, Result, first_line, median
from benchmarks.servers import Engine, Gateway, Layout
from benchmarks.workload import Workload
from benchmarks.wrk import Load, Script, wrk_version

SEED = 1
CONTENT = chat.words(random.Random(SEED), 600)  # a reply of about 900 bytes
UNIQUE_DRAWS = 4_000  # spellings; each goes out in other bytes every time
HITS_WANTED = 0.999
BOOKED_WITHIN_S = 10.0
PRIMING_CONNECTIONS = 32
CHECKED_REPLIES = 500
LITELLM_CONNECTIONS = 4  # its hits take 10 ms each: few may be under way when a block ends
LITELLM_CHATS = 40  # times four tenants: its local cache holds 200 answers
LITELLM_ROUNDS = 2
LITELLM_HELP = (
    "LiteLLM's executable, installed apart: python -m venv DIR && "
    "DIR/bin/pip install 'litellm[proxy]', then --litellm DIR/bin/litellm"
)


class Side(msgspec.Struct, frozen=True):
    """A server under test."""

    name: str
    server: Server
    port: int


class Block(msgspec.Struct, frozen=True):
    """One short run of wrk against one side."""

    cpu_s: float
    load: Load

    @property
    def cpu_us(self) -> float:
        return self.cpu_s * 1e6 / self.load.requests

    @property
    def busy_share(self) -> float:
        return self.cpu_s * 1e6 / self.load.duration_us


Blocks = Mapping[tuple[str, str], Sequence[Block]]  # by spelling and side


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each kind (5)")
    parser.add_argument("--block-s", type=int, default=3, help="seconds a block lasts (3)")
    parser.add_argument("--connections", type=int, default=32, help="kept alive by wrk (32)")
    parser.add_argument("--chats", type=int, default=10_000, help="distinct chats (10,000)")
    parser.add_argument("--draws", type=int, default=40_000, help="Zipf draws replayed (40,000)")
    parser.add_argument("--litellm", metavar="PATH", help=LITELLM_HELP)
    Layout.add_options(parser, log=True)


def tools() -> dict[str, list[str]]:
    """What else must be installed, by the command that tells its version."""
    return {"nginx": servers.nginx_version(), "wrk": wrk_version()}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    cores = two_cores()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        with (
            servers.fake_engine(folder, core=cores.client) as engine,
            servers.gateway(
                folder, {"m1": engine}, core=cores.server, layout=Layout.of(options)
            ) as gateway,
        ):
            engine.answer_with({"content": CONTENT, "delay_s": 0.0})
            bench = HitPath(options, progress, folder, cores, engine, gateway)
            figures = bench.beside_nginx()
            settings: dict[str, object] = {"preheat": gateway.settings}
            if options.litellm:
                figures |= bench.beside_litellm(options.litellm)
                settings["litellm"] = first_line(litellm_version(options.litellm))
            else:
                progress.say(f"no figure beside LiteLLM: give {LITELLM_HELP}")
            return Result(figures, settings)


class HitPath:
    """The gateway with all that is asked of it in L1, and the others measured beside it."""

    def __init__(
        self,
        options: argparse.Namespace,
        progress: Progress,
        folder: Path,
        cores: Cores,
        engine: Engine,
        gateway: Gateway,
    ) -> None:
        self._options = options
        self._progress = progress
        self._folder = folder
        self._cores = cores
        self._engine = engine
        self._gateway = gateway
        self._ours = Side("hit", gateway.server, gateway.port)

    def beside_nginx(self) -> dict[str, float]:
        workloads = dict(self._workloads())
        plain = self._prepare("plain", workloads["plain"])
        body_bytes, connections = self._reply_bytes, self._options.connections
        core, folder = self._cores.server, self._folder
        with (
            servers.nginx(folder, core=core, body_bytes=body_bytes) as nginx,
            servers.nginx(folder, core=core, body_bytes=body_bytes, is_tuned=True) as tuned,
        ):
            sides = [Side("nginx", *nginx), Side("nginx_tuned", *tuned), self._ours]
            blocks: dict[tuple[str, str], list[Block]] = defaultdict(list)
            latencies: dict[str, float] = {}
            for name, workload in workloads.items():
                script = plain if name == "plain" else self._prepare(name, workload)
                for side in sides:  # uncounted: code and caches warm up
                    self._block(script, side, connections, duration_s=1)
                for side in turns(sides, self._options.rounds):
                    block = self._block(script, side, connections)
                    blocks[name, side.name].append(block)
                    said = f"{block.cpu_us:.1f} us CPU a request, {block.load.requests:,} requests"
                    self._progress.say(f"{name} {side.name}: {said}")
                if name == "plain":
                    for side in turns(sides, 2):
                        load = self._block(script, side, 1).load
                        latencies[f"p50_us_{side.name}_c1"] = load.p50_us
                        latencies[f"p99_us_{side.name}_c1"] = load.p99_us
            figures = figures_beside_nginx(blocks, connections) | latencies
        return figures | {"reply_body_bytes": body_bytes}

    def beside_litellm(self, executable: str) -> dict[str, float]:
        """Both on their own hits, with the same few chats and connections."""
        load = workload.plain(chats=LITELLM_CHATS, tenants=servers.TENANTS, draws=5_000, seed=SEED)
        script = self._prepare("litellm", load)
        self._progress.say("starting LiteLLM")
        with servers.litellm(
            self._folder, self._engine, executable=executable, core=self._cores.server
        ) as (server, port):
            theirs = Side("litellm", server, port)
            self._ask(port, load, connections=LITELLM_CONNECTIONS)
            server.wait_until_idle()
            blocks: dict[str, list[Block]] = defaultdict(list)
            for side in turns([theirs, self._ours], LITELLM_ROUNDS):
                block = self._block(script, side, LITELLM_CONNECTIONS)
                blocks[side.name].append(block)
                self._progress.say(f"{side.name}: {block.cpu_us:,.1f} us CPU a request")
        ours, beside = (median([b.cpu_us for b in blocks[name]]) for name in ("hit", "litellm"))
        return {
            "cpu_us_litellm": beside,
            "cpu_us_hit_beside_litellm": ours,
            "cpu_ratio_litellm": ours / beside,
        }

    def _workloads(self) -> Iterator[tuple[str, Workload]]:
        chats, draws = self._options.chats, self._options.draws
        unique = min(UNIQUE_DRAWS, draws)
        tenants = servers.TENANTS
        yield "plain", workload.plain(chats=chats, tenants=tenants, draws=draws, seed=SEED)
        yield "rekeyed", workload.rekeyed(chats=chats, tenants=tenants, draws=unique, seed=SEED)
        yield (
            "rescalared",
            workload.rescalared(chats=chats, tenants=tenants, draws=unique, seed=SEED),
        )

    def _prepare(self, name: str, load: Workload) -> Script:
        """Asks for everything once, so that all that follows are hits, and sees that they are."""
        self._progress.say(f"asking each of {len(load.requests):,} {name} requests once")
        self._ask(self._gateway.port, load, connections=PRIMING_CONNECTIONS)
        self._gateway.server.wait_until_idle()
        replies: list[Reply] = []
        step = max(1, len(load.requests) // CHECKED_REPLIES)
        self._ask(
            self._gateway.port,
            msgspec.structs.replace(load, requests=load.requests[::step]),
            connections=PRIMING_CONNECTIONS,
            on_reply=replies.append,
        )
        hits = sum(chat.read(reply).is_hit for reply in replies)
        if hits < len(replies) * HITS_WANTED:
            raise BenchmarkError(f"{name}: only {hits} of {len(replies)} repeats say they are hits")
        self._reply_bytes = round(median([len(reply.body) for reply in replies]))
        return Script(load, keys=self._gateway.keys, path=self._folder / name)

    def _ask(
        self,
        port: int,
        load: Workload,
        *,
        connections: int,
        on_reply: Callable[[Reply], None] = lambda _: None,
    ) -> None:
        keys = self._gateway.keys
        bodies = load.first_bodies()
        requests = [post(chat.PATH, body, key=keys[tenant]) for tenant, body in bodies]
        with on_core(self._cores.client):
            uvloop.run(ask_all(port, requests, connections, on_reply, self._progress))

    def _block(
        self, script: Script, side: Side, connections: int, *, duration_s: int | None = None
    ) -> Block:
        """One block; fails where anything but hits was measured."""
        calls = self._engine.calls()
        hits = self._booked_hits() if side is self._ours else 0
        cpu_s = side.server.cpu_s()
        load = script.run(
            side.port,
            connections=connections,
            duration_s=duration_s or self._options.block_s,
            core=self._cores.client,
        )
        cpu_s = side.server.cpu_s() - cpu_s
        if load.failures or not load.requests:
            raise BenchmarkError(f"{side.name}: requests failed: {load}")
        missed = self._engine.calls() - calls
        if missed > load.requests * (1 - HITS_WANTED):
            raise BenchmarkError(
                f"{side.name}: {missed:,} of {load.requests:,} requests went to the engine"
            )
        if side is self._ours:
            self._wait_for_hits(hits + load.requests * HITS_WANTED, hits, load.requests)
        return Block(cpu_s, load)

    def _wait_for_hits(self, wanted: float, before: int, requests: int) -> None:
        """The ledger may lag behind by a batch."""
        deadline = time.monotonic() + BOOKED_WITHIN_S
        while (hits := self._booked_hits()) < wanted:
            if time.monotonic() > deadline:
                raise BenchmarkError(
                    f"only {hits - before:,} of {requests:,} requests are booked as hits"
                )
            time.sleep(0.1)

    def _booked_hits(self) -> int:
        """Requests that cost nothing and saved their price; joins can't be, with all in L1."""
        return sum(
            row["requests"]
            for row in self._gateway.ledger()["rows"]
            if row["paid"] == 0 and row["saved_by_us"] > 0
        )


def litellm_version(executable: str) -> list[str]:
    """Asked of its own Python: `litellm --version` goes to the network first."""
    script = "import importlib.metadata as m; print(m.version('litellm'))"
    return [str(Path(executable).with_name("python")), "-c", script]


def figures_beside_nginx(blocks: Blocks, connections: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in dict.fromkeys(name for name, _ in blocks):
        suffix = "" if name == "plain" else f"_{name}"
        ours = [block.cpu_us for block in blocks[name, "hit"]]
        figures[f"cpu_us_hit{suffix}"] = median(ours)
        for side in ("nginx", "nginx_tuned"):
            theirs = [block.cpu_us for block in blocks[name, side]]
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            figures[f"cpu_us_{side}{suffix}"] = median(theirs)
            figures[f"cpu_ratio_{side}{suffix}"] = median(ours) / median(theirs)
            figures[f"cpu_ratio_{side}{suffix}_min"] = min(ratios)
            figures[f"cpu_ratio_{side}{suffix}_max"] = max(ratios)
    for side in ("nginx", "nginx_tuned", "hit"):
        measured = blocks["plain", side]
        rates = [block.load.requests * 1e6 / block.load.duration_us for block in measured]
        figures[f"requests_per_s_{side}"] = median(rates)
        figures[f"busy_share_{side}"] = median([block.busy_share for block in measured])
        figures[f"p50_us_{side}_c{connections}"] = median([block.load.p50_us for block in measured])
        figures[f"p99_us_{side}_c{connections}"] = median([block.load.p99_us for block in measured])
    return figures


def turns(sides: Sequence[Side], rounds: int) -> Iterator[Side]:
    """Each round in another order, so that what drifts drifts for all."""
    for i in range(rounds):
        yield from sides if i % 2 == 0 else reversed(sides)


async def ask_all(
    port: int,
    requests: Sequence[bytes],
    connections: int,
    on_reply: Callable[[Reply], None],
    progress: Progress,
) -> None:
    """Sends all requests over a few connections; each must be answered with 200."""
    waiting = iter(requests)
    answered = 0

    async def ask() -> None:
        nonlocal answered
        connection = await Connection.open(port)
        for request in waiting:
            try:
                reply = await connection.exchange(request)
            except (OSError, TimeoutError) as error:
                raise BenchmarkError(f"a request wasn't answered: {error!r}") from error
            if reply.status != 200:
                raise BenchmarkError(f"answered {reply.status}: {reply.body[:300]!r}")
            on_reply(reply)
            answered += 1
            progress.tick(f"{answered:,} of {len(requests):,} asked")
            if connection.closed:
                connection = await Connection.open(port)
        connection.close()

    await asyncio.gather(*(ask() for _ in range(connections)))
