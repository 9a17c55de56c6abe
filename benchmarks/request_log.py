"""What the request log costs: bytes a row, microseconds a hit, and what is lost with kill -9.

Feeds the worker's side of the log and a log process of its own; no gateway. Bytes a row come from
bodies composed after Mooncake's conversation trace: the same lengths and the same shared prefixes,
four bytes a token, the text made up from the block ids.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.report import BenchmarkError, Progress, Result
from preheat.core.types import Ask, Check, Hit, Key, Request, RequestId
from preheat.telemetry.requestlog import RequestFeed
from preheat.traces import own
from preheat.wire.journal import Row
from preheat.wire.openai import Answer

TRACE = Path(__file__).parents[2] / "shared/data/mooncake/conversation.part1.jsonl.gz"
ROUTE = b"/v1/chat/completions"
BLOCK_TOKENS = 512
TOKEN_BYTES = 4
TICKS_A_S = os.sysconf("SC_CLK_TCK")
NEVER_ROLLS = ("--spool-bytes", str(2**40), "--roll-s", "1e9")


class Source(msgspec.Struct):
    path: bytes
    body: bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", default=str(TRACE), help="Mooncake's conversation trace")
    parser.add_argument("--hits", type=int, default=2_000_000, help="hits timed (2,000,000)")
    parser.add_argument("--requests", type=int, default=100_000, help="with a kill in the middle")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    if not Path(options.trace).exists():
        raise BenchmarkError(
            f"{Path(options.trace)} is missing; --trace names Mooncake's conversation"
        )
    figures: dict[str, float] = {}
    for step in (_bytes_a_row, _cost_of_hits, _kill_in_the_middle):
        with tempfile.TemporaryDirectory(prefix="preheat-log-") as folder:
            figures |= asyncio.run(step(options, Path(folder), progress))
        progress.say(", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return Result(figures, {"source": "composed: Mooncake's lengths and prefixes, made-up text"})


class LogProcess:
    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "socket"
        self.folder = folder / "log"
        self._command = [
            *(sys.executable, "-m", "preheat.host.logger"),
            *("--folder", str(self.folder), "--socket", str(self.socket), *options),
        ]
        self.start()

    def start(self) -> None:
        self._child = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(30)

    def stop(self) -> None:
        self._child.send_signal(signal.SIGTERM)
        self._child.wait(120)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_A_S

    def spool_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("spool-*"))

    def file_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("log-*"))


async def _feed(log: LogProcess) -> RequestFeed:
    while not log.socket.exists():
        await asyncio.sleep(0.05)
    process = f"{secrets.token_hex(4)}-"
    feed = RequestFeed(str(log.socket), process, secrets.token_bytes(32), lambda _: None)
    feed.start()
    await asyncio.sleep(0.3)
    return feed


async def _settled(log: LogProcess) -> int:
    """The spool's bytes once they grow no more."""
    seen = -1
    while (now := log.spool_bytes()) != seen:
        seen = now
        await asyncio.sleep(0.6)
    return seen


# Bytes a row ---------------------------------------------------------------------------------


async def _bytes_a_row(
    options: argparse.Namespace, folder: Path, progress: Progress
) -> dict[str, float]:
    log = LogProcess(folder, *NEVER_ROLLS)
    feed = await _feed(log)
    rows = 0
    for body, input_tokens, output_tokens in _mooncake(Path(options.trace)):
        rows += 1
        request = _request(rows)
        row = Row(
            "forward",
            fwd="miss",
            detail="key-first-seen",
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cached_tokens=0,
            answer_bytes=output_tokens * TOKEN_BYTES,
            ttft_s=input_tokens * 1.1e-4,
            service_s=output_tokens * 0.023,
            engine_worker=f"gpu-{rows % 8}:8000",
        )
        feed.row(rows, request, Source(ROUTE, body), row, time.monotonic(), output_tokens * 0.023)
        if rows % 100 == 0:
            progress.tick(f"{rows} bodies")
            await asyncio.sleep(0.02)
    await feed.aclose()
    spool_bytes = await _settled(log)
    await asyncio.to_thread(log.stop)
    logged = sum(table.num_rows for table in own.tables(log.folder))
    if logged != rows or feed.dropped:
        raise BenchmarkError(f"{rows} rows were sent, {logged} are in the log")
    return {
        "bytes_per_row_spool": spool_bytes / rows,
        "bytes_per_row_parquet": log.file_bytes() / rows,
    }


