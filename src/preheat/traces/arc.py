"""The ARC key streams (Megiddo and Modha, FAST 2003): first block, count, 0 and the request's
number a line, which is an access to each of so many blocks from the first."""

from array import array
from collections.abc import Sequence
from typing import Final

from preheat.traces.keys import ORDER_RULE, Keys
from preheat.traces.numbering import Numbering
from preheat.traces.reader import Draft, Format, Reading, is_whole
from preheat.traces.source import Head, Source

_WORDS: Final = 4
_MOST_BLOCKS: Final = 1_000_000
"""Of one line: more is damage."""


def _recognises(head: Head) -> bool:
    return bool(head.lines) and all(_numbers(line) is not None for line in head.lines)


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    numbering = Numbering()
    keys = array("q")
    for source in sources:
        for number, line in reading.lines(source):
            words = _numbers(line)
            if words is None:
                reading.refuse(source, number, "not the four numbers of an access")
                continue
            first, count = words
            keys.extend(map(numbering.of, range(first, first + count)))
    reading.tell(ORDER_RULE)
    return Draft(arrivals=Keys(keys), times="order", is_ordered=True)


def _numbers(line: bytes) -> tuple[int, int] | None:
    """First block and count, or None for a line that is none."""
    words = line.split()
    if len(words) != _WORDS or not all(map(is_whole, words)) or int(words[2]):
        return None
    count = int(words[1])
    return (int(words[0]), count) if 0 < count <= _MOST_BLOCKS else None


FORMAT: Final = Format(_recognises, _read)
