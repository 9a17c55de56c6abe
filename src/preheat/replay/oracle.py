"""What a cache could have had at best: nothing that can be used, only reached for.

Prefix-closed input is a list of requests, each a tuple of block ids from the root on, chained: an equal
id is an equal prefix (`Arrival.blocks`). A block is a hit when it and all before it are held.
"""

import heapq
from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from preheat.errors import ConfigError

K = TypeVar("K", bound=Hashable)

Path = tuple[int, ...]


def infinite_keys(keys: Sequence[Hashable]) -> int:
    """Hits of a cache that never has to evict: all but the first request for each key."""
    return len(keys) - len(set(keys))


def infinite_blocks(paths: Sequence[Path]) -> int:
    """Block hits of a cache that never has to evict."""
    known: set[int] = set()
    hits = 0
    for path in paths:
        hits += _held_prefix(path, known)
        known.update(path)
    return hits


def belady_blocks(paths: Sequence[Path], capacity_blocks: int) -> int:
    """Block hits of Belady's MIN on prefixes (Belady, IBM Systems Journal 1966; leaf first) with
    bypassing: what no policy can beat, whatever it may turn away.

    A block's next use is the next request whose path has it. The one used last leaves, among equals
    the deeper: a prefix is used no later than what stands on it, so whoever leaves is a leaf. A
    request takes no room while it runs, and what it leaves behind is chosen freely. Where it must come in,
    as in engines, `orders.Clairvoyant` in a `PrefixStore` is MIN.
    """
    after = _next_uses(paths)
    due: dict[int, int] = {}  # the next use of what is held
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for now, path in enumerate(paths):
        hits += _held_prefix(path, due)
        for depth, (block, next_use) in enumerate(zip(path, after[now], strict=True)):
            due[block] = next_use
            heapq.heappush(heap, (-next_use, -depth, block))
        while len(due) > capacity_blocks:
            next_use, _, block = heapq.heappop(heap)
            if due.get(block) == -next_use:
                del due[block]
    return hits


def belady_keys(keys: Sequence[K], capacity: int, *, bypass: bool = False) -> int:
    """Hits of Belady's MIN where all objects are of one size.

    With `bypass` an object may be passed on without being held, and then nothing can do better;
    without, as caches here, it comes in whatever it is worth.
    """
    if capacity < 1:
        return 0
    after = [uses[0] for uses in _next_uses([(key,) for key in keys])]
    due: dict[K, int] = {}
    heap: list[tuple[int, int]] = []  # a request's number names its key
    hits = 0
    for now, key in enumerate(keys):
        hits += key in due
        if key not in due and len(due) >= capacity:
            while due.get(keys[heap[0][1]]) != -heap[0][0]:
                heapq.heappop(heap)
            if bypass and after[now] >= -heap[0][0]:
                continue
            del due[keys[heapq.heappop(heap)[1]]]
        due[key] = after[now]
        heapq.heappush(heap, (-after[now], now))
    return hits


def best_saving(
    keys: Sequence[Hashable],
    sizes: Sequence[int],
    costs: Sequence[float],
    capacity_bytes: int,
    *,
    whole: bool = False,
) -> float:
    """What no policy can save more than, in the unit of `costs`, where sizes and costs differ.

    Berger, Beckmann and Harchol-Balter, "Practical Bounds on Optimal Caching with Variable Object
    Sizes", SIGMETRICS 2018: each pair of requests for one object is an interval over which it may be
    held, in part if need be; between any two requests what is held must fit. That relaxed optimum is a
    minimum-cost flow, solved here as its linear program, one row a request. With `whole` objects are
    held whole or not at all: the true optimum with bypassing, for tiny traces only.

    For thousands of requests, not millions. Raises ConfigError where scipy isn't installed.
    """
    last: dict[Hashable, int] = {}
    intervals = []  # from, to
    for now, key in enumerate(keys):
        if key in last and sizes[now] <= capacity_bytes:
            intervals.append((last[key], now))
        last[key] = now
    if not intervals:
        return 0.0
    return _solve(intervals, sizes, costs, capacity_bytes, whole=whole)


def _held_prefix(path: Path, held: set[int] | dict[int, Any]) -> int:
    """How many blocks of the path are held, up to the first that isn't."""
    for depth, block in enumerate(path):
        if block not in held:
            return depth
    return len(path)


def _next_uses(paths: Sequence[tuple[K, ...]]) -> list[list[int]]:
    """For each request and each of its blocks the next request that has it, or their number."""
    never = len(paths)
    coming: dict[K, int] = {}
    after: list[list[int]] = [[]] * len(paths)
    for now in range(len(paths) - 1, -1, -1):
        path = paths[now]
        after[now] = [coming.get(block, never) for block in path]
        coming.update(dict.fromkeys(path, now))
    return after


def _solve(
    intervals: Sequence[tuple[int, int]],
    sizes: Sequence[int],
    costs: Sequence[float],
    capacity_bytes: int,
    *,
    whole: bool,
) -> float:
    """Variables: how much of each interval is held, then how many bytes are held after each request.

    A row says: bytes after this request = bytes before it - what ends here + what begins here.
    """
    try:
        optimize, sparse = import_module("scipy.optimize"), import_module("scipy.sparse")
    except ImportError as error:
        raise ConfigError(
            "this bound needs scipy's solver, which isn't installed: pip install scipy"
        ) from error
    count, steps = len(intervals), len(sizes)
    rows, columns, values = [], [], []
    for number, (start, end) in enumerate(intervals):
        rows += [start, end]
        columns += [number, number]
        values += [-sizes[end], sizes[end]]
    for now in range(steps):
        rows += [now, now][: 2 if now else 1]
        columns += [count + now, count + now - 1][: 2 if now else 1]
        values += [1, -1][: 2 if now else 1]
    balance = sparse.csr_matrix((values, (rows, columns)), shape=(steps, count + steps))
    found = optimize.milp(
        [-costs[end] for _, end in intervals] + [0.0] * steps,
        constraints=optimize.LinearConstraint(balance, 0.0, 0.0),
        bounds=optimize.Bounds(0.0, [1.0] * count + [float(capacity_bytes)] * steps),
        integrality=[int(whole)] * count + [0] * steps,
    )
    if found.x is None:
        raise ArithmeticError(f"the solver gave up: {found.message}")
    return -float(found.fun)
