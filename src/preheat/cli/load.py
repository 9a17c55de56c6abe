"""Send a recorded load to a live address, each request at its time, and report what came back.

    preheat load trace.jsonl http://127.0.0.1:8000
    preheat load trace.jsonl http://gpu-1:8000 --speed 4 --slo-ttft-s 0.5 --json
    preheat load trace.jsonl http://127.0.0.1:8000 --run-at 60 'systemctl restart vllm'

TRACE has one JSON object a line: `at` (seconds from the start), and a whole `body` (with `path`),
or `messages` or a `prompt` with `model`, `max_tokens`, `temperature`, `stream`; docs/load.md has
all fields. The loop is open: requests leave at their time whatever the server does. All lines are
checked before the first is sent. The report goes to standard output, progress to standard error.

Exit code 0 where anything was answered and no command of --run-at failed; 1 otherwise, 2 for wrong
usage. Ctrl-C ends the load and prints the report of what there is (130).
"""

import argparse
import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from preheat import config
from preheat.errors import ConfigError

if TYPE_CHECKING:
    from preheat.core.spread import Spread
    from preheat.lab.load.exchange import Outcome
    from preheat.lab.load.generator import Generator, Plan
    from preheat.lab.load.summary import Summary, Tally
    from preheat.lab.load.trace import Trace

_PROGRESS_S: Final = 0.5
_SPARE_FILES: Final = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the requests, as JSON lines")
    parser.add_argument("url", metavar="URL", help="the server's address, e.g. http://gpu-1:8000")
    pace = parser.add_argument_group("pace")
    pace.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="time runs X times as fast"
    )
    pace.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    pace.add_argument("--duration", type=_positive, metavar="S", help="end sending after S seconds")
    pace.add_argument(
        "--concurrency-limit",
        type=_count,
        default=1_024,
        metavar="N",
        help="most open requests; those over it are counted as unsent (default 1024)",
    )
    pace.add_argument(
        "--timeout", type=_positive, default=300.0, metavar="S", help="for one request (300)"
    )
    pace.add_argument(
        "--run-at",
        nargs=2,
        action="append",
        default=[],
        metavar=("S", "COMMAND"),
        help="run a shell command S seconds into the trace, e.g. an engine's restart; repeatable",
    )
    parser.add_argument("--model", default="", metavar="NAME", help="ask for this model instead")
    parser.add_argument(
        "--api-key-env", default="", metavar="VAR", help="environment variable with the key to send"
    )
    parser.add_argument(
        "--slo-ttft-s", type=_positive, metavar="S", help="target: time to the first content"
    )
    parser.add_argument("--slo-e2e-s", type=_positive, metavar="S", help="target: the whole time")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write a JSON line a request, without text"
    )


def run(options: argparse.Namespace) -> int:
    """Check, send, report."""
    plan = _plan(options)
    from preheat.lab.load.trace import Trace

    trace = Trace(options.trace)
    _raise_file_limit(plan.most_open)
    with _outcomes_to(options.out) as on_outcome:
        try:
            import uvloop
        except ImportError:
            tally = asyncio.run(_load(plan, trace, on_outcome))
        else:
            tally = uvloop.run(_load(plan, trace, on_outcome))
    summary = tally.summary()
    if options.json:
        print(msgspec.json.encode(summary).decode())
    else:
        print(_table(summary), end="")
    if summary.is_interrupted:
        return 130
    commands_failed = any(one.exit_code != 0 for one in summary.commands)
    return 1 if commands_failed or not summary.answered else 0


def _plan(options: argparse.Namespace) -> "Plan":
    from preheat.lab.load.generator import Plan

    _check_url(options.url)
    key = ""
    if options.api_key_env:
        key = config.secret_from(options.api_key_env, "--api-key-env", config.environment())
    return Plan(
        url=options.url,
        speed=options.speed,
        limit=options.limit,
        duration_s=options.duration,
        model=options.model,
        most_open=options.concurrency_limit,
        timeout_s=options.timeout,
        api_key=key,
        slo_ttft_s=options.slo_ttft_s,
        slo_e2e_s=options.slo_e2e_s,
        commands=tuple((_moment(at), command) for at, command in options.run_at),
    )


def _check_url(url: str) -> None:
    """Raises ConfigError for what is no server's address: the same rules as for an engine's."""
    try:
        config.check({"engines": {"it": {"url": url}}})
    except ConfigError as error:
        raise ConfigError(str(error).replace("engines.it.url", "URL")) from None


