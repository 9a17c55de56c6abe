"""Send a recorded load to a live address, each request at its time, and report what came back.

    preheat load trace.jsonl http://127.0.0.1:8000
    preheat load trace.jsonl http://gpu-1:8000 --speed 4 --slo-ttft-s 0.5 --json
    preheat load trace.jsonl http://127.0.0.1:8000 --run-at 60 'systemctl restart vllm'
    preheat load trace.jsonl http://127.0.0.1:8000 --cold-at 60 'systemctl restart vllm' --paired

TRACE has one JSON object a line: `at` (seconds from the start), and a whole `body` (with `path`),
or `messages` or a `prompt` with `model`, `max_tokens`, `temperature`, `stream`; docs/load.md has
all fields. The loop is open: requests leave at their time whatever the server does. All lines are
checked before the first is sent. The report goes to standard output, progress to standard error.

With --paired the trace is played twice, first without the cold starts of --cold-at, then with them;
told is by how much later each request's first token came in the second run, minute by minute.

Exit code 0 where anything was answered and no command failed; 1 otherwise, 2 for wrong usage.
Ctrl-C ends the load and prints the report of what there is (130).
"""

import argparse
import contextlib
import resource
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec

from preheat import config
from preheat.errors import ConfigError

if TYPE_CHECKING:
    from preheat.lab.load.exchange import Outcome
    from preheat.lab.load.generator import Plan
    from preheat.lab.load.summary import Summary

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
    cold = parser.add_argument_group("cold starts")
    cold.add_argument(
        "--cold-at",
        nargs=2,
        action="append",
        default=[],
        metavar=("S", "COMMAND"),
        help="run a shell command that makes something cold, S seconds into the trace; repeatable",
    )
    cold.add_argument(
        "--paired",
        action="store_true",
        help="play the trace without the cold starts first, then with them, and compare",
    )
    cold.add_argument(
        "--before",
        default="",
        metavar="COMMAND",
        help="run a shell command before the trace is played, each time",
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
    cold_starts = tuple((_moment(at, "--cold-at"), command) for at, command in options.cold_at)
    if options.paired and not cold_starts:
        raise ConfigError("--paired compares with cold starts: give --cold-at S COMMAND")
    from preheat.cli.load_runs import Runs
    from preheat.cli.load_text import paired_table, table
    from preheat.lab.load.trace import Trace

    trace = Trace(options.trace)
    _raise_file_limit(plan.most_open)
    with _outcomes_to(options.out) as on_outcome:
        runs = Runs(trace, on_outcome, options.before)
        if options.paired:
            report = runs.twice(plan, cold_starts)
            summaries = [one for one in (report.warm, report.cold) if one is not None]
            print(msgspec.json.encode(report).decode() if options.json else paired_table(report))
            return _code(summaries)
        summary = runs.play(msgspec.structs.replace(plan, commands=plan.commands + cold_starts))
    print(msgspec.json.encode(summary).decode() if options.json else table(summary))
    return _code([summary])


def _code(summaries: "Sequence[Summary]") -> int:
    if any(one.is_interrupted for one in summaries):
        return 130
    commands_failed = any(one.exit_code != 0 for each in summaries for one in each.commands)
    return 1 if commands_failed or not all(one.answered for one in summaries) else 0


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
        commands=tuple((_moment(at, "--run-at"), command) for at, command in options.run_at),
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


def _moment(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise ConfigError(f"{option}: expected seconds from the start, got {text!r}")
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
