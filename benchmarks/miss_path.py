"""What a miss costs and how long it takes, beside vLLM's router doing the same.

CPU time (user and system, of all processes of a side) per request, as in `hit_path`: each side is
pinned to the same core in turn, load and engine to the other; short blocks of each alternate. Every
request is distinct and greedy, so the gateway does all it does for a miss: keys, look-ups in L1 and
L2, a flight, storing in both. Beside it runs vLLM's router (Rust) before the same worker with its
`cache_aware` policy, which looks for the prompt's prefix as we look for the prompt, and, as the
least that a router can do, with `round_robin`. The request log is off unless `--log` (the router has
none). The worker is the fake engine over HTTP, without its
KV cache and its own log.

request  a chat of 893 bytes, a reply of about 1 KB, not streamed, 32 connections.
chunk    100 chunks of about 190 bytes, 2 ms apart, 20 streams at once; a stream's whole CPU time
         divided by its chunks.

Latency is what the gateway adds: an open loop (Poisson, 500 a second, sent at planned moments) asks
the engine, which takes 50 ms, in one window directly and in the next through the gateway; the added
latency is the difference of the percentiles. Wall time measures the neighbours too, so only quiet
pairs count: those in which, in both windows, everybody else on the machine used less than 8 % of
one core (/proc/stat less the run's own processes). Windows go on until enough pairs are quiet or
the most are run; without any quiet pair there is no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import uvloop

from benchmarks import chat, open_loop, servers
from benchmarks.open_loop import percentile
from benchmarks.process import Cores, Others, Server, on_core, two_cores
from benchmarks.rawhttp import Connection, post
from benchmarks.report import BenchmarkError, Progress, Result, first_line, median
from benchmarks.servers import Engine, Gateway, Layout
from benchmarks.workload import COMPACT, MARK, Request, Workload
from benchmarks.wrk import Script, wrk_version

SEED = 1
MODEL = "m1"
BODY_BYTES = 893
LARGE_BODY_BYTES = 32_768
HOLE = "#" * 16
REPLY_TEXT = chat.words(random.Random(SEED), 710)  # a reply of about 1 KB
PIECES = 98  # with the role and the finish 100 chunks
CHUNKS = PIECES + 2
STREAM_TEXT = "word " * PIECES
CHUNK_DELAY_S = 0.002
STREAMS_AT_ONCE = 20
RATE = 500.0
SERVICE_S = 0.05
OPEN_CONNECTIONS = 64
QUIET_SHARE = 0.08  # of one core, used by everybody else
SETTLE_S = 0.3  # what is put off (writes, the log) belongs to the block that caused it
MISSES_WANTED = 0.999
OURS, ROUTER, ROUND_ROBIN = "miss", "vllm_router", "vllm_router_round_robin"
POLICIES = {ROUTER: "cache_aware", ROUND_ROBIN: "round_robin"}
ROUTER_HELP = (
    "vLLM's router, installed apart: python -m venv DIR && DIR/bin/pip install vllm-router, then "
    "--vllm-router DIR/bin/vllm-router"
)


class Side(msgspec.Struct, frozen=True):
    """A server under test."""

    name: str
    server: Server
    port: int


class Windows(msgspec.Struct):
    """What the windows of one size gave, of quiet pairs only."""

    direct_s: list[float] = []
    through_s: list[float] = []
    lateness_s: list[float] = []
    pairs: int = 0
    quiet_pairs: int = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each kind (5)")
    parser.add_argument("--block-s", type=int, default=3, help="seconds a block lasts (3)")
    parser.add_argument("--connections", type=int, default=32, help="kept alive by wrk (32)")
    parser.add_argument("--streams", type=int, default=10, help="streams a client and block (10)")
    parser.add_argument("--window-s", type=float, default=4.0, help="of the open loop (4)")
    parser.add_argument("--quiet", type=int, default=5, help="quiet pairs wanted (5)")
    parser.add_argument("--pairs", type=int, default=15, help="most pairs of windows (15)")
    parser.add_argument("--vllm-router", metavar="PATH", help=ROUTER_HELP)
    Layout.add_options(parser, log=False)


def tools() -> dict[str, list[str]]:
    """What else must be installed, by the command that tells its version."""
    return {"wrk": wrk_version()}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    cores = two_cores()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        engine = stack.enter_context(servers.fake_engine(folder, core=cores.client, is_bare=True))
        gateway = stack.enter_context(
            servers.gateway(folder, {MODEL: engine}, core=cores.server, layout=Layout.of(options))
        )
        sides = [Side(OURS, gateway.server, gateway.port)]
        settings: dict[str, object] = {"preheat": gateway.settings}
        if executable := options.vllm_router:
            for name, policy in POLICIES.items():
                router = servers.vllm_router(
                    folder, engine, executable=executable, policy=policy, core=cores.server
                )
                sides.append(Side(name, *stack.enter_context(router)))
            settings["vllm_router"] = first_line(router_version(executable))
        else:
            progress.say(f"no figure beside vllm-router: give {ROUTER_HELP}")
        bench = MissPath(options, progress, folder, cores, engine, gateway, sides)
        return Result(bench.requests() | bench.chunks() | bench.added(), settings)


def router_version(executable: str) -> list[str]:
    """Asked of its own Python: the command has no option for it."""
    script = "import importlib.metadata as m; print(m.version('vllm-router'))"
    return [str(Path(executable).with_name("python")), "-c", script]


class MissPath:
    """The sides before one engine, and what each of the three loads measures."""

    def __init__(
        self,
        options: argparse.Namespace,
        progress: Progress,
        folder: Path,
        cores: Cores,
        engine: Engine,
        gateway: Gateway,
        sides: list[Side],
    ) -> None:
        self._options = options
        self._progress = progress
        self._folder = folder
        self._cores = cores
        self._engine = engine
        self._gateway = gateway
        self._key = gateway.keys[0]
        self._sides = sides
        self._numbers = itertools.count()

    # CPU of a request

    def requests(self) -> dict[str, float]:
        self._engine.answer_with({"content": REPLY_TEXT, "delay_s": 0.0})
        load = Workload([Request(0, _body(BODY_BYTES).replace(HOLE, MARK))], [0], "digits")
        script = Script(load, keys=self._gateway.keys, path=self._folder / "requests")
        for side in self._sides:  # uncounted: code, caches and pools warm up
            self._request_block(script, side, duration_s=1)
        costs: dict[str, list[float]] = defaultdict(list)
        rates: dict[str, list[float]] = defaultdict(list)
        for side in self._turns():
            cpu_us, rate = self._request_block(script, side, duration_s=self._options.block_s)
            costs[side.name].append(cpu_us)
            rates[side.name].append(rate)
            self._progress.say(f"{side.name}: {cpu_us:.1f} us CPU a request, {rate:,.0f} a second")
        figures = {f"cpu_us_{name}": median(all_us) for name, all_us in costs.items()}
        figures |= {f"requests_per_s_{name}": median(each) for name, each in rates.items()}
        return figures | _ratios(costs, "cpu_ratio")

    def _request_block(self, script: Script, side: Side, *, duration_s: int) -> tuple[float, float]:
        """CPU microseconds a request, and requests a second; fails unless all were forwarded."""
        calls, cpu_s = self._engine.calls(), side.server.cpu_s()
        load = script.run(
            side.port,
            connections=self._options.connections,
            duration_s=duration_s,
            core=self._cores.client,
        )
        time.sleep(SETTLE_S)
        cpu_s, calls = side.server.cpu_s() - cpu_s, self._engine.calls() - calls
        if load.failures or not load.requests:
            raise BenchmarkError(f"{side.name}: requests failed: {load}")
        if calls < load.requests * MISSES_WANTED:
            raise BenchmarkError(f"{side.name}: only {calls:,} of {load.requests:,} were forwarded")
        return cpu_s * 1e6 / load.requests, load.requests * 1e6 / load.duration_us

    # CPU of a chunk

    def chunks(self) -> dict[str, float]:
        self._engine.answer_with(
            {"content": STREAM_TEXT, "pieces": PIECES, "chunk_delay_s": CHUNK_DELAY_S}
        )
        costs: dict[str, list[float]] = defaultdict(list)
        durations: dict[str, list[float]] = defaultdict(list)
        stream_bytes = 0.0
        for side in self._sides:
            self._chunk_block(side, streams=1)
        for side in self._turns():
            cpu_us, stream_s, stream_bytes = self._chunk_block(side, streams=self._options.streams)
            costs[side.name].append(cpu_us)
            durations[side.name].append(stream_s)
            self._progress.say(f"{side.name}: {cpu_us:.1f} us CPU a chunk, {stream_s:.3f} s each")
        figures = {f"chunk_cpu_us_{name}": median(all_us) for name, all_us in costs.items()}
        figures |= {f"stream_s_{name}": median(each) for name, each in durations.items()}
        return figures | _ratios(costs, "chunk_cpu_ratio") | {"chunk_bytes": stream_bytes / CHUNKS}

    def _chunk_block(self, side: Side, *, streams: int) -> tuple[float, float, float]:
        """CPU microseconds a chunk, seconds a stream took, and its bytes."""
        cpu_s = side.server.cpu_s()
        with on_core(self._cores.client):
            seconds, size_bytes = uvloop.run(self._read_streams(side, streams))
        time.sleep(SETTLE_S)
        cpu_s = side.server.cpu_s() - cpu_s
        return cpu_s * 1e6 / (streams * STREAMS_AT_ONCE * CHUNKS), seconds, size_bytes

    async def _read_streams(self, side: Side, streams: int) -> tuple[float, float]:
        seconds: list[float] = []
        sizes: list[int] = []

        async def read() -> None:
            connection = await Connection.open(side.port)
            for _ in range(streams):
                request = self._post(BODY_BYTES, stream=True)
                began_at = time.monotonic()
                reply = await connection.exchange(request)
                seconds.append(time.monotonic() - began_at)
                sizes.append(len(reply.body))
                has_all = reply.body.count(b"\ndata:") >= CHUNKS - 1
                if not has_all or not reply.body.endswith(b"data: [DONE]\n\n"):
                    raise BenchmarkError(f"{side.name}: no whole stream: {reply.body[-300:]!r}")
            connection.close()

        await asyncio.gather(*(read() for _ in range(STREAMS_AT_ONCE)))
        return median(seconds), median(sizes)

    # Latency

    def added(self) -> dict[str, float]:
        self._engine.answer_with({"content": REPLY_TEXT, "delay_s": SERVICE_S})
        small = self._added(BODY_BYTES)
        large = self._added(LARGE_BODY_BYTES)
        figures: dict[str, float] = {}
        for suffix, windows in (("", small), ("_32k", large)):
            figures[f"windows{suffix}"] = 2 * windows.pairs
            figures[f"windows_quiet{suffix}"] = 2 * windows.quiet_pairs
            if windows.quiet_pairs:
                for name, share in (("p50", 0.5), ("p99", 0.99)):
                    direct = percentile(windows.direct_s, share) * 1e3
                    through = percentile(windows.through_s, share) * 1e3
                    figures[f"added_{name}_ms{suffix}"] = through - direct
                    figures[f"direct_{name}_ms{suffix}"] = direct
                late = percentile(windows.lateness_s, 0.99)
                figures[f"sent_late_p99_ms{suffix}"] = late * 1e3
        return figures

    def _added(self, body_bytes: int) -> Windows:
        windows = Windows()
        rng = random.Random(SEED)
        while windows.pairs < self._options.pairs and windows.quiet_pairs < self._options.quiet:
            at_s = open_loop.moments(rng, rate=RATE, duration_s=self._options.window_s)
            direct, direct_share = self._window(self._engine.port, at_s, body_bytes)
            through, through_share = self._window(self._gateway.port, at_s, body_bytes)
            windows.pairs += 1
            is_quiet = max(direct_share, through_share) < QUIET_SHARE
            if is_quiet:
                windows.quiet_pairs += 1
                windows.direct_s += direct.latencies_s
                windows.through_s += through.latencies_s
                windows.lateness_s += direct.lateness_s + through.lateness_s
            self._progress.say(
                f"{body_bytes:,} bytes, pair {windows.pairs}: others used {direct_share:.1%} and "
                f"{through_share:.1%} of a core{'' if is_quiet else ' (not counted)'}; "
                f"p50 {percentile(direct.latencies_s, 0.5) * 1e3:.2f} and "
                f"{percentile(through.latencies_s, 0.5) * 1e3:.2f} ms"
            )
        return windows

    def _window(
        self, port: int, at_s: list[float], body_bytes: int
    ) -> tuple[open_loop.Sample, float]:
        """A window, and the share of a core that everybody else used in it."""
        requests = [self._post(body_bytes, stream=False) for _ in at_s]
        others = Others([self._engine.server, *(side.server for side in self._sides)])
        calls = self._engine.calls()
        with on_core(self._cores.client):
            sample = uvloop.run(
                open_loop.send(port, iter(requests), at_s, connections=OPEN_CONNECTIONS)
            )
        share, calls = others.share(), self._engine.calls() - calls
        if calls != len(at_s):
            raise BenchmarkError(f"{calls:,} of {len(at_s):,} requests of a window were forwarded")
        return sample, share

    def _turns(self) -> Iterator[Side]:
        """Each round in another order, so that what drifts drifts for all."""
        for i in range(self._options.rounds):
            yield from self._sides if i % 2 == 0 else reversed(self._sides)

    def _post(self, body_bytes: int, *, stream: bool) -> bytes:
        body = _body(body_bytes, stream=stream).replace(HOLE, f"-{next(self._numbers):015d}")
        return post(chat.PATH, body.encode(), key=self._key)


@functools.cache
def _body(size_bytes: int, *, stream: bool = False) -> str:
    """A chat of this size; what makes it another one goes where the hole is, in the last message:
    hexadecimal digits where wrk sends it, a hyphen and decimal ones where we do."""
    fields: dict[str, object] = {"model": MODEL, "temperature": 0}
    if stream:
        fields["stream"] = True
    system = {"role": "system", "content": ""}
    case = {"role": "user", "content": f"Case {HOLE}: "}
    fields["messages"] = [system, case]
    text = chat.words(random.Random(SEED), size_bytes - len(json.dumps(fields, **COMPACT)))
    system["content"] = text[: len(text) // 2]
    case["content"] += text[len(text) // 2 :]
    return json.dumps(fields, **COMPACT)


def _ratios(costs: dict[str, list[float]], name: str) -> dict[str, float]:
    """Ours over theirs: of the medians, and of the rounds the least and the most."""
    figures: dict[str, float] = {}
    for side in POLICIES:
        if side in costs:
            rounds = [a / b for a, b in zip(costs[OURS], costs[side], strict=True)]
            figures[f"{name}_{side}"] = median(costs[OURS]) / median(costs[side])
            figures[f"{name}_{side}_min"] = min(rounds)
            figures[f"{name}_{side}_max"] = max(rounds)
    return figures
