"""The options by which a trace is read, for every command that takes one."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.cli.numbers import positive
from preheat.cli.progress import Line
from preheat.errors import TraceError

if TYPE_CHECKING:
    from preheat.traces.arrival import Trace
    from preheat.traces.rules import Rules

_SHOWN = 3


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """TRACE and how it is read."""
    parser.add_argument("trace", nargs="+", type=Path, metavar="TRACE")
    reading = parser.add_argument_group("reading (docs/traces.md)")
    reading.add_argument(
        "--format", metavar="NAME", help="the trace's format, if it isn't recognised"
    )
    reading.add_argument(
        "--on-bad", choices=("skip", "fail"), default="skip", help="what a bad line does (skip)"
    )
    reading.add_argument(
        "--open-sessions",
        type=positive,
        metavar="S",
        help="of sessions without start times, draw so many that S are open in the mean",
    )
    reading.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="how what a trace doesn't say is made up, e.g. seed=3, hours=12; repeatable",
    )


def read_trace(options: argparse.Namespace) -> "Trace":
    """The trace that the options name; how far it is, and bad lines, are told on standard error."""
    from preheat.traces.reading import OWN_TIMES_RULE, read

    rules = _rules(options)
    line = Line()

    def told(path: str, count: int) -> None:
        line.tell(f"reading {path}: {count:,} lines" if path else f"{count:,} requests drawn")

    try:
        trace = read(
            options.trace,
            format=options.format,
            rules=rules,
            on_bad=options.on_bad,
            progress=told,
        )
    finally:
        line.end()
    if options.open_sessions is not None and OWN_TIMES_RULE in trace.rules:
        print("--open-sessions draws nothing here: the trace has its own times", file=sys.stderr)
    for bad in trace.bad[:_SHOWN]:
        print(f"skipped {bad.path}:{bad.line}: {bad.why}", file=sys.stderr)
    if trace.skipped > _SHOWN:
        print(f"skipped {trace.skipped} lines in all", file=sys.stderr)
    return trace


def _rules(options: argparse.Namespace) -> "Rules":
    import msgspec

    from preheat.traces.rules import Rules

    given: dict[str, object] = {}
    for rule in options.rule:
        name, _, value = rule.partition("=")
        if name not in Rules.__struct_fields__:
            known = ", ".join(Rules.__struct_fields__)
            raise TraceError(f"--rule {rule}: no such rule; known: {known}")
        given[name] = tuple(value.split(",")) if name == "clients" else value
    if options.open_sessions is not None:
        given |= {"sessions": "drawn", "open_sessions": options.open_sessions}
    try:
        return msgspec.convert(given, Rules, strict=False)
    except msgspec.ValidationError as error:
        raise TraceError(f"--rule: {error}") from None
