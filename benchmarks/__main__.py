"""`python -m benchmarks NAME --json FILE`: runs one benchmark, prints and writes its figures."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from benchmarks import (
    closure,
    crash,
    deploys,
    engine_routing,
    entry_memory,
    eviction_oracle,
    hit_path,
    hot_prefixes,
    index_speed,
    miss_path,
    pause_return,
    pauses,
    prefix_warm,
    replay_speed,
    request_log,
    restart_gate,
    retention,
    routers,
    routing,
    signals,
    soak,
    stampede,
    vllm_live,
    warm_foreground,
    warm_live,
)
from benchmarks.report import BenchmarkError, Progress, Result, figures_table, machine


class Benchmark(Protocol):
    """What a module must have to stand in the table below."""

    __doc__: str | None

    def add_options(self, parser: argparse.ArgumentParser, /) -> None: ...

    def tools(self) -> dict[str, list[str]]: ...

    def run(self, options: argparse.Namespace, progress: Progress, /) -> Result: ...


BENCHMARKS: dict[str, Benchmark] = {
    "closure": closure,
    "crash": crash,
    "deploys": deploys,
    "engine_routing": engine_routing,
    "entry_memory": entry_memory,
    "eviction_oracle": eviction_oracle,
    "hit_path": hit_path,
    "hot_prefixes": hot_prefixes,
    "index_speed": index_speed,
    "miss_path": miss_path,
    "pause_return": pause_return,
    "pauses": pauses,
    "prefix_warm": prefix_warm,
    "replay_speed": replay_speed,
    "request_log": request_log,
    "restart_gate": restart_gate,
    "retention": retention,
    "routers": routers,
    "routing": routing,
    "signals": signals,
    "soak": soak,
    "stampede": stampede,
    "vllm_live": vllm_live,
    "warm_foreground": warm_foreground,
    "warm_live": warm_live,
}

STOPPING = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not sys.platform.startswith("linux"):
        print("the benchmarks read /proc: they need Linux", file=sys.stderr)
        return 1
    for number in STOPPING:
        signal.signal(number, _interrupt)
    benchmark = BENCHMARKS[options.name]
    try:
        about = machine(benchmark.tools())  # before the load the benchmark itself puts on it
        result = benchmark.run(options, Progress(options.name))
    except BenchmarkError as error:
        print(f"{options.name} failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{options.name} was stopped", file=sys.stderr)
        return 130
    print(figures_table(result.figures))
    if options.json is not None:
        chosen = {k: v for k, v in vars(options).items() if k not in ("name", "json")}
        settings = {"options": chosen, **result.settings}
        document = {"figures": result.figures, "settings": settings, "machine": about}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, benchmark in BENCHMARKS.items():
        about = (benchmark.__doc__ or "").strip()
        one = names.add_parser(
            name,
            help=about.partition("\n")[0].replace("%", "%%"),
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
        benchmark.add_options(one)
    return parser


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Stops once, and lets nothing stop the stopping: every process we started must be ended."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
