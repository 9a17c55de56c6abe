"""Any keys as numbers from 0 on, compiled by numba."""

from typing import Final

import numpy as np
import numpy.typing as npt

from preheat.replay.compiled_tables import Ints, jit

_GOLDEN: Final = -7_046_029_254_386_353_131  # 2^64 by the golden ratio, as a signed number


def numbered(keys: Ints) -> tuple[Ints, Ints]:
    """The different keys in the order in which they came, and for each request its key's place there."""
    names = np.empty(len(keys), np.int64)
    numbers = np.empty(len(keys), np.int64)
    size = 1 << max(4, (2 * len(keys)).bit_length())
    distinct = _number_loop(keys, np.full(size, -1, np.int32), names, numbers)
    return names[:distinct], numbers


def _number(keys: Ints, slots: npt.NDArray[np.int32], names: Ints, numbers: Ints) -> int:
    """A hash table with linear probing (Fibonacci hashing: Knuth, vol. 3, section 6.4)."""
    mask = len(slots) - 1
    distinct = 0
    for place in range(len(keys)):
        key = keys[place]
        slot = ((key * _GOLDEN) >> 20) & mask
        while slots[slot] >= 0 and names[slots[slot]] != key:
            slot = (slot + 1) & mask
        if slots[slot] < 0:
            slots[slot] = distinct
            names[distinct] = key
            distinct += 1
        numbers[place] = slots[slot]
    return distinct


_number_loop = jit(_number)
