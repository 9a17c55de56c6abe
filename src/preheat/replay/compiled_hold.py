"""One pool of prefixes on arrays, request after request: what `PrefixStore` with `HoldLeaves`
decides, compiled by numba."""

import numpy as np

from preheat.core.hold_leaves import FIRST_REFRESH
from preheat.replay.compiled_pool import (
    GONE,
    LEAVES,
    REFRESH_AT,
    REQUESTS,
    RESIDENT,
    HoldOptions,
    Paths,
    Pool,
    Times,
    answers_ended,
    leaf_added,
    leaf_dropped,
    learned,
    left,
    make_pool,
    used,
    worth_of,
)
from preheat.replay.compiled_tables import EDGES, Floats, Ints, Table, jit, make_table


def run(
    paths: Paths, times: Times, kinds: int, capacity: int, options: HoldOptions
) -> tuple[Ints, Ints]:
    """Blocks found, by request, and victims in order. Kinds are 0 to `kinds` less one."""
    requests = len(paths.starts) - 1
    hits = np.zeros(requests, np.int64)
    victims = np.zeros(len(paths.blocks), np.int64)
    step = min(FIRST_REFRESH, options.refresh_requests)
    pool = make_pool(requests, len(paths.parents), len(victims), step)
    table = make_table(kinds * options.levels, options.memory)
    gone = _loop(paths, times, capacity, options, pool, table, EDGES, hits, victims)
    return hits, victims[:gone]


def _lowest(pool: Pool, held: int) -> int:
    """The leaf of the smallest value, of the oldest request among equals; never `held`."""
    lowest = -1
    least = 0.0
    for place in range(pool.numbers[LEAVES]):
        block = pool.leaves[place]
        if block == held:
            continue
        value = pool.values[place]
        is_older = lowest >= 0 and pool.last[block] < pool.last[lowest]
        if lowest < 0 or value < least or (value == least and is_older):
            lowest = block
            least = value
    return lowest


_lowest_of = jit(_lowest)


def _make_room(
    pool: Pool,
    paths: Paths,
    times: Times,
    table: Table,
    options: HoldOptions,
    edges: Floats,
    count: int,
    held: int,
    now: float,
    victims: Ints,
    gone: int,
) -> None:
    """`count` leaves leave. Each leaf is looked at once."""
    levels = options.levels
    for place in range(pool.numbers[LEAVES]):
        pool.values[place] = worth_of(pool, times, table, levels, edges, pool.leaves[place], now)
    for turn in range(count):
        victim = _lowest_of(pool, held)
        victims[gone + turn] = victim
        leaf_dropped(pool, victim, -2)
        pool.numbers[RESIDENT] -= 1
        left(pool, times, table, options, victim, now)
        parent = paths.parents[victim]
        if parent >= 0:
            pool.children[parent] -= 1
            if pool.children[parent] == 0:
                value = worth_of(pool, times, table, levels, edges, parent, now)
                leaf_added(pool, parent, value)


_room_made = jit(_make_room)


def _insert(pool: Pool, paths: Paths, begin: int, end: int) -> None:
    """A path's new blocks come in, root first."""
    for place in range(begin, end):
        block = paths.blocks[place]
        parent = paths.parents[block]
        if parent >= 0:
            if pool.children[parent] == 0:
                leaf_dropped(pool, parent, -1)
            pool.children[parent] += 1
        if pool.gone_at[block] >= 0:
            pool.gone_at[block] = -1
            pool.numbers[GONE] -= 1
        leaf_added(pool, block, 0.0)
    pool.numbers[RESIDENT] += end - begin


_inserted = jit(_insert)


def _hold(
    paths: Paths,
    times: Times,
    capacity: int,
    options: HoldOptions,
    pool: Pool,
    table: Table,
    edges: Floats,
    hits: Ints,
    victims: Ints,
) -> int:
    gone = 0
    numbers = pool.numbers
    for number in range(len(hits)):
        now = times.began_at[number]
        answers_ended(pool, times, table, now)
        begin = paths.starts[number]
        end = paths.starts[number + 1]
        found = begin
        while found < end and pool.place[paths.blocks[found]] >= -1:
            found += 1
        hits[number] = found - begin
        end = min(end, begin + capacity)
        room = end - found - (capacity - numbers[RESIDENT])
        if room > 0:
            held = paths.blocks[found - 1] if found > begin else -1
            _room_made(pool, paths, times, table, options, edges, room, held, now, victims, gone)
            gone += room
        _inserted(pool, paths, found, end)
        numbers[REQUESTS] += 1
        used(pool, paths, times, table, options.levels, number, end)
        if numbers[REQUESTS] >= numbers[REFRESH_AT]:
            learned(pool, times, table, options, edges, now)
        if times.has_end[number]:
            pool.under_way[number] = 1
    return gone


_loop = jit(_hold)
