"""Streams of prompts on arrays: LRU over prefixes, compiled by numba, and the way to J's loop."""

from collections.abc import Sequence

import numpy as np

from preheat.replay import compiled_hold
from preheat.replay.compiled import Use
from preheat.replay.compiled_pool import HoldOptions, Paths, Times
from preheat.replay.compiled_tables import Ints, jit


class Stream:
    """Requests on arrays, to be run again and again."""

    def __init__(self, paths: Sequence[Sequence[int]], uses: Sequence[Use]) -> None:
        numbers: dict[int, int] = {}
        parents: list[int] = []
        blocks: list[int] = []
        for path in paths:
            parent = -1
            for block in path:
                number = numbers.setdefault(block, len(numbers))
                if number == len(parents):
                    parents.append(parent)
                blocks.append(number)
                parent = number
        starts = np.cumsum([0, *map(len, paths)])
        self._names = np.array(list(numbers), np.int64)
        self._paths = Paths(np.array(blocks, np.int64), starts, np.array(parents, np.int64))
        self._times = _times(uses)
        self._kinds = 1 + max((max(use.began_kind, use.ended_kind) for use in uses), default=0)

    def lru(self, capacity: int) -> tuple[list[int], list[int]]:
        """Blocks found, by request, and victims in order."""
        hits = np.zeros(len(self._paths.starts) - 1, np.int64)
        victims = np.zeros(len(self._paths.blocks), np.int64)
        gone = _lru_loop(self._paths, capacity, hits, victims)
        return hits.tolist(), self._names[victims[:gone]].tolist()

    def hold(self, capacity: int, options: HoldOptions) -> tuple[list[int], list[int]]:
        """Blocks found, by request, and victims in order."""
        hits, victims = compiled_hold.run(self._paths, self._times, self._kinds, capacity, options)
        return hits.tolist(), self._names[victims].tolist()


def _times(uses: Sequence[Use]) -> Times:
    ends = [(use.ended_at, number) for number, use in enumerate(uses) if use.ended_at is not None]
    return Times(
        np.array([use.began_at for use in uses], np.float64),
        np.array([use.began_kind for use in uses], np.int64),
        np.array([use.ended_at or 0.0 for use in uses], np.float64),
        np.array([use.ended_kind for use in uses], np.int64),
        np.array([number for _, number in sorted(ends)], np.int64),
        np.array([use.ended_at is not None for use in uses], np.bool_),
    )


def _lru(paths: Paths, capacity: int, hits: Ints, victims: Ints) -> int:
    """A ring of blocks, oldest first, paths touched deepest block first: so its oldest is always a
    leaf, and one of this request only if nothing else is left."""
    distinct = len(paths.parents)
    newer = np.full(distinct + 1, -1, np.int64)
    older = np.full(distinct + 1, -1, np.int64)
    newer[distinct] = older[distinct] = distinct
    held = gone = 0
    for number in range(len(hits)):
        begin, end = paths.starts[number], paths.starts[number + 1]
        found = begin
        while found < end and newer[paths.blocks[found]] >= 0:
            block = paths.blocks[found]
            newer[older[block]] = newer[block]
            older[newer[block]] = older[block]
            found += 1
        hits[number] = found - begin
        end = min(end, begin + capacity)
        for _ in range(held + end - found - capacity):
            victim = newer[distinct]
            newer[distinct] = newer[victim]
            older[newer[victim]] = distinct
            newer[victim] = -1
            victims[gone] = victim
            gone += 1
            held -= 1
        held += end - found
        for place in range(end - 1, begin - 1, -1):
            block = paths.blocks[place]
            tail = older[distinct]
            newer[tail] = block
            older[block] = tail
            newer[block] = distinct
            older[distinct] = block
    return gone


_lru_loop = jit(_lru)
