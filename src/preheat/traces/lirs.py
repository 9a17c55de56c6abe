"""The LIRS key streams (Jiang and Zhang, SIGMETRICS 2002): one number a line; `*` separates."""

from array import array
from collections.abc import Sequence
from typing import Final

from preheat.traces.keys import ORDER_RULE, Keys
from preheat.traces.numbering import Numbering
from preheat.traces.reader import Draft, Format, Reading, is_whole
from preheat.traces.source import Head, Source


def _recognises(head: Head) -> bool:
    return bool(head.lines) and all(line == b"*" or line.isdigit() for line in head.lines)


def _read(sources: Sequence[Source], reading: Reading) -> Draft:
    numbers = Numbering()
    keys = array("q")
    for source in sources:
        for number, line in reading.lines(source):
            word = line.strip()
            if is_whole(word):
                keys.append(numbers.of(int(word)))
            elif word != b"*":
                reading.refuse(source, number, "neither a whole number nor *")
    reading.tell(ORDER_RULE)
    return Draft(arrivals=Keys(keys), times="order", is_ordered=True)


FORMAT: Final = Format(_recognises, _read)
