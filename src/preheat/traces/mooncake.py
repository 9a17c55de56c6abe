"""Mooncake's traces (Qin et al., FAST 2025): times in milliseconds, lengths, and an id for each
512 tokens of the prompt that names them together with all before."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from preheat.traces.arrival import Arrival
from preheat.traces.numbering import Numbering
from preheat.traces.reader import Count, Draft, Format, Reading
from preheat.traces.source import Head, Source

BLOCK_TOKENS: Final = 512

_LEAST_STEP_MS: Final = 100
_OFF_MS: Final = 2.0
"""The conversation trace's batches come 2,999 to 3,001 ms apart."""
_MOST: Final = 0.9

_LATEST: Final = 1e13
"""Milliseconds, since the beginning or since 1970: three hundred years. Later ones aren't times."""

BlockId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Line(msgspec.Struct, gc=False):
    timestamp: Annotated[float, Meta(ge=0, le=_LATEST)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[BlockId, ...]


def _recognises(head: Head) -> bool:
    return head.has("timestamp", "input_length", "output_length", "hash_ids")


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    keys = Numbering()
    lines: list[_Line] = []
    names: list[str] = []
    decoder = msgspec.json.Decoder(_Line)
    parents: dict[int, int] = {}
    for source in sources:
        for number, line in reading.records(source, decoder):
            blocks = -(-line.input_length // BLOCK_TOKENS)
            if len(line.hash_ids) != blocks:
                why = f"{len(line.hash_ids)} block ids for a prompt of {blocks} blocks"
                reading.refuse(source, number, why)
                continue
            if not _is_chained(line.hash_ids, parents):
                why = "a block id that stands behind another block elsewhere: it can't name all before"
                reading.refuse(source, number, why)
                continue
            lines.append(line)
            names.append(f"{source.prefix}{number}")
    ats = [line.timestamp / 1000 for line in lines]
    if reading.rules.batch_spread and (step_s := batch_s(ats)):
        ats = spread(ats, step_s)
        reading.tell(
            f"Times come in batches every {step_s:g} s: the arrivals of each are spread evenly "
            "from its time to the next."
        )
    arrivals = [
        Arrival(
            at=at,
            id=name,
            key=keys.of((line.hash_ids, line.input_length, line.output_length)),
            input_tokens=line.input_length,
            output_tokens=line.output_length,
            blocks=line.hash_ids,
        )
        for at, name, line in zip(ats, names, lines, strict=True)
    ]
    return Draft(arrivals=arrivals, block_tokens=BLOCK_TOKENS)


def _is_chained(ids: Sequence[int], parents: dict[int, int]) -> bool:
    """Whether each id stands behind the block that it stood behind before; what is new is noted.
    So none comes twice in a prompt."""
    before = -1
    new: dict[int, int] = {}
    for block in ids:
        known = parents.get(block)
        if (new.setdefault(block, before) if known is None else known) != before:
            return False
        before = block
    parents.update(new)
    return True


def batch_s(ats: Sequence[float]) -> float:
    """The step in seconds in which arrivals were recorded, or 0 where they weren't in batches.

    They were if nine in ten distinct times are multiples of one step and most have company.
    """
    counts = Counter(round(at * 1000, 3) for at in ats)
    times = sorted(counts)
    if len(times) < 3:
        return 0.0
    step_ms = median(after - before for before, after in pairwise(times))
    if step_ms < _LEAST_STEP_MS:
        return 0.0
    off = (abs(time - step_ms * round(time / step_ms)) for time in times)
    are_multiples = sum(each <= _OFF_MS for each in off) >= _MOST * len(times)
    have_company = sum(count > 1 for count in counts.values()) * 2 > len(times)
    return step_ms / 1000 if are_multiples and have_company else 0.0


def spread(ats: Sequence[float], step_s: float) -> list[float]:
    """Each batch's arrivals, in their order, evenly from its time to the next batch's.

    >>> spread([0.0, 0.0, 3.0, 3.0, 3.0, 9.0], 3.0)
    [0.0, 1.5, 3.0, 4.0, 5.0, 9.0]
    """
    counts = Counter(ats)
    times = sorted(counts)
    widths = {
        before: min(step_s, after - before)
        for before, after in zip(times, [*times[1:], times[-1] + step_s], strict=True)
    }
    seen: Counter[float] = Counter()
    spread_ats = []
    for at in ats:
        spread_ats.append(at + widths[at] * seen[at] / counts[at])
        seen[at] += 1
    return spread_ats


FORMAT: Final = Format(_recognises, _read)
