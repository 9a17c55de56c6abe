"""Alibaba's image generation trace: who asked for a picture by which model, and how long it took.

It says which model is wanted next, so the key is the model's. Prompts are pictures' and their
lengths are characters: no token counts are made of them.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from preheat.traces.arrival import UNKNOWN, Arrival
from preheat.traces.moments import seconds_of
from preheat.traces.numbering import Numbering
from preheat.traces.reader import Draft, Format, Reading
from preheat.traces.source import Head, Source


class _Row(msgspec.Struct):
    at: datetime = msgspec.field(name="gmt_create")
    user: str = msgspec.field(name="groupId")
    model: str = msgspec.field(name="checkpoint_model_version_id")
    service_s: Annotated[float, Meta(ge=0)] = msgspec.field(name="exec_time_seconds")
    kind: str = msgspec.field(name="predict_type", default="")
    stop: str = msgspec.field(name="predict_status", default="")


def _recognises(head: Head) -> bool:
    return head.has("gmt_create", "groupId", "checkpoint_model_version_id")


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    models = Numbering()
    arrivals = [
        Arrival(
            at=seconds_of(row.at),
            id=f"{source.prefix}{number}",
            tenant=row.user,
            model=row.model,
            key=models.of(row.model) if row.model else UNKNOWN,
            service_s=row.service_s,
            kind=row.kind,
            stop=row.stop,
        )
        for source in sources
        for number, row in reading.rows(source, _Row)
    ]
    reading.tell("A request's key is its model.")
    return Draft(arrivals=arrivals, is_dated=True)


FORMAT: Final = Format(_recognises, _read)
