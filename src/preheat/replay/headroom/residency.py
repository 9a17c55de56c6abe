"""Which model, adapter or other loaded thing stays, where there is room for a few of many."""

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Final

from preheat.core.eviction import POLICIES
from preheat.core.prefix import PrefixStore
from preheat.replay.headroom.finding import Finding
from preheat.replay.headroom.wanted import Progress, Wanted, simulated
from preheat.replay.keys import outcomes
from preheat.replay.orders import Clairvoyant
from preheat.replay.report import Table
from preheat.traces.arrival import Arrival, Trace

LOAD_S: Final = 30.0
"""What loading one takes (research: headroom, 5)."""
COUNTED: Final = 0.5
"""The first half of the requests only fills the rooms."""
MODELS: Final = 1_000
"""A trace with more distinct keys is a stream of keys, and not one of models that are loaded."""
_BOUND: Final = "bound: knows what comes"


def residency(
    trace: Trace, wanted: Wanted, progress: Progress
) -> Generator[Table, None, tuple[Finding, ...]]:
    """Every policy, and who knows what comes. A request must be served: a miss always loads. Those
    that don't say their model are left out."""
    asked = [one for one in trace.arrivals if one.key >= 0]
    keys = [one.key for one in asked]
    models = len(set(keys))
    found = []
    for room in wanted.rooms:
        tasks: dict[str, Callable[[], int]] = {
            name: partial(_misses, keys, room, name) for name in (*POLICIES, _BOUND)
        }
        misses = simulated(tasks, progress, f"residency, room for {room}")
        yield _table(asked, models, room, misses)
        found.append(_finding(models, room, misses))
    return tuple(found)


def _table(asked: Sequence[Arrival], models: int, room: int, misses: Mapping[str, int]) -> Table:
    start = _start(len(asked))
    days = (asked[-1].at - asked[start].at) / 86_400.0

    def a_day(count: float) -> float | None:
        return count / days if days else None

    return Table(
        title=f"Residency: {models} models, room for {room}",
        note=f"A load takes {LOAD_S:g} s. The second half of the trace.",
        columns=("policy", "loads a day", "load seconds a day", "requests that wait"),
        rows=tuple(
            (name, a_day(count), a_day(count * LOAD_S), count / (len(asked) - start))
            for name, count in misses.items()
        ),
    )


def _finding(models: int, room: int, misses: Mapping[str, int]) -> Finding:
    part = f"residency, {room}"
    if models <= room:
        return Finding(part, 0.0, f"everything fits: {models} models, room for {room}", fits=True)
    lru, least = misses["lru"], misses[_BOUND]
    best = min(POLICIES, key=lambda name: misses[name])
    numbers = (
        f"{models} models, room for {room}: {lru:,} loads by LRU, {misses[best]:,} by the best"
        f" policy ({best}), {least:,} if it knew what comes"
    )
    return Finding(part, (lru - least) / max(1, lru), numbers)


def _start(requests: int) -> int:
    return int(requests * COUNTED)


def _misses(keys: Sequence[int], room: int, name: str) -> int:
    """Requests of the counted part that wait for a load."""
    if name == _BOUND:
        found = _belady(keys, room)
    else:
        found = outcomes(POLICIES[name](), keys, None, None, room)
    start = _start(len(keys))
    return len(keys) - start - sum(found[start:])


def _belady(keys: Sequence[int], room: int) -> bytearray:
    """One byte a request, as `outcomes` gives: the one whose next use is farthest away goes."""
    paths = [(key,) for key in keys]
    store = PrefixStore(room, Clairvoyant(paths, room))
    found = bytearray(len(keys))
    for now, path in enumerate(paths):
        found[now] = store.overlap(path)
        store.take(path, 0, now)
        store.release(path, 0, now)
        store.evicted.clear()
    return found
