"""Bing's queries about one topic, by day and place, with how popular each was that day."""

import random
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from preheat.traces.arrival import Arrival
from preheat.traces.numbering import Numbering
from preheat.traces.reader import Draft, Format, Reading, too_many
from preheat.traces.source import Head, Source

_DAY_S: Final = 86_400.0


class _Row(msgspec.Struct):
    day: date = msgspec.field(name="Date")
    query: str = msgspec.field(name="Query")
    country: str = msgspec.field(name="Country")
    popularity: Annotated[int, Meta(ge=1, le=100)] = msgspec.field(name="PopularityScore")
    state: str = msgspec.field(name="State", default="")


def _recognises(head: Head) -> bool:
    return head.has("Date", "Query", "Country", "PopularityScore")


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    chance = random.Random(f"{reading.rules.seed} bing")
    scale = reading.rules.rate_scale
    queries = Numbering()
    arrivals: list[Arrival] = []
    for source in sources:
        for number, row in reading.rows(source, _Row):
            key = queries.of_text(row.query.encode())
            midnight_at = datetime.combine(row.day, time(), UTC).timestamp()
            place = f"{row.country}/{row.state}" if row.state else row.country
            draws = max(1, round(row.popularity * scale))
            if len(arrivals) + draws > reading.rules.most_requests:
                too_many(len(arrivals) + draws, reading.rules)
            for draw in range(draws):
                at = midnight_at + chance.random() * _DAY_S
                arrivals.append(
                    Arrival(at=at, id=f"{source.prefix}{number}.{draw}", tenant=place, key=key)
                )
    reading.tell(
        f"Each query of a day and place comes as often as its popularity (1 to 100) times {scale:g} "
        f"says, at least once, at times drawn evenly from the day (seed {reading.rules.seed}). "
        "A request's key is its query."
    )
    return Draft(arrivals=arrivals, times="rule", is_dated=True)


FORMAT: Final = Format(_recognises, _read)
