"""Which model, adapter or other loaded thing stays, where there is room for a few of many."""

from collections.abc import Iterator, Sequence
from typing import Final

from preheat.core.eviction import POLICIES
from preheat.core.prefix import PrefixStore
from preheat.replay.headroom.wanted import Progress
from preheat.replay.keys import outcomes
from preheat.replay.orders import Clairvoyant
from preheat.replay.report import Table
from preheat.traces.arrival import Trace

LOAD_S: Final = 30.0
"""What loading one takes (research: headroom, 5)."""
COUNTED: Final = 0.5
"""The first half of the requests only fills the rooms."""


def residency(trace: Trace, rooms: Sequence[int], progress: Progress) -> Iterator[Table]:
    """Every policy, and who knows what comes. A request must be served: a miss always loads."""
    keys = [one.key for one in trace.arrivals]
    start = int(len(keys) * COUNTED)
    days = (trace.arrivals[-1].at - trace.arrivals[start].at) / 86_400.0
    for room in rooms:
        rows = []
        for name, policy in POLICIES.items():
            progress(f"residency, room for {room}: {name}")
            found = outcomes(policy(), keys, None, None, room)
            rows.append((name, found))
        rows.append(("bound: knows what comes", _belady(keys, room)))
        yield Table(
            title=f"Residency: {len(set(keys))} models, room for {room}",
            note=f"A load takes {LOAD_S:g} s. The second half of the trace.",
            columns=("policy", "loads a day", "load seconds a day", "requests that wait"),
            rows=tuple(
                (
                    name,
                    (len(keys) - start - sum(found[start:])) / days,
                    (len(keys) - start - sum(found[start:])) / days * LOAD_S,
                    1 - sum(found[start:]) / (len(keys) - start),
                )
                for name, found in rows
            ),
        )


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
