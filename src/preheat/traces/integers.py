"""Key streams that are big-endian integers without a break: cache2k's and CloudPhysics' of 32
bits, Scarab's of 64. Their content says nothing, so they are known by their names."""

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from preheat.traces.keys import ORDER_RULE, Keys
from preheat.traces.numbering import Numbering
from preheat.traces.reader import Draft, Format, Reading
from preheat.traces.source import Head, Source

_SCARAB: Final = "scarab"


def _is_32(head: Head) -> bool:
    is_named = ".trace" in head.name or head.name.startswith(("cache2k", "cloud_physics"))
    return not head.is_text and is_named and not head.name.startswith(_SCARAB)


def _is_64(head: Head) -> bool:
    return not head.is_text and head.name.startswith(_SCARAB)


def _read(kind: str, sources: Sequence[Source], reading: Reading) -> Draft:
    numbers = Numbering()
    keys = array("q")
    for source in sources:
        words = array(kind)
        words.frombytes(reading.data(source, words.itemsize))
        if sys.byteorder == "little":
            words.byteswap()
        keys.extend(map(numbers.of, words))
    reading.tell(ORDER_RULE)
    return Draft(arrivals=Keys(keys), times="order", is_ordered=True)


_Read = Callable[[Sequence[Source], Reading], Draft]
INT32: Final = Format(_is_32, partial(_read, "I"))
INT64: Final = Format(_is_64, partial(_read, "Q"))
