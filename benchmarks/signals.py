"""What a session's signals are worth to a llama.cpp server's slots: that it is over, that a tool runs.

In virtual time, `core.slot_desk` and `core.pauses` themselves with files behind them, `--sessions-a-slot`
as many sessions open as slots. Sessions, their pauses and which answers call a tool are Weka's (real coding
agents), begun by a Poisson process; lengths are scaled by one factor. The engine does one thing
at a time: it computes (the service model of an 8B model at 200 TFLOP/s), saves or loads (128 KiB a
token, at the speeds that `preheat tiers` measured on llama.cpp; moves also stop the real one). What
isn't worth loading isn't saved.

- none: LRU;
- over: a session's last request says so;
- tool: answers that call a tool are known, and what pauses are usual behind them is learned;
- both;
- foreseen: it is known when each session returns.

Each ratio is by none with the same sessions; their geometric mean, and all of them in the settings.
Nothing was fitted, but the sessions looked at while this was built are `--half first`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from benchmarks.report import BenchmarkError, Progress, Result
from benchmarks.signal_world import Counted, Prices, Rules, Turn, World
from benchmarks.traces import agents
from preheat.core.costs import ServiceModel
from preheat.traces.arrival import Arrival

ARMS: Final[Mapping[str, Rules]] = {
    "none": Rules(),
    "over": Rules(over=True),
    "tool": Rules(tool=True),
    "both": Rules(over=True, tool=True),
    "foreseen": Rules(sees_all=True),
}
TRACES: Final = ("v6_global", "v8_local")
TOKEN_BYTES: Final = 131_072
MOVE_S: Final = 0.005
OUTPUT_TOKEN_S: Final = 0.01
MEAN_TOKENS: Final = 92_000
"""Of a prompt in these traces, about."""
WARM_SHARE: Final = 1 / 6


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=8, help="of the server (8)")
    parser.add_argument("--sessions-a-slot", type=float, default=3.0, help="open ones (3)")
    parser.add_argument("--files-a-slot", type=float, default=8.0, help="the disk's room (8)")
    parser.add_argument("--hours", type=float, default=24.0, help="a sixth warms up (24)")
    parser.add_argument("--seeds", type=int, default=3, help="for each of the traces (3)")
    parser.add_argument("--lengths", type=float, default=0.125, help="scaled by (0.125)")
    parser.add_argument("--said", type=float, default=1.0, help="share of ends that are said (1)")
    parser.add_argument("--save-mb-s", type=float, default=593.0, help="measured (593)")
    parser.add_argument("--load-mb-s", type=float, default=2_813.0, help="measured (2813)")
    parser.add_argument("--half", choices=("first", "second"), default="second")


def tools() -> dict[str, list[str]]:
    return {}


def run(options: argparse.Namespace, progress: Progress) -> Result:
    prices = Prices(
        ServiceModel(),
        TOKEN_BYTES,
        1e-6 / options.save_mb_s,
        1e-6 / options.load_mb_s,
        MOVE_S,
        OUTPUT_TOKEN_S,
    )
    told: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for name, seed in itertools.product(TRACES, range(1, options.seeds + 1)):
        sessions = _sessions(name, seed, options)
        for arm, rules in ARMS.items():
            world = World(
                sessions,
                prices,
                rules,
                slots=options.slots,
                file_tokens=options.files_a_slot * options.slots * MEAN_TOKENS * options.lengths,
                warm_s=options.hours * 3_600.0 * WARM_SHARE,
            )
            told[arm].append(_figures_of(world.run()))
            progress.say(f"{name}, seed {seed}, {arm}: {_said(told[arm][-1])}")
    return Result(_figures(told), {"ratios": {arm: _ratios(told, arm) for arm in ARMS}})


def _figures_of(counted: Counted) -> dict[str, float]:
    return {
        "requests": float(len(counted.ttfts_s)),
        "written_bytes": counted.written_bytes,
        "saves": float(counted.saves),
        "loads": float(counted.loads),
        "prefill_s": counted.prefill_s,
        "engine_s": counted.engine_s,
        "mean_ttft_s": statistics.fmean(counted.ttfts_s),
        "p95_ttft_s": statistics.quantiles(counted.ttfts_s, n=20, method="inclusive")[-1],
    }


def _figures(told: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    figures = {"requests": sum(one["requests"] for one in told["none"])}
    figures |= {
        f"none_{what}": statistics.fmean(one[what] for one in told["none"])
        for what in told["none"][0]
        if what != "requests"
    }
    for arm in ARMS:
        if arm != "none":
            figures |= {
                f"{arm}_{what}_ratio": statistics.geometric_mean(ratios)
                for what, ratios in _ratios(told, arm).items()
            }
    return figures


def _ratios(told: Mapping[str, Sequence[Mapping[str, float]]], arm: str) -> dict[str, list[float]]:
    """By none, run by run."""
    pairs = list(zip(told[arm], told["none"], strict=True))
    return {
        what: [mine[what] / base[what] for mine, base in pairs]
        for what in told[arm][0]
        if what != "requests"
    }


def _said(figures: Mapping[str, float]) -> str:
    return (
        f"{figures['written_bytes'] / 1e9:.0f} GB in {figures['saves']:.0f} saves, "
        f"{figures['loads']:.0f} loads, prefill {figures['prefill_s']:.0f} s, "
        f"TTFT {figures['mean_ttft_s']:.2f} s, p95 {figures['p95_ttft_s']:.2f} s"
    )


# Sessions ------------------------------------------------------------------------------------


def _sessions(name: str, seed: int, options: argparse.Namespace) -> list[list[Turn]]:
    """Those of one half of the trace's, twice as many drawn as are wanted; sub-agents' requests aren't
    their session's own."""
    open_sessions = 2.0 * options.slots * options.sessions_a_slot
    trace = agents(open_sessions, seed, hours=options.hours, name=name)
    sessions: dict[str, list[Arrival]] = {}
    for one in trace.arrivals:
        if not one.agent:
            sessions.setdefault(one.session, []).append(one)
    names = sorted({_drawn_from(session) for session in sessions})
    middle = len(names) // 2
    half = set(names[:middle] if options.half == "first" else names[middle:])
    chance = random.Random(f"{seed} said")
    drawn = [
        list(_turns(turns, trace.block_tokens, options.lengths, chance.random() < options.said))
        for session, turns in sessions.items()
        if _drawn_from(session) in half
    ]
    if not drawn:
        raise BenchmarkError("no session was drawn: take more hours")
    return drawn


def _drawn_from(session: str) -> str:
    return session.partition("#")[0]


def _turns(
    arrivals: Sequence[Arrival], block_tokens: int, scale: float, says_over: bool
) -> Iterator[Turn]:
    for before, one in _with_before(arrivals):
        pause_s = one.at if before is None else one.at - before.at - max(0.0, before.service_s)
        yield Turn(
            max(0.0, pause_s),
            one.blocks[: one.input_tokens // block_tokens],
            max(1, round(one.input_tokens * scale)),
            max(1, round(one.output_tokens)),
            calls_tool=one.stop == "tool_use",
            says_over=says_over and one is arrivals[-1],
        )


def _with_before(arrivals: Sequence[Arrival]) -> Iterable[tuple[Arrival | None, Arrival]]:
    return zip([None, *arrivals], arrivals, strict=False)
