"""libCacheSim's oracleGeneral: records of 24 bytes, little end first, which know the next access
to their object."""

from collections.abc import Sequence
from struct import Struct
from typing import Final

from preheat.traces.keys import timed
from preheat.traces.numbering import Numbering
from preheat.traces.reader import Draft, Format, Reading
from preheat.traces.source import Head, Source

_RECORD: Final = Struct("<IQIq")
"""Seconds, id, size in bytes, place of the next access or -1."""
_LOOKED_AT: Final = 64
_MOST_RECORDS: Final = 2**40


def _recognises(head: Head) -> bool:
    """Times that don't go back, sizes above 0, and next accesses that come later."""
    if head.is_text or len(head.data) < _RECORD.size:
        return False
    count = min(_LOOKED_AT, len(head.data) // _RECORD.size)
    before = 0
    for place, (at, _, size, next_at) in enumerate(
        _RECORD.iter_unpack(head.data[: count * _RECORD.size])
    ):
        if at < before or not size or not (next_at == -1 or place < next_at < _MOST_RECORDS):
            return False
        before = at
    return True


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    numbers = Numbering()
    rows: list[tuple[int, int, int]] = []
    for source in sources:
        data = reading.data(source, _RECORD.size)
        for number, (at, name, size, _) in enumerate(_RECORD.iter_unpack(data), 1):
            if size:
                rows.append((at, numbers.of(name), size))
            else:
                reading.refuse(source, number, "an object of no size")
    return Draft(arrivals=timed(rows, reading), is_ordered=True)


FORMAT: Final = Format(_recognises, _read)
