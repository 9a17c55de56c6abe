"""How much each lever could save at most on a trace, before any policy: tables, in seconds.

    preheat headroom conversation.jsonl.gz
    preheat headroom sessions.jsonl.gz --open-sessions 20 --part pauses
    preheat headroom log/ --workers 4 --worker-tokens 500000 --json > headroom.json

TRACE is a file or folder of any format that `preheat replay` reads. Parts: capacity (hits by the
size of one memory), granularity (where prompts are cut into blocks), pauses (sessions that wait, return and end), trunks (first requests), events
(restarts, deploys, machines that join, peaks; each arm from nothing to the clairvoyant), routing
(every rule), residency (traces of keys: which model stays loaded). Small is said to be small.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from preheat.cli.numbers import count, seconds, sizes
from preheat.cli.progress import Line
from preheat.cli.reading import add_reading_arguments, read_trace

if TYPE_CHECKING:
    from preheat.replay.report import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_reading_arguments(parser)
    parser.add_argument(
        "--part", action="append", default=[], metavar="NAME", help="only this part; repeatable"
    )
    fleet = parser.add_argument_group("what it runs on")
    fleet.add_argument("--workers", type=count, default=8, metavar="N", help="of the fleet (8)")
    fleet.add_argument(
        "--worker-tokens", type=sizes, metavar="N,N", help="KV of each worker (1000000,3000000)"
    )
    fleet.add_argument(
        "--alone-tokens",
        type=sizes,
        metavar="N,N",
        help="KV of a worker alone (1, 3 and 10 million)",
    )
    fleet.add_argument(
        "--session-tokens",
        type=sizes,
        metavar="N,N",
        help="KV for each open session (16000 to 256000)",
    )
    fleet.add_argument(
        "--decodes",
        action="store_true",
        help="continuous batching with decoding, not prefill alone",
    )
    events = parser.add_argument_group("events")
    events.add_argument("--switches", type=count, default=6, metavar="N", help="moments tried (6)")
    events.add_argument(
        "--budget-s", type=seconds, default=60.0, metavar="S", help="computed beforehand (60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print the tables as they are made."""
    from preheat.core.costs import DECODING, ServiceModel
    from preheat.replay import report
    from preheat.replay.headroom.study import study
    from preheat.replay.headroom.wanted import Wanted

    trace = read_trace(options)
    defaults = Wanted()
    wanted = Wanted(
        workers=options.workers,
        worker_tokens=options.worker_tokens or defaults.worker_tokens,
        alone_tokens=options.alone_tokens or defaults.alone_tokens,
        session_tokens=options.session_tokens or defaults.session_tokens,
        open_sessions=options.open_sessions,
        uncounted_s=min(defaults.uncounted_s, 0.2 * trace.arrivals[-1].at),
        switches=options.switches,
        budget_s=options.budget_s,
        decodes=options.decodes,
        service=DECODING if options.decodes else ServiceModel(),
    )
    tables, line = [], Line()
    for table in study(trace, wanted, line.tell, options.part):
        line.end()
        tables.append(table)
        if not options.json:
            print(f"\n{text_of(table)}", flush=True)
    if options.json:
        sys.stdout.buffer.write(report.encode(report.Report(headroom=tuple(tables))) + b"\n")
    return 0


def text_of(table: "Table") -> str:
    """A table as plain text: the first column to the left, numbers to the right."""
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    widths = [
        max(len(row[i]) for row in [list(table.columns), *rows]) for i in range(len(table.columns))
    ]
    lines = [table.title, *([table.note] if table.note else ())]
    for row in [list(table.columns), *rows]:
        first, *others = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(text.rjust(w) for text, w in others)]))
    return "\n".join([*lines, *([table.verdict] if table.verdict else ())])


def _cell(cell: str | float | int | None) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str | int):
        return str(cell)
    if abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.3f}" if abs(cell) < 1 else f"{cell:.2f}"