def _positive(text: str) -> float:
    value = float(text)
    if not (isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def _moment(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise ConfigError(f"--run-at: expected seconds from the start, got {text!r}")
    return value


def _raise_file_limit(most_open: int) -> None:
    """Room for a socket a request. Raises ConfigError where the system has less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most_open + _SPARE_FILES
    if soft >= wanted:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft < wanted and soft != resource.RLIM_INFINITY:
        raise ConfigError(
            f"--concurrency-limit {most_open} needs {wanted} open files, and this system allows "
            f"{soft} (ulimit -n)"
        )


@contextlib.contextmanager
def _outcomes_to(path: Path | None) -> Iterator[Callable[["Outcome"], None]]:
    """Whom to tell about each request: the file, or nobody."""
    if path is None:
        yield lambda _: None
        return
    encode = msgspec.json.Encoder().encode
    try:
        file: IO[bytes] = path.open("wb")
    except OSError as error:
        raise ConfigError(f"--out: can't write {path}: {error.strerror}") from None
    with file:
        yield lambda outcome: _write(file, encode(outcome))


def _write(file: IO[bytes], line: bytes) -> None:
    file.write(line + b"\n")


async def _load(plan: "Plan", trace: "Trace", on_outcome: Any) -> "Tally":
    from preheat.lab.load.generator import Generator
    from preheat.lab.load.summary import Tally

    tally = Tally()
    generator = Generator(plan, trace, tally, on_outcome)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stopping.set)
    progress = None
    if sys.stderr.isatty():
        progress = loop.create_task(_show_progress(trace, plan, tally, generator))
    try:
        await generator.run(stopping)
    finally:
        if progress is not None:
            progress.cancel()
            await asyncio.wait([progress])
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return tally


async def _show_progress(
    trace: "Trace", plan: "Plan", tally: "Tally", generator: "Generator"
) -> None:
    began_at = asyncio.get_running_loop().time()
    total = min(trace.requests, plan.limit or trace.requests)
    while True:
        await asyncio.sleep(_PROGRESS_S)
        passed_s = asyncio.get_running_loop().time() - began_at
        print(
            f"\r\x1b[K{passed_s:.0f} s: {tally.sent} of {total} sent, {tally.answered} answered, "
            f"{generator.open} open, {tally.errors.total()} not answered",
            end="",
            file=sys.stderr,
            flush=True,
        )


# The table --------------------------------------------------------------------------------------


def _table(summary: "Summary") -> str:
    lines = [
        f"requests   {summary.requests} due in {summary.duration_s:.1f} s, {summary.sent} sent, "
        f"{summary.answered} answered ({summary.answers_per_s:.1f}/s)",
        f"good       {summary.good} ({summary.goodput_share:.1%}, {summary.goodput_per_s:.1f}/s)",
        f"tokens     {summary.input_tokens} input ({summary.cached_tokens} cached), "
        f"{summary.output_tokens} output ({summary.output_tokens_per_s:.1f}/s)",
        *_counts("errors", summary.errors | _some("unsent", summary.unsent)),
        *_counts("", _some("cut by the interruption", summary.cut)),
        *_counts("from", summary.layers),
        *_counts("detail", summary.details),
        "",
        f"{'seconds':<10} {'mean':>9} {'p50':>9} {'p90':>9} {'p95':>9} {'p99':>9} {'most':>9}",
        _row("TTFT", summary.ttft_s),
        _row("E2E", summary.e2e_s),
        _row("TPOT", summary.tpot_s),
        _row("late", summary.late_s),
    ]
    for one in summary.commands:
        how = "was ended" if one.exit_code is None else f"exit code {one.exit_code}"
        lines.append(f"at {one.at_s:g} s ran {one.command!r}: {how} after {one.took_s:.1f} s")
    lines += [f"warning: {warning}" for warning in summary.warnings]
    return "\n".join(lines) + "\n"


def _some(word: str, count: int) -> dict[str, int]:
    return {word: count} if count else {}


def _counts(name: str, counts: dict[str, int]) -> list[str]:
    if not counts:
        return []
    return [f"{name:<10} " + ", ".join(f"{word} {count}" for word, count in counts.items())]


def _row(name: str, spread: "Spread") -> str:
    numbers = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.most)
    return f"{name:<10} " + " ".join(
        f"{'-':>9}" if number is None else f"{number:>9.4f}" for number in numbers
    )
