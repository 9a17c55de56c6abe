"""LMCache's traces of agents: whole prompts and answers, with sessions and times."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from preheat.traces.arrival import Arrival
from preheat.traces.moments import seconds_from
from preheat.traces.numbering import CHUNK_TOKENS, TEXT_RULE, Numbering, tokens_of
from preheat.traces.reader import Draft, Format, Reading, said
from preheat.traces.source import Head, Source


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input: str
    output: str
    session_id: str


def _recognises(head: Head) -> bool:
    return head.has("timestamp", "input", "output", "session_id")


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    reading.tell(TEXT_RULE)
    texts, keys = Numbering(), Numbering()
    turns: Counter[str] = Counter()
    arrivals = []
    decoder = msgspec.json.Decoder(_Line)
    for source in sources:
        for number, line in reading.records(source, decoder):
            try:
                at = seconds_from(line.timestamp)
            except ValueError as error:
                reading.refuse(source, number, said(error))
                continue
            prompt = line.input.encode()
            arrivals.append(
                Arrival(
                    at=at,
                    id=f"{source.prefix}{number}",
                    session=line.session_id,
                    turn=turns[line.session_id],
                    key=keys.of_text(prompt),
                    input_tokens=tokens_of(prompt),
                    output_tokens=tokens_of(line.output.encode()),
                    blocks=texts.blocks(prompt),
                )
            )
            turns[line.session_id] += 1
    return Draft(arrivals=arrivals, block_tokens=CHUNK_TOKENS, is_dated=True)


FORMAT: Final = Format(_recognises, _read)
