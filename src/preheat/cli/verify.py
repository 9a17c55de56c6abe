"""Whether prefixes are warm: proven, refuted or unknown, by a one-token probe of each.

    preheat verify system.json --url http://gpu-1:8000
    preheat verify prompts.jsonl --url http://gpu-1:8000 --url http://gpu-2:8000 --json

Proven: the server says that at least 0.9 of the warmed length was cached (of what can be: whole blocks,
and never the last token). Refuted: it says less. Unknown: it doesn't tell, or couldn't be asked; vLLM
tells with --enable-prompt-tokens-details, SGLang with --enable-cache-report, TGI never. A probe of what
isn't there computes it, and may push out something else; those that probably are there are asked first.

{forms}

Exit code 1 where something is refuted, else 0; 2 for wrong usage; 130 after Ctrl-C.
"""

import argparse
import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from preheat.cli import warming
from preheat.cli.progress import Line
from preheat.cli.warming import FORMS, Wanted
from preheat.core.warmup import Pace, Proof

if TYPE_CHECKING:
    from preheat.cli.marks import Marks
    from preheat.engines.direct import Direct

__doc__ = (__doc__ or "").format(forms=FORMS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    warming.add_arguments(parser)
    parser.add_argument(
        "--adapter", default="", metavar="NAME", help="prove this adapter, and the prefixes for it"
    )


def run(options: argparse.Namespace) -> int:
    """Probe and tell."""
    adapter = options.adapter.partition("=")[0]
    job = _Job(options, warming.wanted_of(options, adapter), adapter, warming.marks_of(options))
    try:
        is_stopped = asyncio.run(warming.on_each(warming.servers_of(options), job.verify))
    finally:
        job.line.end()
    rows = sorted(job.rows, key=lambda row: (row.worker, row.number))
    verdicts = Counter(row.proof.verdict for row in rows)
    if options.json:
        document = {"proofs": rows, "counts": verdicts, "is_interrupted": is_stopped}
        print(msgspec.json.encode(document).decode())
    else:
        print(_table(rows), end="")
        print(", ".join(f"{verdicts[word]} {word}" for word in ("proven", "refuted", "unknown")))
    if is_stopped:
        return 130
    return 1 if verdicts["refuted"] else 0


class _Row(msgspec.Struct, frozen=True):
    """`number` is the prefix's in the file, 0 an adapter."""

    number: int
    object: str
    worker: str
    proof: Proof


class _Job:
    """One run of the command."""

    def __init__(
        self, options: argparse.Namespace, wanted: list[Wanted], adapter: str, marks: "Marks"
    ) -> None:
        self.rows: list[_Row] = []
        self.line = Line()
        self._options = options
        self._wanted = wanted
        self._adapter = adapter
        self._marks = marks

    async def verify(self, direct: "Direct") -> None:
        """All of it on one server."""
        from preheat.engines.warmer import Warmer

        warmer = Warmer(
            direct,
            pace=Pace(most_load=self._options.most_load),
            patience_s=self._options.wait,
        )
        if self._adapter:
            proof = await warmer.prove_adapter(self._adapter)
            self.rows.append(_Row(0, self._adapter, direct.url, proof))
        marks = [self._marks.of(direct.url, one.name) for one in self._wanted]
        for index in await warmer.order(marks):
            one, mark = self._wanted[index], marks[index]
            self.line.tell(f"{direct.url}: {len(self.rows)} of {len(self._wanted)} probed")
            proof = await warmer.prove(one.prompt, None if mark is None else mark.done_tokens)
            self.rows.append(_Row(one.number, one.name, direct.url, proof))


def _table(rows: list[_Row]) -> str:
    lines = [f"{'prefix':<12} {'verdict':<8} {'warmed':>8} {'needed':>8} {'cached':>8}  server"]
    for row in rows:
        proof = row.proof
        name = f"{row.number} {row.object[:8]}" if row.number else row.object
        cached = "-" if proof.cached_tokens is None else proof.cached_tokens
        lines.append(
            f"{name:<12} {proof.verdict:<8} {proof.warmed_tokens:>8} {proof.asked_tokens:>8} "
            f"{cached:>8}  {row.worker}"
        )
        if proof.verdict != "proven":
            lines.append(f"{'':<12} {proof.why}")
    return "\n".join(lines) + "\n"