def _mooncake(trace: Path) -> Iterator[tuple[bytes, int, int]]:
    """Bodies, input and output tokens."""
    with gzip.open(trace) as lines:
        for line in lines:
            request = json.loads(line)
            text = "".join(
                hashlib.sha256(b"%d" % block).hexdigest() * (BLOCK_TOKENS * TOKEN_BYTES // 64)
                for block in request["hash_ids"]
            )[: request["input_length"] * TOKEN_BYTES]
            yield _body(text), request["input_length"], request["output_length"]


def _body(text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": messages, "temperature": 0}).encode()


def _request(number: int) -> Request:
    ask = Ask(Key(hashlib.blake2b(b"%d" % number, digest_size=16).digest()), Check(b""), "m")
    return Request(RequestId(b""), "tenant", "", ask)


# What a hit costs ----------------------------------------------------------------------------


async def _cost_of_hits(
    options: argparse.Namespace, folder: Path, progress: Progress
) -> dict[str, float]:
    log = LogProcess(folder, *NEVER_ROLLS)
    feed = await _feed(log)
    source = Source(ROUTE, _body("x" * 2_000))
    requests = [_request(number) for number in range(1_000)]
    hit = Hit(Key(b""), b"", 0.0, 3600.0, Answer(b'"usage":{}}', b"", b""), 0.0)
    for number, request in enumerate(requests):
        feed.hit(number, request, hit, source, time.monotonic(), 1e-5)
    await _settled(log)
    logger_before_s = log.cpu_s()
    spent = {"nothing": 0.0, "feed": 0.0}
    rounds = max(1, options.hits // 10_000)
    for turn in range(rounds):
        for name, call in (("nothing", _nothing), ("feed", feed.hit)):
            before_s = time.process_time()
            for _ in range(10):
                for request in requests:
                    call(turn, request, hit, source, before_s, 1e-5)
            if name == "feed":
                await asyncio.sleep(0.05)
            spent[name] += time.process_time() - before_s
        progress.tick(f"{turn * 10_000:,} hits")
    before_s = time.process_time()
    await feed.aclose()
    spent["feed"] += time.process_time() - before_s
    await _settled(log)
    hits = rounds * 10_000
    logger_s = log.cpu_s() - logger_before_s
    before_s = _children_s() + log.cpu_s()
    spool_bytes = log.spool_bytes()
    await asyncio.to_thread(log.stop)
    return {
        "us_per_hit_worker": (spent["feed"] - spent["nothing"]) / hits * 1e6,
        "us_per_hit_logger": logger_s / hits * 1e6,
        "us_per_hit_compaction": (_children_s() - before_s) / hits * 1e6,
        "bytes_per_hit_spool": spool_bytes / hits,
        "bytes_per_hit_parquet": log.file_bytes() / hits,
    }


def _nothing(*_: object) -> None: ...


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# kill -9 -------------------------------------------------------------------------------------


async def _kill_in_the_middle(
    options: argparse.Namespace, folder: Path, progress: Progress
) -> dict[str, float]:
    """A tenth are misses of new prompts, the others hits of known ones."""
    log = LogProcess(folder)
    feed = await _feed(log)
    hit = Hit(Key(b""), b"", 0.0, 3600.0, Answer(b'"usage":{}}', b"", b""), 0.0)
    known: list[tuple[Request, Source]] = []
    sent: list[tuple[float, int]] = []
    killed_at = 0.0
    for number in range(options.requests):
        now = time.monotonic()
        if number == options.requests // 2:
            killed_at = now
            log.kill()
            log.start()
        if number % 10 == 0:
            known.append((_request(number), Source(ROUTE, _body(f"{number} " * 700))))
            row = Row("forward", "miss", "key-first-seen", 200, 9, number, 0, 40, 0.1, 0.2)
            feed.row(number, *known[-1], row, now, 0.25)
            sent.append((now, number))
        else:
            request, source = known[(number * 7919) % len(known)]
            feed.hit(number, request, hit, source, now, 0.25)
            sent.append((now, ((number * 7919) % len(known)) * 10))
        if number % 200 == 0:
            progress.tick(f"{number:,} requests")
            await asyncio.sleep(0.01)
    await feed.aclose()
    await asyncio.to_thread(log.stop)
    return {"rows_equal": _equal(log.folder, sent), **_lost(log.folder, sent, killed_at)}


def _equal(folder: Path, sent: list[tuple[float, int]]) -> float:
    """1 if every row that is there is as it was sent, once, with its whole chain."""
    seen = set()
    chain_of: dict[int, bytes] = {}
    for request in own.requests(folder):
        number, prompt = request.fields["number"], sent[request.fields["number"]][1]
        is_miss = number == prompt
        chain = chain_of.setdefault(prompt, request.blocks.tobytes())
        layer = "forward" if is_miss else "exact"
        body_bytes = len(_body(f"{prompt} " * 700))
        is_right = (
            number not in seen
            and request.layer == layer
            and chain == request.blocks.tobytes()
            and len(chain) // 8 == (request.fields["prompt_bytes"]) // 512
            and request.fields["body_bytes"] == body_bytes
            and (not is_miss or request.fields["output_tokens"] == number)
        )
        if not is_right:
            return 0.0
        seen.add(number)
    return 1.0 if len(set(chain_of.values())) == len(chain_of) else 0.0


def _lost(folder: Path, sent: list[tuple[float, int]], killed_at: float) -> dict[str, float]:
    there = np.concatenate([table["number"].to_numpy() for table in own.tables(folder)])
    missing = sorted(set(range(len(sent))) - set(there.tolist()))
    lost_s = max((abs(killed_at - sent[number][0]) for number in missing), default=0.0)
    return {"rows_lost": len(missing), "rows_lost_s": lost_s}
