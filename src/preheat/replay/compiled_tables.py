"""The life tables of `core.value` on arrays: the core's own arithmetic, compiled by numba when this
module is imported (from a cache after the first time)."""

from hashlib import blake2b
from importlib import import_module
from os import W_OK, access
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from preheat.core import life_table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def _keep_by_source() -> None:
    """Machine code is kept under a digest of all sources that it is made of: numba itself doesn't see
    that a function in another module has changed. A cache folder of the user's own is left alone."""
    config = import_module("numba").config
    here = Path(__file__).parent
    if config.CACHE_DIR or not access(here, W_OK):
        return
    digest = blake2b(digest_size=8)
    for source in (*sorted(here.glob("compiled_*.py")), Path(life_table.__file__)):
        digest.update(source.read_bytes())
    config.CACHE_DIR = str(here / "__pycache__" / f"numba-{digest.hexdigest()}")


_keep_by_source()

jit: Final[Any] = import_module("numba").njit(cache=True)
"""Without fast-math: the order of operations is the core's, and so are the numbers."""

EDGES: Final = np.array(life_table.EDGES)
_BINS: Final = life_table.BINS

age_bin = jit(life_table.age_bin)
fade = jit(life_table.fade)
use_level = jit(life_table.use_level)
between = jit(life_table.between)
_hazards = jit(life_table.hazards)
_curve = jit(life_table.curve)
_steepest = jit(life_table.steepest)
_delayed = jit(life_table.delayed)
_rests = jit(life_table.rests)


class Table(NamedTuple):
    """A `HoldTable`, its rows complete. All by row and bin but `over`, which is by bin, `fades`, and `refreshes`
    of one number."""

    uses: Floats
    ends: Floats
    opened: Floats
    value: Floats
    under_way: Floats
    over: Floats
    fades: Floats
    refreshes: Ints


def make_table(rows: int, memory: float) -> Table:
    """Of so many rows, empty."""
    uses, ends, opened, value, under_way = np.zeros((5, rows, _BINS))
    fades = np.array(life_table.fades(memory))
    over, refreshes = np.zeros(_BINS), np.zeros(1, np.int64)
    return Table(uses, ends, opened, value, under_way, over, fades, refreshes)


def _level_hazards(table: Table, ends: Floats, levels: int, back_off: float) -> Floats:
    """What rows of each use level lean on, and what these lean on in turn."""
    overall = np.zeros(_BINS)
    by_level = np.zeros((levels, _BINS))
    for level in range(-1, levels):
        uses_sum = np.zeros(_BINS)
        ends_sum = np.zeros(_BINS)
        for row in range(len(ends)):
            if level in (-1, row % levels):
                for place in range(_BINS):
                    uses_sum[place] += table.uses[row, place]
                    ends_sum[place] += ends[row, place]
        if level < 0:
            _hazards(uses_sum, ends_sum, np.zeros(_BINS), 1.0, overall)
        else:
            _hazards(uses_sum, ends_sum, overall, back_off, by_level[level])
    return by_level


_level_hazards_of = jit(_level_hazards)


def _refresh(table: Table, levels: int, back_off: float, memory: float, edges: Floats) -> None:
    """`HoldTable.refresh`, with the open lives counted in `table.opened`."""
    ends = table.ends + table.opened
    by_level = _level_hazards_of(table, ends, levels, back_off)
    rest = np.zeros(_BINS)
    _rests(table.over, edges, rest)
    hazard = np.zeros(_BINS)
    gained = np.zeros(_BINS + 1)
    held = np.zeros(_BINS + 1)
    until = np.zeros(_BINS, np.int64)
    stack = np.zeros(_BINS + 2, np.int64)
    for row in range(len(ends)):
        _hazards(table.uses[row], ends[row], by_level[row % levels], back_off, hazard)
        _curve(hazard, edges, gained, held)
        _steepest(gained, held, table.value[row], until, stack)
        for place in range(_BINS):
            table.under_way[row, place] = _delayed(gained, held, rest[place])
    table.uses[:] *= memory
    table.ends[:] *= memory
    table.over[:] *= memory
    table.refreshes[0] += 1


refresh = jit(_refresh)
