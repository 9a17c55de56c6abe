"""How much each lever could save at most on a trace, before any policy: tables, in seconds.

    preheat headroom conversation.jsonl.gz --quick
    preheat headroom sessions.jsonl.gz --open-sessions 20 --part pauses
    preheat headroom log/ --workers 4 --worker-tokens 500000 --html headroom.html

TRACE is a file or folder of any format that `preheat replay` reads. Parts: capacity (hits by the
size of one memory), granularity (where prompts are cut into blocks), pauses (sessions that wait,
return and end), trunks (first requests), events (restarts, deploys, machines that join, peaks; each
arm from nothing to the clairvoyant), routing (every rule), residency (traces of keys: which model
stays loaded). The last table says in short what each part is worth; small is said to be small.
What is computed beforehand is told net at two prices: at the equal one, and off-peak, where GPUs would
else be idle and a second of theirs costs a share of a second when they are busy.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from preheat import __version__
from preheat.cli.numbers import count, few, seconds, sizes
from preheat.cli.pages import check_page, write_page
from preheat.cli.progress import Line
from preheat.cli.reading import add_reading_arguments, read_trace
from preheat.cli.tables import text_of, text_of_trace

if TYPE_CHECKING:
    from preheat.replay import report
    from preheat.replay.headroom.wanted import Wanted
    from preheat.traces.arrival import Trace

__all__ = ["add_arguments", "run", "text_of"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_reading_arguments(parser)
    parser.add_argument(
        "--part", action="append", default=[], metavar="NAME", help="only this part; repeatable"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first answer: one size, one load, two moments and two events",
    )
    fleet = parser.add_argument_group("what it runs on")
    fleet.add_argument("--workers", type=few, default=8, metavar="N", help="of the fleet (8)")
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
    events.add_argument("--switches", type=count, metavar="N", help="moments tried (6)")
    events.add_argument(
        "--budget-s", type=seconds, default=60.0, metavar="S", help="computed beforehand (60)"
    )
    events.add_argument(
        "--off-peak-price",
        type=seconds,
        default=0.3,
        metavar="X",
        help="a warming GPU-second off-peak costs this share of a peak one (0.3)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the tables as one page")


def run(options: argparse.Namespace) -> int:
    """Print the tables as they are made."""
    from preheat.replay import report
    from preheat.replay.headroom.study import check_parts, study
    from preheat.replay.sections import trace_section

    check_parts(options.part)
    if options.html is not None:
        check_page(options.html)
    trace, line = read_trace(options), Line()
    wanted = _wanted(options, trace)
    made = study(trace, wanted, line.tell, options.part)
    about = trace_section(trace)
    if not options.json:
        print(text_of_trace(about), flush=True)
    tables: list[report.Table] = []
    events: list[report.Event] = []
    for one in made:
        line.end()
        if isinstance(one, report.Event):
            events.append(one)
            continue
        tables.append(one)
        if not options.json:
            print(f"\n{text_of(one)}", flush=True)
    document = report.encode(_report(about, wanted, tables, events))
    if options.json:
        sys.stdout.buffer.write(document + b"\n")
    if options.html is not None:
        write_page(options.html, document)
    return 0


def _report(
    about: "report.Trace",
    wanted: "Wanted",
    tables: "Sequence[report.Table]",
    events: "Sequence[report.Event]",
) -> "report.Report":
    """What it comes to in short stands first: a page is read from its top."""
    from preheat.replay import report
    from preheat.traces.reading import printable

    return report.Report(
        preheat_version=__version__,
        trace=about,
        settings=report.Settings(
            workers=wanted.workers,
            service=msgspec.structs.asdict(wanted.service),
            command=printable(f"preheat {shlex.join(sys.argv[1:])}"),
        ),
        events=tuple(events),
        headroom=(*tables[-1:], *tables[:-1]),
    )


def _wanted(options: argparse.Namespace, trace: "Trace") -> "Wanted":
    """What isn't given is the study's own, or the quick one's."""
    from preheat.core.costs import DECODING, ServiceModel
    from preheat.replay.headroom.wanted import QUICK, Wanted

    usual = QUICK if options.quick else Wanted()
    return msgspec.structs.replace(
        usual,
        workers=options.workers,
        worker_tokens=options.worker_tokens or usual.worker_tokens,
        alone_tokens=options.alone_tokens or usual.alone_tokens,
        session_tokens=options.session_tokens or usual.session_tokens,
        open_sessions=options.open_sessions,
        uncounted_s=min(usual.uncounted_s, 0.2 * trace.arrivals[-1].at),
        switches=options.switches or usual.switches,
        budget_s=options.budget_s,
        off_peak_price=options.off_peak_price,
        decodes=options.decodes,
        service=DECODING if options.decodes else ServiceModel(),
    )
