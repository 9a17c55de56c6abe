"""What a session's signals are worth to a llama.cpp server's slots: that it is over, that a tool runs.

In virtual time, `core.slot_desk` and `core.pauses` themselves with files behind them, `--sessions-a-slot`
as many sessions open as slots, begun by a Poisson process. Two mixes: *agents*, Weka's real coding agents,
with their pauses and which answers call a tool, prompts scaled by one factor; *mixed*, half of
the sessions such agents, half chats (Mooncake's conversations), which call none.

The engine does one thing at a time: it computes (the service model of an 8B model at 200 TFLOP/s), saves or
loads (128 KiB a token, at the speeds that `preheat tiers` measured on llama.cpp; moves also stop the real
one). What isn't worth loading isn't saved.

- none: LRU;
- over: a session's last request says so;
- tool: answers that call a tool are known, and what pauses are usual behind them is learned;
- both;
- judged: tool; and what isn't worth a file, by the chance of a return that pauses have told, what loading
  it would save and what writing takes, is taken for over;
- all: both and judged;
- priced, unwritten: to tell what judged is by; tool where all are thought to return, and where nothing is written;
- foreseen: it is known when each session returns.

Each ratio is by none with the same sessions; their geometric mean, and all of them in the settings.
What was looked at while this was built is `--half first` of the sessions.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.report import Progress, Result
from benchmarks.signal_sessions import agent_sessions, chat_sessions, quiet
from benchmarks.signal_world import Counted, Prices, Rules, Turn, World
from preheat.core.costs import ServiceModel

ARMS: Final[Mapping[str, Rules]] = {
    "none": Rules(),
    "over": Rules(over=True),
    "tool": Rules(tool=True),
    "both": Rules(over=True, tool=True),
    "judged": Rules(tool=True, judged=True),
    "all": Rules(over=True, tool=True, judged=True),
    "priced": Rules(tool=True, judged=True, returns=True),
    "unwritten": Rules(tool=True, writes=False),
    "foreseen": Rules(sees_all=True),
}
MIXES: Final = ("agents", "mixed")
Told = dict[str, float]
TRACES: Final = ("v6_global", "v8_local")
TOKEN_BYTES: Final = 131_072
MOVE_S: Final = 0.005
MEAN_TOKENS: Final = 12_000
"""Of a prompt, about: of Mooncake's conversations, and of Weka's at an eighth."""
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
    told: dict[str, dict[str, list[Told]]] = {}
    for mix, name, seed in itertools.product(MIXES, TRACES, range(1, options.seeds + 1)):
        sessions = _sessions(mix, name, seed, options)
        for arm in ARMS:
            figures = _figures_of(_world(sessions, ARMS[arm], options).run())
            told.setdefault(mix, {}).setdefault(arm, []).append(figures)
            progress.say(f"{mix}, {name}, seed {seed}, {arm}: {_said(figures)}")
    figures = {
        f"{mix}_{what}": value for mix in MIXES for what, value in _figures(told[mix]).items()
    }
    ratios = {mix: {arm: _ratios(told[mix], arm) for arm in ARMS if arm != "none"} for mix in MIXES}
    return Result(figures, {"ratios": ratios})


def _sessions(mix: str, name: str, seed: int, options: argparse.Namespace) -> list[list[Turn]]:
    """Half of them chats where they are mixed."""
    open_sessions = options.slots * options.sessions_a_slot * (0.5 if mix == "mixed" else 1.0)
    drawn = agent_sessions(
        name,
        seed,
        open_sessions,
        hours=options.hours,
        lengths=options.lengths,
        half=options.half,
    )
    if mix == "mixed":
        drawn += chat_sessions(seed, open_sessions, hours=options.hours, half=options.half)
    return quiet(drawn, options.said, seed)


def _world(sessions: Sequence[Sequence[Turn]], rules: Rules, options: argparse.Namespace) -> World:
    prices = Prices(
        ServiceModel(),
        token_bytes=TOKEN_BYTES,
        save_byte_s=1e-6 / options.save_mb_s,
        load_byte_s=1e-6 / options.load_mb_s,
        move_s=MOVE_S,
    )
    return World(
        sessions,
        prices,
        rules,
        slots=options.slots,
        file_tokens=options.files_a_slot * options.slots * MEAN_TOKENS,
        warm_s=options.hours * 3_600.0 * WARM_SHARE,
    )


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


def _figures(told: Mapping[str, Sequence[Told]]) -> dict[str, float]:
    figures = {"requests": sum(one["requests"] for one in told["none"])}
    figures |= {
        f"none_{what}": statistics.fmean(one[what] for one in told["none"])
        for what in told["none"][0]
        if what != "requests"
    }
    for arm in ARMS:
        if arm != "none":
            figures |= {
                f"{arm}_{what}_ratio": statistics.geometric_mean(ratios) if all(ratios) else 0.0
                for what, ratios in _ratios(told, arm).items()
            }
    return figures


def _ratios(told: Mapping[str, Sequence[Told]], arm: str) -> dict[str, list[float]]:
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
