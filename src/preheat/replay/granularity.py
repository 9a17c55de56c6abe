"""Where prompts are cut into blocks: fixed lengths, turns, or where reuse branches.

The seeds' "attention-heat" granularity wants finer blocks where attention is. What a cache can gain from
cutting is another thing: a block can be reused whole or not at all, so a cut is worth something
only where two prompts part. `by_branch` cuts exactly there, as a radix tree does (Zheng et al.,
SGLang, 2024); `by_turn` where an earlier request of the session ended, as message-aligned
breakpoints do; `fixed` every so many blocks of the trace, as vLLM does. All are made of the trace's
own blocks, so they hit at most what those do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import msgspec

from preheat.core.prefix import LeafLru, PrefixStore
from preheat.traces.arrival import Trace


class Cut(msgspec.Struct, frozen=True):
    """A trace cut anew: each prompt's larger blocks, and their sizes in small ones."""

    name: str
    paths: Sequence[Sequence[int]]
    sizes: Mapping[int, int]


class Effect(msgspec.Struct, frozen=True):
    """What a cut came to at one capacity: blocks to keep books of, and small blocks hit and asked."""

    name: str
    objects: int
    hit: int
    asked: int


def full_paths(trace: Trace) -> list[Sequence[int]]:
    """The small blocks of each prompt, without a partial last one."""
    return [one.blocks[: max(0, one.input_tokens) // trace.block_tokens] for one in trace.arrivals]


def fixed(paths: Sequence[Sequence[int]], every: int) -> Cut:
    """Every so many small blocks; what is left at a prompt's end can't be reused."""
    cut = [path[every - 1 :: every] for path in paths]
    return Cut(f"fixed, {every} of the trace's", cut, dict.fromkeys(_ids(cut), every))


def by_turn(trace: Trace, paths: Sequence[Sequence[int]]) -> Cut:
    """At the ends of the prompts of the session so far, and of this one."""
    ends: dict[str, set[int]] = {}
    cut = []
    for one, path in zip(trace.arrivals, paths, strict=True):
        known = ends.setdefault(one.session, set())
        if path:
            known.add(path[-1])
        cut.append([block for block in path if block in known])
    return _named("at turns", cut, paths)


def by_branch(paths: Sequence[Sequence[int]]) -> Cut:
    """Where two prompts of the trace part, or one ends: known in hindsight here; a radix tree
    splits when it happens, and hits the same."""
    child: dict[int, int] = {}
    joints: set[int] = set()
    for path in paths:
        for block, following in pairwise(path):
            if child.setdefault(block, following) != following:
                joints.add(block)
        if path:
            joints.add(path[-1])
    cut = [[block for block in path if block in joints] for path in paths]
    return _named("where reuse branches", cut, paths)


def effect(trace: Trace, cut: Cut, asked: int, capacity_blocks: int) -> Effect:
    """Hits under the engine's LRU with room for so many small blocks."""
    store = PrefixStore(capacity_blocks, LeafLru(), cut.sizes)
    hit = 0
    for one, path in zip(trace.arrivals, cut.paths, strict=True):
        hit += sum(cut.sizes[block] for block in path[: store.serve(path, one.at)])
        store.evicted.clear()
    return Effect(cut.name, len(cut.sizes), hit, asked)


def cuts(trace: Trace, multiples: Sequence[int] = (1, 4, 16)) -> list[Callable[[], Cut]]:
    """All of them, made one after the other: each holds as much as the trace."""
    paths = full_paths(trace)
    made: list[Callable[[], Cut]] = [partial(fixed, paths, every) for every in multiples]
    if any(one.session for one in trace.arrivals):
        made.append(partial(by_turn, trace, paths))
    made.append(partial(by_branch, paths))
    return made


def _ids(paths: Sequence[Sequence[int]]) -> set[int]:
    return {block for path in paths for block in path}


def _named(name: str, cut: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> Cut:
    """A larger block is named by its last small one and the cut before it: the same stretch cut in
    two ways is two blocks."""
    names: dict[tuple[int, int], int] = {}
    sizes: dict[int, int] = {}
    named = []
    for larger, small in zip(cut, paths, strict=True):
        place = {block: number for number, block in enumerate(small)}
        path, before, start = [], -1, -1
        for block in larger:
            made = names.setdefault((before, block), len(names))
            sizes[made] = place[block] - start
            before, start = block, place[block]
            path.append(made)
        named.append(path)
    return Cut(name, named, sizes)
