"""Rounds of ShareGPT conversations: each holds the whole text so far, and its answer's length."""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import msgspec

from preheat.traces.arrival import UNKNOWN, Arrival
from preheat.traces.calendar import Session, placed
from preheat.traces.numbering import CHUNK_TOKENS, TEXT_RULE, Numbering, tokens_of
from preheat.traces.reader import Count, Draft, Format, Reading
from preheat.traces.source import Head, Source


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
            rounds[name].append(
                Arrival(
                    at=0.0,
                    id=f"{name}/{line.round}",
                    session=name,
                    turn=line.round,
                    key=keys.of_text(prompt),
                    input_tokens=tokens_of(prompt),
                    output_tokens=line.output_tokens,
                    blocks=texts.blocks(prompt),
                )
            )
    sessions = [Session(name, _apart(arrivals, rules.turn_s)) for name, arrivals in rounds.items()]
    return Draft(
        arrivals=placed(sessions, reading),
        block_tokens=CHUNK_TOKENS,
        times="rule",
        is_ordered=True,
    )


def _apart(arrivals: list[Arrival], turn_s: float) -> list[Arrival]:
    """In order of their rounds, so many seconds apart."""
    ordered = sorted(arrivals, key=attrgetter("turn"))
    return [
        msgspec.structs.replace(one, at=place * turn_s, think_s=turn_s if place else UNKNOWN)
        for place, one in enumerate(ordered)
    ]


FORMAT: Final = Format(_recognises, _read)
