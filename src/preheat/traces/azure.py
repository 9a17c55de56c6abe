"""Azure's LLM traces (Patel et al., ISCA 2024, and Stojkovic et al., HPCA 2025): when, and how
long prompt and answer were. No prompts, so nothing here can be found in a cache."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from preheat.traces.arrival import Arrival
from preheat.traces.moments import seconds_of
from preheat.traces.reader import Count, Draft, Format, Reading
from preheat.traces.source import Head, Source


class _Row(msgspec.Struct):
    at: datetime = msgspec.field(name="TIMESTAMP")
    input_tokens: Count = msgspec.field(name="ContextTokens")
    output_tokens: Count = msgspec.field(name="GeneratedTokens")


def _recognises(head: Head) -> bool:
    return head.has("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    arrivals = [
        Arrival(
            at=seconds_of(row.at),
            id=f"{source.prefix}{number}",
            kind=source.path.name.partition(".")[0] if len(sources) > 1 else "",
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
        )
        for source in sources
        for number, row in reading.rows(source, _Row)
    ]
    return Draft(arrivals=arrivals, is_dated=True)


FORMAT: Final = Format(_recognises, _read)
