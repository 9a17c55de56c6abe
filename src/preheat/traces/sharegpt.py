"""Rounds of ShareGPT conversations: each holds the whole text so far, and its answer's length."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from preheat.traces.arrival import UNKNOWN, Arrival
from preheat.traces.calendar import Session, placed
from preheat.traces.numbering import CHUNK_TOKENS, TEXT_RULE, Numbering, tokens_of
from preheat.traces.reader import Draft, Format, Reading
from preheat.traces.source import Head, Source

Count = Annotated[int, Meta(ge=0)]


class _Line(msgspec.Struct):
    user: int
    round: Count
    input: str
    output_tokens: Count


def _recognises(head: Head) -> bool:
    return head.has("user", "round", "input", "output_tokens")


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    rules = reading.rules
    reading.tell(TEXT_RULE)
    reading.tell(f"The rounds of a session come {rules.turn_s:g} s apart.")
    texts, keys = Numbering(), Numbering()
    rounds: dict[str, list[Arrival]] = defaultdict(list)
    decoder = msgspec.json.Decoder(_Line)
    for source in sources:
        for _, line in reading.records(source, decoder):
            prompt = line.input.encode()
            name = str(line.user)
            session = rounds[name]
            session.append(
                Arrival(
                    at=len(session) * rules.turn_s,
                    id=f"{name}/{line.round}",
                    session=name,
                    turn=line.round,
                    key=keys.of_text(prompt),
                    input_tokens=tokens_of(prompt),
                    output_tokens=line.output_tokens,
                    blocks=texts.blocks(prompt),
                    think_s=rules.turn_s if session else UNKNOWN,
                )
            )
    sessions = [Session(name, arrivals) for name, arrivals in rounds.items()]
    return Draft(
        arrivals=placed(sessions, reading),
        block_tokens=CHUNK_TOKENS,
        times="rule",
        is_ordered=True,
    )


FORMAT: Final = Format(_recognises, _read)
