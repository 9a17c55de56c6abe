"""Have prefixes computed on servers before anybody asks: in chunks, in idle moments only.

    preheat warm system.json --url http://gpu-1:8000
    preheat warm prompts.jsonl --url http://gpu-1:8000 --url http://gpu-2:8000 --json
    preheat warm --adapter sql=/adapters/sql --url http://gpu-1:8000
    echo 'You are …' | preheat warm - --url http://127.0.0.1:8080 --keep --every-slot

A chunk begins only while nobody waits at the server and less than --most-load of it is in use, and is
sized to take less than --slack. Ctrl-C stops it; the same command goes on where it was. It costs what
computing the prefixes once costs: what pays it back is the first request of each, at a busier time.
`preheat verify` with the same FILE tells whether they are there.

{forms}

Exit code 0 where all is done; 1 where something failed or no idle moment came; 2 for wrong usage; 130
after Ctrl-C.
"""

import argparse
import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from preheat.cli import warming
from preheat.cli.numbers import positive
from preheat.cli.progress import Line
from preheat.cli.warming import FORMS, Wanted
from preheat.core.warmup import Mark, Outcome, Pace

if TYPE_CHECKING:
    from preheat.cli.marks import Marks
    from preheat.engines.direct import Direct
    from preheat.engines.warmer import Step

__doc__ = (__doc__ or "").format(forms=FORMS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    warming.add_arguments(parser)
    parser.add_argument(
        "--slack",
        type=positive,
        default=Pace().slack_s,
        metavar="S",
        help="how long a chunk may hold up a live request (%(default)s)",
    )
    parser.add_argument(
        "--share",
        type=_share,
        default=Pace().share,
        metavar="SHARE",
        help="of the time at most; it rests after each chunk (%(default)s)",
    )
    parser.add_argument(
        "--adapter",
        default="",
        metavar="NAME[=PATH]",
        help="load this LoRA adapter first, and warm the prefixes for it",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="llama.cpp: read slot files where there are any, and write them (--slot-save-path)",
    )
    parser.add_argument(
        "--every-slot",
        action="store_true",
        help="llama.cpp: fill all idle slots, for a burst; with several prefixes the last one wins",
    )


def run(options: argparse.Namespace) -> int:
    """Warm, remember, report."""
    adapter, _, path = options.adapter.partition("=")
    wanted = warming.wanted_of(options, adapter)
    servers = warming.servers_of(options)
    job = _Job(options, wanted, adapter, path, warming.marks_of(options))
    try:
        is_stopped = asyncio.run(warming.on_each(servers, job.warm))
    finally:
        job.line.end()
        job.marks.save()
    states = Counter(one.outcome.state for one in job.rows)
    if options.json:
        document = {"outcomes": job.rows, "counts": states, "is_interrupted": is_stopped}
        print(msgspec.json.encode(document).decode())
    else:
        print(_table(job.rows, is_stopped=is_stopped), end="")
    if is_stopped:
        return 130
    return 1 if states["failed"] or states["busy"] else 0


def _share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError("must be at most 1")
    return value


class _Row(msgspec.Struct, frozen=True):
    """`number` is the prefix's in the file, 0 an adapter; `slots` are those that have it now."""

    number: int
    outcome: Outcome
    slots: list[int]


class _Job:
    """One run of the command."""

    def __init__(
        self,
        options: argparse.Namespace,
        wanted: list[Wanted],
        adapter: str,
        path: str,
        marks: "Marks",
    ) -> None:
        self.marks = marks
        self.rows: list[_Row] = []
        self.line = Line()
        self._options = options
        self._wanted = wanted
        self._adapter = adapter
        self._path = path

    async def warm(self, direct: "Direct") -> None:
        """All of it on one server, in the file's order."""
        from preheat.engines.slot_files import SlotFiles
        from preheat.engines.warmer import Warmer

        options = self._options
        files = SlotFiles(direct)
        warmer = Warmer(
            direct,
            pace=Pace(slack_s=options.slack, most_load=options.most_load, share=options.share),
            patience_s=options.wait,
            files=files if options.keep else None,
            on_step=lambda step: self._note(direct.url, step),
        )
        if self._adapter:
            outcome = await warmer.load_adapter(self._adapter, self._path)
            self.rows.append(_Row(0, outcome, []))
            if outcome.state != "done":
                return
        for one in self._wanted:
            outcome = await warmer.warm(one.prompt, self.marks.of(direct.url, one.name))
            slots = [] if outcome.slot is None else [outcome.slot]
            if options.every_slot and slots and outcome.state == "done":
                slots = await files.spread(one.name, slots[0])
            self.rows.append(_Row(one.number, outcome, slots))

    def _note(self, url: str, step: "Step") -> None:
        from preheat.cli.marks import wall_clock

        if step.done_tokens:
            self.marks.put(
                Mark(
                    worker=url,
                    prefix=step.prefix,
                    tokens=step.tokens,
                    done_tokens=step.done_tokens,
                    slot=step.slot,
                    at=wall_clock(),
                )
            )
        number = next((one.number for one in self._wanted if one.name == step.prefix), 0)
        waits = f", waits: {step.waits_for}" if step.waits_for else ""
        self.line.tell(
            f"{url} {number} of {len(self._wanted)}: "
            f"{step.done_tokens} of {step.tokens or 'its'} tokens{waits}"
        )


def _table(rows: list[_Row], *, is_stopped: bool) -> str:
    heads = ("prefix", "tokens", "computed", "chunks", "longest", "took", "waited", "state")
    lines = [f"{heads[0]:<12}" + "".join(f"{head:>9}" for head in heads[1:]) + "  server"]
    for row in rows:
        one = row.outcome
        name = one.object if one.kind == "adapter" else f"{row.number} {one.object[:8]}"
        where = one.worker + (f", slots {row.slots}" if row.slots else "")
        lines.append(
            f"{name:<12}{one.tokens:>9}{one.computed_tokens:>9}{one.chunks:>9}"
            f"{one.longest_chunk_s:>8.2f}s{one.took_s:>8.2f}s{one.waited_s:>8.0f}s{one.state:>9}  "
            f"{where}"
        )
        if one.why:
            lines.append(f"{'':<12}{one.why}")
    if is_stopped:
        lines.append("stopped; the same command goes on where it was")
    return "\n".join(lines) + "\n"
