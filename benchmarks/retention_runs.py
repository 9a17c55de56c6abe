"""One order of leaving over all capacities of a trace: what `retention` runs in its processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.retention_held import FACTS, held
from benchmarks.retention_levers import LeafLhd, ordered, touched
from benchmarks.retention_streams import Stream, load, uses
from preheat.core.costs import ServiceModel
from preheat.core.eviction import POLICIES
from preheat.core.eviction.lhd import Lhd
from preheat.core.prefix import LeafPolicy, PrefixStore
from preheat.replay.compiled import PrefixStream, Use
from preheat.replay.orders import Clairvoyant

Floats = npt.NDArray[np.float64]

BLOCK_S = 120.0


class Task(NamedTuple):
    """One order over all capacities of a trace: a policy with a variant, or J with facts and levels."""

    trace: str
    policy: str
    options: dict[str, Any]
    is_choice: bool

    def __str__(self) -> str:
        said = ", ".join(f"{name} {value}" for name, value in self.options.items() if value != "")
        return f"{self.policy} ({said})" if said else self.policy


class Cells(NamedTuple):
    """By capacity and two-minute block of the reported part: blocks of prompts that were found."""

    task: Task
    found: Floats
    extra: int = 0


_seed = 0
_streams: dict[tuple[str, bool], Stream] = {}


def begin(seed: int) -> None:
    global _seed
    _seed = seed


def _stream(name: str, *, is_choice: bool) -> Stream:
    if (name, is_choice) not in _streams:
        whole = load(name, _seed)
        _streams[name, is_choice] = whole.first_half() if is_choice else whole
    return _streams[name, is_choice]


def run(task: Task) -> Cells:
    stream = _stream(task.trace, is_choice=task.is_choice)
    serve = _order(task, stream)
    rows = []
    extra = 0
    for capacity in stream.capacities:
        hits = serve(capacity)
        if isinstance(hits, tuple):
            hits, touches = hits
            extra += touches
        rows.append(_by_block(stream, hits))
    return Cells(task, np.array(rows), extra)


def _order(task: Task, stream: Stream) -> Callable[[int], Any]:
    options = dict(task.options)
    if task.policy in ("j", "touched"):
        told = uses(stream, options["facts"])
        if task.policy == "touched":
            return lambda capacity: touched(stream, told, capacity, options["levels"])
        ready = PrefixStream(stream.paths, told)
        return lambda capacity: ready.hold(capacity, levels=options["levels"]).hits
    if task.policy == "lru":
        ready = PrefixStream(stream.paths, [Use(one.at) for one in stream.arrivals])
        return lambda capacity: ready.lru(capacity).hits
    if task.policy == "asked":
        return lambda _: [len(path) for path in stream.paths]
    if task.policy == "held":
        told = uses(stream, FACTS)
        order = options["order"]
        return lambda capacity: held(stream, told, capacity, order, options["levels"])
    if task.policy == "ordered":
        return lambda capacity: ordered(stream, capacity)
    if task.policy == "belady":
        return lambda capacity: _serve(
            stream, PrefixStore(capacity, Clairvoyant(stream.paths, capacity))
        )
    return lambda capacity: _serve(stream, PrefixStore(capacity, _policy(task, stream)))


def _policy(task: Task, stream: Stream) -> LeafPolicy | LeafLhd:
    options = dict(task.options)
    if task.policy == "lhd":
        return LeafLhd(Lhd(**options))
    tokens = stream.block_tokens
    if task.policy == "t_lru":
        options["block_tokens"] = tokens
    service = ServiceModel()
    by_depth = options.pop("cost", "") == "depth"
    return LeafPolicy(
        POLICIES[task.policy](**options),
        block_tokens=tokens,
        cost_s=(lambda place: service.prefill_s(tokens, place * tokens))
        if by_depth
        else lambda _: 1.0,
    )


def _serve(stream: Stream, store: PrefixStore) -> list[int]:
    hits = []
    for one, path in zip(stream.arrivals, stream.paths, strict=True):
        hits.append(store.overlap(path))
        blocks = path[: store.capacity_blocks]
        if store.take(blocks, 0, one.at):
            store.release(blocks, 0, one.at)
        store.evicted.clear()
    return hits


def _by_block(stream: Stream, hits: Sequence[int]) -> Floats:
    """Sums over two minutes each, of what came in the reported part."""
    numbers: dict[int, int] = {}
    sums: list[int] = []
    for one, found in zip(stream.arrivals, hits, strict=True):
        if one.at >= stream.half_at:
            number = numbers.setdefault(int(one.at // BLOCK_S), len(sums))
            if number == len(sums):
                sums.append(0)
            sums[number] += found
    return np.array(sums, np.float64)
