"""AdaptSize's key streams (Berger et al., NSDI 2017): time, key and size a line."""

from collections.abc import Sequence
from typing import Final

from preheat.traces.keys import timed
from preheat.traces.numbering import Numbering
from preheat.traces.reader import Draft, Format, Reading, is_whole
from preheat.traces.source import Head, Source

_WORDS: Final = 3
_MOST: Final = 2**63


def _recognises(head: Head) -> bool:
    return bool(head.lines) and all(_numbers(line) is not None for line in head.lines)


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    numbers = Numbering()
    rows: list[tuple[int, int, int]] = []
    for source in sources:
        for number, line in reading.lines(source):
            words = _numbers(line)
            if words is None:
                reading.refuse(source, number, "not a time, a key and a size above 0")
            else:
                rows.append((words[0], numbers.of(words[1]), words[2]))
    return Draft(arrivals=timed(rows, reading), is_ordered=True)


def _numbers(line: bytes) -> tuple[int, int, int] | None:
    words = line.split()
    if len(words) != _WORDS or not all(map(is_whole, words)):
        return None
    at, key, size = map(int, words)
    return (at, key, size) if 0 < size < _MOST and at < _MOST else None


FORMAT: Final = Format(_recognises, _read)
